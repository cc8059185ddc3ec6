-- name: set_priority
-- Moves a claimable execution that the transaction has locked, and its entry of ready, to the place of another priority: the order
-- of creation, the bits below, stays. Returns where it can be claimed, and no row if it has that priority already.
with clock as materialized (select ff_now() as now),
held as materialized (
  select e.partition_key, e.execution_id, e.lane_no, e.queue_no, q.route_no, e.place as old_place, e.granted_until, c.now,
         (:inverse_priority::bigint << 48) | (e.place & ((1::bigint << 48) - 1)) as place
    from clock c
   cross join execution e
   cross join lateral (select q.route_no from queue q where q.queue_no = e.queue_no limit 1) q
   where e.partition_key = :partition_key and e.execution_id = :execution_id and e.place >> 48 <> :inverse_priority
),
moved as (
  update execution e set place = h.place, last_mutation_at = h.now
    from held h
   where e.partition_key = any(array[h.partition_key]) and e.execution_id = h.execution_id
  returning h.*, e.namespace_no, e.attempt_count, e.lease_epoch, e.flow_id, e.instance_tag,
            case when e.has_tags then (
              select jsonb_object_agg(t.key, t.value) from execution_tag t
               where t.partition_key = e.partition_key and t.execution_id = e.execution_id) end as tags
),
moved_entries as (
  update ready r set place = h.place
    from held h
   where r.route_no = any(array[h.route_no]) and r.queue_no = any(array[h.queue_no]) and r.place = h.old_place
),
inserted_events as (
  insert into event (at, execution_id, partition_key, kind, namespace_no, attempt_index, lease_epoch, reason, details, flow_id,
                     instance_tag, tags)
  select now, execution_id, partition_key, 'operator_action', namespace_no, nullif(attempt_count, 0) - 1, lease_epoch, :event_type,
         jsonb_build_object('old_priority', :max_priority - (old_place >> 48), 'new_priority', :max_priority - :inverse_priority),
         flow_id, instance_tag, tags
    from moved
)
select l.lane_id, m.route_no, m.queue_no, m.place from moved m join lane l using (lane_no);
