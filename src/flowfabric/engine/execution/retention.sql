-- fragment: is_past_retention
-- Whether the ended member h of the flow f may be deleted: no member is live, no end is queued for the cascade, no cancellation is owed,
-- and the retention of h after the end of the flow is over. The offsets keep the planner from joining whole tables.
f.live_count <= 0 and f.ended_at + h.retention_ms <= (select now from clock)
and not exists (select from cancel_backlog o where o.partition_key = f.partition_key and o.flow_id = f.flow_id offset 0)
and not exists (select from pending_cancel_group o where o.partition_key = f.partition_key and o.flow_id = f.flow_id offset 0)

-- name: take_retained
-- Deletes ended executions past their retention and all their rows, the oldest after :since first, up to :until or now: only those in
-- :only unless that is null, none of :skipped, and as many as have :frames frames with :bytes bytes together. One with more than that is
-- left: its frames are hidden, and its streams are due for the sweep that deletes hidden frames. One whose frames are hidden already
-- is left until they are deleted, and one with a locked stream is left too. A member that its flow keeps is held until it is due again. The
-- retention of an execution is its own one or :retention_ms. Returns how many were deleted and held, how many streams and rows of retained
-- were changed, whether some were left because of their streams (has_more), and otherwise the time up to which none is left except locked
-- and skipped ones.
-- Joins by `any` of a one-element array, as an equality lets the planner scan a whole index.
with clock as materialized (select ff_now() as now),
-- Whole rows of retained until :limit executions are reached, each locked as it is read; later rows are not locked.
batch as materialized (
  select r.*
    from (select r.*, m.nth
            from (select r.ctid as tid, r.retain_until, r.ended_at, r.partition_key, r.execution_ids, r.terminal_outcome
                    from clock c
                   cross join lateral (
                         select r.ctid, r.* from retained r
                          where r.retain_until > :since and r.retain_until <= coalesce(:until::bigint, c.now)
                            and not r.execution_ids <@ :skipped::uuid[] and (:only::uuid[] is null or r.execution_ids && :only)
                          order by r.retain_until offset 0) r) r
           cross join lateral (select from retained l where l.ctid = r.tid for update skip locked) l
           cross join lateral generate_series(1, cardinality(r.execution_ids)) as m(nth)
           limit :limit) r
   where r.nth = 1
),
member as materialized (
  select b.tid as batch_tid, b.retain_until, b.ended_at, b.partition_key, b.terminal_outcome, m.execution_id, h.queue_no,
         case when w.is_held is null then h.tid end as tid, w.is_held, w.due_at, row_number() over () as nth
    from batch b
   cross join lateral unnest(b.execution_ids) as m(execution_id)
    left join lateral (
         select e.ctid as tid, e.queue_no, e.flow_id, coalesce(e.retention_ms, :retention_ms::bigint) as retention_ms from execution e
          where e.partition_key = b.partition_key and e.execution_id = m.execution_id and e.lifecycle_phase = 'terminal'
            and e.last_transition_at = b.ended_at
            and m.execution_id <> all(:skipped) and (:only is null or m.execution_id = any(:only))
            for update skip locked) h on true
    -- The flow of a member is locked, or the member is held. Skipped entirely for an execution outside of flows.
    left join lateral (
         select true as is_past_retention from flow f
          where h.flow_id is not null and f.partition_key = any(array[b.partition_key]) and f.flow_id = h.flow_id
            and
            -- include: is_past_retention
            for share skip locked) s on true
    left join lateral (
         select true as is_held, case when f.live_count <= 0 then f.ended_at + h.retention_ms end as due_at from flow f
          where h.flow_id is not null and s.is_past_retention is null and f.partition_key = any(array[b.partition_key]) and f.flow_id = h.flow_id
          limit 1) w on true
),
-- Those with streams, which are locked before anything of them is deleted, as the sweep of streams does. The number of the oldest
-- stored frame of a stream tells how many there are at most, and its frames so far have the same size on average. Skipped entirely if
-- there are no streams.
counted as materialized (
  select c.nth, c.partition_key, c.execution_id, c.is_locked and c.is_long as is_hidden,
         c.is_locked and not c.is_long
           and sum(c.frames) filter (where c.is_locked and not c.is_long) over (order by c.nth) <= :frames
           and sum(c.bytes) filter (where c.is_locked and not c.is_long) over (order by c.nth) <= :bytes as fits
    from (select m.nth, m.partition_key, m.execution_id, f.is_locked, f.frames, f.bytes,
                 f.frames > :frames::bigint or f.bytes > :bytes::bigint or f.is_hidden as is_long
            from member m
           cross join lateral (
                 select bool_and(l.is_locked is not null) as is_locked, coalesce(sum(o.frames), 0) as frames,
                        coalesce(sum(o.frames * s.total_bytes / s.frame_count), 0) as bytes,
                        coalesce(bool_or(o.frames > 0 and s.first_frame_no > s.frame_count), false) as is_hidden
                   from (select s.ctid as tid, s.* from stream s
                          where s.partition_key = m.partition_key and s.execution_id = m.execution_id offset 0) s
                   left join lateral (select true as is_locked from stream l where l.ctid = s.tid for update skip locked) l on true
                   left join lateral (
                        select s.frame_count + 1 - f.frame_no as frames from stream_frame f
                         where f.partition_key = s.partition_key and f.execution_id = s.execution_id
                           and f.attempt_index = s.attempt_index
                         order by f.ms, f.seq limit 1) o on true) f
           where m.tid is not null and f.is_locked is not null and exists (select from stream)) c
),
hidden as (
  update stream s set first_frame_no = s.frame_count + 1, sweep_at = least(s.sweep_at, (select now from clock))
    from counted d
   where d.is_hidden and s.first_frame_no <= s.frame_count
     and s.partition_key = any(array[d.partition_key]) and s.execution_id = d.execution_id
  returning 1
),
-- By ctid: a row that has changed since the statement began is kept, for example one with a tag this snapshot lacks.
deleted as (
  delete from execution where ctid = any(array(
         select tid from member where tid is not null and nth not in (select nth from counted where not fits)))
  returning partition_key, execution_id, has_tags, terminal_outcome <> 'success' as is_listed, input_payload is null as has_large_input,
            result_payload is null and terminal_outcome = 'success' as may_have_large_result
),
-- Members that still exist, except those that are held. The others were already deleted, or replayed and thus ended at another time.
kept as materialized (
  select m.batch_tid, m.execution_id
    from (select m.* from member m
           where m.is_held is not true
             and (m.partition_key, m.execution_id) not in (select partition_key, execution_id from deleted) offset 0) m
   cross join lateral (
         select from execution e
          where e.partition_key = m.partition_key and e.execution_id = m.execution_id and e.lifecycle_phase = 'terminal'
            and e.last_transition_at = m.ended_at limit 1) e
),
spent as (
  delete from retained where ctid = any(array(select tid from batch except select batch_tid from kept))
  returning 1
),
-- queue_nos is removed: the remaining ids may be in another order than their queues.
left_over as (
  update retained r set execution_ids = k.execution_ids, queue_nos = null
    from (select batch_tid, array_agg(execution_id) as execution_ids from kept group by batch_tid) k
   where r.ctid = k.batch_tid and cardinality(k.execution_ids) < cardinality(r.execution_ids)
  returning 1
),
-- Due again when the retention after the end of the flow is over, or after :recheck_ms if the flow has not ended or that time has passed.
held as (
  insert into retained (retain_until, ended_at, partition_key, execution_ids, queue_no, queue_nos, terminal_outcome)
  select greatest(m.retain_until, case when m.due_at > c.now then m.due_at else c.now + :recheck_ms::bigint end), m.ended_at,
         m.partition_key, array_agg(m.execution_id),
         case when min(m.queue_no) = max(m.queue_no) then min(m.queue_no) end,
         case when min(m.queue_no) < max(m.queue_no) then array_agg(m.queue_no) end, m.terminal_outcome
    from clock c cross join member m
   where m.is_held
   group by c.now, m.retain_until, m.due_at, m.ended_at, m.partition_key, m.terminal_outcome
  returning cardinality(execution_ids) as members
),
inputs as (
  delete from execution_input i using deleted d
   where d.has_large_input and i.partition_key = any(array[d.partition_key]) and i.execution_id = d.execution_id),
