-- name: set_tags
-- Sets tags of one execution, replacing old values; no row if there is no such execution.
with clock as materialized (select ff_now() as now),
held as materialized (
  select partition_key, execution_id from execution
   where partition_key = :partition_key and execution_id = :execution_id
     for update
),
touched as (
  update execution e
     set last_mutation_at = c.now, instance_tag = coalesce(:instance_tag::text, e.instance_tag), has_tags = true
    from held h cross join clock c
   where e.partition_key = any(array[h.partition_key]) and e.execution_id = h.execution_id
),
tagged as (
  insert into execution_tag (partition_key, execution_id, key, value)
  select h.partition_key, h.execution_id, t.key, t.value
    from held h cross join unnest(:keys::text[], :values::text[]) as t(key, value)
  on conflict (partition_key, execution_id, key) do update set value = excluded.value
)
select 1 from held;

-- name: read_tag
-- The value of one tag of one execution. The collation keeps the planner from using the index on tag keys.
select value from execution_tag
 where partition_key = :partition_key and execution_id = :execution_id and key collate "C" = :key;
