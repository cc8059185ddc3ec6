-- name: list_flow_limits
-- The budgets and the quota of a flow, in the order in which they were attached.
select limit_type, limit_id from limit_attachment
 where scope_type = 'flow' and scope_id = :flow_id::text
 order by attached_at, limit_id;

-- name: read_member_queue
-- The queue of an execution, its names and the limits it was created with, and what keys are read from.
select e.flow_id, e.queue_no, l.lane_id, n.namespace, x.execution_kind, c.required, e.creator_identity, k.budget_ids as own_budget_ids,
       k.fair_key, q.quota_policy_id, q.key,
       coalesce(e.input_payload, (
         select i.input_payload from execution_input i
          where i.partition_key = e.partition_key and i.execution_id = e.execution_id)) as input_payload,
       case when e.has_tags then (
         select jsonb_object_agg(t.key, t.value) from execution_tag t
          where t.partition_key = e.partition_key and t.execution_id = e.execution_id) end as tags
  from execution e
  join queue u on u.queue_no = e.queue_no
  join lane l on l.lane_no = u.lane_no
  join namespace n on n.namespace_no = u.namespace_no
  join kind x on x.kind_no = u.kind_no
  join route r on r.route_no = u.route_no
  join capability_set c on c.capability_set_no = r.capability_set_no
  left join admission_key k on k.admission_key_no = u.admission_key_no
  left join lateral (
       select q.quota_policy_id, q.key from quota_key q where q.quota_key_no = k.quota_key_nos[1] limit 1) q on true
 where e.partition_key = :partition_key and e.execution_id = :execution_id;

-- name: move_to_queue
-- Moves an execution that the transaction has locked, and its entry of ready, to another queue of its lane. Returns where it can be
-- claimed, and no row if it cannot.
with held as materialized (
  select e.partition_key, e.execution_id, e.lane_no, e.queue_no, e.place, q.route_no
    from execution e
   cross join lateral (select q.route_no from queue q where q.queue_no = e.queue_no limit 1) q
   where e.partition_key = :partition_key and e.execution_id = :execution_id
),
moved as (
  update execution e set queue_no = :queue_no::int, quota_weight = :quota_weight::bigint
    from held h
   where e.partition_key = any(array[h.partition_key]) and e.execution_id = h.execution_id
),
moved_entries as (
  update ready r set queue_no = :queue_no, route_no = :route_no::int
    from held h
   where r.route_no = any(array[h.route_no]) and r.queue_no = any(array[h.queue_no]) and r.place = h.place
  returning r.place
)
select l.lane_id, :route_no as route_no, :queue_no as queue_no, m.place
  from moved_entries m cross join held h join lane l on l.lane_no = h.lane_no;
