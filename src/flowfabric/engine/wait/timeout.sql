-- name: lock_timed_out
-- Locks suspended executions whose suspension has timed out, the oldest after :since first, except :skipped.
-- The timers are sorted before the executions are locked: only returned executions are locked.
select e.partition_key, e.execution_id
  from (select ff_now() as now) c
 cross join lateral (
       select t.partition_key, t.execution_id from timer t
        where t.kind = 'suspension_timeout' and t.due_at > :since and t.due_at <= c.now
          and t.execution_id <> all(:skipped::uuid[])
        order by t.due_at offset 0) t
 cross join lateral (
       select e.partition_key, e.execution_id from execution e
        where e.partition_key = t.partition_key and e.execution_id = t.execution_id
          and e.lifecycle_phase = 'suspended' and e.suspension_timeout_at <= c.now
          for update skip locked) e
 limit :limit;

-- name: list_open_suspensions
-- The open suspensions of executions that the transaction has locked, with the current time.
select i.nth, s.suspension_id, s.timeout_at, s.timeout_behavior, s.satisfier_ids, c.now
  from (select ff_now() as now) c
 cross join unnest(:partition_keys::smallint[], :execution_ids::uuid[]) with ordinality as i(partition_key, execution_id, nth)
 cross join lateral (
       select e.suspension_id from execution e
        where e.partition_key = i.partition_key and e.execution_id = i.execution_id limit 1) e
 cross join lateral (
       select s.* from suspension s
        where s.partition_key = i.partition_key and s.execution_id = i.execution_id and s.suspension_id = e.suspension_id
          for update) s
 where s.closed_at is null;

-- name: insert_timeout_signals
-- Inserts the signals that inform resumed attempts of the timeout.
insert into signal (partition_key, execution_id, signal_id, suspension_id, waitpoint_key, signal_name, signal_category,
                    source_type, source_identity, target_scope, created_at, accepted_at, effect, disposition)
select i.partition_key, i.execution_id, i.signal_id, i.suspension_id, :waitpoint_key, :signal_name, :signal_category,
       :source_type, :source_identity, 'execution', :now, :now, :disposition, :disposition
  from unnest(:partition_keys::smallint[], :execution_ids::uuid[], :signal_ids::uuid[], :suspension_ids::uuid[])
       as i(partition_key, execution_id, signal_id, suspension_id);

-- name: escalate_locked
-- Escalates suspended executions that the transaction has locked to an operator: they and their waitpoints stay open, with
-- no deadline.
with clock as materialized (select ff_now() as now),
held as materialized (
  select c.now, e.tid, i.partition_key, i.execution_id, s.tid as suspension_tid, s.timeout_at, s.waitpoint_ids
    from clock c
   cross join unnest(:partition_keys::smallint[], :execution_ids::uuid[]) as i(partition_key, execution_id)
   cross join lateral (
         select e.ctid as tid, e.suspension_id from execution e
          where e.partition_key = i.partition_key and e.execution_id = i.execution_id for update) e
   cross join lateral (
         select s.ctid as tid, s.timeout_at, s.closed_at, s.waitpoint_ids from suspension s
          where s.partition_key = i.partition_key and s.execution_id = i.execution_id and s.suspension_id = e.suspension_id
            for update) s
   where s.closed_at is null
),
-- Every writer locks waitpoints in ascending order.
active_waitpoint as materialized (
  select h.partition_key, w.waitpoint_id
    from held h
   cross join lateral (select waitpoint_id from unnest(h.waitpoint_ids) as i(waitpoint_id) order by 1) i
   cross join lateral (
         select w.waitpoint_id from waitpoint w
          where w.partition_key = h.partition_key and w.waitpoint_id = i.waitpoint_id and w.state = 'active'
            for update) w
),
extended as (
  update waitpoint w set expires_at = null
    from active_waitpoint l
   where w.partition_key = any(array[l.partition_key]) and w.waitpoint_id = l.waitpoint_id
),
moved as (
  update execution e
     set blocking_reason = :to_blocking, blocking_detail = 'suspension escalated: timeout at ' || h.timeout_at,
         suspension_timeout_at = null, last_transition_at = h.now, last_mutation_at = null
    from held h
   where e.ctid = h.tid
),
-- The kind is compared as text: comparing the enum would let a plan made while the table is empty scan timer_due.
untimed as (
  delete from timer t using held h
   where t.partition_key = any(array[h.partition_key]) and t.execution_id = h.execution_id
     and t.kind::text = 'suspension_timeout'
)
update suspension s set reason_code = :reason_code, timeout_at = null, timeout_behavior = null
  from held h
 where s.ctid = h.suspension_tid;

-- name: expire_pending_waitpoints
-- Closes pending waitpoints that expired before a suspend used them, the oldest first, and returns how many. :only limits them
-- to some executions unless it is null; those of :skipped are skipped. Their executions are locked first, unless they no
-- longer exist; rows locked by another session are left for the next call.
with clock as materialized (select ff_now() as now),
due as materialized (
  select w.*, e.is_held
    from clock c
   cross join lateral (
         select w.partition_key, w.execution_id, w.waitpoint_id, c.now from waitpoint w
          where w.activated_at is null and w.closed_at is null and w.expires_at <= c.now and w.state = 'pending'
            and w.execution_id <> all(:skipped::uuid[]) and (:only::uuid[] is null or w.execution_id = any(:only))
          order by w.expires_at limit :limit) w
    left join lateral (
         select true as is_held from execution e
          where e.partition_key = w.partition_key and e.execution_id = w.execution_id
            for update skip locked) e on true
),
held as materialized (
  select w.tid, d.now
    from due d
   cross join lateral (
         select w.ctid as tid, w.state from waitpoint w
          where w.partition_key = d.partition_key and w.waitpoint_id = d.waitpoint_id
            for update skip locked) w
   where w.state = 'pending' and (d.is_held or (
         select true from execution e where e.partition_key = d.partition_key and e.execution_id = d.execution_id) is null)
),
closed as (
  update waitpoint w set state = 'closed', closed_at = h.now, close_reason = :close_reason
    from held h
   where w.ctid = h.tid
  returning 1
)
select count(*) as closed from closed;

-- name: list_pending_waitpoints
-- The executions of pending waitpoints that expired before a suspend used them, the oldest first, except :skipped.
select w.partition_key, w.execution_id
  from waitpoint w
 where w.activated_at is null and w.closed_at is null and w.expires_at <= (select ff_now()) and w.state = 'pending'
   and w.execution_id <> all(:skipped::uuid[])
 order by w.expires_at limit :limit;
