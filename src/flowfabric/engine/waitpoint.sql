-- name: read_runs
-- What runs that the transaction holds are judged by when they suspend or make waitpoints, in the order given, with the
-- key that signs now, and what earlier suspends under the same idempotency keys came to while that is kept.
with clock as materialized (select ff_now() as now)
select c.now, i.partition_key, i.execution_id, e.lifecycle_phase, e.ownership_state, e.terminal_outcome, e.lease_epoch, e.lease_id,
       e.attempt_id, e.attempt_count, e.lease_expires_at, e.lease_expires_at - coalesce(e.lease_renewed_at, e.claimed_at) as lease_ttl_ms,
       e.namespace_no, q.lane_no, l.lane_id, w.worker_instance_id, p.policy,
       k.kid as signing_kid, coalesce(k.installed_at, 0) as signing_since,
       s.is_open is not null as has_open_suspension, o.outcome, o.attempt_index as outcome_attempt_index
  from clock c
 cross join unnest(:partition_keys::smallint[], :execution_ids::uuid[], :idempotency_keys::text[])
       with ordinality as i(partition_key, execution_id, idempotency_key, nth)
 -- The limits keep what is given in the lead, whatever the planner expects of the tables.
 cross join lateral (
       select e.* from execution e
        where e.partition_key = i.partition_key and e.execution_id = i.execution_id limit 1) e
 cross join lateral (
       select p.policy from execution_input p
        where p.partition_key = i.partition_key and p.execution_id = i.execution_id limit 1) p
  join queue q on q.queue_no = e.queue_no
  join lane l on l.lane_no = q.lane_no
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

-- name: insert_pending
-- Stores a waitpoint that keeps signals for a later suspend; no row when its id is in use.
insert into waitpoint (partition_key, waitpoint_id, execution_id, attempt_index, waitpoint_key, token_kid, token, state, created_at, expires_at)
values (:partition_key, :waitpoint_id, :execution_id, :attempt_index, :waitpoint_key, :token_kid, :token, 'pending', :now, :expires_at)
on conflict do nothing
returning waitpoint_id;

-- name: read_waitpoint
-- One waitpoint; whoever holds its execution reads it as it stays.
select execution_id, attempt_index, waitpoint_key, token, state::text, expires_at
  from waitpoint
 where partition_key = :partition_key and waitpoint_id = :waitpoint_id;

-- name: set_closed
-- Closes a waitpoint whose execution the transaction holds, unless it is closed.
update waitpoint w set state = 'closed', closed_at = c.now, close_reason = :reason
  from (select ff_now() as now) c
 where w.partition_key = :partition_key and w.waitpoint_id = :waitpoint_id and w.state in ('pending', 'active');

-- name: read_token
-- The token of a waitpoint that takes signals.
select token
  from waitpoint
 where partition_key = :partition_key and waitpoint_id = :waitpoint_id and execution_id = :execution_id
   and state in ('pending', 'active');

-- name: list_open_waitpoints
-- The waitpoints of an execution that take signals, by id, and whether there is such an execution; at least one row.
select w.waitpoint_id, w.waitpoint_key, w.state, w.required_signal_names, w.created_at, w.activated_at, w.expires_at, w.token
  from execution e
  left join lateral (
       select w.* from (
              select w.* from waitpoint w
               where w.partition_key = e.partition_key and w.execution_id = e.execution_id
                 and (:after::uuid is null or w.waitpoint_id > :after) and w.state in ('pending', 'active') offset 0) w
        order by w.waitpoint_id limit :limit) w on true
 where e.partition_key = :partition_key and e.execution_id = :execution_id
 order by w.waitpoint_id;

-- name: list_suspended
-- The executions that wait, by when they began to, then id: what is left of the millisecond a page ended in, then on.
with wanted as materialized (
  select (select namespace_no from namespace where namespace = :namespace::text) as namespace_no,
         (select lane_no from lane where lane_id = :lane_id::text) as lane_no
)
select s.id, s.suspended_at, s.reason_code
  from (select ('{fp:' || f.partition_key || '}:' || f.execution_id) collate "C" as id, f.suspended_at, f.reason_code
          from wanted n
         cross join lateral (
               (select s.partition_key, s.execution_id, s.suspended_at, s.reason_code
                  from suspension s
                 where s.close_reason is null and s.suspended_at = :after_at::bigint
                   and (:namespace is null or s.namespace_no = n.namespace_no)
                   and (:lane_id is null or s.lane_no = n.lane_no)
                   and (:reason::text is null or s.reason_code = :reason))
               union all
               -- In the order of the index; those of one millisecond are sorted by id once they are read.
               (select s.partition_key, s.execution_id, s.suspended_at, s.reason_code
                  from suspension s
                 where s.close_reason is null and s.suspended_at > coalesce(:after_at, -1)
                   and (:namespace is null or s.namespace_no = n.namespace_no)
                   and (:lane_id is null or s.lane_no = n.lane_no)
                   and (:reason is null or s.reason_code = :reason)
                 order by s.suspended_at fetch first (:limit::bigint) rows with ties)) f) s
 where :after_at is null or (s.suspended_at, s.id) > (:after_at, :after_id::text collate "C")
 order by s.suspended_at, s.id
 limit :limit;
