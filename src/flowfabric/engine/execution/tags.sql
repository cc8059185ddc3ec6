-- name: set_tags
-- Sets tags of one execution, replacing old values; no row if there is no such execution. :instance_tag is the new value of the
-- instance tag, null if it is not among the tags. If it differs from the old value, the statement writes events, and returns so.
-- The events carry all tags: the caller has locked the execution in an earlier statement, so that this one reads current tags.
with clock as materialized (select ff_now() as now),
held as materialized (
  select partition_key, execution_id, namespace_no, flow_id from execution
   where partition_key = :partition_key and execution_id = :execution_id
     for update
),
tags_before as materialized (
  select coalesce(jsonb_object_agg(t.key, t.value), '{}') as tags from execution_tag t
   where :instance_tag::text is not null and t.partition_key = :partition_key and t.execution_id = :execution_id
),
touched as (
  update execution e
     set last_mutation_at = c.now, instance_tag = coalesce(:instance_tag, e.instance_tag), has_tags = true
    from held h cross join clock c
   where e.partition_key = any(array[h.partition_key]) and e.execution_id = h.execution_id
),
tagged as (
  insert into execution_tag (partition_key, execution_id, key, value)
  select h.partition_key, h.execution_id, t.key, t.value
    from held h cross join unnest(:keys::text[], :values::text[]) as t(key, value)
  on conflict (partition_key, execution_id, key) do update set value = excluded.value
),
inserted_events as (
  insert into event (at, execution_id, partition_key, kind, namespace_no, flow_id, instance_tag, tags)
  select c.now, h.execution_id, h.partition_key, v.kind::event_kind, h.namespace_no, h.flow_id, v.tags ->> :instance_key, v.tags
    from held h
   cross join clock c
   cross join tags_before b
   cross join lateral (
         values (1, 'tag_cleared', b.tags), (2, 'tag_attached', b.tags || jsonb_object(:keys, :values))) as v(nth, kind, tags)
   where :instance_tag is distinct from b.tags ->> :instance_key::text and v.tags ? :instance_key
   order by v.nth
  returning 1
)
select exists (select from inserted_events) as has_events from held;

-- name: read_tag
-- The value of one tag of one execution. The collation keeps the planner from using the index on tag keys.
select value from execution_tag
 where partition_key = :partition_key and execution_id = :execution_id and key collate "C" = :key;
