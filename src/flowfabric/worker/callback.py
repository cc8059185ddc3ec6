"""Callbacks: where and with what an outsider signals a waitpoint, and the check of what comes back."""

from dataclasses import dataclass
from typing import Any, Required, TypedDict
from urllib.parse import quote
from uuid import UUID

from flowfabric.engine.engine import Engine
from flowfabric.model.errors import BugError, EngineError, TransportError, UnavailableError
from flowfabric.model.ids import ExecutionId, WaitpointId, parse_execution_id, parse_uuid
from flowfabric.model.signal import Accepted, SignalDuplicate
from flowfabric.model.text import check_text
from flowfabric.model.token import WaitpointToken


@dataclass(frozen=True, kw_only=True, slots=True)
class Callback:
    """What an outsider is given to signal a waitpoint; it prints with its token redacted."""

    execution_id: ExecutionId
    waitpoint_id: WaitpointId
    url: str
    """Where to send the signal; the token is not part of it, as addresses end up in logs."""
    token: WaitpointToken

    @classmethod
    def of(
        cls, base_url: str | None, execution_id: ExecutionId, waitpoint_id: WaitpointId, token: WaitpointToken
    ) -> "Callback":
        """The callback of a waitpoint below a base address."""
        if not base_url:
            raise ValueError("callback: name a base_url, or set FF_CALLBACK_URL")
        check_text(base_url, "base_url")
        url = f"{base_url.rstrip('/')}/{quote(execution_id, safe='')}/{waitpoint_id}"
        return cls(execution_id=execution_id, waitpoint_id=waitpoint_id, url=url, token=token)


class SignalFields(TypedDict, total=False):
    """What a signal says, as `Engine.deliver_signal` takes it; ids and token a bridge adds by itself."""

    signal_name: Required[str]
    signal_category: str
    source_type: str
    source_identity: str
    signal_id: UUID | str
    payload: bytes | None
    payload_encoding: str
    correlation_id: str | None
    idempotency_key: str | None
    target_scope: str
    created_at: int | None
    dedup_ttl_ms: int
    resume_delay_ms: int | None
    max_signals_per_execution: int | None
    signal_maxlen: int


class CallbackError(Exception):
    """A callback was not delivered: the class and the text are for the log of the bridge, the rest for the caller."""

    code = "invalid_token"
    http_status = 401
    """What the bridge answers; a caller that is told 500 or more does well to call again."""

    def __init__(self, execution_id: str, waitpoint_id: str) -> None:
        super().__init__(execution_id, waitpoint_id)
        self.execution_id = execution_id
        self.waitpoint_id = waitpoint_id

    def __str__(self) -> str:
        """Read `<code> at <execution id> <waitpoint id>`."""
        return f"{self.code} at {self.execution_id} {self.waitpoint_id}"


class UnknownWaitpoint(CallbackError):
    """No such waitpoint is open; the caller is told the same as of a wrong token."""


class TokenMismatch(CallbackError):
    """The token is not the waitpoint's."""


class BackendError(CallbackError):
    """The engine refused the signal or could not be asked; `error` says why."""

    def __init__(self, execution_id: str, waitpoint_id: str, error: EngineError) -> None:
        super().__init__(execution_id, waitpoint_id)
        self.error = error
        self.code = error.code
        self.http_status = _status_of(error)

    def __str__(self) -> str:
        """Read `<code>: <detail> at <execution id> <waitpoint id>`."""
        return f"{self.error} at {self.execution_id} {self.waitpoint_id}"


def _status_of(error: EngineError) -> int:
    """What an outsider is told of an error: 503 where the call may succeed later, 400 where it is at fault itself."""
    if _may_succeed_later(error):
        return 503
    if error.code == "payload_too_large":
        return 413
    return 500 if isinstance(error, BugError) or error.code == "corruption" else 400


def _may_succeed_later(error: EngineError) -> bool:
    # A store that cannot be asked says the same of every waitpoint, so that it may be told.
    return error.retryable or isinstance(error, TransportError | UnavailableError)


async def verify_and_deliver(
    engine: Engine,
    execution_id: ExecutionId | str,
    waitpoint_id: WaitpointId | UUID | str,
    presented: WaitpointToken | str | None,
    signal: SignalFields,
) -> Accepted | SignalDuplicate:
    """Deliver a signal an outsider sent to a bridge, where the token it presented is the waitpoint's own.

    Whatever ids and token the signal itself carries are overruled. The engine verifies the token: it notes a wrong one,
    and knows a repeat of the very signal that closed the waitpoint. What the refusal is called is for the bridge.
    """
    told = str(execution_id), str(waitpoint_id)
    try:
        execution_id, waitpoint_id = parse_execution_id(execution_id), parse_uuid(waitpoint_id, "waitpoint_id")
    except EngineError:
        raise UnknownWaitpoint(*told) from None
    if not isinstance(presented, WaitpointToken):
        presented = WaitpointToken(presented if isinstance(presented, str) else "")
    fields: dict[str, Any] = {
        **signal,
        "execution_id": execution_id,
        "waitpoint_id": waitpoint_id,
        "waitpoint_token": presented,
    }
    try:
        return await engine.deliver_signal(**fields)
    except EngineError as refused:
        if _may_succeed_later(refused):
            raise BackendError(*told, refused) from refused
        fault = refused
    try:
        stored = await engine.read_waitpoint_token(execution_id=execution_id, waitpoint_id=waitpoint_id)
    except EngineError as refused:
        raise BackendError(*told, refused) from refused
    if stored is None:
        raise UnknownWaitpoint(*told)
    if presented != stored:
        raise TokenMismatch(*told)
    raise BackendError(*told, fault) from fault
