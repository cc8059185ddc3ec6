-- fragment: frame_columns
-- What readers get of a frame.
f.ms, f.seq, f.frame_no, f.at, f.mode, f.frame_type, f.payload, f.correlation_id, f.summary_version, f.ttl_ms

-- fragment: is_visible
-- Whether readers see a frame; those below first_frame_no are deleted later.
f.frame_no >= s.first_frame_no and (s.expires_at is null or s.expires_at > (select now from clock))

-- fragment: is_ended
-- Whether no frame follows those of the attempts up to the last one asked for. That one has ended if it waits for its successor or
-- has lost its lease: without a frame, it has no stream that was closed.
coalesce(e.lifecycle_phase = 'terminal' or e.attempt_count > i.last_attempt_index::bigint + 1
         or (e.attempt_count = i.last_attempt_index::bigint + 1
             and (e.attempt_state in ('pending_retry_attempt', 'pending_replay_attempt')
                  or e.ownership_state in ('lease_expired_reclaimable', 'lease_revoked')))
         or (n.attempt_index = i.last_attempt_index and n.closed_at is not null), false)

-- name: list_frames
-- The visible frames between two positions, each with the id of the newest frame and when and why the stream was closed; one row
-- without a frame if there is none, and no row if the attempt has no stream or its execution is deleted. The caller orders them: a
-- sort here would copy the payloads.
with clock as materialized (select ff_now() as now)
select coalesce(s.closed_at, e.ended_at, a.ended_at) as closed_at,
       case when a.is_reclaimed then 'reclaimed'
            else coalesce(s.closed_reason, e.reason, case when a.ended_at is not null then 'attempt_failure' end) end as closed_reason,
       s.last_ms, s.last_seq,
       -- include: frame_columns
  from stream s
  -- The previous version ends attempts without closing their streams, and a claim does not wait for a locked stream.
  left join lateral (
       select e.last_transition_at as ended_at,
              case e.terminal_outcome when 'success' then 'attempt_success' when 'cancelled' then 'attempt_cancelled'
                   when 'expired' then 'expired' when 'skipped' then 'dependency_impossible' else 'attempt_failure' end as reason
         from execution e
        where s.closed_at is null and e.partition_key = s.partition_key and e.execution_id = s.execution_id
          and e.lifecycle_phase = 'terminal' and e.attempt_count = s.attempt_index + 1
        limit 1) e on true
  left join lateral (
       select a.ended_at, a.attempt_state = 'interrupted_reclaimed' as is_reclaimed
         from attempt a
        where (s.closed_at is null or s.closed_reason in ('lease_expired', 'attempt_interrupted'))
          and a.partition_key = s.partition_key and a.execution_id = s.execution_id and a.attempt_index = s.attempt_index
          and a.ended_at is not null
        limit 1) a on true
 -- One bound: of two, a scan may begin at the lower one.
 cross join lateral (
       select greatest(array[:from_ms::bigint, :from_seq::bigint], array[s.oldest_ms, s.oldest_seq]) as first_id) b
  left join lateral (
       select
       -- include: frame_columns
         from stream_frame f
        where f.partition_key = s.partition_key and f.execution_id = s.execution_id and f.attempt_index = s.attempt_index
          and (f.ms, f.seq) >= (b.first_id[1], b.first_id[2]) and (f.ms, f.seq) <= (:to_ms, :to_seq)
          and not (:excludes_best_effort and f.mode = 'best_effort')
          and
          -- include: is_visible
        order by f.ms, f.seq limit :count_limit) f on true
 where s.partition_key = :partition_key and s.execution_id = :execution_id and s.attempt_index = :attempt_index
   and exists (select from execution x where x.partition_key = :partition_key and x.execution_id = :execution_id);

