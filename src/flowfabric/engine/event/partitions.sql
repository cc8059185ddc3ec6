-- name: read_event_window
-- The current time, and the time before which events are past their retention.
select c.now, c.now - :retention_ms::bigint as oldest from (select ff_now() as now) c;

-- fragment: writers
-- The transactions of the events in `deleted`, by family and origin of their ids, each with its newest event. Kinds that this version
-- does not know are of the family :other_family. Events without an outcome are not of :outcome_family.
writers as (
  select f.family,
         (select coalesce(max(o.restored_event_id), 0) from feed_origin o where o.restored_event_id < d.event_id) as restored_event_id,
         d.xid, max(d.event_id) as event_id
    from deleted d
   cross join lateral (
         select k.family from unnest(:families::text[], :kinds::text[]) as k(family, kind)
          where k.kind = d.kind and (d.outcome is not null or k.family <> :outcome_family)
          union all
         select :other_family where d.kind <> all(:kinds)) f
   group by 1, 2, 3
)

-- fragment: record_trim
-- Adds `writers` to what was deleted, and `unlisted`: transactions up to this one may have written deleted events. Of the transactions
-- of a family the :listed highest ones are kept.
insert into feed_trim as t (family, restored_event_id, event_id, xids, event_ids, unlisted_xid)
select w.family, w.restored_event_id, max(w.event_id),
       coalesce(array_agg(w.xid order by w.place) filter (where w.place <= :listed::int), '{}'),
       coalesce(array_agg(w.event_id order by w.place) filter (where w.place <= :listed), '{}'),
       coalesce(max(w.xid) filter (where w.place is null or w.place > :listed), '0')
  from (select family, restored_event_id, xid, event_id,
               row_number() over (partition by family, restored_event_id order by xid desc) as place
          from writers
         union all
        select family, restored_event_id, xid, event_id, null from unlisted) w
 group by 1, 2 order by 1, 2
on conflict (family, restored_event_id) do update
   set (trims, event_id, xids, event_ids, unlisted_xid) = (
       select t.trims + 1, greatest(t.event_id, excluded.event_id),
              coalesce(array_agg(m.xid order by m.place) filter (where m.place <= :listed), '{}'),
              coalesce(array_agg(m.event_id order by m.place) filter (where m.place <= :listed), '{}'),
              greatest(t.unlisted_xid, excluded.unlisted_xid, max(m.xid) filter (where m.place > :listed))
         from (select l.xid, max(l.event_id) as event_id, row_number() over (order by l.xid desc) as place
                 from (select * from unnest(t.xids, t.event_ids)
                        union all
                       select * from unnest(excluded.xids, excluded.event_ids)) as l(xid, event_id)
                group by l.xid) m)

-- name: take_old_events
-- Deletes events past their retention from the default partition, the oldest first; returns how many.
-- Event ids rise with time, so the index on them returns the oldest events first. The limit is applied before the check of the
-- age, so that a call reads at most :limit events.
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
  returning e.kind::text as kind, e.outcome, e.event_id, e.xid
),
-- include: writers
, unlisted as (
  select * from writers where false
),
recorded as (
-- include: record_trim
)
select count(*) as trimmed from deleted;

-- name: insert_dropped_events
-- Records the events from :first until before :until, all of them in one partition, as deleted. The caller has locked the table.
-- A partition may hold millions of events: the :scanned newest ones, those of the :scanned highest transactions, and the :scanned
-- newest ones of each rare kind are read. What is known about the others is that their ids are lower. So for a family of which not
-- all events were read, transactions up to the lowest one that was read are unlisted.
with newest as materialized (
  select e.kind::text as kind, e.outcome, e.event_id, e.xid
    from event e where e.at >= :first::bigint and e.at < :until::bigint order by e.event_id desc limit :scanned::int
),
highest as materialized (
  select e.kind::text as kind, e.outcome, e.event_id, e.xid
    from event e where e.at >= :first and e.at < :until order by e.xid desc limit :scanned
),
rare as materialized (
  select k.family, r.*
    from unnest(:families::text[], :kinds::text[]) as k(family, kind)
   cross join lateral (
         select e.kind::text as kind, e.outcome, e.event_id, e.xid
           from event e
          where e.at >= :first and e.at < :until and e.kind not in ('acquired', 'renewed', 'released', 'ended')
            -- Compared together, as in the index: see list_rare_events.
            and (e.kind, e.event_id) > (k.kind::event_kind, 0) and (e.kind, e.event_id) <= (k.kind::event_kind, 9223372036854775807)
          order by e.kind desc, e.event_id desc limit :scanned) r
   where k.family = any(:rare_families::text[])
),
deleted as materialized (
  select * from newest union select * from highest union select kind, outcome, event_id, xid from rare
),
-- include: writers
, unlisted as (
  select f.family, g.restored_event_id, h.xid,
         -- Without an event among the newest ones, its newest event may be right below them.
         case when f.family = any(:rare_families) or exists (select from writers w where w.family = f.family and w.event_id >= n.lowest)
              then 0 else n.lowest end as event_id
    from (select min(xid) as xid from highest having count(*) >= :scanned) h
   cross join (select min(event_id) as lowest, max(event_id) as event_id from newest) n
   cross join (select distinct k.family from unnest(:families::text[]) as k(family)) f
   -- The origins that the events of the partition may have.
   cross join (select 0 as restored_event_id union select restored_event_id from feed_origin) g
   where (f.family <> all(:rare_families)
          or exists (select from rare r where r.family = f.family group by r.kind having count(*) >= :scanned))
     and g.restored_event_id < n.event_id
     and not exists (select from feed_origin o
                      where o.restored_event_id > g.restored_event_id
                        and o.restored_event_id < (
                            select e.event_id from event e where e.at >= :first and e.at < :until order by e.event_id limit 1))
)
-- include: record_trim
;

-- name: take_old_worker_events
-- Deletes events of the worker registry that are past their retention, the oldest first; returns how many.
with deleted as (
  delete from worker_event
   where ctid = any(array(
         select ctid from worker_event
          where at < (select ff_now()) - :retention_ms::bigint order by at limit :limit for update skip locked))
  returning 1)
select count(*) as trimmed from deleted;
