"""Callbacks: the URL and token with which an outsider signals a waitpoint, and the check of a call to that URL."""

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
    """The URL and token with which an outsider signals a waitpoint; the token is redacted when printed."""

    execution_id: ExecutionId
    waitpoint_id: WaitpointId
    url: str
    """Where to send the signal. It does not contain the token, because URLs end up in logs."""
    token: WaitpointToken
    """The proof that the sender may signal; send it in a header, for example."""

    @classmethod
    def of(
        cls, base_url: str | None, execution_id: ExecutionId, waitpoint_id: WaitpointId, token: WaitpointToken
    ) -> "Callback":
        """Return the callback of a waitpoint, with a URL that begins with `base_url`."""
        if not base_url:
            raise ValueError("callback: has no base URL; pass base_url='https://…' or set FF_CALLBACK_URL")
        check_text(base_url, "base_url")
        url = f"{base_url.rstrip('/')}/{quote(execution_id, safe='')}/{waitpoint_id}"
        return cls(execution_id=execution_id, waitpoint_id=waitpoint_id, url=url, token=token)


class SignalFields(TypedDict, total=False):
    """The fields of a signal, as in `Engine.deliver_signal`, without the ids and the token."""

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
    """A callback was not delivered.

    `code` and `http_status` are safe to send to the caller. The class and the text are for your own log.
    """

    code = "invalid_token"
    http_status = 401
    """The status to answer with; from 500 on, the caller should try again."""

    def __init__(self, execution_id: str, waitpoint_id: str) -> None:
        super().__init__(execution_id, waitpoint_id)
        self.execution_id = execution_id
        self.waitpoint_id = waitpoint_id

    def __str__(self) -> str:
        """Return `<code> at <execution id> <waitpoint id>`."""
        return f"{self.code} at {self.execution_id} {self.waitpoint_id}"


class UnknownWaitpoint(CallbackError):
    """No such waitpoint is open; the caller gets the same answer as for a wrong token."""


class TokenMismatch(CallbackError):
    """The token does not belong to the waitpoint."""


class BackendError(CallbackError):
    """The engine refused the signal or was unavailable; `error` says why."""

    def __init__(self, execution_id: str, waitpoint_id: str, error: EngineError) -> None:
        super().__init__(execution_id, waitpoint_id)
        self.error = error
        self.code = error.code
        self.http_status = _status_of(error)

    def __str__(self) -> str:
        """Return `<code>: <detail> at <execution id> <waitpoint id>`."""
        return f"{self.error} at {self.execution_id} {self.waitpoint_id}"


def _status_of(error: EngineError) -> int:
    """Return 503 for an error that may go away, 400 or 413 if the caller is at fault, and 500 otherwise."""
    if _may_succeed_later(error):
        return 503
    if error.code == "payload_too_large":
        return 413
    return 500 if isinstance(error, BugError) or error.code == "corruption" else 400


def _may_succeed_later(error: EngineError) -> bool:
    # Safe to disclose: an unavailable store says the same about every waitpoint.
    return error.retryable or isinstance(error, TransportError | UnavailableError)


async def verify_and_deliver(
    engine: Engine,
    execution_id: ExecutionId | str,
    waitpoint_id: WaitpointId | UUID | str,
    presented: WaitpointToken | str | None,
    signal: SignalFields,
) -> Accepted | SignalDuplicate:
    """Deliver a signal that an outsider sent to your server, if the token it presented belongs to the waitpoint.

    Ids and token in `signal` itself are ignored. The engine verifies the token, records a wrong one on the execution,
    and recognises a repeat of the signal that closed the waitpoint. Raises a `CallbackError` if it is not delivered.
    """
    ids = str(execution_id), str(waitpoint_id)
    try:
        execution_id, waitpoint_id = parse_execution_id(execution_id), parse_uuid(waitpoint_id, "waitpoint_id")
    except EngineError:
        raise UnknownWaitpoint(*ids) from None
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
            raise BackendError(*ids, refused) from refused
        fault = refused
    try:
        stored = await engine.read_waitpoint_token(execution_id=execution_id, waitpoint_id=waitpoint_id)
    except EngineError as refused:
        raise BackendError(*ids, refused) from refused
    if stored is None:
        raise UnknownWaitpoint(*ids)
    if presented != stored:
        raise TokenMismatch(*ids)
    raise BackendError(*ids, fault) from fault
