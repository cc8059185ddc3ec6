-- fragment: item
-- The streams that frames are appended to, and the fences of their writers.
item as materialized (
  select * from unnest(:partition_keys::smallint[], :execution_ids::uuid[], :attempt_indexes::int[], :lease_epochs::bigint[],
                       :lease_ids::uuid[])
    with ordinality as i(partition_key, execution_id, attempt_index, given_epoch, given_lease_id, nth)
)

-- fragment: run
-- The columns of an execution that decide whether its worker may append.
select e.lifecycle_phase, e.ownership_state, e.attempt_count, e.attempt_id, e.lease_id, e.lease_epoch, e.lease_expires_at, e.claim_no,
       e.policy
  from execution e
 where e.partition_key = i.partition_key and e.execution_id = i.execution_id

-- fragment: claim
-- The expiry of a renewed lease, which its claim stores; read only if the lease has expired according to the execution's row.
left join lateral (
     select r.expires_at from claim r
      where e.lease_expires_at <= c.now and r.partition_key = i.partition_key and r.claim_no = e.claim_no limit 1) r on true

-- fragment: verdict
-- Whether the worker may append, or why not.
case
  when e.lifecycle_phase is null then 'not_found'
  when e.lifecycle_phase <> 'active' then 'not_active'
  when e.ownership_state <> 'leased' then 'lost'
  when e.attempt_count - 1 <> i.attempt_index or e.lease_epoch <> i.given_epoch or e.lease_id <> i.given_lease_id then 'stale'
  when greatest(e.lease_expires_at, r.expires_at) <= c.now then 'lease_expired'
  else 'ok' end

-- name: lock_streams
-- Locks the streams that the workers may append to, without waiting, and returns them in the order given; is_present tells
-- a stream that another session has locked from one that does not exist. The execution is read without a lock: every move that
-- ends a lease also changes the stream, so the locked row of the stream shows a move that this statement does not see.
with clock as materialized (select ff_now() as now),
-- include: item
,
seen as materialized (
  select i.*, e.lifecycle_phase, c.now,
         -- include: verdict
         as verdict
    from clock c
   cross join item i
    left join lateral (
         -- include: run
         limit 1) e on true
    -- include: claim
)
select i.now, i.verdict, i.lifecycle_phase, s.attempt_index is not null as is_locked, s.last_ms, s.last_seq, s.frame_count, s.first_frame_no,
       s.total_bytes, s.has_durable_frame, s.ema_rate_hz, s.last_append_ts_ms, s.maxlen_applied_last, s.retention_maxlen,
       s.expires_at, s.sweep_at, s.numbered_epoch, s.numbered_count, s.closed_reason, s.released_epoch, x.is_present
  from seen i
  left join lateral (
       select s.* from stream s
        where i.verdict = 'ok' and s.partition_key = i.partition_key and s.execution_id = i.execution_id
          and s.attempt_index = i.attempt_index
          for update skip locked) s on true
  left join lateral (
       select true as is_present from stream x
        where i.verdict = 'ok' and s.attempt_index is null and x.partition_key = i.partition_key
          and x.execution_id = i.execution_id and x.attempt_index = i.attempt_index limit 1) x on true
 order by i.nth;

-- name: lock_stream
-- Locks one stream, waiting for it.
select from stream
 where partition_key = :partition_key and execution_id = :execution_id and attempt_index = :attempt_index
   for update;

-- name: lock_claim
-- Waits for a renewal of the lease of an execution that the transaction has locked, and prevents another one.
select from claim r
 where r.partition_key = :partition_key
   and r.claim_no = (select e.claim_no from execution e
                      where e.partition_key = :partition_key and e.execution_id = :execution_id)
   for share;

