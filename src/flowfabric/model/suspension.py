"""What a worker says when it suspends: waitpoints, condition, deadline, and what the resume is to do."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from enum import StrEnum
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeAlias
from uuid import UUID

import msgspec

from flowfabric.model.conditions import (
    ByName,
    Composite,
    Condition,
    Count,
    Single,
    TimeoutOnly,
    check_depth,
    check_structure,
    check_word,
    leaves,
    parse_condition,
    waitpoint_keys,
)
from flowfabric.model.errors import EngineError, error
from flowfabric.model.ids import SuspensionId, WaitpointId, parse_uuid
from flowfabric.model.policy import SuspensionPolicy
from flowfabric.model.policy_checks import MAX_MS, settle
from flowfabric.model.states import BlockingReason, TimeoutBehavior
from flowfabric.model.text import check_range, check_short, check_text, shorten

CLOCK_SKEW_MS = 600_000
REPLAY_MARGIN_MS = 60_000
LONGEST_REPLAY_MS = 604_800_000


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
    """Give what an execution suspended for a stored reason shows as blocking it."""
    return _BLOCKING.get(reason_code, BlockingReason.WAITING_FOR_SIGNAL)


class SuspensionRequester(StrEnum):
    """Who asks for a suspension."""

    WORKER = "worker"
    OPERATOR = "operator"
    POLICY = "policy"
    SYSTEM_TIMEOUT_POLICY = "system_timeout_policy"


class ResumeTarget(StrEnum):
    """What a met condition makes of the execution."""

    RUNNABLE = "runnable"


def parse_timeout_behavior(value: object) -> TimeoutBehavior:
    """Give the timeout behaviour an argument is."""
    word = TimeoutBehavior.AUTO_RESUME_WITH_TIMEOUT_SIGNAL if value == "auto_resume" else value
    return check_word(TimeoutBehavior, word, "timeout_behavior")


def read_stored_timeout_behavior(value: str | None) -> TimeoutBehavior:
    """Give the timeout behaviour a row holds; none is `fail`."""
    try:
        return parse_timeout_behavior(value or TimeoutBehavior.FAIL)
    except EngineError as refused:
        raise error("corruption", refused.detail) from None


@dataclass(frozen=True, kw_only=True, slots=True)
class Fresh:
    """A waitpoint made with the suspension."""

    waitpoint_id: WaitpointId
    waitpoint_key: str

    if TYPE_CHECKING:

        def __init__(self, *, waitpoint_id: UUID | str, waitpoint_key: str) -> None: ...

    def __post_init__(self) -> None:
        """Refuse what is no binding."""
        settle(self, "waitpoint_id", parse_uuid(self.waitpoint_id, "waitpoint_id"))
        check_text(self.waitpoint_key, "waitpoint_key")


@dataclass(frozen=True, kw_only=True, slots=True)
class UsePending:
    """A waitpoint made earlier, with its key, token and buffered signals."""

    waitpoint_id: WaitpointId

    if TYPE_CHECKING:

        def __init__(self, *, waitpoint_id: UUID | str) -> None: ...

    def __post_init__(self) -> None:
        """Refuse what is no binding."""
        settle(self, "waitpoint_id", parse_uuid(self.waitpoint_id, "waitpoint_id"))


Binding: TypeAlias = Fresh | UsePending


def default_binding(waitpoint_id: WaitpointId, condition: Condition) -> Fresh:
    """Give the binding of a wait that names none: the first key the condition names, else one of its own."""
    return Fresh(waitpoint_id=waitpoint_id, waitpoint_key=next(iter(waitpoint_keys(condition)), f"wpk:{waitpoint_id}"))


def parse_binding(value: Any) -> Binding:
    """Give the binding a JSON value says."""
    match value:
        case Fresh() | UsePending():
            return value
        case {"Fresh": {"waitpoint_id": given, "waitpoint_key": key, **others}} if len(value) == 1 and not others:
            return Fresh(waitpoint_id=given, waitpoint_key=key)
        case {"UsePending": {"waitpoint_id": given, **others}} if len(value) == 1 and not others:
            return UsePending(waitpoint_id=given)
    raise error("invalid_input", "waitpoints: must be Fresh or UsePending")


@dataclass(frozen=True, kw_only=True, slots=True)
class ResumePolicy:
    """What happens when the condition is met."""

    resume_target: ResumeTarget = ResumeTarget.RUNNABLE
    consume_matched_signals: bool = True
    retain_signal_buffer_until_closed: bool = False
    resume_delay_ms: int | None = None
    close_waitpoint_on_resume: bool = True

    def __post_init__(self) -> None:
        """Refuse what is no policy."""
        settle(self, "resume_target", check_word(ResumeTarget, self.resume_target, "resume_policy.resume_target"))
        for name in ("consume_matched_signals", "retain_signal_buffer_until_closed", "close_waitpoint_on_resume"):
            if not isinstance(getattr(self, name), bool):
                raise error("invalid_input", f"resume_policy.{name}: must be true or false")
        if self.resume_delay_ms is not None:
            check_range(self.resume_delay_ms, "resume_policy.resume_delay_ms", 0, MAX_MS)

    def delay_ms(self, signal_delay_ms: int | None) -> int:
        """Give the pause between the closing signal and the resume."""
        return (self.resume_delay_ms or 0) if signal_delay_ms is None else signal_delay_ms


_RESUME_FIELDS = frozenset(each.name for each in fields(ResumePolicy))


def parse_resume_policy(value: object) -> ResumePolicy:
    """Give the policy a JSON object says; a field left out or null has its default."""
    if isinstance(value, ResumePolicy):
        return value
    if not isinstance(value, Mapping) or not set(value) <= _RESUME_FIELDS:
        raise error("invalid_input", "resume_policy: must be an object of its own fields")
    return ResumePolicy(**{name: given for name, given in value.items() if given is not None})


def resume_policy_json(policy: ResumePolicy) -> str:
    """Give the JSON text of a policy, as it is stored."""
    return msgspec.json.encode(asdict(policy)).decode()


@lru_cache(maxsize=1024)
def read_stored_resume_policy(text: str | None) -> ResumePolicy:
    """Give the policy a row holds, without what only a newer version that runs beside this one understands."""
    plain = msgspec.json.decode(text or "{}", type=dict[str, Any])
    return parse_resume_policy({name: given for name, given in plain.items() if name in _RESUME_FIELDS})


@dataclass(frozen=True, kw_only=True, slots=True)
class SuspendArgs:
    """What a suspension is; conditions, bindings and policy may be given as their JSON values.

    Without `timeout_behavior` a deadline fails the execution, or does what the execution's policy says where that
    policy sets the deadline.
    """

    suspension_id: SuspensionId
    waitpoints: tuple[Binding, ...]
    resume_condition: Condition
    resume_policy: ResumePolicy = ResumePolicy()
    reason_code: SuspensionReason
    requested_by: SuspensionRequester = SuspensionRequester.WORKER
    timeout_at: int | None = None
    timeout_behavior: TimeoutBehavior | None = None
    continuation_metadata_pointer: str | None = None
    idempotency_key: str | None = None

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
            timeout_behavior: TimeoutBehavior | str | None = None,
            continuation_metadata_pointer: str | None = None,
            idempotency_key: str | None = None,
        ) -> None: ...

    def __post_init__(self) -> None:
        """Refuse fields of the wrong kind; whether they go together, check_suspend tells."""
        settle(self, "suspension_id", parse_uuid(self.suspension_id, "suspension_id"))
        if not isinstance(self.waitpoints, list | tuple):
            raise error("invalid_input", "waitpoints: must be a list")
        settle(self, "waitpoints", tuple(parse_binding(each) for each in self.waitpoints))
        settle(self, "resume_condition", parse_condition(self.resume_condition))
        settle(self, "resume_policy", parse_resume_policy(self.resume_policy))
        settle(self, "reason_code", check_word(SuspensionReason, self.reason_code, "reason_code"))
        settle(self, "requested_by", check_word(SuspensionRequester, self.requested_by, "requested_by"))
        if self.timeout_at is not None:
            check_range(self.timeout_at, "timeout_at", -MAX_MS, MAX_MS)
        if self.timeout_behavior is not None:
            settle(self, "timeout_behavior", parse_timeout_behavior(self.timeout_behavior))
        if self.continuation_metadata_pointer is not None:
            check_text(self.continuation_metadata_pointer, "continuation_metadata_pointer")
        key = None if self.idempotency_key == "" else self.idempotency_key
        settle(self, "idempotency_key", None if key is None else check_short(key, "idempotency_key"))


def check_suspend(args: SuspendArgs) -> None:
    """Refuse arguments that do not go together; the deadline is the clock's to judge, by check_deadline."""
    condition, bindings = args.resume_condition, args.waitpoints
    if not bindings:
        raise _refusal("waitpoints_empty")
    first = bindings[0]
    if isinstance(first, Fresh) and isinstance(condition, Single) and first.waitpoint_key != condition.waitpoint_key:
        raise _refusal("waitpoint_key_mismatch")
    for index, binding in enumerate(bindings[1:], start=1):
        if not isinstance(binding, Fresh):
            raise _refusal(f"additional_waitpoint_binding_must_be_fresh at waitpoints[{index}]")
        if not binding.waitpoint_key:
            raise _refusal(f"additional_waitpoint_binding_empty_key at waitpoints[{index}]")
    is_too_deep = _is_too_deep(condition)
    # Of a tree that is too deep not every key is read.
    if len(bindings) > 1 and not is_too_deep:
        _check_keys(condition, map(_bound_key, bindings))
    if isinstance(condition, TimeoutOnly) and args.timeout_at is None:
        raise _refusal("timeout_only_without_deadline")
    if not is_too_deep and any(
        isinstance(leaf, Single | Count) and leaf.matcher == ByName("") for leaf in leaves(condition)
    ):
        raise _refusal("resume_condition: empty signal name (use Wildcard instead)")
    check_structure(condition)
    ids, keys = {each.waitpoint_id for each in bindings}, set(map(_bound_key, bindings))
    if min(len(ids), len(keys)) < len(bindings):
        raise _refusal("duplicate_waitpoint_binding")
    if isinstance(first, Fresh) and isinstance(condition, Composite):
        _check_keys(condition, map(_bound_key, bindings))


