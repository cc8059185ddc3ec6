-- name: read_feed_clock
-- The current time, and the time before which events are past their retention.
select c.now, c.now - :retention_ms::bigint as oldest from (select ff_now() as now) c;

-- name: take_old_events
-- Deletes events past their retention that are in no daily partition, the oldest first; returns how many.
-- Transaction ids rise with time, so the oldest rows are at the head of the feed's index.
with oldest as materialized (
  select xid, event_id, at from event_default order by xid, event_id limit :limit
),
old as materialized (
  select e.xid, e.event_id
    from oldest o join event_default e on e.xid = o.xid and e.event_id = o.event_id
   where o.at < (select ff_now()) - :retention_ms::bigint
     for update of e skip locked
),
gone as (
  delete from event_default e using old o where e.xid = o.xid and e.event_id = o.event_id returning 1)
select count(*) as trimmed from gone;

-- name: take_old_worker_events
-- Deletes events of the worker registry past their retention, the oldest first; returns how many.
with gone as (
  delete from worker_event
   where ctid = any(array(
         select ctid from worker_event
          where at < (select ff_now()) - :retention_ms::bigint order by at limit :limit for update skip locked))
  returning 1)
select count(*) as trimmed from gone;
