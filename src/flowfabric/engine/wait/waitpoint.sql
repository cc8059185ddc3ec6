-- name: insert_pending
-- Inserts a waitpoint that stores signals for a later suspend. Returns no row if the id is in use.
insert into waitpoint (partition_key, waitpoint_id, execution_id, attempt_index, waitpoint_key, token_kid, token, state, created_at, expires_at)
values (:partition_key, :waitpoint_id, :execution_id, :attempt_index, :waitpoint_key, :token_kid, :token, 'pending', :now, :expires_at)
on conflict do nothing
returning waitpoint_id;

-- name: close_waitpoint
-- Closes an open waitpoint whose execution the transaction has locked.
update waitpoint w set state = 'closed', closed_at = c.now, close_reason = :reason
  from (select ff_now() as now) c
 where w.partition_key = :partition_key and w.waitpoint_id = :waitpoint_id and w.state in ('pending', 'active');

-- name: read_token
-- The token of a waitpoint that accepts signals. A terminal execution accepts none.
select w.token
  from waitpoint w
  join execution e using (partition_key, execution_id)
 where w.partition_key = :partition_key and w.waitpoint_id = :waitpoint_id and w.execution_id = :execution_id
   and w.state in ('pending', 'active') and e.lifecycle_phase <> 'terminal';

-- name: list_open_waitpoints
-- The waitpoints of an execution that accept signals, ordered by id; a row of nulls if there are none, no row if the
-- execution does not exist. A terminal execution accepts no signals, even if a waitpoint is still marked open.
select w.waitpoint_id, w.waitpoint_key, w.state, w.required_signal_names, w.created_at, w.activated_at, w.expires_at, w.token
  from execution e
  left join lateral (
       select w.* from (
              select w.* from waitpoint w
               where e.lifecycle_phase <> 'terminal' and w.partition_key = e.partition_key and w.execution_id = e.execution_id
                 and (:after::uuid is null or w.waitpoint_id > :after) and w.state in ('pending', 'active') offset 0) w
        order by w.waitpoint_id limit :limit) w on true
 where e.partition_key = :partition_key and e.execution_id = :execution_id
 order by w.waitpoint_id;

-- name: list_suspended
-- A page of suspended executions, ordered by suspension time, then id. It starts with the rest of the millisecond in which
-- the previous page ended.
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
               -- In index order; the outer query sorts rows of the same millisecond by id.
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

-- name: read_waitpoint
-- One waitpoint. It cannot change while the transaction holds the lock on its execution.
select execution_id, attempt_index, waitpoint_key, token, state::text, expires_at
  from waitpoint
 where partition_key = :partition_key and waitpoint_id = :waitpoint_id;
