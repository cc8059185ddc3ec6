-- name: mark_expired_leases
-- Marks expired leases so that the next claim takes them: the named executions, or the oldest due after :since when none
-- is named.
with clock as materialized (select ff_now() as now),
due as materialized (
  select e.partition_key, e.execution_id, e.queue_no, e.place, e.namespace_no, e.lane_no, e.lease_epoch, e.lease_id,
         e.worker_no, e.attempt_id, e.attempt_count, e.flow_id, e.instance_tag, c.now
    from clock c
   cross join lateral (
         select e.* from execution e
          where :execution_ids::uuid[] is null
            and e.due_at > :since and e.due_at <= c.now and e.ownership_state = 'leased' and e.lease_expires_at <= c.now
          order by e.due_at limit :limit
            for update skip locked) e
  union all
  select e.partition_key, e.execution_id, e.queue_no, e.place, e.namespace_no, e.lane_no, e.lease_epoch, e.lease_id,
         e.worker_no, e.attempt_id, e.attempt_count, e.flow_id, e.instance_tag, c.now
    from clock c
   cross join lateral (
         select e.* from unnest(:partition_keys::smallint[], :execution_ids::uuid[]) as i(partition_key, execution_id)
           join execution e using (partition_key, execution_id)
          where e.ownership_state = 'leased' and e.lease_expires_at <= c.now
            for update of e skip locked) e
),
marked as (
  update execution e
     set ownership_state = :to_ownership, blocking_reason = :to_blocking, attempt_state = :to_attempt,
         blocking_detail = 'lease expired, awaiting reclaim', lease_expired_at = d.now, last_mutation_at = d.now
    from due d
   where e.partition_key = d.partition_key and e.execution_id = d.execution_id
),
events as (
  insert into event (at, execution_id, partition_key, kind, namespace_no, attempt_index, worker_no, lease_epoch, lease_id,
                     attempt_id, flow_id, instance_tag)
  select now, execution_id, partition_key, 4, namespace_no, attempt_count - 1, worker_no, lease_epoch, lease_id,
         nullif(attempt_id, lease_id), flow_id, instance_tag
    from due
)
select l.lane_id, d.queue_no, d.place, d.partition_key, d.execution_id, d.lease_epoch
  from due d join lane l using (lane_no);

-- name: list_expired_leases
-- Leases of active work that end by :as_of, marked or not, by the time of their end, then id.
with clock as materialized (select coalesce(:as_of::bigint, ff_now()) as as_of),
expired as (
  select e.* from clock c
   cross join lateral (
         select e.partition_key, e.execution_id, e.namespace_no, e.lease_id, e.lease_epoch, e.worker_no, e.lease_expires_at, e.attempt_count
           from execution e
          where e.due_at <= c.as_of and e.ownership_state = 'leased' and e.lease_expires_at <= c.as_of) e
  union all
  select e.* from clock c
   cross join lateral (
         select e.partition_key, e.execution_id, e.namespace_no, e.lease_id, e.lease_epoch, e.worker_no, e.lease_expires_at, e.attempt_count
           from execution e
          where e.ownership_state = 'lease_expired_reclaimable' and e.lease_expires_at <= c.as_of) e
),
found as (
  select ('{fp:' || partition_key || '}:' || execution_id) collate "C" as id, lease_id, lease_epoch, worker_no,
         lease_expires_at, attempt_count - 1 as attempt_index
    from expired
   where :namespace::text is null or namespace_no = (select namespace_no from namespace where namespace = :namespace)
)
select f.id, f.lease_id, f.lease_epoch, w.worker_instance_id, f.lease_expires_at, f.attempt_index
  from (select * from found
         where :after_expires_at::bigint is null or (lease_expires_at, id) > (:after_expires_at, :after_id::text collate "C")
         order by lease_expires_at, id limit :limit) f
  join worker_identity w using (worker_no)
 order by f.lease_expires_at, f.id;

-- name: lock_expired
-- Holds executions whose attempt timer or deadline has passed, the oldest after :since first, but for some, with what
-- the decision to retry needs.
select e.partition_key, e.execution_id, e.retry_count, e.lease_epoch, e.lifecycle_phase, i.policy,
       coalesce(e.deadline_at <= c.now, false) as past_deadline
  from (select ff_now() as now) c
 cross join lateral (
       select e.* from execution e
        where e.due_at > :since and e.due_at <= c.now
          and (e.deadline_at <= c.now or (e.lifecycle_phase = 'active' and e.attempt_timeout_at <= c.now))
          and e.execution_id <> all(:left_out::uuid[])
        order by e.due_at limit :limit
          for update skip locked) e
  left join lateral ff_input(e.namespace_no, e.lane_no, e.created_at, e.partition_key, e.execution_id) i on true;

-- name: read_expiry
-- Whether the deadline or the attempt timer of a held execution has passed, with what the decision to retry needs.
select e.partition_key, e.execution_id, e.retry_count, e.lease_epoch, e.lifecycle_phase, i.policy,
       coalesce(e.deadline_at <= c.now, false) as past_deadline,
       e.lifecycle_phase = 'active' and coalesce(e.attempt_timeout_at <= c.now, false) as past_timeout
  from (select ff_now() as now) c
 cross join execution e
  left join lateral ff_input(e.namespace_no, e.lane_no, e.created_at, e.partition_key, e.execution_id) i on true
 where e.partition_key = :partition_key and e.execution_id = :execution_id;
