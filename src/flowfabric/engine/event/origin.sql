-- name: read_is_current_origin
-- Whether the events of the last recorded origin and new events have transaction ids of the same server.
select coalesce((select o.origin from feed_origin o order by o.generation desc limit 1) = ff_event_origin(), false) as is_current;

-- name: lock_events
-- Waits for the transactions that are writing events, and blocks new ones.
lock table event in share row exclusive mode;

-- name: insert_origin
-- Records this server as the origin of new events, unless it is; returns the new generation. The caller has locked the events.
-- The newest event that was restored may have been deleted since: feed_trim and the last origin name it too. So restored_event_id
-- never falls, and separates the events of the origins, also the deleted ones.
insert into feed_origin (generation, origin, restored_event_id)
select coalesce(last.generation, 0) + 1, here.origin,
       greatest(coalesce((select e.event_id from event e order by e.event_id desc limit 1), 0),
                (select max(t.event_id) from feed_trim t), last.restored_event_id)
  from (select ff_event_origin() as origin) here
  left join lateral (select o.* from feed_origin o order by o.generation desc limit 1) last on true
 where last.origin is distinct from here.origin
returning generation;
