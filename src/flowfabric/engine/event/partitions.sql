-- name: read_event_window
-- The current time, and the time before which events are past their retention.
select c.now, c.now - :retention_ms::bigint as oldest from (select ff_now() as now) c;

-- name: take_old_events
-- Deletes events past their retention from the default partition, the oldest first; returns how many.
-- Event ids rise with time, so the index on them returns the oldest events first. The limit is applied before the check of the
-- age, so that a call reads at most :limit events. The newest deleted event of each family is recorded in the same transaction, and
-- the highest transaction id, except that of restored events, which is from another server. Kinds that this version does not know
-- count as lease events.
with oldest as materialized (
  select xid, event_id, at from event_default order by event_id limit :limit
),
old as materialized (
  select e.xid, e.event_id
    from oldest o join event_default e on e.xid = o.xid and e.event_id = o.event_id
   where o.at < (select ff_now()) - :retention_ms::bigint
     for update of e skip locked
),
deleted as (
  delete from event_default e using old o where e.xid = o.xid and e.event_id = o.event_id
  returning e.kind::text as kind, e.event_id, e.xid
),
recorded as (
  insert into feed_trim as t (family, event_id, xid)
  select coalesce(f.family, :other_family), max(d.event_id),
         coalesce(max(d.xid) filter (where d.event_id > coalesce((select max(o.restored_event_id) from feed_origin o), 0)), '0')
    from deleted d left join unnest(:families::text[], :kinds::text[]) as f(family, kind) on f.kind = d.kind
   group by 1 order by 1
  on conflict (family) do update
     set event_id = greatest(t.event_id, excluded.event_id), xid = greatest(t.xid, excluded.xid), trims = t.trims + 1
)
select count(*) as trimmed from deleted;

-- name: take_old_worker_events
-- Deletes events of the worker registry that are past their retention, the oldest first; returns how many.
with deleted as (
  delete from worker_event
   where ctid = any(array(
         select ctid from worker_event
          where at < (select ff_now()) - :retention_ms::bigint order by at limit :limit for update skip locked))
  returning 1)
select count(*) as trimmed from deleted;
