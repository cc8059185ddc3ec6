"""Corruptions of stored rows, by the rule that each of them breaks."""

ENTRY = """
insert into ready (place, route_no, queue_no, partition_key, execution_id)
select place, route_no, queue_no, partition_key, execution_id from execution join queue using (queue_no) where {mine}
"""
"""Adds an entry of the execution to ready."""

ROWS: dict[str, list[tuple[str, str]]] = {
    "lifecycle_phase: submitted is never stored": [
        ("created", "lifecycle_phase = 'submitted', eligibility_state = 'not_applicable'"),
    ],
    "leased implies active": [
        ("created", "ownership_state = 'leased'"),
    ],
    "lease_revoked implies active": [
        ("created", "ownership_state = 'lease_revoked'"),
    ],
    "terminal_outcome is set if and only if": [
        ("created", "terminal_outcome = 'success'"),
        ("completed", "terminal_outcome = 'none'"),
    ],
    "eligibility_state applies if and only if": [
        ("created", "eligibility_state = 'not_applicable'"),
        ("claimed", "eligibility_state = 'eligible_now'"),
    ],
    "ownership_state: unowned though the execution is active": [
        ("claimed", "ownership_state = 'unowned'"),
    ],
    "blocking_reason: contradicts the rest of the state": [
        ("created", "blocking_reason = 'none'"),
        ("claimed", "blocking_reason = 'waiting_for_worker'"),
        ("delayed", "blocking_reason = 'waiting_for_budget'"),
        ("completed", "blocking_reason = 'paused_by_policy'"),
        ("suspended", "blocking_reason = 'waiting_for_delay'"),
    ],
    "attempt_state: contradicts the rest of the state": [
        ("claimed", "attempt_state = 'attempt_interrupted'"),
        ("created", "attempt_state = 'attempt_terminal'"),
        ("completed", "attempt_state = 'running_attempt'"),
    ],
    "started_at: must be set if and only if there was an attempt": [
        ("created", "started_at = 1"),
        ("created", "claimed_at = 1"),
    ],
    "started_at: missing after the first of several attempts": [
        ("reclaimed", "started_at = null"),
    ],
    "result_payload: set though the execution did not succeed": [
        ("claimed", "result_payload = 'x'"),
    ],
    "delay_until: missing on a delayed execution": [
        ("delayed", "delay_until = null"),
    ],
    "cancelled_by: set though the execution was not cancelled": [
        ("failed", "cancelled_by = 'x'"),
    ],
    "attempt_count: contradicts attempt_state": [
        ("created", "attempt_count = 1"),
        ("completed", "attempt_count = 0"),
    ],
    "attempt: an attempt_index is beyond attempt_count": [
        ("backing_off", "attempt_count = 0"),
    ],
    "attempt: the number of ended rows contradicts attempt_count": [
        ("completed", "attempt_count = 2"),
        ("reclaimed", "attempt_count = 1"),
    ],
    "attempt_id: contradicts attempt_state": [
        ("created", "attempt_id = gen_random_uuid()"),
        ("backing_off", "attempt_id = gen_random_uuid()"),
        ("completed", "lease_id = null"),
        ("resumable", "attempt_id = null"),
    ],
    "lease_epoch: lower than attempt_count": [
        ("completed", "lease_epoch = 0"),
    ],
    "lease_epoch: lower than the epoch of an attempt": [
        ("reclaimed", "lease_epoch = 0"),
    ],
    "lease_epoch: not higher than the epoch of an earlier attempt": [
        ("reclaimed", "lease_epoch = 1"),
    ],
    "lease: a field of the lease is missing": [
        ("claimed", "lease_id = null"),
        ("claimed", "worker_no = null"),
        ("claimed", "lease_expires_at = null"),
        ("claimed", "claim_no = null"),
    ],
    "lease_id: set though the execution is unowned": [
        ("backing_off", "lease_id = gen_random_uuid()"),
        ("resumable", "lease_id = gen_random_uuid()"),
    ],
    "lease_expired_at: contradicts ownership_state": [
        ("claimed", "lease_expired_at = 5"),
    ],
    "lease_revoked_at: contradicts ownership_state": [
        ("claimed", "lease_revoked_at = 5"),
    ],
    "retry_count: not between 0 and attempt_count": [
        ("backing_off", "retry_count = 2"),
        ("created", "retry_count = -1"),
    ],
    "replay_count: negative": [
        ("created", "replay_count = -1"),
    ],
    "reclaim_count: not between 0 and attempt_count - 1": [
        ("claimed", "reclaim_count = 1"),
    ],
    "place: the priority is out of range": [
        ("created", "place = (9001::bigint << 48) + place"),
    ],
    "queue_no: the queue does not exist": [
        ("created", "queue_no = 30000"),
    ],
    "queue_no: the queue belongs to another lane": [
        ("created", "lane_no = 30000"),
    ],
    "queue_no: the queue belongs to another namespace": [
        ("created", "namespace_no = 30000"),
    ],
    "namespace_no: the namespace does not exist": [
        ("created", "namespace_no = 30000"),
    ],
    "worker_no: the worker does not exist": [
        ("claimed", "worker_no = 30000"),
    ],
    "granted_until: set without a matching grant": [
        ("created", "granted_until = ff_now() + 1000"),
    ],
    "ready: granted_until is not granted_until of the execution": [
        ("created", "granted_until = 5"),
    ],
    "input_payload: neither on the row nor in execution_input": [
        ("created", "input_payload = null"),
    ],
    "execution_tag: has_tags contradicts the tags": [
        ("created", "has_tags = true"),
    ],
    "attached: the slot bit contradicts slot_keys": [
        ("claimed", "attached = 8"),
        ("claimed", "slot_keys = '{1}'"),
    ],
    "attached: the suspension bit contradicts the suspensions": [
        ("created", "attached = 2"),
        ("suspended", "attached = 0"),
    ],
    "attached: the grant bit is missing": [
        ("granted", "attached = 0"),
    ],
    "attached: the stream bit is set without a stream": [
        ("created", "attached = 4"),
        ("claimed", "attached = 4"),
    ],
    "attached: the stream bit is missing": [
        ("streaming", "attached = 0"),
    ],
    "suspension: missing or closed though the execution is suspended": [
        ("suspended", "suspension_id = null"),
    ],
    "suspension_id: not the latest suspension": [
        ("suspended", "suspension_id = null"),
    ],
    "suspension_id: the suspension does not exist": [
        ("created", "suspension_id = gen_random_uuid()"),
    ],
    "suspension_timeout_at: contradicts the suspension": [
        ("suspended", "suspension_timeout_at = null"),
    ],
    "ready: no entry though the execution is claimable": [
        ("created", "place = place + 1"),
    ],
    "ready: its execution does not exist": [
        ("created", "place = place + 1"),
    ],
    "ready: an entry though the execution is not claimable": [
        ("created", "eligibility_state = 'blocked_by_operator', blocking_reason = 'paused_by_operator'"),
        ("lost", "blocking_reason = 'paused_by_flow_cancel'"),
    ],
    "listed: the entry is missing": [
        ("created", "eligibility_state = 'blocked_by_quota', blocking_reason = 'waiting_for_quota'"),
    ],
    "listed: the entry contradicts the state of the execution": [
        ("failed", "terminal_outcome = 'expired'"),
        ("failed", "terminal_outcome = 'success'"),
    ],
    "listed: at is not the time the execution ended": [
        ("failed", "last_transition_at = 5"),
    ],
    "retained: no entry though the execution ended": [
        ("completed", "last_transition_at = 5"),
    ],
    "timer: due_at contradicts the execution": [
        ("delayed", "delay_until = delay_until + 1"),
        ("delayed", "delay_until = delay_until - 1"),
    ],
    "timer: attempt_timeout contradicts the execution": [
        ("timed", "attempt_timeout_at = null"),
        ("claimed", "attempt_timeout_at = 5"),
    ],
    "timer: deadline contradicts the execution": [
        ("timed", "deadline_at = null"),
        ("created", "deadline_at = 5"),
    ],
    "claim: the claim of the lease is missing": [
        ("claimed", "claim_no = 30000"),
    ],
    "claim: the claim of the lease belongs to another worker": [
        ("claimed", "worker_no = 30000"),
    ],
    "instance_tag: not the value of the tag": [
        ("created", "instance_tag = 'x'"),
    ],
}
"""For each problem: the state of an execution, and what is changed in its row."""

