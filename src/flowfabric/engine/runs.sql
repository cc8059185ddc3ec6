-- name: read_runs
-- What runs that the transaction holds are judged by when they suspend or make waitpoints, in the order given, with the
-- key that signs now, and what earlier suspends under the same idempotency keys came to while that is kept.
with clock as materialized (select ff_now() as now)
select c.now, i.partition_key, i.execution_id, e.lifecycle_phase, e.ownership_state, e.terminal_outcome, e.lease_epoch, e.lease_id,
       e.attempt_id, e.attempt_count, e.lease_expires_at, e.lease_expires_at - coalesce(e.lease_renewed_at, e.claimed_at) as lease_ttl_ms,
       e.namespace_no, e.lane_no, l.lane_id, w.worker_instance_id, p.policy,
       k.kid as signing_kid, coalesce(k.installed_at, 0) as signing_since,
       s.is_open is not null as has_open_suspension, o.outcome, o.attempt_index as outcome_attempt_index
  from clock c
 cross join unnest(:partition_keys::smallint[], :execution_ids::uuid[], :idempotency_keys::text[])
       with ordinality as i(partition_key, execution_id, idempotency_key, nth)
 -- The limits keep what is given in the lead, whatever the planner expects of the tables.
 cross join lateral (
       select e.* from execution e
        where e.partition_key = i.partition_key and e.execution_id = i.execution_id limit 1) e
 cross join lateral ff_input(e.namespace_no, e.lane_no, e.created_at, e.partition_key, e.execution_id) p
  join lane l on l.lane_no = e.lane_no
  left join worker_identity w on w.worker_no = e.worker_no
  left join signing_key k on k.is_current
  left join lateral (
       select true as is_open from suspension s
        where s.partition_key = i.partition_key and s.execution_id = i.execution_id and s.closed_at is null limit 1) s on true
  left join lateral (
       select o.outcome, o.attempt_index from suspend_key o
        where o.partition_key = i.partition_key and o.execution_id = i.execution_id
          and o.idempotency_key = i.idempotency_key and o.expires_at > c.now limit 1) o on true
 order by i.nth;

-- name: read_waitpoint
-- One waitpoint; whoever holds its execution reads it as it stays.
select execution_id, attempt_index, waitpoint_key, token, state::text, expires_at
  from waitpoint
 where partition_key = :partition_key and waitpoint_id = :waitpoint_id;