results as (
  delete from execution_result r using deleted d
   where d.may_have_large_result and r.partition_key = any(array[d.partition_key]) and r.execution_id = d.execution_id),
attempts as (
  delete from attempt a using deleted d where a.partition_key = any(array[d.partition_key]) and a.execution_id = d.execution_id),
grants as (
  delete from claim_grant g using deleted d where g.partition_key = any(array[d.partition_key]) and g.execution_id = d.execution_id),
tags as (
  delete from execution_tag t using deleted d
   where d.has_tags and t.partition_key = any(array[d.partition_key]) and t.execution_id = d.execution_id),
listings as (
  delete from listed l using deleted d
   where d.is_listed and l.partition_key = any(array[d.partition_key]) and l.execution_id = d.execution_id),
-- Skipped entirely if nothing was ever suspended.
waits as (
  delete from suspension s using deleted d
   where s.partition_key = any(array[d.partition_key]) and s.execution_id = d.execution_id and exists (select from suspension)),
waitpoints as (
  delete from waitpoint w using deleted d
   where w.partition_key = any(array[d.partition_key]) and w.execution_id = any(array[d.execution_id])
     and exists (select from waitpoint)),
signals as (
  delete from signal g using deleted d
   where g.partition_key = any(array[d.partition_key]) and g.execution_id = d.execution_id and exists (select from signal)),
-- Skipped entirely if there are no streams.
streams as (
  delete from stream s using deleted d
   where s.partition_key = any(array[d.partition_key]) and s.execution_id = d.execution_id and exists (select from stream)),
frames as (
  delete from stream_frame f using deleted d
   where f.partition_key = any(array[d.partition_key]) and f.execution_id = d.execution_id and exists (select from stream)),
summaries as (
  delete from stream_summary s using deleted d
   where s.partition_key = any(array[d.partition_key]) and s.execution_id = d.execution_id and exists (select from stream)),