RELATED_ROWS: dict[str, list[tuple[str, str]]] = {
    "execution_tag: has_tags contradicts the tags": [
        (
            "created",
            "insert into execution_tag select partition_key, execution_id, 'a.b', 'x' from execution where {mine}",
        ),
    ],
    "input_payload: both on the row and in execution_input": [
        (
            "created",
            "insert into execution_input select partition_key, execution_id, input_payload from execution where {mine}",
        ),
    ],
    "input_payload: neither on the row nor in execution_input": [
        ("large", "delete from execution_input where {mine}"),
    ],
    "result_payload: both on the row and in execution_result": [
        (
            "completed",
            "insert into execution_result "
            "select partition_key, execution_id, result_payload from execution where {mine}",
        ),
    ],
    "execution_result: present though the execution did not succeed": [
        ("failed", "insert into execution_result select partition_key, execution_id, '' from execution where {mine}"),
    ],
    "attempt: the number of ended rows contradicts attempt_count": [
        ("backing_off", "delete from attempt where ended_at is not null and {mine}"),
    ],
    "attempt: the pending attempt has no previous_attempt_index": [
        ("backing_off", "delete from attempt where ended_at is null and {mine}"),
    ],
    "attempt: an attempt_index is beyond attempt_count": [
        ("backing_off", "update attempt set attempt_index = attempt_index + 5 where {mine}"),
    ],
    "attempt: ended_at contradicts attempt_state": [
        ("backing_off", "update attempt set attempt_state = 'ended_failure' where {mine}"),
        ("backing_off", "update attempt set ended_at = null where {mine}"),
    ],
    "attempt: a row has the state started": [
        ("backing_off", "update attempt set attempt_state = 'started', ended_at = null where {mine}"),
    ],
    "lease_epoch: lower than the epoch of an attempt": [
        ("backing_off", "update attempt set lease_epoch = 9 where {mine}"),
    ],
    "attempt: an attempt that has not failed has an error": [
        ("backing_off", "update attempt set error_type = 'KeyError' where {mine}"),
        ("resumable", "update attempt set traceback = 'Traceback' where {mine}"),
    ],
    "attempt: a field of an ended attempt is missing": [
        ("backing_off", "update attempt set attempt_id = null where {mine}"),
    ],
    "attempt: a previous_attempt_index is not lower than its attempt_index": [
        ("backing_off", "update attempt set previous_attempt_index = 1 where {mine}"),
    ],
    "attempt: a retry, reclaim or replay has no previous_attempt_index": [
        ("reclaimed", "delete from attempt where attempt_index = 1 and {mine}"),
    ],
    "attempt: lease_epoch does not increase from one attempt to the next": [
        ("reclaimed", "update attempt set lease_epoch = 9 where {mine}"),
    ],
    "attempt: an attempt before the latest has not ended": [
        (
            "reclaimed",
            "update attempt set attempt_state = 'suspended', ended_at = null where attempt_index = 0 and {mine}",
        ),
    ],
    "attempt: the next attempt is stored though none is pending": [
        (
            "created",
            "insert into attempt (partition_key, execution_id, attempt_index, attempt_state) "
            "select partition_key, execution_id, 0, 'created' from execution where {mine}",
        ),
    ],
    "attempt: the latest attempt contradicts the execution": [
        ("resumable", "delete from attempt where {mine}"),
        ("resumable", "update attempt set attempt_state = 'created' where {mine}"),
        ("resumable", "update attempt set attempt_state = 'ended_failure', ended_at = 5 where {mine}"),
        ("reclaimed_out", "update attempt set attempt_state = 'ended_failure' where {mine}"),
    ],
    "ready: no entry though the execution is claimable": [
        ("created", "delete from ready where {mine}"),
        ("resumable", "delete from ready where {mine}"),
        ("lost", "delete from ready where {mine}"),
    ],
    "ready: the entry names another execution": [
        ("created", "update ready set execution_id = gen_random_uuid() where {mine}"),
    ],
    "ready: the route is not the route of the queue": [
        ("created", "update ready set route_no = 30000 where {mine}"),
    ],
    "ready: its execution does not exist": [
        (
            "created",
            "insert into ready select 5, route_no, queue_no, partition_key, execution_id from ready where {mine}",
        ),
    ],
    "ready: granted_until is not granted_until of the execution": [
        ("granted", "update ready set granted_until = null where {mine}"),
    ],
    "ready: an entry though the execution is not claimable": [
        ("claimed", ENTRY),
        ("completed", ENTRY),
        ("suspended", ENTRY),
        ("delayed", ENTRY),
    ],
    "listed: the entry is missing": [
        ("resumable", "delete from listed where {mine}"),
        ("lost", "delete from listed where {mine}"),
        ("failed", "delete from listed where {mine}"),
    ],
    "listed: the entry contradicts the state of the execution": [
        ("cancelled", "update listed set public_state = 'failed' where {mine}"),
        (
            "created",
            "insert into listed select partition_key, execution_id, public_state, 5 from execution where {mine}",
        ),
    ],
    "listed: at is not the time the execution ended": [
        ("cancelled", "update listed set at = at + 1 where {mine}"),
    ],
    "timer: delay contradicts the execution": [
        ("delayed", "delete from timer where {mine}"),
        ("backing_off", "delete from timer where {mine}"),
        ("created", "insert into timer select partition_key, execution_id, 'delay', 5 from execution where {mine}"),
        ("claimed", "insert into timer select partition_key, execution_id, 'delay', 5 from execution where {mine}"),
    ],
    "timer: due_at contradicts the execution": [
        ("delayed", "update timer set due_at = due_at + 1 where {mine}"),
        ("timed", "update timer set due_at = 5 where kind = 'deadline' and {mine}"),
    ],
    "timer: deadline contradicts the execution": [
        ("timed", "delete from timer where kind = 'deadline' and {mine}"),
        ("created", "insert into timer select partition_key, execution_id, 'deadline', 5 from execution where {mine}"),
        (
            "completed",
            "insert into timer select partition_key, execution_id, 'deadline', 5 from execution where {mine}",
        ),
    ],
    "timer: attempt_timeout contradicts the execution": [
        ("timed", "delete from timer where kind = 'attempt_timeout' and {mine}"),
        (
            "claimed",
            "insert into timer select partition_key, execution_id, 'attempt_timeout', 5 from execution where {mine}",
        ),
        (
            "completed",
            "insert into timer select partition_key, execution_id, 'attempt_timeout', 5 from execution where {mine}",
        ),
    ],
    "timer: suspension_timeout contradicts the execution": [
        ("suspended", "delete from timer where {mine}"),
        (
            "resumable",
            "insert into timer select partition_key, execution_id, 'suspension_timeout', 5 from execution where {mine}",
        ),
    ],
    "claim: the claim of the lease is missing": [
        ("claimed", "delete from claim where {holds}"),
        ("expired_lease", "delete from claim where {holds}"),
    ],
    "claim: the claim of the lease does not contain the execution": [
        ("claimed", "update claim set execution_ids = '{}' where {holds}"),
    ],
    "claim: the claim of the lease belongs to another worker": [
        ("claimed", "update claim set worker_no = 30000 where {holds}"),
    ],
    "retained: no entry though the execution ended": [
        ("completed", "delete from retained where {holds}"),
        ("cancelled", "delete from retained where {holds}"),
        ("completed", "update retained set ended_at = 5 where {holds}"),
        ("completed", "update retained set execution_ids = '{}' where {holds}"),
    ],
    "retained: the entry has another queue or outcome": [
        ("completed", "update retained set queue_no = 30000 where {holds}"),
        ("failed", "update retained set terminal_outcome = 'success' where {holds}"),
    ],
    "retained: counts an execution that did not end then": [
        ("completed", "update retained set ended_at = 5 where {holds}"),
    ],
    "granted_until: set without a matching grant": [
        ("granted", "delete from claim_grant where {mine}"),
        ("granted", "update claim_grant set expires_at = 5 where {mine}"),
    ],
    "suspension: missing or closed though the execution is suspended": [
        ("suspended", "delete from suspension where {mine}"),
        ("suspended", "update suspension set closed_at = 5, close_reason = 'x' where {mine}"),
    ],
    "suspension_id: the suspension does not exist": [
        ("suspended", "delete from suspension where {mine}"),
    ],
    "suspension: does not belong to the latest attempt": [
        ("suspended", "update suspension set attempt_index = 5 where {mine}"),
        ("suspended", "update suspension set attempt_index = 1 where {mine}"),
    ],
    "suspension: its namespace or lane is not that of the execution": [
        ("suspended", "update suspension set lane_no = 30000 where {mine}"),
        ("suspended", "update suspension set namespace_no = namespace_no + 1 where {mine}"),
    ],
    "suspension_timeout_at: contradicts the suspension": [
        ("suspended", "update suspension set timeout_at = null where {mine}"),
    ],
    "suspension: a waitpoint is missing": [
        ("suspended", "delete from waitpoint where {mine}"),
        ("suspended", "delete from waitpoint where waitpoint_key = 'b' and {mine}"),
    ],
    "waitpoint: active though its suspension is not open": [
        ("suspended", "update waitpoint set suspension_id = gen_random_uuid() where {mine}"),
        ("suspended", "update suspension set closed_at = 1, close_reason = 'x' where {mine}"),
    ],
    "waitpoint: closed_at contradicts the state": [
        ("suspended", "update waitpoint set closed_at = 5 where {mine}"),
        ("suspended", "update waitpoint set state = 'closed' where waitpoint_key = 'a' and {mine}"),
    ],
    "suspension: open though the execution is not suspended": [
        ("resumed", "update suspension set closed_at = null, close_reason = null where {mine}"),
    ],
    "suspension: an earlier suspension is open": [
        ("resumed", "update suspension set closed_at = null, close_reason = null where {mine}"),
    ],
    "suspension: its attempt does not exist": [
        (
            "resumed",
            "update suspension set attempt_index = 1 "
            "where suspension_id <> (select suspension_id from execution where {mine}) and {mine}",
        ),
    ],
    "suspension_id: not the latest suspension": [
        (
            "resumed",
            "update suspension set attempt_index = 1 "
            "where suspension_id <> (select suspension_id from execution where {mine}) and {mine}",
        ),
    ],
    "stream: its attempt does not exist": [
        ("streaming", "update stream set attempt_index = 1 where {mine}"),
    ],
    "stream: the counters contradict each other": [
        ("streaming", "update stream set frame_count = 0 where {mine}"),
        ("streaming", "update stream set first_frame_no = 4 where {mine}"),
        ("streaming", "update stream set expires_at = 1 where {mine}"),
    ],
    "stream: the newest frame contradicts the counters": [
        ("streaming", "update stream set frame_count = 3 where {mine}"),
        ("streaming", "update stream set last_seq = 7 where {mine}"),
        ("streaming", "delete from stream_frame where frame_no = 2 and {mine}"),
        ("streaming", "delete from stream_frame where {mine}"),
    ],
    "stream_summary: present though the stream has no summary frame": [
        ("streaming", "update stream set has_durable_frame = false where {mine}"),
    ],
    "stream: a frame has an id below that of the oldest": [
        ("streaming", "update stream set (oldest_ms, oldest_seq) = (last_ms, last_seq) where {mine}"),
    ],
    "stream: its execution does not exist": [
        ("streaming", "delete from execution where {mine}; update stream set sweep_at = 1 where {mine}"),
    ],
    "stream_frame: its stream does not exist": [
        ("streaming", "delete from stream where {mine}"),
    ],
    "stream_summary: its stream does not exist": [
        ("streaming", "delete from stream where {mine}"),
    ],
    "attached: the suspension bit contradicts the suspensions": [
        ("resumed", "update suspension set closed_at = null, close_reason = null where {mine}"),
    ],
}
"""For each problem: the state of an execution, and what is done to the rows that belong to it."""
