"""The exceptions of the engine: each has a stable code, a category and a class that says how to react."""

import copy
from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import ClassVar, Self

Detail = str | Mapping[str, object] | None


class ErrorClass(StrEnum):
    """How a caller should react to an error."""

    TERMINAL = "Terminal"
    """Stop; a retry cannot succeed."""
    RETRYABLE = "Retryable"
    """Retry after a pause."""
    COOPERATIVE = "Cooperative"
    """Take the action that the error prescribes, then stop."""
    INFORMATIONAL = "Informational"
    """Continue; the call changed nothing."""
    ADVISORY = "Advisory"
    """Log a warning."""
    BUG = "Bug"
    """Alert a developer."""
    EXPECTED = "Expected"
    """Continue; nothing is there, which is normal."""
    SOFT_ERROR = "SoftError"
    """Log it; the caller may continue."""


class TransportKind(StrEnum):
    """Why the store could not be reached or its reply could not be read."""

    TRANSPORT = "transport"
    PROTOCOL = "protocol"
    TIMEOUT = "timeout"
    AUTH = "auth"
    CLUSTER = "cluster"
    BUSY_LOADING = "busy_loading"
    SCRIPT_NOT_LOADED = "script_not_loaded"
    OTHER = "other"


RETRYABLE_TRANSPORT = frozenset(
    {TransportKind.TRANSPORT, TransportKind.TIMEOUT, TransportKind.CLUSTER, TransportKind.BUSY_LOADING}
)


class EngineError(Exception):
    """An operation was rejected or failed; `code` is the stable name of the error."""

    category: ClassVar[str]
    takes_context: ClassVar[bool] = False
    """Whether `with_context` adds its note to errors of this class."""

    def __init__(self, code: str, detail: Detail = None) -> None:
        """Create an error; the code must belong to the category of this class."""
        super().__init__(code, detail)
        self.code = code
        self.detail = detail
        self.error_class = self._classify(code)

    def _classify(self, code: str) -> ErrorClass:
        category, error_class = CODES[code]
        if category != self.category:
            raise ValueError(f"code {code!r} is of category {category!r}, not {self.category!r}; call error({code!r})")
        return error_class

    @property
    def retryable(self) -> bool:
        """Whether the same call may succeed after a pause."""
        return self.error_class is ErrorClass.RETRYABLE

    def copy(self) -> Self:
        """Return a copy to raise elsewhere, without the traceback of this one."""
        return copy.copy(self)

    def with_context(self, text: str) -> Self:
        """Add a note about what was being done, if errors of this class take one; return self."""
        if self.takes_context:
            self.add_note(text)
        return self

    def __str__(self) -> str:
        """Return `<code>: <detail>`, the `message` of the detail first, or the code alone if there is no detail."""
        if not self.detail:
            return self.code
        if isinstance(self.detail, str):
            return f"{self.code}: {self.detail}"
        fields = ", ".join(f"{name}={value}" for name, value in self.detail.items() if name != "message")
        message = self.detail.get("message")
        return f"{self.code}: {fields}" if message is None else f"{self.code}: {message} ({fields})"


class NotFoundError(EngineError):
    """The object does not exist."""

    category = "not_found"

    @property
    def entity(self) -> str:
        """The kind of object that is missing: `execution`, `flow`, ..."""
        return self.code.removesuffix("_not_found")

    def __str__(self) -> str:
        """Return `not found: <entity>`, followed by its id if that is known."""
        return f"not found: {self.entity}" + (f" {self.detail}" if isinstance(self.detail, str) else "")


class InvalidInputError(EngineError):
    """An argument is invalid, or stored data is unreadable."""

    category = "validation"


class ContentionError(EngineError):
    """The caller lost a race or the state has changed: call again or take other work."""

    category = "contention"


class ConflictError(EngineError):
    """The call conflicts with an existing record; a retry cannot succeed."""

    category = "conflict"

    def __init__(self, code: str, detail: Detail = None, text: str | None = None) -> None:
        """Create an error; the text replaces the detail in the message."""
        super().__init__(code, detail)
        self.args = (code, detail, text)
        self._text = text

    def __str__(self) -> str:
        """Return `<code>: <text>`, or `<code>: <detail>` without a text."""
        return super().__str__() if self._text is None else f"{self.code}: {self._text}"


class StateError(EngineError):
    """The state of the execution does not allow the call."""

    category = "state"


class BugError(EngineError):
    """An invariant of the engine is violated."""

    category = "bug"


class TransportError(EngineError):
    """The store cannot be reached or its reply cannot be read; the code is the transport kind."""

    category = "transport"
    takes_context = True

    def __init__(
        self,
        kind: str = TransportKind.TRANSPORT,
        detail: Detail = None,
        backend: str = "postgres",
        *,
        outcome_unknown: bool = False,
    ) -> None:
        """Create the error of a transport kind."""
        self.kind = TransportKind(kind)
        self.backend = backend
        self.outcome_unknown = outcome_unknown
        """Whether the call may have taken effect: it was sent, but its answer did not arrive."""
        super().__init__(self.kind.value, detail)
        self.args = (self.kind.value, detail, backend)

    def __str__(self) -> str:
        """Return `<code>: <detail>`, with a remark if the call may have taken effect."""
        return super().__str__() + (" (it is unknown whether the call was carried out)" if self.outcome_unknown else "")

    def _classify(self, code: str) -> ErrorClass:
        return ErrorClass.RETRYABLE if code in RETRYABLE_TRANSPORT else ErrorClass.TERMINAL


class UnavailableError(EngineError):
    """The operation is not available; the detail names it."""

    category = "unavailable"
    takes_context = True


