-- name: read_state
-- The public state of one execution.
select public_state from execution where partition_key = :partition_key and execution_id = :execution_id;

-- name: read_info
-- What an operator sees of one execution.
select n.namespace, l.lane_id, e.priority, i.execution_kind, e.lifecycle_phase, e.ownership_state, e.eligibility_state,
       e.blocking_reason, e.terminal_outcome, e.attempt_state, e.public_state, i.created_at, e.started_at, e.completed_at,
       greatest(e.attempt_count - 1, 0) as attempt_index, e.flow_id, e.blocking_detail
  from execution e
  join execution_input i using (partition_key, execution_id)
  join namespace n on n.namespace_no = e.namespace_no
  join queue q using (queue_no)
  join lane l on l.lane_no = q.lane_no
 where e.partition_key = :partition_key and e.execution_id = :execution_id;

-- name: read_result
-- The result of one completed execution.
select a.result_payload
  from execution e
  join attempt a on a.partition_key = e.partition_key and a.execution_id = e.execution_id
                and a.attempt_index = e.attempt_count - 1
 where e.partition_key = :partition_key and e.execution_id = :execution_id and e.terminal_outcome = 'success';

-- name: list_endings
-- Of the named executions those that have ended, with their outcome and result; absent ones show an outcome of null.
select i.nth, e.terminal_outcome, e.public_state, a.result_payload, coalesce(e.failure_reason, e.cancellation_reason) as reason
  from unnest(:partition_keys::smallint[], :execution_ids::uuid[]) with ordinality as i(partition_key, execution_id, nth)
  left join execution e using (partition_key, execution_id)
  left join attempt a on e.terminal_outcome = 'success' and a.partition_key = e.partition_key
                     and a.execution_id = e.execution_id and a.attempt_index = e.attempt_count - 1
 where e.execution_id is null or e.lifecycle_phase = 'terminal';

-- name: read_clock
-- The clock that decides everything.
select ff_now() as now;
