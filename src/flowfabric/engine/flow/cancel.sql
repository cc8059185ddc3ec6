-- name: list_members
-- The members of a flow in ascending order, each with its phase.
select e.partition_key, e.execution_id, e.lifecycle_phase
  from execution e
 where e.flow_id = :flow_id
 order by e.flow_id, e.execution_id
 limit :limit;

-- name: lock_members
-- Locks members of a flow until the transaction ends, waiting for each, in the order given, and returns their phases.
select e.execution_id, e.lifecycle_phase
  from unnest(:execution_ids::uuid[]) with ordinality as i(execution_id, nth)
 cross join lateral (
       select e.execution_id, e.lifecycle_phase from execution e
        where e.partition_key = :partition_key and e.execution_id = i.execution_id
          for update) e
 order by i.nth;

-- name: hold_owed_members
-- Records members that the transaction has locked as owed by their cancelled flow, and holds them back from claims: runnable ones,
-- and active ones whose lease is lost. Their entries of ready, their grants and their delays are deleted.
-- Returns the quota keys in which slots became free.
with clock as materialized (select ff_now() as now),
member as materialized (
  select e.*, (e.is_runnable or e.is_lost) as is_held, c.now
    from unnest(:execution_ids::uuid[]) as i(execution_id)
   cross join clock c
   cross join lateral (
         select e.partition_key, e.execution_id, e.queue_no, e.place, e.attached & 1 <> 0 as has_grant,
                case when e.granted_until is not null then e.slot_keys end as slot_keys,
                e.lifecycle_phase in ('submitted', 'runnable') as is_runnable, e.eligibility_state,
                e.ownership_state in ('lease_expired_reclaimable', 'lease_revoked') as is_lost
           from execution e
          where e.partition_key = :partition_key and e.execution_id = i.execution_id limit 1) e
),
owed as (
  insert into cancel_backlog_member (partition_key, flow_id, execution_id)
  select partition_key, :flow_id::uuid, execution_id from member
  on conflict do nothing
),
held as (
  update execution e
     set eligibility_state = case when m.is_runnable then :to_eligibility::eligibility_state else e.eligibility_state end,
         blocking_reason = :to_blocking, blocking_detail = 'its flow is cancelled', delay_until = null, granted_until = null,
         attached = e.attached & ~9, slot_keys = null,
         last_transition_at = case when m.is_runnable then m.now else e.last_transition_at end,
         last_mutation_at = case when not m.is_runnable then m.now end
    from member m
   where m.is_held and e.partition_key = any(array[m.partition_key]) and e.execution_id = m.execution_id
),
-- The slots of the grants.
returned_slots as (
  insert into slot_return as s (quota_key_no, shard, returned)
  select k.quota_key_no, :slot_shard::smallint, count(*)
    from member m cross join lateral unnest(m.slot_keys) as k(quota_key_no)
   where m.is_held and m.slot_keys is not null
   group by k.quota_key_no
   order by k.quota_key_no
  on conflict (quota_key_no, shard) do update set returned = s.returned + excluded.returned
  returning s.quota_key_no
),
with_entry as materialized (
  select m.place, m.queue_no, q.route_no
    from member m
   cross join lateral (select q.route_no from queue q where q.queue_no = m.queue_no limit 1) q
   where m.is_held and (m.is_lost or m.eligibility_state in ('eligible_now', 'blocked_by_budget', 'blocked_by_quota'))
),
-- Entries are looked up by the columns of both indexes, so that the planner can use either.
deleted_entries as (
  delete from ready r using with_entry w
   where r.route_no = any(array[w.route_no]) and r.queue_no = any(array[w.queue_no]) and r.place = w.place
),
deleted_grants as (
  delete from claim_grant g using member m
   where m.is_held and m.has_grant and g.partition_key = any(array[m.partition_key]) and g.execution_id = m.execution_id
),
-- The kind is compared as text: with an enum equality, a plan made while there are few timers scans timer_due.
deleted_delays as (
  delete from timer t using member m
   where m.eligibility_state = 'not_eligible_until_time' and t.partition_key = any(array[m.partition_key])
     and t.execution_id = m.execution_id and t.kind::text = 'delay'
),
listings as (
  insert into listed (partition_key, execution_id, public_state, at)
  select partition_key, execution_id, 'waiting', now from member where is_runnable
  on conflict (partition_key, execution_id) do update set public_state = excluded.public_state, at = excluded.at
)
select quota_key_no from returned_slots;

-- name: set_flow_cancelled
-- Cancels a flow that the transaction has locked, with the header of what it owes if that is anything, and writes the events.
with clock as materialized (select ff_now() as now),
cancelled as (
  update flow f
     set public_flow_state = :to_state, cancelled_at = c.now, cancel_reason = :reason, cancellation_policy = :cancellation_policy,
         last_mutation_at = c.now
    from clock c
   where f.partition_key = :partition_key and f.flow_id = :flow_id
  returning f.partition_key, f.flow_id, f.namespace_no, f.derived_state, c.now
),
owing as (
  insert into cancel_backlog (partition_key, flow_id, requested_at, requester, reason, cancellation_policy, grace_until)
  select partition_key, flow_id, now, :requester, :reason, :cancellation_policy, now + :grace_ms::bigint
    from cancelled where :member_count::int > 0
  on conflict (partition_key, flow_id) do update
     set requested_at = excluded.requested_at, requester = excluded.requester, reason = excluded.reason,
         cancellation_policy = excluded.cancellation_policy, grace_until = excluded.grace_until, status = excluded.status
)
insert into event (at, execution_id, partition_key, kind, namespace_no, reason, details)
select c.now, c.flow_id, c.partition_key, 'operator_action', c.namespace_no, e.event_type, e.details
  from cancelled c
 cross join lateral (values
       (1, 'flow_cancel_requested', jsonb_build_object(
         'flow_id', c.flow_id, 'cancellation_policy', :cancellation_policy, 'reason', :reason, 'member_count', :member_count)),
       (2, 'flow_state_changed', jsonb_build_object('flow_id', c.flow_id, 'from', c.derived_state, 'to', :to_state)))
       as e(nth, event_type, details)
 order by e.nth;

-- name: read_cancellation
-- Whether members of a cancelled flow that have not ended are still owed, or held back for the cancellation; no row if the flow does
-- not exist. With `exists` the planner would hash the members of all flows.
select coalesce(
         (select true from cancel_backlog_member m
           cross join lateral (
                 select e.lifecycle_phase from execution e
                  where e.partition_key = m.partition_key and e.execution_id = m.execution_id limit 1) e
           where m.partition_key = f.partition_key and m.flow_id = f.flow_id and e.lifecycle_phase <> 'terminal' limit 1),
         (select true from execution e
           where e.flow_id = f.flow_id and e.lifecycle_phase <> 'terminal' and e.blocking_reason = 'paused_by_flow_cancel' limit 1),
         false) as has_live_members
  from flow f
 where f.partition_key = :partition_key and f.flow_id = :flow_id;
