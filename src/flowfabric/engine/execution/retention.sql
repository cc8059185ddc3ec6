-- name: take_retained
-- Deletes ended executions past their retention and all their rows, the oldest after :since first: only those in :only
-- unless that is null, and none of :skipped. Returns how many, the time up to which none is left except locked and skipped ones,
-- and whether there are streams. Joins by `any` of a one-element array, as an equality lets the planner scan a whole index.
with clock as materialized (select ff_now() as now),
-- Whole rows of retained until :limit executions are reached, each locked as it is read; later rows are not locked.
batch as materialized (
  select r.*
    from (select r.*, m.nth
            from (select r.ctid as tid, r.retain_until, r.ended_at, r.partition_key, r.execution_ids
                    from clock c
                   cross join lateral (
                         select r.ctid, r.* from retained r
                          where r.retain_until > :since and r.retain_until <= c.now
                            and not r.execution_ids <@ :skipped::uuid[] and (:only::uuid[] is null or r.execution_ids && :only)
                          order by r.retain_until offset 0) r) r
           cross join lateral (select from retained l where l.ctid = r.tid for update skip locked) l
           cross join lateral generate_series(1, cardinality(r.execution_ids)) as m(nth)
           limit :limit) r
   where r.nth = 1
),
member as materialized (
  select b.tid as batch_tid, b.ended_at, b.partition_key, m.execution_id, h.tid
    from batch b
   cross join lateral unnest(b.execution_ids) as m(execution_id)
    left join lateral (
         select e.ctid as tid from execution e
          where e.partition_key = b.partition_key and e.execution_id = m.execution_id and e.lifecycle_phase = 'terminal'
            and e.last_transition_at = b.ended_at
            and m.execution_id <> all(:skipped) and (:only is null or m.execution_id = any(:only))
            for update skip locked) h on true
),
-- By ctid: a row that has changed since the statement began is kept, for example one with a tag this snapshot lacks.
deleted as (
  delete from execution where ctid = any(array(select tid from member where tid is not null))
  returning partition_key, execution_id, has_tags, terminal_outcome <> 'success' as is_listed, input_payload is null as has_large_input,
            result_payload is null and terminal_outcome = 'success' as may_have_large_result
),
-- Members that still exist. The others were already deleted, or replayed and thus ended at another time.
kept as materialized (
  select m.batch_tid, m.execution_id
    from (select m.* from member m
           where (m.partition_key, m.execution_id) not in (select partition_key, execution_id from deleted) offset 0) m
   cross join lateral (
         select from execution e
          where e.partition_key = m.partition_key and e.execution_id = m.execution_id and e.lifecycle_phase = 'terminal'
            and e.last_transition_at = m.ended_at limit 1) e
),
spent as (
  delete from retained where ctid = any(array(select tid from batch except select batch_tid from kept))
),
-- queue_nos is removed: the remaining ids may be in another order than their queues.
left_over as (
  update retained r set execution_ids = k.execution_ids, queue_nos = null
    from (select batch_tid, array_agg(execution_id) as execution_ids from kept group by batch_tid) k
   where r.ctid = k.batch_tid
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
outcomes as (
  delete from idempotency_key
   where ctid = any(array(
         select k.tid
           from deleted d
          cross join lateral (
                select k.ctid as tid from idempotency_key k
                 where k.partition_key = d.partition_key and k.operation = 'suspend' and k.scope = d.execution_id offset 0) k
          where exists (select from suspension))))
select (select count(*) from deleted) as trimmed, coalesce((select max(retain_until) from batch), (select now from clock)) as reached,
       exists (select from stream) as has_streams;

-- name: read_frames_to_trim
-- Whether the executions that take_retained would delete have more than :frames frames together (is_cut); if so, the first of
-- them that fit, and the one that does not (next_id). Reads nothing but the clock if there are no streams.
with due as materialized (
  select r.partition_key, r.execution_id, row_number() over () as nth
    from (select r.partition_key, r.ended_at, m.execution_id
            from (select r.partition_key, r.execution_ids, r.ended_at from retained r
                   where r.retain_until > :since and r.retain_until <= (select ff_now()) and not r.execution_ids <@ :skipped::uuid[]
                   order by r.retain_until limit :limit) r
           cross join lateral unnest(r.execution_ids) as m(execution_id)
           where m.execution_id <> all(:skipped)
           limit :limit) r
   cross join lateral (
         select from execution e
          where e.partition_key = r.partition_key and e.execution_id = r.execution_id and e.lifecycle_phase = 'terminal'
            and e.last_transition_at = r.ended_at limit 1) e
   where exists (select from stream)
),
frame as materialized (
  select d.nth
    from (select * from due order by nth) d
   cross join lateral (
         select from stream_frame f where f.partition_key = d.partition_key and f.execution_id = d.execution_id offset 0) f
   limit :frames::bigint + 1
),
total as materialized (
  select count(*) > :frames as is_cut, max(nth) as nth from frame
)
select t.is_cut, array(select d.execution_id from due d where t.is_cut and d.nth < t.nth) as fitting_ids,
       d.partition_key as next_partition, d.execution_id as next_id
  from total t
  left join due d on t.is_cut and d.nth = t.nth;

-- name: take_ended_frames
-- Hides all frames of an ended execution, and deletes up to :frames of them; returns how many.
with ended as materialized (
  select e.partition_key, e.execution_id from execution e
   where e.partition_key = :partition_key and e.execution_id = :execution_id and e.lifecycle_phase = 'terminal'
     for update skip locked
),
hidden as (
  update stream s set first_frame_no = s.frame_count + 1
    from ended e
   where s.partition_key = any(array[e.partition_key]) and s.execution_id = e.execution_id and s.first_frame_no <= s.frame_count
),
deleted as (
  delete from stream_frame
   where ctid = any(array(
         select f.tid
           from ended e
          cross join lateral (
                select f.ctid as tid from stream_frame f
                 where f.partition_key = e.partition_key and f.execution_id = e.execution_id
                 order by f.attempt_index, f.ms, f.seq limit :frames) f))
  returning 1)
select count(*) as deleted from deleted;

-- name: list_retained
-- The ended executions past their retention except :skipped, the oldest after :since first.
select r.partition_key, m.execution_id
  from (select r.retain_until, r.partition_key, r.execution_ids from retained r
         where r.retain_until > :since and r.retain_until <= (select ff_now()) and not r.execution_ids <@ :skipped::uuid[]
         order by r.retain_until limit :limit) r
 cross join lateral unnest(r.execution_ids) as m(execution_id)
 where m.execution_id <> all(:skipped)
 order by r.retain_until limit :limit;

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
-- Deletes grants that expired more than :grant_memory_ms ago; returns how many.
with expired as (
  delete from claim_grant
   where ctid = any(array(
         select ctid from claim_grant
          where expires_at <= (select ff_now()) - :grant_memory_ms::bigint
          order by expires_at limit :limit for update skip locked))
  returning 1)
select count(*) as purged from expired;