class ResourceExhaustedError(EngineError):
    """A pool of the engine is full; the detail holds `pool`, `max` and maybe `retry_after_ms`."""

    category = "resource_exhausted"
    takes_context = True


class OperationTimeoutError(EngineError):
    """An operation exceeded its deadline; the detail holds `op` and `elapsed_ms`."""

    category = "timeout"
    takes_context = True


class StreamDisconnectedError(EngineError):
    """A subscription ended; the detail holds the `cursor` to reconnect with, and the `reason`."""

    category = "stream_disconnected"

    @property
    def cursor(self) -> bytes:
        """The position after the last event that was taken."""
        cursor = self.detail.get("cursor") if isinstance(self.detail, Mapping) else None
        return cursor if isinstance(cursor, bytes) else b""


class StreamBackpressureError(EngineError):
    """A subscription dropped events and continues."""

    category = "stream_backpressure"


def error(code: str, detail: Detail = None) -> EngineError:
    """Return an exception for a code; its class is that of the code's category."""
    category, _ = CODES[code]
    return _CLASS_BY_CATEGORY[category](code, detail)


_CLASS_BY_CATEGORY: Mapping[str, type[EngineError]] = {
    kind.category: kind
    for kind in (
        NotFoundError,
        InvalidInputError,
        ContentionError,
        ConflictError,
        StateError,
        BugError,
        UnavailableError,
        ResourceExhaustedError,
        OperationTimeoutError,
        StreamDisconnectedError,
        StreamBackpressureError,
    )
}


def reason_of(failure: EngineError) -> str:
    """Return the message of an error without its code, to show to a person."""
    return failure.detail if isinstance(failure.detail, str) and failure.detail else str(failure)


def _codes(category: str, error_class: ErrorClass, codes: str) -> Iterable[tuple[str, tuple[str, ErrorClass]]]:
    return ((code, (category, error_class)) for code in codes.split())


CODES: Mapping[str, tuple[str, ErrorClass]] = dict(
    [
        *_codes(
            "validation",
            ErrorClass.TERMINAL,
            """
            invalid_input invalid_capabilities invalid_policy_json payload_too_large signal_limit_exceeded
            invalid_waitpoint_key invalid_token missing_token token_expired waitpoint_not_token_bound
            invalid_waitpoint_for_execution retention_limit_exceeded invalid_lease_for_suspend invalid_dependency
            invalid_blocking_reason unauthorized invalid_budget_scope budget_override_not_allowed invalid_quota_spec
            invalid_kid invalid_secret_hex invalid_grace_ms invalid_tag_key corruption handle_from_other_backend
            """,
        ),
        *_codes("validation", ErrorClass.RETRYABLE, "capability_mismatch invalid_offset"),
        *_codes("validation", ErrorClass.SOFT_ERROR, "invalid_frame_type"),
        *_codes(
            "contention",
            ErrorClass.RETRYABLE,
            """
            use_claim_resumed_execution not_a_resumed_execution execution_not_leaseable lease_conflict
            invalid_claim_grant claim_grant_expired no_eligible_execution waitpoint_not_found stale_graph_revision
            rate_limit_exceeded concurrency_limit_exceeded retry_exhausted
            """,
        ),
        *_codes("contention", ErrorClass.TERMINAL, "execution_not_active"),
        *_codes(
            "contention",
            ErrorClass.INFORMATIONAL,
            "execution_not_eligible execution_not_in_eligible_set execution_not_reclaimable no_active_lease",
        ),
        *_codes(
            "conflict",
            ErrorClass.TERMINAL,
            """
            dependency_already_exists cycle_detected self_referencing_edge execution_already_in_flow
            budget_attach_conflict quota_attach_conflict rotation_conflict idempotency_conflict
            """,
        ),
        *_codes("conflict", ErrorClass.INFORMATIONAL, "waitpoint_already_exists"),
        *_codes("conflict", ErrorClass.BUG, "active_attempt_exists"),
        *_codes(
            "state",
            ErrorClass.TERMINAL,
            """
            stale_lease lease_expired lease_revoked target_not_signalable resume_condition_not_met stream_closed
            stale_owner_cannot_append execution_not_in_flow attempt_not_started execution_not_eligible_for_attempt
            max_retries_exhausted execution_not_terminal max_replays_exhausted replay_not_allowed not_runnable
            terminal flow_already_terminal
            """,
        ),
        *_codes(
            "state",
            ErrorClass.INFORMATIONAL,
            """
            execution_not_suspended already_suspended waitpoint_closed waitpoint_not_pending
            pending_waitpoint_expired waitpoint_not_open grant_already_exists deps_not_satisfied not_blocked_by_deps
            duplicate_signal ok_already_applied attempt_already_terminal stream_already_closed already_satisfied
            budget_soft_exceeded
            """,
        ),
        *_codes("state", ErrorClass.COOPERATIVE, "budget_exceeded"),
        *_codes("bug", ErrorClass.BUG, "attempt_not_in_created_state internal"),
        *_codes(
            "not_found",
            ErrorClass.TERMINAL,
            "execution_not_found flow_not_found attempt_not_found budget_not_found quota_policy_not_found",
        ),
        *_codes("not_found", ErrorClass.EXPECTED, "stream_not_found"),
        *_codes("unavailable", ErrorClass.TERMINAL, "unavailable hmac_secret_not_initialized"),
        *_codes("resource_exhausted", ErrorClass.RETRYABLE, "resource_exhausted"),
        *_codes("timeout", ErrorClass.TERMINAL, "timeout"),
        *_codes("stream_disconnected", ErrorClass.TERMINAL, "stream_disconnected"),
        *_codes("stream_backpressure", ErrorClass.INFORMATIONAL, "stream_backpressure"),
    ]
)
