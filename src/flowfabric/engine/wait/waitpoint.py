"""Waitpoints: create, close and list them; and the list of suspended executions."""

import base64
import binascii
import logging
from uuid import UUID

import msgspec

from flowfabric.db.database import Record, Transaction
from flowfabric.db.statements import statements_beside
from flowfabric.engine.core.keys import Keys
from flowfabric.engine.core.row import check_fence, check_lease_handle, lock_execution, read_runs
from flowfabric.engine.core.stored import literal
from flowfabric.engine.lease.expire import LeaseExpiry
from flowfabric.engine.store import Store
from flowfabric.model.errors import EngineError, error
from flowfabric.model.handle import Handle
from flowfabric.model.ids import (
    ExecutionId,
    WaitpointId,
    check_lane_id,
    parse_execution_id,
    parse_uuid,
    row_key,
    uuid7,
)
from flowfabric.model.states import WaitpointState
from flowfabric.model.suspension import SuspendedExecution, SuspendedPage
from flowfabric.model.text import check_limit, check_range, check_text, shorten, shown
from flowfabric.model.token import WaitpointToken, sign_token
from flowfabric.model.waitpoint import (
    AlreadyClosed,
    Closed,
    CloseReason,
    PendingWaitpoint,
    WaitpointInfo,
    WaitpointPage,
)

SQL = statements_beside(__file__)

logger = logging.getLogger(__name__)

MAX_LIMIT = 1000
MAX_TIME = 2**63 - 1
_OPEN = frozenset({WaitpointState.PENDING, WaitpointState.ACTIVE})
_CLOSED = frozenset({WaitpointState.CLOSED, WaitpointState.EXPIRED})


async def read_waitpoint(transaction: Transaction, partition_key: int, waitpoint_id: UUID) -> Record | None:
    """Return a waitpoint whose execution the transaction has locked, or None."""
    rows = await transaction.fetch(SQL.read_waitpoint, partition_key=partition_key, waitpoint_id=waitpoint_id)
    return rows[0] if rows else None


