-- name: is_drained
-- Whether every execution has ended.
select not exists (select from flowfabric.execution where lifecycle_phase <> 'terminal');

-- name: list_activity
-- The last statement of each client of a database, by the moment it began.
select pid, query_start from pg_stat_activity
 where datname = :name and query_start is not null and backend_type = 'client backend';

-- name: read_sizes
-- The bytes of all tables and of all their indexes.
select sum(pg_table_size(oid))::bigint as tables, sum(pg_indexes_size(oid))::bigint as indexes
  from pg_class
 where relnamespace = 'flowfabric'::regnamespace and relkind = 'r';

-- name: group_executions
-- The executions of each lane and state, counted row by row.
select lane_no, public_state, count(*) from flowfabric.execution group by 1, 2;

-- name: count_retained
-- How many ended executions are kept.
select count(*) from flowfabric.execution where lifecycle_phase = 'terminal';