-- name: list_followed_frames
-- The visible frames from a position on, of all attempts up to the last one asked for, each with the id of the newest frame and
-- with whether no more frames can follow; one row without a frame if there is none, and no row if the execution does not exist.
with clock as materialized (select ff_now() as now)
select
       -- include: is_ended
       as is_ended,
       n.attempt_index as newest_index, n.last_ms, n.last_seq, f.attempt_index,
       -- include: frame_columns
  from (select :last_attempt_index::int as last_attempt_index) i
 cross join execution e
  left join lateral (
       select s.attempt_index, s.last_ms, s.last_seq, s.closed_at from stream s
        where s.partition_key = e.partition_key and s.execution_id = e.execution_id and s.attempt_index <= i.last_attempt_index
        order by s.attempt_index desc limit 1) n on true
  left join lateral (
       select f.*
         -- Stream by stream: a plain join could read all streams first, and then sort all frames.
         from (select s.*,
                      greatest(case when s.attempt_index = :attempt_index then array[:from_ms::bigint, :from_seq::bigint] end,
                               array[s.oldest_ms, s.oldest_seq]) as first_id
                 from stream s
                where s.partition_key = :partition_key and s.execution_id = :execution_id
                  and s.attempt_index between :attempt_index and :last_attempt_index
                order by s.attempt_index) s
        cross join lateral (
              select f.attempt_index,
              -- include: frame_columns
                from stream_frame f
               where f.partition_key = s.partition_key and f.execution_id = s.execution_id and f.attempt_index = s.attempt_index
                 and (f.ms, f.seq) >= (s.first_id[1], s.first_id[2])
                 and
                 -- include: is_visible
               order by f.ms, f.seq limit :count_limit) f
        limit :count_limit) f on true
 where e.partition_key = :partition_key and e.execution_id = :execution_id;

-- name: list_changed
-- Which of the given waits of tails may be over: there may be a frame from the position on, or no more frames can follow. If the
-- latter is so although there is no stream, that ends only the wait of a tail that follows an execution.
select i.nth
  from unnest(:partition_keys::smallint[], :execution_ids::uuid[], :attempt_indexes::int[], :mss::bigint[], :seqs::int[],
              :last_attempt_indexes::int[], :are_following::boolean[]) with ordinality
       as i(partition_key, execution_id, attempt_index, ms, seq, last_attempt_index, is_following, nth)
  left join lateral (
       select e.lifecycle_phase, e.attempt_count, e.attempt_state, e.ownership_state from execution e
        where e.partition_key = i.partition_key and e.execution_id = i.execution_id limit 1) e on true
  left join lateral (
       select s.attempt_index, s.last_ms, s.last_seq, s.closed_at from stream s
        where s.partition_key = i.partition_key and s.execution_id = i.execution_id
          and s.attempt_index between i.attempt_index and i.last_attempt_index
        order by s.attempt_index desc limit 1) n on true
 where (n.attempt_index, n.last_ms, n.last_seq) >= (i.attempt_index, i.ms, i.seq)
    or (i.is_following and e.attempt_count is null)
    or ((i.is_following or n.attempt_index is not null)
        and
        -- include: is_ended
       );

-- name: read_newest_summary
-- The newest summary of an execution, which its latest attempt may not have yet; nulls if it has none, and no row if the
-- execution does not exist.
select s.document, s.version, s.patch_kind, s.last_updated_ms, s.first_applied_ms
  from execution e
  left join lateral (
       select s.* from stream_summary s
        where s.partition_key = e.partition_key and s.execution_id = e.execution_id
        order by s.attempt_index desc limit 1) s on true
 where e.partition_key = :partition_key and e.execution_id = :execution_id;

-- name: read_summary
-- The summary of one attempt, unless its execution is deleted.
select s.document, s.version, s.patch_kind, s.last_updated_ms, s.first_applied_ms
  from stream_summary s
 where s.partition_key = :partition_key and s.execution_id = :execution_id and s.attempt_index = :attempt_index
   and exists (select from execution e where e.partition_key = :partition_key and e.execution_id = :execution_id);
