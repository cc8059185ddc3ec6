-- name: take_expired_frames
-- Deletes up to :frames frames of expired streams, those that expired first. A stream without frames is no longer due; its row
-- stays, and its later frames are visible. Returns the number of such streams and of deleted frames.
with clock as materialized (select ff_now() as now),
due as materialized (
  select s.*, row_number() over (order by s.expires_at) as nth
    from (select s.partition_key, s.execution_id, s.attempt_index, s.expires_at from stream s
           where s.expires_at <= (select now from clock)
           order by s.expires_at limit :limit
             for update skip locked) s
),
found as materialized (
  select d.nth, f.tid
    from (select * from due order by nth) d
   cross join lateral (
         select f.ctid as tid from stream_frame f
          where f.partition_key = d.partition_key and f.execution_id = d.execution_id and f.attempt_index = d.attempt_index
          order by f.ms, f.seq limit :frames) f
   limit :frames
),
deleted as (
  delete from stream_frame where ctid = any(array(select tid from found)) returning 1
),
-- The last stream of a full batch may have more frames.
emptied as (
  update stream s set expires_at = null, first_frame_no = s.frame_count + 1
    from due d
   where s.partition_key = any(array[d.partition_key]) and s.execution_id = d.execution_id and s.attempt_index = d.attempt_index
     and ((select count(*) from found) < :frames or d.nth < (select max(nth) from found))
  returning 1
)
select (select count(*) from emptied) as emptied, (select count(*) from deleted) as deleted;
