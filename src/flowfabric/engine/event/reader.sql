-- name: open_window
-- The current snapshot and the newest visible event; what was deleted; and which server the transaction ids are from.
-- :floor is the newest event that was read before; :xmax, :next_xid and :in_progress are the transactions that were in progress
-- then; :generation is 0 for a new reader, so that it gets a window. next_xid is null if nothing can have become visible since.
-- Otherwise it is the id of this transaction, which is higher than that of every transaction that was in progress when the snapshot
-- was taken: the snapshot itself does not list transactions that began after the last one that has ended.
-- Events with ids up to :floor can only come from those transactions: a transaction has its id before it draws an event id, and
-- sessions do not cache numbers of the sequence, so a transaction that begins later draws higher ids.
with seen as materialized (
  select pg_current_snapshot() as snapshot, coalesce((select e.event_id from event e order by e.event_id desc limit 1), 0) as newest
)
select s.snapshot, s.newest,
       case when s.newest > :floor::bigint or o.generation <> :generation::int
              or (:next_xid::bigint > :xmax::bigint and pg_snapshot_xmax(s.snapshot) > :xmax::text::xid8)
              or exists (select from unnest(:in_progress::bigint[]) as p(xid)
                          where pg_visible_in_snapshot(p.xid::text::xid8, s.snapshot))
         then pg_current_xact_id() end as next_xid,
       coalesce(o.origin = ff_event_origin(), false) as is_current,
       o.generation, o.origin, o.restored_event_id,
       (select r.origin from feed_origin r where r.generation = :generation) as earlier_origin,
       array(select r.restored_event_id from feed_origin r where r.generation >= :generation order by r.generation) as restored,
       t.*, coalesce((select max(a.event_id) from feed_trim a), 0) as trimmed_newest
  from seen s
 cross join (
-- include: trimmed
       ) t
  left join lateral (select * from feed_origin order by generation desc limit 1) o on true;

-- fragment: trimmed
-- What was deleted of a family. Which deleted events were late is looked up only if something was deleted since :trims.
select coalesce(sum(f.trims), 0)::bigint as trims, coalesce(max(f.event_id), 0) as trimmed_event_id,
       coalesce(max(f.unlisted_xid) filter (where f.restored_event_id = :before_restored_event_id::bigint), '0') as unlisted_xid,
       coalesce(sum(f.trims), 0) <> :trims::bigint
         and exists (select from feed_trim l cross join unnest(l.xids, l.event_ids) as d(xid, event_id)
                      where l.family = :family and l.restored_event_id = :before_restored_event_id and d.event_id > :late_after::bigint
                        and (d.xid = any(array(select p.xid::text::xid8 from unnest(:in_progress::bigint[]) as p(xid)))
                             or (d.xid >= :xmax::bigint::text::xid8 and d.xid < :next_xid::bigint::text::xid8))) as trimmed_late_events
  from feed_trim f where f.family = :family

-- fragment: page
-- What was deleted, and the events of a page of `scan`: up to :page events that match, in the order of their ids. If all :scanned
-- events were read, the last one is returned too, whether it matches or not, so that the next page starts after it.
select t.*, e.event_id, e.is_match, e.place, e.at, e.kind::text as kind, e.partition_key, e.execution_id, e.lease_id, e.execution_ids,
       case when :has_leases::boolean then e.lease_ids end as lease_ids, e.lease_epoch, e.attempt_index,
       case when :has_leases then (
         select w.worker_instance_id from worker_identity w where w.worker_no = e.worker_no limit 1) end as worker_instance_id,
       e.outcome, e.reason, e.flow_id, e.instance_tag, e.details
  from trimmed t
  left join lateral (
       select m.*
         from (select s.*, row_number() over (order by s.event_id) as place,
                      coalesce(
                        (s.kind = any((select :kinds::text[]::event_kind[])::event_kind[])) is distinct from :takes_unknown_kinds::boolean
                        and (s.outcome is not null or not :has_outcome::boolean)
                        and (s.event_id <= :restored_event_id::bigint or pg_visible_in_snapshot(s.xid, :snapshot::pg_snapshot))
                        and (:namespace::text is null
                             or s.namespace_no = (select n.namespace_no from namespace n where n.namespace = :namespace))
                        and case
                              when :tag_key::text is null then true
                              when :is_instance_tag::boolean and s.tags is null then s.instance_tag = :tag_value::text
                              else s.tags ->> :tag_key = :tag_value end, false) as is_match
                 from scan s) m
        where m.is_match or m.place = :scanned::int
        order by m.event_id
        limit :page::int) e on true
 order by e.event_id;

-- name: list_late_events
-- A page of the events of transactions that were in progress when events up to :newest were read.
with trimmed as (
-- include: trimmed
),
scan as (
  select l.*
    from (select e.* from event e
           where e.xid = any(array(select p.xid::text::xid8 from unnest(:in_progress) as p(xid)))
          union all
          select e.* from event e
           where e.xid >= :xmax::text::xid8 and e.xid < :next_xid::text::xid8
          -- Without it the planner may read all events between the ids below.
          offset 0) l
   where l.event_id > :after::bigint and l.event_id <= :newest::bigint
   order by l.event_id limit :scanned
)
-- include: page

-- name: list_events
-- A page of the events with ids above :after, up to :newest.
with trimmed as (
-- include: trimmed
),
scan as (
  select e.* from event e
   where e.event_id > :after::bigint and e.event_id <= :newest::bigint
   order by e.event_id limit :scanned
)
-- include: page

-- name: list_rare_events
-- A page of the events of rare kinds with ids above :after, up to :newest. Events of other kinds are not read: the condition on the
-- kinds is that of the index. Kind and id are compared and sorted together, as in the index: with separate conditions the planner may
-- read events of all kinds by their ids.
with trimmed as (
-- include: trimmed
),
scan as (
  select r.*
    from unnest(:kinds::text[]) as k(kind)
   cross join lateral (
         select e.* from event e
          where e.kind not in ('acquired', 'renewed', 'released', 'ended')
            and (e.kind, e.event_id) > (k.kind::event_kind, :after::bigint)
            and (e.kind, e.event_id) <= (k.kind::event_kind, :newest::bigint)
          order by e.kind, e.event_id limit :scanned) r
   order by r.event_id limit :scanned
)
-- include: page