-- What it has spent stays counted. Skipped entirely if there are no ledgers.
ledgers as (
  delete from budget_spend s using deleted d
   where s.execution_partition = any(array[d.partition_key]) and s.execution_id = d.execution_id and exists (select from budget_spend)),
outcomes as (
  delete from idempotency_key
   where ctid = any(array(
         select k.tid
           from deleted d
          cross join lateral (
                select k.ctid as tid from idempotency_key k
                 where k.partition_key = d.partition_key and k.operation = 'suspend' and k.scope = d.execution_id offset 0) k
          where exists (select from suspension))))
select (select count(*) from deleted) as trimmed, (select coalesce(sum(members), 0) from held) as held,
       (select count(*) from hidden) + (select count(*) from spent) + (select count(*) from left_over) as changed,
       coalesce((select max(retain_until) from batch), (select now from clock)) as reached,
       exists (select from counted where not fits) as has_more;

-- name: list_retained
-- The ended executions past their retention except :skipped and those whose hidden frames are deleted before, the oldest after
-- :since first.
select r.partition_key, m.execution_id
  from (select r.retain_until, r.partition_key, r.execution_ids from retained r
         where r.retain_until > :since and r.retain_until <= (select ff_now()) and not r.execution_ids <@ :skipped::uuid[]
         order by r.retain_until offset 0) r
 cross join lateral unnest(r.execution_ids) as m(execution_id)
 where m.execution_id <> all(:skipped)
   and not exists (
         select from stream s
          where s.partition_key = r.partition_key and s.execution_id = m.execution_id and s.first_frame_no > s.frame_count
            and exists (
                  select from stream_frame f
                   where f.partition_key = s.partition_key and f.execution_id = s.execution_id
                     and f.attempt_index = s.attempt_index offset 0)
         offset 0)
 order by r.retain_until limit :limit;

-- name: read_retained_end
-- Up to when the next :size rows of retained after :since are due.
select max(retain_until) as until
  from (select retain_until from retained where retain_until > :since order by retain_until limit :size) r;

-- name: list_trimmable
-- The ended executions whose row of retained is due after :since and up to :until, which ended at least :retention_ms or their own
-- retention ago, and which have the given namespace and tag, except :skipped and members that their flows keep; in the order in which
-- they are due.
with clock as materialized (select ff_now() as now)
select r.retain_until, r.partition_key, m.execution_id
  from clock c
 cross join lateral (
       select r.* from retained r
        where r.retain_until > :since and r.retain_until <= :until
          and (r.retain_until <= c.now or r.ended_at <= c.now - :retention_ms::bigint)
        order by r.retain_until offset 0) r
 cross join lateral unnest(r.execution_ids) as m(execution_id)
 cross join lateral (
       select e.partition_key, e.execution_id, e.namespace_no, e.flow_id, e.has_tags, coalesce(e.retention_ms, :retention_ms) as retention_ms
         from execution e
        where e.partition_key = r.partition_key and e.execution_id = m.execution_id and e.lifecycle_phase = 'terminal'
          and e.last_transition_at = r.ended_at
          and e.last_transition_at + coalesce(e.retention_ms, :retention_ms) <= c.now limit 1) h
 where m.execution_id <> all(:skipped::uuid[])
   and (:namespace::text is null or exists (
         select from namespace n where n.namespace_no = h.namespace_no and n.namespace = :namespace offset 0))
   and (:tag_key::text is null or (h.has_tags and exists (
         select from execution_tag t
          where t.partition_key = h.partition_key and t.execution_id = h.execution_id and t.key collate "C" = :tag_key
            and t.value = :tag_value::text
         offset 0)))
   and (h.flow_id is null or not exists (
         select from flow f
          where f.partition_key = h.partition_key and f.flow_id = h.flow_id
            and not (
            -- include: is_past_retention
            )
         offset 0))
 limit :limit;

-- name: hide_frames
-- Hides the frames of an execution except of locked streams, and makes its streams due for the sweep that deletes hidden frames; returns
-- whether there were any (has_hidden).
with hidden as (
  update stream set first_frame_no = frame_count + 1, sweep_at = least(sweep_at, (select ff_now()))
   where ctid = any(array(
         select ctid from stream
          where partition_key = :partition_key and execution_id = :execution_id and first_frame_no <= frame_count
            for update skip locked))
  returning 1)
select exists (select from hidden) as has_hidden;

-- name: take_expired_keys
-- Deletes expired idempotency keys; returns how many.
with expired as (
  delete from idempotency_key
   where ctid = any(array(
         select ctid from idempotency_key
          where expires_at <= (select ff_now()) order by expires_at limit :limit for update skip locked))
  returning 1)
select count(*) as purged from expired;

-- name: take_old_grants
-- Deletes grants that expired more than :grant_memory_ms ago and whose slots were returned; returns how many.
with expired as (
  delete from claim_grant
   where ctid = any(array(
         select ctid from claim_grant
          where expires_at <= (select ff_now()) - :grant_memory_ms::bigint and not has_slots
          order by expires_at limit :limit for update skip locked))
  returning 1)
select count(*) as purged from expired;
