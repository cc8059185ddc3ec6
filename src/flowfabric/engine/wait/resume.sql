-- name: read_is_waiting
-- Whether the latest suspension of an execution that the transaction has locked is open; no row if it has none.
select s.closed_at is null as is_open
  from execution e
 cross join lateral (
       select s.closed_at from suspension s
        where s.partition_key = e.partition_key and s.execution_id = e.execution_id and s.suspension_id = e.suspension_id
        limit 1) s
 where e.partition_key = :partition_key and e.execution_id = :execution_id;

-- name: resume_locked
-- Makes suspended executions that the transaction has locked runnable, now or after a delay, and closes their suspensions
-- and waitpoints. The waitpoint of the satisfying signal counts the signals it accepted. Writes an event if :kind is given.
-- Returns, for each delay and queue, the number of resumed executions and the first place. A column whose values are all
-- equal may be passed as one element.
-- Only the execution row is locked, so only it is updated by ctid. Another session may commit a newer version of the
-- suspension or a waitpoint; those are updated by key, as in insert_deliveries.
with clock as materialized (select ff_now() as now),
item as materialized (
  select coalesce(partition_key, (:partition_keys)[1]) as partition_key, execution_id,
         case cardinality(:delays_ms) when 1 then (:delays_ms)[1] else delay_ms end as delay_ms,
         case cardinality(:blocking_details) when 1 then (:blocking_details)[1] else blocking_detail end as blocking_detail,
         coalesce(to_eligibility, (:to_eligibilities)[1]) as to_eligibility,
         coalesce(to_blocking, (:to_blockings)[1]) as to_blocking,
         coalesce(satisfiers, (:satisfiers)[1])::uuid[] as satisfiers,
         case cardinality(:closing_signals) when 1 then (:closing_signals)[1] else closing_signal_id end as closing_signal_id,
         case cardinality(:closing_waitpoints) when 1 then (:closing_waitpoints)[1] else closing_waitpoint_id end as closing_waitpoint_id,
         coalesce(accepted, (:accepted)[1]) as accepted, coalesce(matched, (:matched)[1]) as matched
    from unnest(:partition_keys::smallint[], :execution_ids::uuid[], :delays_ms::bigint[], :blocking_details::text[],
                :to_eligibilities::eligibility_state[], :to_blockings::blocking_reason[], :satisfiers::text[],
                :closing_signals::uuid[], :closing_waitpoints::uuid[], :accepted::int[], :matched::int[])
         as i(partition_key, execution_id, delay_ms, blocking_detail, to_eligibility, to_blocking, satisfiers,
              closing_signal_id, closing_waitpoint_id, accepted, matched)
),
held as materialized (
  select i.*, c.now, e.*, i.to_eligibility = 'eligible_now' as is_ready, s.waitpoint_ids
    from clock c
   cross join item i
   cross join lateral (
         select e.ctid as tid, e.queue_no, e.place, e.namespace_no, e.attempt_count, e.lease_epoch, e.flow_id, e.instance_tag,
                e.has_tags, e.suspension_id, e.suspension_timeout_at is not null as had_timeout
           from execution e
          where e.partition_key = i.partition_key and e.execution_id = i.execution_id and e.lifecycle_phase = 'suspended'
         offset 0) e
   cross join lateral (
         select s.waitpoint_ids, s.closed_at from suspension s
          where s.partition_key = i.partition_key and s.execution_id = i.execution_id and s.suspension_id = e.suspension_id
         offset 0) s
   where s.closed_at is null
),
moved as (
  update execution e
     set lifecycle_phase = :to_phase, ownership_state = :to_ownership, eligibility_state = h.to_eligibility,
         blocking_reason = h.to_blocking, terminal_outcome = :to_outcome, attempt_state = :to_attempt,
         blocking_detail = h.blocking_detail, delay_until = h.now + h.delay_ms, suspension_timeout_at = null,
         attached = e.attached & ~2, last_transition_at = h.now, last_mutation_at = null
    from held h
   where e.ctid = h.tid
),
queued as (
  insert into ready (place, route_no, queue_no, partition_key, execution_id)
  select h.place, q.route_no, h.queue_no, h.partition_key, h.execution_id
    from held h
   cross join lateral (select q.route_no from queue q where q.queue_no = h.queue_no limit 1) q
   where h.is_ready
),
listings as (
  insert into listed (partition_key, execution_id, public_state, at)
  select partition_key, execution_id, 'resumable', now from held where is_ready
  on conflict (partition_key, execution_id) do update set public_state = excluded.public_state, at = excluded.at
),
timed as (
  insert into timer (partition_key, execution_id, kind, due_at)
  select partition_key, execution_id, 'delay', now + delay_ms from held where not is_ready
  on conflict (partition_key, execution_id, kind) do update set due_at = excluded.due_at
),
-- The kind is compared as text: comparing the enum would let a plan made while the table is empty scan timer_due.
untimed as (
  delete from timer t using held h
   where h.had_timeout and t.partition_key = any(array[h.partition_key]) and t.execution_id = h.execution_id
     and t.kind::text = 'suspension_timeout'
),
closed as (
  update suspension s
     set closed_at = h.now, close_reason = :close_reason,
         satisfier_ids = case when :is_satisfied::boolean then s.satisfier_ids || h.satisfiers || h.closing_signal_id else h.satisfiers end,
         satisfied_at = case when :is_satisfied then h.now end,
         last_signal_at = case when :is_satisfied then h.now else s.last_signal_at end
    from held h
   where s.partition_key = any(array[h.partition_key]) and s.execution_id = h.execution_id and s.suspension_id = h.suspension_id
),
closing as materialized (
  select h.partition_key, i.waitpoint_id, h.now,
         case when i.waitpoint_id = h.closing_waitpoint_id then h.accepted else 0 end as accepted, h.matched
    from held h
   cross join lateral unnest(h.waitpoint_ids) as i(waitpoint_id)
),
closed_waitpoints as (
  update waitpoint w
     set state = 'closed', closed_at = c.now, close_reason = :close_reason,
         satisfied_at = case when :is_satisfied then c.now end, signal_count = w.signal_count + c.accepted,
         matched_signal_count = w.matched_signal_count + case when c.accepted > 0 then c.matched else 0 end,
         last_signal_at = case when c.accepted > 0 then c.now else w.last_signal_at end
    from closing c
   where w.partition_key = any(array[c.partition_key]) and w.waitpoint_id = c.waitpoint_id and w.state in ('pending', 'active')
),
events as (
  insert into event (at, execution_id, partition_key, kind, namespace_no, attempt_index, lease_epoch, outcome, flow_id,
                     instance_tag, details, tags)
  select now, execution_id, partition_key, :kind::event_kind, namespace_no, attempt_count - 1, lease_epoch,
         :outcome::smallint, flow_id, instance_tag, :event_details::jsonb,
         case when has_tags then (
           select jsonb_object_agg(t.key, t.value) from execution_tag t
            where t.partition_key = h.partition_key and t.execution_id = h.execution_id) end
    from held h where :kind is not null
)
select h.delay_ms, q.lane_id, q.route_no, h.queue_no, h.place, h.resumed
  from (select delay_ms, queue_no, min(place) as place, count(*) as resumed from held group by delay_ms, queue_no) h
 cross join lateral (
       select l.lane_id, q.route_no from queue q join lane l using (lane_no) where q.queue_no = h.queue_no limit 1) q;
