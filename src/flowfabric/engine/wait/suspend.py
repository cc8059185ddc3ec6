"""Suspension of executions: release the lease and wait until the resume condition is satisfied."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias
from uuid import UUID

import msgspec

from flowfabric.db.batch import LOCKED, Batch, Locked
from flowfabric.db.database import Record, Transaction
from flowfabric.db.statements import array_text, full_columns, statements_beside
from flowfabric.engine.core.consequence import LeaseEnd, LeaseEnds
from flowfabric.engine.core.keys import Keys
from flowfabric.engine.core.row import GivenFence, LockedRun, Verdict, check_fence, lock_executions, read_runs
from flowfabric.engine.core.transition import Move
from flowfabric.engine.lease.expire import LeaseExpiry
from flowfabric.engine.store import Store
from flowfabric.engine.wait.signal_batch import facts_of
from flowfabric.engine.wait.waitpoint import read_waitpoint
from flowfabric.model.condition import condition_json, required_signal_names
from flowfabric.model.errors import EngineError, error
from flowfabric.model.evaluation import Evaluation, evaluate
from flowfabric.model.handle import Fence, Handle, check_handle
from flowfabric.model.ids import (
    AttemptId,
    ExecutionId,
    LaneId,
    LeaseId,
    WorkerInstanceId,
    check_storable,
    parse_execution_id,
)
from flowfabric.model.policy import read_stored_policy
from flowfabric.model.resume import resume_policy_json
from flowfabric.model.states import HandleKind, TimeoutBehavior, WaitpointState
from flowfabric.model.suspend_outcome import SuspendOutcome, already_met, outcome_json, read_stored_outcome
from flowfabric.model.suspension import (
    DEFAULT_DETAIL,
    AlreadyMet,
    SuspendArgs,
    SuspendDetails,
    Suspended,
    blocking_reason_of,
    check_pending,
    check_suspend,
    check_timeout_at,
    replay_window_ms,
    resolve_timeout,
)
from flowfabric.model.text import shown
from flowfabric.model.token import WaitpointToken, sign_token
from flowfabric.model.waitpoint import AdditionalWaitpoint, CloseReason, Fresh, UsePending

SQL = statements_beside(__file__)

Triple: TypeAlias = tuple[UUID | str | None, int | None, UUID | str | None]

_NO_SIGNALS = Evaluation(satisfied=False, satisfiers=(), closing_signal=None, dispositions=())


@dataclass(frozen=True, slots=True)
class _Request:
    """One suspend call; `fence` proves that the caller holds the lease."""

    execution_id: ExecutionId
    fence: Handle | Triple
    args: SuspendArgs


@dataclass(frozen=True, kw_only=True, slots=True)
class _Wait:
    """A suspend that passed its checks: its waitpoints, its timeout and the evaluation of earlier signals."""

    locked: LockedRun
    args: SuspendArgs
    kid: str
    details: SuspendDetails
    outcome: SuspendOutcome
    timeout_at: int | None
    timeout_behavior: TimeoutBehavior
    pending: UsePending | None
    buffered: Sequence[Record]
    evaluation: Evaluation

    @property
    def satisfied_at(self) -> int | None:
        return self.locked.now if self.evaluation.satisfied else None

    @property
    def close_reason(self) -> str | None:
        return CloseReason.RESUMED.value if self.evaluation.satisfied else None


class Suspend:
    """The suspend operations; concurrent callers share their statements."""

    def __init__(self, store: Store, keys: Keys, lease_ends: LeaseEnds, expiry: LeaseExpiry) -> None:
        self._store = store
        self._keys = keys
        self._lease_ends = lease_ends
        self._expiry = expiry
        self._batch: Batch[_Request, SuspendOutcome] = Batch(
            self._suspend_together, self._suspend_alone, keys=lambda request: (request.execution_id,)
        )

    async def suspend(self, handle: Handle, args: SuspendArgs) -> Suspended | AlreadyMet:
        """Release the lease and wait until the condition is satisfied; if it already is, the lease is kept."""
        if isinstance(handle, Handle) and handle.kind is HandleKind.SUSPENDED:
            raise error("already_suspended")
        check_suspend(_check_args(args))
        handle = check_handle(handle)
        return await self._suspend(_Request(handle.execution_id, handle, args))

    async def suspend_by_triple(
        self,
        *,
        execution_id: str,
        lease_id: UUID | str | None = None,
        lease_epoch: int | None = None,
        attempt_id: UUID | str | None = None,
        args: SuspendArgs,
    ) -> Suspended | AlreadyMet:
        """Suspend a run by its fence instead of its handle."""
        triple = (lease_id, lease_epoch, attempt_id)
        check_suspend(_check_args(args))
        return await self._suspend(_Request(parse_execution_id(execution_id), triple, args))

    async def drain(self) -> None:
        """Wait until every suspend in progress is answered."""
        await self._batch.drain()

    async def _suspend(self, request: _Request) -> SuspendOutcome:
        check_storable(request.execution_id)
        if any(isinstance(binding, UsePending) for binding in request.args.waitpoints):
            # Its buffered signals must be read and evaluated, so it runs in its own transaction.
            return await self._suspend_alone(request)
        return await self._store.answer(self._batch.put(request))

    async def _suspend_together(self, requests: Sequence[_Request]) -> Sequence[SuspendOutcome | Locked | Exception]:
        async def suspend(transaction: Transaction) -> "tuple[list[_Answer | Locked], _Released]":
            began, rows = await lock_executions(
                transaction, [request.execution_id for request in requests], waits=False
            )
            locked = [request for request, row in zip(requests, rows, strict=True) if row is not None]
            given, released = await self._suspend_locked(transaction, locked, began, is_shared=True)
            answers = iter(given)
            return [LOCKED if row is None else next(answers) for row in rows], released

        # Bypasses the store, which would translate faults: the batch handles them by trying each request alone.
        answers, released = await self._store.database.transact(suspend)
        await self._after_commit(requests, answers, released)
        return answers

    async def _suspend_alone(self, request: _Request) -> SuspendOutcome:
        async def suspend(transaction: Transaction) -> "tuple[list[_Answer], _Released]":
            began, (locked,) = await lock_executions(transaction, [request.execution_id])
            check_timeout_at(request.args.timeout_at, began)
            if locked is None:
                raise error("execution_not_found", request.execution_id)
            return await self._suspend_locked(transaction, [request], began)

        answers, released = await self._store.transact(suspend, execution_id=request.execution_id)
        await self._after_commit([request], answers, released)
        (answer,) = answers
        if isinstance(answer, EngineError):
            raise answer
        return answer

    async def _suspend_locked(
        self, transaction: Transaction, requests: Sequence[_Request], began: int, *, is_shared: bool = False
    ) -> "tuple[list[_Answer], _Released]":
        """Suspend runs whose executions the transaction has locked; a refused request changes nothing."""
        if not requests:
            return [], ([], [])
        runs = await read_runs(
            transaction, [(request.execution_id, request.args.idempotency_key) for request in requests]
        )
        checked: list[_Wait | _Answer] = []
        for request, locked in zip(requests, runs, strict=True):
            try:
                check_timeout_at(request.args.timeout_at, began)
                stored = read_stored_outcome(locked.outcome, locked.outcome_attempt_index)
                checked.append(stored or await self._check(transaction, request, locked))
            except EngineError as refused:
                checked.append(refused)
        waits = [each for each in checked if isinstance(each, _Wait)]
        ends = [_lease_end(wait) for wait in waits if not wait.evaluation.satisfied]
        verdicts = await self._lease_ends.within(transaction, ends, is_shared=is_shared) if ends else []
        if waits:
            await _insert(transaction, waits)
        return [each.outcome if isinstance(each, _Wait) else each for each in checked], (ends, verdicts)

    async def _check(self, transaction: Transaction, request: _Request, locked: LockedRun) -> _Wait:
        """Check that a run may suspend, and return its wait."""
        fence = request.fence if isinstance(request.fence, Handle) else _read_fence(request.fence)
        if locked.attempt_count < 1:
            raise error("attempt_not_found")
        check_fence(locked, fence)
        handle = fence if isinstance(fence, Handle) else _handle_of(request.execution_id, fence, locked)
        if handle.attempt_index != locked.attempt_index:
            raise error("invalid_lease_for_suspend")
        if locked.has_open_suspension:
            raise error("already_suspended")
        key = await self._keys.signing(transaction, locked.signing_kid, locked.signing_since)
        bound: list[AdditionalWaitpoint] = []
        pending: UsePending | None = None
        buffered: Sequence[Record] = ()
        evaluation = _NO_SIGNALS
        for binding in request.args.waitpoints:
            if isinstance(binding, Fresh):
                waitpoint_key = binding.waitpoint_key
                token = sign_token(key, request.execution_id, binding.waitpoint_id)
            else:
                pending = binding
                token, waitpoint_key = await _read_pending(transaction, locked, binding)
                check_pending(request.args.resume_condition, waitpoint_key)
                buffered = await transaction.fetch(
                    SQL.list_buffered_signals, partition_key=locked.partition_key, waitpoint_id=binding.waitpoint_id
                )
                evaluation = evaluate(request.args.resume_condition, map(facts_of, buffered))
            bound.append(
                AdditionalWaitpoint(
                    waitpoint_id=binding.waitpoint_id, waitpoint_key=waitpoint_key, waitpoint_token=token
                )
            )
        details = _details(request.args, locked.attempt_index, bound)
        policy = read_stored_policy(locked.policy)
        timeout_at, behavior = resolve_timeout(
            request.args, policy.suspension_policy if policy is not None else None, locked.now
        )
        return _Wait(
            locked=locked,
            args=request.args,
            kid=key.kid,
            details=details,
            outcome=already_met(details)
            if evaluation.satisfied
            else Suspended(details=details, handle=msgspec.structs.replace(handle, kind=HandleKind.SUSPENDED)),
            timeout_at=timeout_at,
            timeout_behavior=behavior,
            pending=pending,
            buffered=buffered,
            evaluation=evaluation,
        )

    async def _after_commit(
        self, requests: Sequence[_Request], answers: "Sequence[_Answer | Locked]", released: "_Released"
    ) -> None:
        await self._lease_ends.after_commit(*released)
        expired = [
            request.execution_id
            for request, answer in zip(requests, answers, strict=True)
            if isinstance(answer, EngineError) and answer.code == "lease_expired"
        ]
        if expired:
            await self._expiry.mark_expired(expired)


_Answer: TypeAlias = SuspendOutcome | EngineError
_Released: TypeAlias = tuple[list[LeaseEnd], list[Verdict | Locked]]


async def _read_pending(transaction: Transaction, locked: LockedRun, binding: UsePending) -> tuple[WaitpointToken, str]:
    """Return the token and the key of a pending waitpoint, which must belong to this attempt and not be expired."""
    row = await read_waitpoint(transaction, locked.partition_key, binding.waitpoint_id)
    if row is None:
        raise error("waitpoint_not_found")
    if row["state"] != WaitpointState.PENDING:
        raise error("waitpoint_not_pending")
    if row["execution_id"] != locked.execution_id or row["attempt_index"] != locked.attempt_index:
        raise error("invalid_waitpoint_for_execution")
    if row["expires_at"] is not None and row["expires_at"] <= locked.now:
        raise error("pending_waitpoint_expired")
    if not row["token"]:
        raise error("waitpoint_not_token_bound")
    return WaitpointToken(row["token"]), row["waitpoint_key"]


def _lease_end(wait: _Wait) -> LeaseEnd:
    handle = wait.outcome.handle if isinstance(wait.outcome, Suspended) else None
    assert handle is not None, "a run whose condition is already satisfied keeps its lease"
    # No fence: the lease was checked and the row is locked, so a later clock must not expire it.
    return LeaseEnd(
        handle.execution_id,
        Move.SUSPENDED,
        blocking=blocking_reason_of(wait.args.reason_code),
        detail=wait.args.detail or f"{DEFAULT_DETAIL} {wait.details.waitpoint_id} awaiting {wait.args.reason_code}",
        suspension_id=wait.args.suspension_id,
        timeout_at=wait.timeout_at,
    )


_SUSPENSION_COLUMNS = (
    "partition_keys",
    "execution_ids",
    "suspension_ids",
    "attempt_indexes",
    "waitpoint_ids",
    "namespace_nos",
    "lane_nos",
    "reason_codes",
    "requesters",
    "timeouts_at",
    "timeout_behaviors",
    "conditions",
    "resume_policies",
    "pointers",
    "satisfier_ids",
    "satisfied_ats",
    "close_reasons",
    "last_signals_at",
)
_FRESH_COLUMNS = (
    "fresh_partitions",
    "fresh_ids",
    "fresh_executions",
    "fresh_attempts",
    "fresh_suspensions",
    "fresh_keys",
    "fresh_kids",
    "fresh_tokens",
    "fresh_names",
    "fresh_timeouts_at",
)
_OUTCOME_COLUMNS = (
    "outcome_partitions",
    "outcome_executions",
    "outcome_keys",
    "outcome_attempts",
    "outcomes",
    "outcome_expiries",
)


async def _insert(transaction: Transaction, waits: Sequence[_Wait]) -> None:
    fresh = [row for wait in waits for row in _waitpoint_rows(wait)]
    outcomes = [
        (
            wait.locked.partition_key,
            wait.locked.execution_id,
            wait.args.idempotency_key,
            wait.locked.attempt_index,
            outcome_json(wait.outcome),
            wait.locked.now + replay_window_ms(wait.timeout_at, wait.locked.now),
        )
        for wait in waits
        if wait.args.idempotency_key is not None
    ]
    (stored,) = await transaction.fetch(
        SQL.insert_suspensions,
        now=waits[0].locked.now,
        **full_columns(_SUSPENSION_COLUMNS, [_suspension_row(wait) for wait in waits]),
        **full_columns(_FRESH_COLUMNS, fresh),
        **full_columns(_OUTCOME_COLUMNS, outcomes),
    )
    if stored["inserted"] != len(fresh):
        raise error("waitpoint_already_exists")
    for wait in waits:
        if wait.pending is not None:
            await _activate(transaction, wait, wait.pending)


async def _activate(transaction: Transaction, wait: _Wait, pending: UsePending) -> None:
    activated = await transaction.fetch(
        SQL.activate_waitpoint,
        partition_key=wait.locked.partition_key,
        execution_id=wait.locked.execution_id,
        waitpoint_id=pending.waitpoint_id,
        suspension_id=wait.args.suspension_id,
        required_signal_names=list(required_signal_names(wait.args.resume_condition, wait.details.waitpoint_key)),
        now=wait.locked.now,
        timeout_at=wait.timeout_at,
        matched_signal_count=sum(each.is_matched for each in wait.evaluation.dispositions),
        satisfied_at=wait.satisfied_at,
        close_reason=wait.close_reason,
    )
    if not activated:
        raise error("waitpoint_not_pending")


def _suspension_row(wait: _Wait) -> tuple[object, ...]:
    locked, args = wait.locked, wait.args
    return (
        locked.partition_key,
        locked.execution_id,
        args.suspension_id,
        locked.attempt_index,
        array_text(binding.waitpoint_id for binding in args.waitpoints),
        locked.namespace_no,
        locked.lane_no,
        args.reason_code,
        args.requested_by,
        wait.timeout_at,
        wait.timeout_behavior,
        condition_json(args.resume_condition),
        resume_policy_json(args.resume_policy),
        args.continuation_metadata_pointer,
        array_text(wait.evaluation.satisfiers),
        wait.satisfied_at,
        wait.close_reason,
        wait.buffered[-1]["accepted_at"] if wait.buffered else None,
    )


def _waitpoint_rows(wait: _Wait) -> list[tuple[object, ...]]:
    first = wait.details.waitpoint_token
    tokens = [first, *(each.waitpoint_token for each in wait.details.additional_waitpoints)]
    return [
        (
            wait.locked.partition_key,
            binding.waitpoint_id,
            wait.locked.execution_id,
            wait.locked.attempt_index,
            wait.args.suspension_id,
            binding.waitpoint_key,
            wait.kid,
            token.reveal(),
            msgspec.json.encode(required_signal_names(wait.args.resume_condition, binding.waitpoint_key)).decode(),
            wait.timeout_at,
        )
        for binding, token in zip(wait.args.waitpoints, tokens, strict=True)
        if isinstance(binding, Fresh)
    ]


def _details(args: SuspendArgs, attempt_index: int, bound: Sequence[AdditionalWaitpoint]) -> SuspendDetails:
    first, *others = bound
    return SuspendDetails(
        suspension_id=args.suspension_id,
        attempt_index=attempt_index,
        waitpoint_id=first.waitpoint_id,
        waitpoint_key=first.waitpoint_key,
        waitpoint_token=first.waitpoint_token,
        additional_waitpoints=tuple(others),
    )


def _check_args(args: object) -> SuspendArgs:
    if not isinstance(args, SuspendArgs):
        raise error("invalid_input", f"args: expected SuspendArgs, got {shown(args)}")
    return args


def _read_fence(triple: Triple) -> Fence:
    fence = GivenFence.read(*triple, None).fence
    assert fence is not None, "without an override, a fence is required"
    return fence


def _handle_of(execution_id: ExecutionId, fence: Fence, locked: LockedRun) -> Handle:
    """The handle of a run, rebuilt from its fence and its row as its claim returned it."""
    return Handle(
        kind=HandleKind.FRESH,
        execution_id=execution_id,
        attempt_index=locked.attempt_index,
        attempt_id=AttemptId(fence.attempt_id),
        lease_id=LeaseId(fence.lease_id),
        lease_epoch=fence.lease_epoch,
        # A row without a lease has no TTL; 1 is the smallest value that a handle can decode.
        lease_ttl_ms=locked.lease_ttl_ms or 1,
        lane_id=LaneId(locked.lane_id),
        worker_instance_id=WorkerInstanceId(locked.worker_instance_id or ""),
    )