def check_pending(condition: Condition, waitpoint_key: str) -> None:
    """Refuse a condition that names other keys than the pending waitpoint it is to wait on, or none."""
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
            raise _refusal(f"referenced_waitpoint_key_missing_binding: {shorten(key)}")
    for each in bound:
        if each not in named:
            raise _refusal(f"extra_binding_not_referenced_by_condition: {shorten(str(each))}")


def _bound_key(binding: Binding) -> str | UUID:
    # The key of a pending waitpoint is known to the store alone; no condition names it by its id.
    return binding.waitpoint_key if isinstance(binding, Fresh) else binding.waitpoint_id


def _refusal(detail: str) -> EngineError:
    return error("invalid_input", detail)


def check_deadline(timeout_at: int | None, now: int) -> None:
    """Refuse a deadline that has passed by more than clocks may differ."""
    if timeout_at is not None and timeout_at + CLOCK_SKEW_MS < now:
        raise _refusal("timeout_at_in_past")


def deadline_of(args: SuspendArgs, policy: SuspensionPolicy | None, now: int) -> tuple[int | None, TimeoutBehavior]:
    """Give when a suspension times out and what happens then: as its arguments say, else the execution's policy."""
    if args.timeout_at is not None or policy is None or policy.default_timeout_ms is None:
        return args.timeout_at, args.timeout_behavior or TimeoutBehavior.FAIL
    return now + policy.default_timeout_ms, args.timeout_behavior or policy.timeout_behavior


def replay_window_ms(timeout_at: int | None, now: int) -> int:
    """Give how long the answer to an idempotency key is kept."""
    if timeout_at is None:
        return LONGEST_REPLAY_MS
    return min(max(timeout_at - now, 0) + REPLAY_MARGIN_MS, LONGEST_REPLAY_MS)