class Waitpoints:
    """The operations on waitpoints, and the list of suspended executions."""

    def __init__(self, store: Store, keys: Keys, expiry: LeaseExpiry) -> None:
        self._store = store
        self._keys = keys
        self._expiry = expiry

    async def create_waitpoint(
        self, handle: Handle, *, waitpoint_key: str, expires_in_ms: int, waitpoint_id: UUID | str | None = None
    ) -> PendingWaitpoint:
        """Create a waitpoint that accepts signals before the execution suspends; the lease is kept.

        With a `waitpoint_id` the call is idempotent: a repeat returns the same waitpoint.
        """
        handle = check_lease_handle(handle)
        check_text(waitpoint_key, "waitpoint_key")
        check_range(expires_in_ms, "expires_in_ms", 0, MAX_TIME)
        new_id = WaitpointId(uuid7() if waitpoint_id is None else parse_uuid(waitpoint_id, "waitpoint_id"))

        async def create(transaction: Transaction) -> PendingWaitpoint:
            await lock_execution(transaction, handle.execution_id)
            (locked,) = await read_runs(transaction, [(handle.execution_id, None)])
            check_fence(locked, handle)
            key = await self._keys.signing(transaction, locked.signing_kid, locked.signing_since)
            token = sign_token(key, handle.execution_id, new_id)
            inserted = await transaction.fetch(
                SQL.insert_pending,
                partition_key=locked.partition_key,
                waitpoint_id=new_id,
                execution_id=locked.execution_id,
                attempt_index=locked.attempt_index,
                waitpoint_key=waitpoint_key,
                token_kid=key.kid,
                token=token.reveal(),
                now=locked.now,
                expires_at=min(locked.now + expires_in_ms, MAX_TIME),
            )
            if not inserted:
                # A caller that passed the id repeats its call.
                found = waitpoint_id and await transaction.fetch(
                    SQL.read_token,
                    partition_key=locked.partition_key,
                    execution_id=locked.execution_id,
                    waitpoint_id=new_id,
                )
                if not found or not found[0]["token"]:
                    raise error("waitpoint_already_exists")
                token = WaitpointToken(found[0]["token"])
            return PendingWaitpoint(waitpoint_id=new_id, hmac_token=token)

        try:
            return await self._store.transact(create, execution_id=handle.execution_id)
        except EngineError as refused:
            if refused.code == "lease_expired":
                await self._expiry.mark_expired([handle.execution_id])
            raise

    async def close_waitpoint(
        self, *, execution_id: str, waitpoint_id: UUID | str, reason: str = CloseReason.PROACTIVE_CLOSE
    ) -> Closed | AlreadyClosed:
        """Close a waitpoint: it accepts no more signals. Closing does not resume the execution."""
        parsed = parse_execution_id(execution_id)
        partition, uuid = row_key(parsed)
        parsed_waitpoint_id = parse_uuid(waitpoint_id, "waitpoint_id")
        check_text(reason, "reason")

        async def close(transaction: Transaction) -> Closed | AlreadyClosed:
            await lock_execution(transaction, parsed)
            waitpoint = await read_waitpoint(transaction, partition, parsed_waitpoint_id)
            if waitpoint is None or str(waitpoint["execution_id"]) != uuid:
                raise error("waitpoint_not_found")
            if waitpoint["state"] in _CLOSED:
                return AlreadyClosed()
            if waitpoint["state"] not in _OPEN:
                raise error("waitpoint_not_open")
            await transaction.fetch(
                SQL.close_waitpoint, partition_key=partition, waitpoint_id=parsed_waitpoint_id, reason=reason
            )
            return Closed()

        return await self._store.transact(close, execution_id=parsed)

    async def read_waitpoint_token(self, *, execution_id: str, waitpoint_id: UUID | str) -> WaitpointToken | None:
        """The token of a waitpoint, or None if the waitpoint accepts no signals.

        Anyone with the token can signal the waitpoint: pass it to trusted callers only.
        """
        partition, uuid = row_key(parse_execution_id(execution_id))
        rows = await self._store.fetch(
            SQL.read_token,
            partition_key=partition,
            execution_id=uuid,
            waitpoint_id=parse_uuid(waitpoint_id, "waitpoint_id"),
        )
        return WaitpointToken(rows[0]["token"]) if rows and rows[0]["token"] else None

    async def list_pending_waitpoints(
        self, *, execution_id: str, after: UUID | str | None = None, limit: int | None = 100
    ) -> WaitpointPage:
        """A page of the waitpoints of an execution that accept signals, ordered by id, without their tokens."""
        parsed = parse_execution_id(execution_id)
        partition, uuid = row_key(parsed)
        page_size = min(max(_check_int(100 if limit is None else limit, "limit"), 1), MAX_LIMIT)
        rows = await self._store.fetch(
            SQL.list_open_waitpoints,
            partition_key=partition,
            execution_id=uuid,
            after=None if after is None else parse_uuid(after, "after"),
            limit=page_size + 1,
        )
        if not rows:
            raise error("execution_not_found", parsed)
        found = [row for row in rows if row["waitpoint_id"] is not None]
        entries = []
        for row in found[:page_size]:
            token = WaitpointToken(row["token"])
            if not row["token"]:
                logger.warning(
                    "waitpoint %s of execution %s has no token; it is omitted from the list",
                    row["waitpoint_id"],
                    parsed,
                )
                continue
            entries.append(
                WaitpointInfo(
                    waitpoint_id=WaitpointId(row["waitpoint_id"]),
                    waitpoint_key=row["waitpoint_key"],
                    state=literal(WaitpointState, row["state"], context="list_pending_waitpoints", field="state"),
                    required_signal_names=tuple(row["required_signal_names"]),
                    created_at=row["created_at"],
                    activated_at=row["activated_at"],
                    expires_at=row["expires_at"],
                    execution_id=parsed,
                    token_kid=token.kid,
                    token_fingerprint=token.fingerprint,
                )
            )
        has_more = len(found) > page_size
        return WaitpointPage(
            entries=entries, next_cursor=WaitpointId(found[page_size - 1]["waitpoint_id"]) if has_more else None
        )

    async def list_suspended(
        self,
        *,
        namespace: str | None = None,
        lane_id: str | None = None,
        reason: str | None = None,
        cursor: str | None = None,
        limit: int = 100,
    ) -> SuspendedPage:
        """A page of the suspended executions, the longest suspended first."""
        limit = check_limit(limit, MAX_LIMIT)
        for value, field in ((namespace, "namespace"), (reason, "reason")):
            if value is not None:
                check_text(value, field)
        after = None if cursor is None else _read_cursor(cursor)
        parameters = {
            "namespace": namespace,
            "lane_id": None if lane_id is None else check_lane_id(lane_id),
            "reason": reason,
            "after_at": None if after is None else after.suspended_at,
            "after_id": None if after is None else after.execution_id,
        }
        if limit == 0:
            return SuspendedPage(entries=[], next_cursor=None)
        rows = await self._store.fetch(SQL.list_suspended, limit=limit + 1, **parameters)
        entries = [
            SuspendedExecution(
                execution_id=ExecutionId(row["id"]), suspended_at_ms=row["suspended_at"], reason=row["reason_code"]
            )
            for row in rows[:limit]
        ]
        last = entries[-1] if len(rows) > limit else None
        return SuspendedPage(entries=entries, next_cursor=None if last is None else _cursor_of(last))


class _Cursor(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The position of the last entry of a page."""

    suspended_at: int
    execution_id: str


def _cursor_of(entry: SuspendedExecution) -> str:
    plain = msgspec.json.encode(_Cursor(entry.suspended_at_ms, entry.execution_id))
    return base64.urlsafe_b64encode(plain).decode().rstrip("=")


def _read_cursor(text: object) -> _Cursor:
    try:
        padded = check_text(text, "cursor") + "=" * (-len(str(text)) % 4)
        plain = base64.b64decode(padded, altchars=b"-_", validate=True)
        read = msgspec.json.decode(plain, type=_Cursor)
        check_range(read.suspended_at, "cursor", 0, MAX_TIME)
        return _Cursor(read.suspended_at, parse_execution_id(read.execution_id))
    except (EngineError, ValueError, binascii.Error, msgspec.MsgspecError):
        raise error(
            "invalid_input",
            f"cursor: expected the next_cursor of an earlier list_suspended page, got {shorten(repr(text))}",
        ) from None


def _check_int(value: object, field: str) -> int:
    if type(value) is not int:
        raise error("invalid_input", f"{field}: must be a whole number, got {shown(value)}")
    return value
