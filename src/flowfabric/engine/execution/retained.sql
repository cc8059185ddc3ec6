-- name: lock_ends
-- Locks the entries of retained with the ends of executions that are due at the given times, and returns these ends.
-- `(... in (...)) is true` makes the planner use a hashed subplan instead of a nested loop.
with item as materialized (
  select * from unnest(:partition_keys::smallint[], :execution_ids::uuid[], :ended_ats::bigint[], :retain_untils::bigint[])
         as i(partition_key, execution_id, ended_at, retain_until)
),
entry as materialized (
  select r.*
    from (select distinct retain_until, partition_key, ended_at from item order by retain_until, partition_key, ended_at) i
   cross join lateral (
         select r.retain_until, r.partition_key, r.ended_at, r.execution_ids from retained r
          where r.retain_until = i.retain_until and r.partition_key = i.partition_key and r.ended_at = i.ended_at for update) r
)
select r.partition_key, m.execution_id, r.ended_at, r.retain_until
  from entry r
 cross join lateral unnest(r.execution_ids) as m(execution_id)
 where ((r.partition_key, m.execution_id) in (select partition_key, execution_id from item)) is true;

-- name: lock_ends_anywhere
-- The same for any retention that ends within :within_ms from now, or ends at all if that is null.
with item as materialized (
  select * from unnest(:partition_keys::smallint[], :execution_ids::uuid[], :ended_ats::bigint[])
         as i(partition_key, execution_id, ended_at)
),
entry as materialized (
  select r.retain_until, r.partition_key, r.ended_at, r.execution_ids from retained r
   where r.retain_until >= (select min(ended_at) from item)
     and r.retain_until <= case when :within_ms::bigint is null then 9223372036854775807 else (select ff_now()) + :within_ms end
     and ((r.partition_key, r.ended_at) in (select partition_key, ended_at from item)) is true
   order by r.retain_until, r.partition_key, r.ended_at
     for update
)
select r.partition_key, m.execution_id, r.ended_at, r.retain_until
  from entry r
 cross join lateral unnest(r.execution_ids) as m(execution_id)
 where ((r.partition_key, m.execution_id) in (select partition_key, execution_id from item)) is true;

-- name: take_ends
-- Removes executions and their queues from the locked entries of retained with their ends; the last one takes the entry with it.
with item as materialized (
  select * from unnest(:partition_keys::smallint[], :execution_ids::uuid[], :ended_ats::bigint[], :retain_untils::bigint[])
         as i(partition_key, execution_id, ended_at, retain_until)
),
entry as materialized (
  select r.tid, k.execution_ids, k.queue_nos
    from (select distinct retain_until, partition_key, ended_at from item) i
   cross join lateral (
         select r.ctid as tid, r.execution_ids, r.queue_nos from retained r
          where r.retain_until = i.retain_until and r.partition_key = i.partition_key and r.ended_at = i.ended_at offset 0) r
   cross join lateral (
         select array_agg(m.execution_id order by m.nth) as execution_ids, array_agg(m.queue_no order by m.nth) as queue_nos
           from unnest(r.execution_ids, r.queue_nos) with ordinality as m(execution_id, queue_no, nth)
          where m.execution_id not in (select execution_id from item)) k
   where cardinality(r.execution_ids) > coalesce(cardinality(k.execution_ids), 0)
),
shortened as (
  update retained r
     set execution_ids = e.execution_ids, queue_nos = case when r.queue_nos is not null then e.queue_nos end
    from entry e
   where r.ctid = e.tid and e.execution_ids is not null
)
delete from retained r using entry e where r.ctid = e.tid and e.execution_ids is null;
