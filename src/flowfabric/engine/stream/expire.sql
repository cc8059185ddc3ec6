-- name: take_hidden_frames
-- Deletes up to :frames hidden frames of the streams that are due, those due first, until they have :bytes bytes: only of the
-- executions in :only unless that is null, and none of :skipped. Hidden are all frames of expired streams, and
-- those that appends have left. A stream without such frames is due again when it expires, or in :check_ms. An expired stream keeps
-- its row, and its later frames are visible; a stream whose execution does not exist any more is deleted with its summary. Returns
-- the number of streams that were due, of streams emptied or deleted, and whether there may be more hidden frames (has_more).
with clock as materialized (select ff_now() as now),
due as materialized (
  select s.partition_key, s.execution_id, s.attempt_index, s.expires_at, s.frame_count, s.first_frame_no,
         row_number() over (order by s.sweep_at) as nth
    from (select s.* from stream s
           where s.sweep_at <= (select now from clock)
             and s.execution_id <> all(:skipped::uuid[]) and (:only::uuid[] is null or s.execution_id = any(:only))
           order by s.sweep_at limit :limit
             for update skip locked) s
),
judged as materialized (
  select d.partition_key, d.execution_id, d.attempt_index, d.nth, x.is_orphan, x.is_expired,
         case when x.is_orphan or x.is_expired then d.frame_count + 1 else d.first_frame_no end as first_frame_no,
         case when not x.is_expired then d.expires_at end as expires_at
    from due d
    left join lateral (
         select true as is_present from execution e
          where e.partition_key = d.partition_key and e.execution_id = d.execution_id limit 1) e on true
   cross join lateral (
         select e.is_present is null as is_orphan, coalesce(d.expires_at <= (select now from clock), false) as is_expired) x
),
-- The hidden frames are the oldest. The number of the oldest stored frame tells how many there are at most, so that visible ones
-- are hardly read. The size of a payload is known without reading it.
found as materialized (
  select j.nth, f.tid, sum(f.size) over (rows unbounded preceding) - f.size < :bytes::bigint as fits
    from (select j.*, o.frame_no as oldest_no
            from (select * from judged order by nth) j
           cross join lateral (
                 select f.frame_no from stream_frame f
                  where f.partition_key = j.partition_key and f.execution_id = j.execution_id and f.attempt_index = j.attempt_index
                  order by f.ms, f.seq limit 1) o
           where o.frame_no < j.first_frame_no) j
   cross join lateral (
         select f.ctid as tid, f.frame_no, octet_length(f.payload) as size from stream_frame f
          where f.partition_key = j.partition_key and f.execution_id = j.execution_id and f.attempt_index = j.attempt_index
          order by f.ms, f.seq limit least(j.first_frame_no - j.oldest_no, :frames)) f
   where f.frame_no < j.first_frame_no
   limit :frames
),
deleted as (
  delete from stream_frame where ctid = any(array(select tid from found where fits))
),
cut as materialized (select count(*) >= :frames or count(*) filter (where not fits) > 0 as is_cut from found),
-- The last stream of a full batch may have more frames.
done as materialized (
  select j.* from judged j
   where not (select is_cut from cut) or j.nth < (select max(nth) from found where fits)
),
kept as (
  update stream s
     set first_frame_no = d.first_frame_no, expires_at = d.expires_at,
         sweep_at = least(d.expires_at, (select now from clock) + :check_ms::bigint)
    from done d
   where not d.is_orphan
     and s.partition_key = any(array[d.partition_key]) and s.execution_id = d.execution_id and s.attempt_index = d.attempt_index
),
orphans as (
  delete from stream s using done d
   where d.is_orphan
     and s.partition_key = any(array[d.partition_key]) and s.execution_id = d.execution_id and s.attempt_index = d.attempt_index
),
orphaned_summaries as (
  delete from stream_summary s using done d
   where d.is_orphan
     and s.partition_key = any(array[d.partition_key]) and s.execution_id = d.execution_id and s.attempt_index = d.attempt_index
)
select (select count(*) from due) as due,
       (select count(*) from done d where d.is_orphan or d.is_expired or d.nth in (select nth from found)) as freed,
       (select is_cut from cut) as has_more;

-- name: list_due_streams
-- The executions of the streams that are due except :skipped, those due first.
select s.partition_key, s.execution_id
  from (select s.partition_key, s.execution_id, s.sweep_at from stream s
         where s.sweep_at <= (select ff_now()) and s.execution_id <> all(:skipped::uuid[])
         order by s.sweep_at limit :limit) s
 group by s.partition_key, s.execution_id
 order by min(s.sweep_at);