-- name: open_streams
-- Creates the streams of executions that can be locked without waiting and whose fence is current. The verdict is null if the
-- execution is locked by another session; retention_maxlen is null if no stream was created, for example because another session
-- has created it since. A stream is first swept after :check_ms, unless its frames expire before.
with clock as materialized (select ff_now() as now),
-- include: item
,
held as materialized (
  select i.*, e.attempt_id, e.lease_id, e.policy, c.now,
         case when e.lifecycle_phase is not null then
         -- include: verdict
         end as verdict
    from clock c
   cross join item i
    left join lateral (
         -- include: run
            for update skip locked) e on true
    -- include: claim
),
attached as (
  update execution e set attached = e.attached | 4
    from held h
   where h.verdict = 'ok' and e.partition_key = any(array[h.partition_key]) and e.execution_id = h.execution_id
),
opened as (
  insert into stream (partition_key, execution_id, attempt_index, attempt_id, created_at, durability_mode, retention_maxlen,
                      retention_ttl_ms, sweep_at)
  select h.partition_key, h.execution_id, h.attempt_index, coalesce(h.attempt_id, h.lease_id), h.now,
         coalesce(h.policy #>> '{stream_policy,durability_mode}', :durability_mode),
         coalesce((h.policy #>> '{stream_policy,retention_maxlen}')::int, :retention_maxlen::int),
         (h.policy #>> '{stream_policy,retention_ttl_ms}')::bigint, h.now + :check_ms::bigint
    from held h where h.verdict = 'ok'
  on conflict (partition_key, execution_id, attempt_index) do nothing
  returning partition_key, execution_id, retention_maxlen
)
select h.verdict, o.retention_maxlen
  from held h left join opened o on o.partition_key = h.partition_key and o.execution_id = h.execution_id
 order by h.nth;

-- name: read_summaries
-- The summaries of streams that the transaction has locked, in the order given; nulls for a stream that has none.
select s.document, s.version, s.first_applied_ms
  from unnest(:partition_keys::smallint[], :execution_ids::uuid[], :attempt_indexes::int[])
       with ordinality as i(partition_key, execution_id, attempt_index, nth)
  left join lateral (
       select s.* from stream_summary s
        where s.partition_key = i.partition_key and s.execution_id = i.execution_id and s.attempt_index = i.attempt_index
        limit 1) s on true
 order by i.nth;

-- name: insert_frames
-- Stores frames of streams that the transaction has locked, the streams as they are now, and their summaries, and deletes the
-- hidden frames among the oldest :trims frames of a stream. :places and :summary_places are positions in the arrays of streams. A
-- column of frames whose values are all equal may be passed as one element. A stream whose :sweeps is null keeps its sweep_at.
with inserted as (
  insert into stream_frame (partition_key, execution_id, attempt_index, ms, seq, frame_no, at, mode, frame_type, payload,
                            correlation_id, summary_version, ttl_ms)
  select (:partition_keys::smallint[])[f.place], (:execution_ids::uuid[])[f.place], (:attempt_indexes::int[])[f.place],
         f.ms, f.seq, f.frame_no, :now::bigint, f.mode, f.frame_type, f.payload, f.correlation_id, f.summary_version, f.ttl_ms
    from (select coalesce(place, (:places)[1]) as place, coalesce(ms, (:mss)[1]) as ms, coalesce(seq, (:seqs)[1]) as seq,
                 coalesce(frame_no, (:frame_nos)[1]) as frame_no, coalesce(mode, (:modes)[1]) as mode,
                 coalesce(frame_type, (:frame_types)[1]) as frame_type, coalesce(payload, (:payloads)[1]) as payload,
                 case cardinality(:correlation_ids) when 1 then (:correlation_ids)[1] else correlation_id end as correlation_id,
                 case cardinality(:summary_versions) when 1 then (:summary_versions)[1] else summary_version end as summary_version,
                 case cardinality(:ttls_ms) when 1 then (:ttls_ms)[1] else ttl_ms end as ttl_ms
            from unnest(:places::int[], :mss::bigint[], :seqs::int[], :frame_nos::bigint[], :modes::frame_mode[], :frame_types::text[],
                        :payloads::bytea[], :correlation_ids::text[], :summary_versions::int[], :ttls_ms::bigint[])
                 as i(place, ms, seq, frame_no, mode, frame_type, payload, correlation_id, summary_version, ttl_ms)) f
),
grown as materialized (
  select * from unnest(:partition_keys, :execution_ids, :attempt_indexes, :last_mss::bigint[], :last_seqs::int[],
                       :frame_counts::bigint[], :first_frame_nos::bigint[], :total_bytes::bigint[], :have_durable_frame::boolean[],
                       :ema_rates_hz::float8[], :last_append_times::bigint[], :maxlens_applied::int[], :expiries::bigint[], :sweeps::bigint[],
                       :numbered_epochs::bigint[], :numbered_counts::bigint[], :trims::int[])
         with ordinality
         as g(partition_key, execution_id, attempt_index, last_ms, last_seq, frame_count, first_frame_no, total_bytes,
              has_durable_frame, ema_rate_hz, last_append_ts_ms, maxlen_applied, expires_at, sweep_at, numbered_epoch,
              numbered_count, trim_limit, nth)
),
-- The oldest frames come first in the primary key, so hidden ones are found without reading visible ones.
hidden as materialized (
  select g.nth, f.tid, f.ms, f.seq
    from grown g
   cross join lateral (
         select s.oldest_ms, s.oldest_seq from stream s
          where s.partition_key = g.partition_key and s.execution_id = g.execution_id and s.attempt_index = g.attempt_index
          limit 1) s
   cross join lateral (
         select f.ctid as tid, f.frame_no, f.ms, f.seq from stream_frame f
          where f.partition_key = g.partition_key and f.execution_id = g.execution_id and f.attempt_index = g.attempt_index
            and (f.ms, f.seq) >= (s.oldest_ms, s.oldest_seq)
          order by f.ms, f.seq limit g.trim_limit) f
   where g.trim_limit > 0 and f.frame_no < g.first_frame_no
),
deleted as (
  delete from stream_frame where ctid = any(array(select tid from hidden))
),
trimmed as materialized (
  select distinct on (nth) nth, ms, seq from hidden order by nth, ms desc, seq desc
),
updated as (
  update stream s
     set last_ms = g.last_ms, last_seq = g.last_seq, frame_count = g.frame_count, first_frame_no = g.first_frame_no,
         total_bytes = g.total_bytes, last_frame_at = :now, has_durable_frame = g.has_durable_frame, ema_rate_hz = g.ema_rate_hz,
         last_append_ts_ms = g.last_append_ts_ms, maxlen_applied_last = g.maxlen_applied, expires_at = g.expires_at,
         sweep_at = coalesce(g.sweep_at, s.sweep_at),
         numbered_epoch = g.numbered_epoch, numbered_count = g.numbered_count,
         oldest_ms = coalesce(t.ms, s.oldest_ms), oldest_seq = coalesce(t.seq + 1, s.oldest_seq)
    from grown g left join trimmed t on t.nth = g.nth
   where s.partition_key = any(array[g.partition_key]) and s.execution_id = g.execution_id and s.attempt_index = g.attempt_index
)
insert into stream_summary as s (partition_key, execution_id, attempt_index, document, version, patch_kind, first_applied_ms,
                                 last_updated_ms)
select (:partition_keys)[i.place], (:execution_ids)[i.place], (:attempt_indexes)[i.place], i.document, i.version, i.patch_kind,
       i.first_applied_ms, :now
  from unnest(:summary_places::int[], :documents::bytea[], :versions::int[], :patch_kinds::text[], :first_applied_times::bigint[])
       as i(place, document, version, patch_kind, first_applied_ms)
on conflict (partition_key, execution_id, attempt_index) do update
   set document = excluded.document, version = excluded.version, patch_kind = excluded.patch_kind,
       last_updated_ms = excluded.last_updated_ms;
