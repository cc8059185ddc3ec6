-- name: lock_worker
-- Locks a registration, expired or live. It expires at lapses_at.
select worker_id, lapses_at > (select ff_now()) as is_live from worker
 where partition_key = :partition_key and namespace = :namespace and worker_instance_id = :worker_instance_id
   for update;

-- name: insert_worker
-- Registers a worker or refreshes its registration, with an event; no row if the instance is registered by another
-- worker_id and has not expired.
with clock as materialized (select ff_now() as now),
written as (
  insert into worker as w (partition_key, namespace, worker_instance_id, worker_id, lanes, capabilities, kinds,
                           serves_all_namespaces, last_heartbeat_at, liveness_ttl_ms, registered_at)
  select :partition_key, :namespace, :worker_instance_id, :worker_id, :lanes::text[], :capabilities::text[], :kinds::text[],
         :serves_all_namespaces, now, :liveness_ttl_ms, now
    from clock
  on conflict (partition_key, namespace, worker_instance_id) do update
     set worker_id = excluded.worker_id, lanes = excluded.lanes, capabilities = excluded.capabilities,
         kinds = excluded.kinds, serves_all_namespaces = excluded.serves_all_namespaces,
         last_heartbeat_at = excluded.last_heartbeat_at, liveness_ttl_ms = excluded.liveness_ttl_ms,
         registered_at = case when :has_expired then excluded.registered_at else w.registered_at end
   where :has_expired or w.worker_id = excluded.worker_id
  -- xmax is not 0 on a row that existed before: this statement locked it to update it.
  returning w.partition_key, w.namespace, w.worker_instance_id, w.worker_id, w.last_heartbeat_at,
            :has_expired or w.xmax = 0 as is_fresh
),
events as (
  insert into worker_event (partition_key, namespace, worker_instance_id, at, kind, worker_id)
  select partition_key, namespace, worker_instance_id, last_heartbeat_at,
         case when is_fresh then 'registered' else 'heartbeat' end, worker_id
    from written
  on conflict do nothing
)
select is_fresh from written;

-- name: renew_worker
-- Extends a live registration; no row if it is absent or has expired.
with clock as materialized (select ff_now() as now),
renewed as (
  update worker w set last_heartbeat_at = c.now
    from clock c
   where w.partition_key = :partition_key and w.namespace = :namespace
     and w.worker_instance_id = :worker_instance_id and w.lapses_at > c.now
  returning w.partition_key, w.namespace, w.worker_instance_id, w.worker_id, w.last_heartbeat_at, w.lapses_at
),
events as (
  insert into worker_event (partition_key, namespace, worker_instance_id, at, kind, worker_id)
  select partition_key, namespace, worker_instance_id, last_heartbeat_at, 'heartbeat', worker_id from renewed
  on conflict do nothing
)
select lapses_at from renewed;

-- name: take_worker
-- Deletes a live registration; no row if it is absent or has expired.
with clock as materialized (select ff_now() as now),
deleted as (
  delete from worker w using clock c
   where w.partition_key = :partition_key and w.namespace = :namespace
     and w.worker_instance_id = :worker_instance_id and w.lapses_at > c.now
  returning w.partition_key, w.namespace, w.worker_instance_id, w.worker_id, c.now
),
events as (
  insert into worker_event (partition_key, namespace, worker_instance_id, at, kind, worker_id, reason)
  select partition_key, namespace, worker_instance_id, now, 'marked_dead', worker_id, :reason from deleted
  on conflict do nothing
)
select worker_id from deleted;

-- name: take_expired_workers
-- Deletes expired registrations; returns how many.
with clock as materialized (select ff_now() as now),
deleted as (
  delete from worker w using clock c
   where w.ctid = any(array(
         select ctid from worker
          where lapses_at < (select now from clock) order by lapses_at limit :limit for update skip locked))
  returning w.partition_key, w.namespace, w.worker_instance_id, w.worker_id, c.now
),
events as (
  insert into worker_event (partition_key, namespace, worker_instance_id, at, kind, worker_id)
  select partition_key, namespace, worker_instance_id, now, 'ttl_swept', worker_id from deleted
  on conflict do nothing
)
select count(*) as swept from deleted;

-- name: list_live_workers
-- The live registrations of one namespace or of all, after a position, in byte order of namespace and instance.
select namespace, worker_instance_id, worker_id, lanes, capabilities, kinds, serves_all_namespaces, last_heartbeat_at,
       liveness_ttl_ms, registered_at
  from worker
 where (:namespace::text is null or namespace collate "C" = :namespace)
   and (namespace collate "C", worker_instance_id collate "C") > (:after_namespace::text, :after_instance::text)
   and lapses_at > (select ff_now())
 order by namespace collate "C", worker_instance_id collate "C"
 limit :limit;
