"""Suspensions: the arguments of a suspend and their checks, its outcomes, and pages of suspended executions."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING
from uuid import UUID

from flowfabric.model.condition import (
    ByName,
    Composite,
    Condition,
    Count,
    Single,
    TimeoutOnly,
    check_depth,
    check_enum,
    check_structure,
    leaves,
    parse_condition,
    waitpoint_keys,
)
from flowfabric.model.errors import EngineError, error
from flowfabric.model.handle import Handle
from flowfabric.model.ids import ExecutionId, SuspensionId, WaitpointId, parse_uuid
from flowfabric.model.lease import AlreadySatisfied
from flowfabric.model.policy import SuspensionPolicy
from flowfabric.model.policy_checks import MAX_MS, set_field
from flowfabric.model.resume import ResumePolicy, parse_resume_policy
from flowfabric.model.states import BlockingReason, TimeoutBehavior
from flowfabric.model.text import check_range, check_short, check_text, shorten, shown
from flowfabric.model.token import WaitpointToken
from flowfabric.model.waitpoint import AdditionalWaitpoint, Binding, Fresh, parse_binding

CLOCK_SKEW_MS = 600_000
"""How far in the past a `timeout_at` may be, because the clocks of callers differ."""
REPLAY_MARGIN_MS = 60_000
"""How long the outcome for an idempotency key is kept after the timeout of the suspension."""
LONGEST_REPLAY_MS = 7 * 24 * 60 * 60 * 1000

DEFAULT_DETAIL = "suspended: waitpoint"
"""How the stored detail of a suspension begins, unless the caller gives one."""

_DEFAULT_RESUME_POLICY = ResumePolicy()


class SuspensionReason(StrEnum):
    """Why an execution is suspended."""

    WAITING_FOR_SIGNAL = "waiting_for_signal"
    WAITING_FOR_APPROVAL = "waiting_for_approval"
    WAITING_FOR_CALLBACK = "waiting_for_callback"
    WAITING_FOR_TOOL_RESULT = "waiting_for_tool_result"
    WAITING_FOR_OPERATOR_REVIEW = "waiting_for_operator_review"
    PAUSED_BY_POLICY = "paused_by_policy"
    PAUSED_BY_BUDGET = "paused_by_budget"
    STEP_BOUNDARY = "step_boundary"
    MANUAL_PAUSE = "manual_pause"


_BLOCKING: Mapping[str | None, BlockingReason] = {
    SuspensionReason.WAITING_FOR_APPROVAL: BlockingReason.WAITING_FOR_APPROVAL,
    SuspensionReason.WAITING_FOR_CALLBACK: BlockingReason.WAITING_FOR_CALLBACK,
    SuspensionReason.WAITING_FOR_TOOL_RESULT: BlockingReason.WAITING_FOR_TOOL_RESULT,
    SuspensionReason.WAITING_FOR_OPERATOR_REVIEW: BlockingReason.PAUSED_BY_OPERATOR,
    SuspensionReason.PAUSED_BY_POLICY: BlockingReason.PAUSED_BY_POLICY,
    SuspensionReason.PAUSED_BY_BUDGET: BlockingReason.WAITING_FOR_BUDGET,
    SuspensionReason.MANUAL_PAUSE: BlockingReason.PAUSED_BY_OPERATOR,
}


def blocking_reason_of(reason_code: str | None) -> BlockingReason:
    """Return the blocking reason of an execution that is suspended for a stored reason."""
    return _BLOCKING.get(reason_code, BlockingReason.WAITING_FOR_SIGNAL)


class SuspensionRequester(StrEnum):
    """Who requested a suspension."""

    WORKER = "worker"
    OPERATOR = "operator"
    POLICY = "policy"
    SYSTEM_TIMEOUT_POLICY = "system_timeout_policy"


def parse_timeout_behavior(value: object) -> TimeoutBehavior:
    """Return the timeout behaviour of an argument; `auto_resume` is an alias."""
    word = TimeoutBehavior.AUTO_RESUME_WITH_TIMEOUT_SIGNAL if value == "auto_resume" else value
    return check_enum(TimeoutBehavior, word, "timeout_behavior")


def read_stored_timeout_behavior(value: str | None) -> TimeoutBehavior:
    """Return the timeout behaviour stored in a row; None means `fail`."""
    try:
        return parse_timeout_behavior(value or TimeoutBehavior.FAIL)
    except EngineError as refused:
        raise error("corruption", refused.detail) from None


@dataclass(frozen=True, kw_only=True, slots=True)
class SuspendArgs:
    """The arguments of a suspend; condition, bindings and policy may be given as their JSON values.

    `timeout_ms` counts from the suspend, by the database clock; `timeout_at` is a time of that clock. Without
    `timeout_behavior`, a timeout given here fails the execution, and a timeout from the execution's policy has the
    behaviour that the policy names. `detail` says in words what it waits for.
    """

    suspension_id: SuspensionId
    waitpoints: tuple[Binding, ...]
    resume_condition: Condition
    resume_policy: ResumePolicy = _DEFAULT_RESUME_POLICY
    reason_code: SuspensionReason
    requested_by: SuspensionRequester = SuspensionRequester.WORKER
    timeout_at: int | None = None
    timeout_ms: int | None = None
    timeout_behavior: TimeoutBehavior | None = None
    continuation_metadata_pointer: str | None = None
    idempotency_key: str | None = None
    detail: str | None = None

    if TYPE_CHECKING:

        def __init__(
            self,
            *,
            suspension_id: UUID | str,
            waitpoints: Sequence[Binding | Mapping[str, object]],
            resume_condition: Condition | Mapping[str, object] | str,
            resume_policy: ResumePolicy | Mapping[str, object] = ...,
            reason_code: SuspensionReason | str,
            requested_by: SuspensionRequester | str = SuspensionRequester.WORKER,
            timeout_at: int | None = None,
            timeout_ms: int | None = None,
            timeout_behavior: TimeoutBehavior | str | None = None,
            continuation_metadata_pointer: str | None = None,
            idempotency_key: str | None = None,
            detail: str | None = None,
        ) -> None: ...

    def __post_init__(self) -> None:
        """Reject fields of the wrong type; check_suspend checks whether they fit together."""
        set_field(self, "suspension_id", parse_uuid(self.suspension_id, "suspension_id"))
        if not isinstance(self.waitpoints, list | tuple):
            raise error("invalid_input", f"waitpoints: must be a list, got {shown(self.waitpoints)}")
        set_field(self, "waitpoints", tuple(parse_binding(each) for each in self.waitpoints))
        set_field(self, "resume_condition", parse_condition(self.resume_condition))
        set_field(self, "resume_policy", parse_resume_policy(self.resume_policy))
        set_field(self, "reason_code", check_enum(SuspensionReason, self.reason_code, "reason_code"))
        set_field(self, "requested_by", check_enum(SuspensionRequester, self.requested_by, "requested_by"))
        if self.timeout_at is not None:
            check_range(self.timeout_at, "timeout_at", -MAX_MS, MAX_MS)
        if self.timeout_ms is not None:
            check_range(self.timeout_ms, "timeout_ms", 0, MAX_MS)
            if self.timeout_at is not None:
                raise error("invalid_input", "timeout_ms: give timeout_ms or timeout_at, not both")
        if self.timeout_behavior is not None:
            set_field(self, "timeout_behavior", parse_timeout_behavior(self.timeout_behavior))
        if self.continuation_metadata_pointer is not None:
            check_text(self.continuation_metadata_pointer, "continuation_metadata_pointer")
        if self.detail is not None:
            check_text(self.detail, "detail")
        key = None if self.idempotency_key == "" else self.idempotency_key
        set_field(self, "idempotency_key", None if key is None else check_short(key, "idempotency_key"))

    @property
    def has_timeout(self) -> bool:
        """Whether the arguments set a timeout."""
        return self.timeout_at is not None or self.timeout_ms is not None


def check_suspend(args: SuspendArgs) -> None:
    """Reject arguments that do not fit together; check_timeout_at checks `timeout_at`, which needs the clock."""
    condition, bindings = args.resume_condition, args.waitpoints
    if not bindings:
        raise _refusal("waitpoints_empty: bind at least one waitpoint with Fresh or UsePending")
    first = bindings[0]
    if isinstance(first, Fresh) and isinstance(condition, Single) and first.waitpoint_key != condition.waitpoint_key:
        raise _refusal(
            f"waitpoint_key_mismatch: the condition waits on {shown(condition.waitpoint_key)}, the first binding is "
            f"{shown(first.waitpoint_key)}; use the same key"
        )
    for index, binding in enumerate(bindings[1:], start=1):
        if not isinstance(binding, Fresh):
            raise _refusal(
                f"additional_waitpoint_binding_must_be_fresh at waitpoints[{index}]: bind it with Fresh; UsePending "
                "must be the only binding"
            )
        if not binding.waitpoint_key:
            raise _refusal(f"additional_waitpoint_binding_empty_key at waitpoints[{index}]: give it a waitpoint_key")
    is_too_deep = _is_too_deep(condition)
    # check_structure rejects a tree that is too deep; until then its leaves are not read.
    if len(bindings) > 1 and not is_too_deep:
        _check_keys(condition, map(_bound_key, bindings))
    if isinstance(condition, TimeoutOnly) and not args.has_timeout:
        raise _refusal("timeout_only_without_deadline: give timeout_ms or timeout_at")
    if not is_too_deep and any(
        isinstance(leaf, Single | Count) and leaf.matcher == ByName("") for leaf in leaves(condition)
    ):
        raise _refusal("resume_condition: empty signal name (use Wildcard instead)")
    check_structure(condition)
    ids, keys = {each.waitpoint_id for each in bindings}, set(map(_bound_key, bindings))
    if len(ids) < len(bindings) or len(keys) < len(bindings):
        raise _refusal("duplicate_waitpoint_binding: bind each waitpoint id and each waitpoint key only once")
    if isinstance(first, Fresh) and isinstance(condition, Composite):
        _check_keys(condition, map(_bound_key, bindings))


def check_pending(condition: Condition, waitpoint_key: str) -> None:
    """Reject a condition that names a key other than that of the pending waitpoint, or no key."""
    if isinstance(condition, Single | Composite):
        _check_keys(condition, (waitpoint_key,))


def _is_too_deep(condition: Condition) -> bool:
    try:
        check_depth(condition)
    except EngineError:
        return True
    return False


def _check_keys(condition: Condition, keys: Iterable[str | UUID]) -> None:
    named, bound = dict.fromkeys(waitpoint_keys(condition)), dict.fromkeys(keys)
    for key in named:
        if key not in bound:
            raise _refusal(
                f"referenced_waitpoint_key_missing_binding: {shorten(key)}: the condition names this key; bind it in "
                "waitpoints"
            )
    for each in bound:
        if each not in named:
            raise _refusal(
                f"extra_binding_not_referenced_by_condition: {shorten(str(each))}: the condition does not name this "
                "waitpoint; remove the binding or name its key in the condition"
            )


def _bound_key(binding: Binding) -> str | UUID:
    # Only the database knows the key of a pending waitpoint; its id, which no condition names, is used instead.
    return binding.waitpoint_key if isinstance(binding, Fresh) else binding.waitpoint_id


def _refusal(detail: str) -> EngineError:
    return error("invalid_input", detail)


def check_timeout_at(timeout_at: int | None, now: int) -> None:
    """Reject a timeout that has passed by more than the tolerated clock skew."""
    if timeout_at is not None and timeout_at + CLOCK_SKEW_MS < now:
        raise _refusal(
            f"timeout_at_in_past: got {timeout_at}, the database clock is {now}; give a later time in ms since "
            "the epoch, or timeout_ms"
        )


def resolve_timeout(args: SuspendArgs, policy: SuspensionPolicy | None, now: int) -> tuple[int | None, TimeoutBehavior]:
    """Return when a suspension times out and what happens then: from its arguments, else from the policy."""
    if args.timeout_ms is not None:
        return now + args.timeout_ms, args.timeout_behavior or TimeoutBehavior.FAIL
    if args.timeout_at is not None or policy is None or policy.default_timeout_ms is None:
        return args.timeout_at, args.timeout_behavior or TimeoutBehavior.FAIL
    return now + policy.default_timeout_ms, args.timeout_behavior or policy.timeout_behavior


def replay_window_ms(timeout_at: int | None, now: int) -> int:
    """Return how long the outcome for an idempotency key is kept."""
    if timeout_at is None:
        return LONGEST_REPLAY_MS
    return min(max(timeout_at - now, 0) + REPLAY_MARGIN_MS, LONGEST_REPLAY_MS)


@dataclass(frozen=True, kw_only=True, slots=True)
class SuspendDetails:
    """The suspension, its attempt, its first waitpoint, and the others in the order of their bindings."""

    suspension_id: SuspensionId
    attempt_index: int
    waitpoint_id: WaitpointId
    waitpoint_key: str
    waitpoint_token: WaitpointToken
    additional_waitpoints: tuple[AdditionalWaitpoint, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Suspended:
    """The execution is suspended and its lease released; the handle only identifies the suspended attempt."""

    details: SuspendDetails
    handle: Handle


@dataclass(frozen=True, kw_only=True, slots=True)
class AlreadyMet(AlreadySatisfied):
    """Earlier signals already meet the condition, so the execution is not suspended and keeps its lease."""

    details: SuspendDetails


@dataclass(frozen=True, kw_only=True, slots=True)
class SuspensionExpired:
    """The wait timed out and this behaviour was applied."""

    behavior_applied: TimeoutBehavior


@dataclass(frozen=True, kw_only=True, slots=True)
class SuspendedExecution:
    """A suspended execution, since when, and why."""

    execution_id: ExecutionId
    suspended_at_ms: int
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class SuspendedPage:
    """A page of suspended executions; `next_cursor` is None on the last page."""

    entries: list[SuspendedExecution]
    next_cursor: str | None
