-- name: stamp_refused_tokens
-- Records on executions when a token was last refused at one of their waitpoints. Returns the positions of the items whose
-- executions are locked by another session. Unknown waitpoints are ignored.
with item as materialized (
  select i.nth, i.refused_at, e.partition_key, e.execution_id
    from unnest(:partition_keys::smallint[], :execution_ids::uuid[], :waitpoint_ids::uuid[], :refused_ats::bigint[])
         with ordinality as i(partition_key, execution_id, waitpoint_id, refused_at, nth)
   cross join lateral (
         select w.partition_key, w.execution_id from waitpoint w
          where w.partition_key = i.partition_key and w.waitpoint_id = i.waitpoint_id and w.execution_id = i.execution_id
          limit 1) e
),
held as materialized (
  select e.partition_key, e.execution_id, i.refused_at
    from (select partition_key, execution_id, max(refused_at) as refused_at from item group by 1, 2 order by 1, 2) i
   cross join lateral (
         select e.partition_key, e.execution_id from execution e
          where e.partition_key = i.partition_key and e.execution_id = i.execution_id
            for update skip locked) e
),
stamped as (
  update execution e set last_hmac_validation_failed_at = greatest(e.last_hmac_validation_failed_at, h.refused_at)
    from held h
   where e.partition_key = any(array[h.partition_key]) and e.execution_id = h.execution_id
)
select i.nth from item i
 where not exists (select from held h where h.partition_key = i.partition_key and h.execution_id = i.execution_id)
   and exists (select from execution e where e.partition_key = i.partition_key and e.execution_id = i.execution_id);
