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
