-- name: is_drained
-- Whether every execution has ended.
select not exists (select from flowfabric.execution where lifecycle_phase <> 'terminal');

-- name: list_activity
-- When each client of a database began its latest statement.
select pid, query_start from pg_stat_activity
 where datname = :name and query_start is not null and backend_type = 'client backend';

-- name: read_sizes
-- The size in bytes of all tables and of all indexes.
select sum(pg_table_size(oid))::bigint as tables, sum(pg_indexes_size(oid))::bigint as indexes
  from pg_class
 where relnamespace = 'flowfabric'::regnamespace and relkind = 'r';

-- name: group_executions
-- The number of executions of each lane and state, by a scan of all rows.
select lane_no, public_state, count(*) from flowfabric.execution group by 1, 2;

-- name: count_retained
-- The number of ended executions in the store.
select count(*) from flowfabric.execution where lifecycle_phase = 'terminal';

-- name: is_only_member_left
-- Whether all members of a flow have ended except one.
select count(*) = 1 from flowfabric.execution where flow_id = :flow_id and lifecycle_phase <> 'terminal';

-- name: read_clock
-- The time of the database in milliseconds.
select flowfabric.ff_now();

-- name: count_over_admissions
-- How many executions were leased since a time while at least so many others were, by the events.
with change as (
  select at, event_id, coalesce(cardinality(execution_ids), 1) * case when kind in ('acquired', 'reclaimed') then 1 else -1 end as leases
    from flowfabric.event
   where at >= :since::bigint and kind in ('acquired', 'reclaimed', 'released', 'expired', 'revoked')
),
leased as (select leases, sum(leases) over (order by at, leases, event_id) as held from change)
select coalesce(sum(least(leases, held - :cap::bigint)), 0)::bigint from leased where leases > 0 and held > :cap;
