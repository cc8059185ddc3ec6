-- name: set_flow_tags
-- Sets tags of one flow, replacing old values; no row if there is no such flow.
with held as materialized (
  select partition_key, flow_id from flow where partition_key = :partition_key and flow_id = :flow_id
     for update
),
tagged as (
  insert into flow_tag (partition_key, flow_id, key, value)
  select h.partition_key, h.flow_id, t.key, t.value
    from held h cross join unnest(:keys::text[], :values::text[]) as t(key, value)
  on conflict (partition_key, flow_id, key) do update set value = excluded.value
)
update flow f set last_mutation_at = (select ff_now())
  from held h
 where f.partition_key = any(array[h.partition_key]) and f.flow_id = h.flow_id
returning f.flow_id;

-- name: read_flow_tag
-- The value of one tag of one flow. The collation keeps the planner from using the index on tag keys.
select value from flow_tag
 where partition_key = :partition_key and flow_id = :flow_id and key collate "C" = :key;
