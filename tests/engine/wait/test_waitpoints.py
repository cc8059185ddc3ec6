"""Waitpoints: create, close, read the token, list."""

import traceback
from collections.abc import Awaitable, Callable
from typing import Any
from uuid import UUID, uuid4

import asyncpg
import msgspec
import pytest

from engine.state import ACTIVE, EXPIRED_LEASE, event_texts, refused, revoke, vector
from engine.waits import SUSPENDED, on_all, suspend_run, suspension, token_of, waitpoint, waitpoints
from fixtures import Clock, Given, Rows
from flowfabric.engine.engine import Engine
from flowfabric.engine.wait import waitpoint as family
from flowfabric.model.errors import EngineError
from flowfabric.model.handle import Backend, Handle
from flowfabric.model.ids import LeaseId, WaitpointId
from flowfabric.model.states import HandleKind, WaitpointState
from flowfabric.model.waitpoint import AlreadyClosed, Closed, WaitpointInfo

MAX_TIME = 2**63 - 1
SOON = 60_000


# Creating.


async def test_a_new_waitpoint_is_pending_and_the_lease_is_kept(
    engine: Engine, given: Given, rows: Rows, clock: Clock
) -> None:
    handle = await given.claimed()
    execution = await rows.execution(handle.execution_id)
    now = await clock.advance(seconds=1)
    made = await engine.create_waitpoint(handle, waitpoint_key="later", expires_in_ms=SOON)
    token = token_of(handle.execution_id, made.waitpoint_id)
    assert (made.waitpoint_id.version, made.hmac_token.reveal()) == (7, token)
    assert await waitpoint(rows, made.waitpoint_id) == {
        "partition_key": execution["partition_key"],
        "waitpoint_id": made.waitpoint_id,
        "execution_id": execution["execution_id"],
        "attempt_index": 0,
        "suspension_id": None,
        "waitpoint_key": "later",
        "token_kid": "k1",
        "token": token,
        "state": "pending",
        "required_signal_names": [],
        "created_at": now,
        "activated_at": None,
        "satisfied_at": None,
        "closed_at": None,
        "expires_at": now + SOON,
        "close_reason": None,
        "signal_count": 0,
        "matched_signal_count": 0,
        "last_signal_at": None,
    }
    assert await rows.execution(handle.execution_id) == execution
    assert vector(execution) == ACTIVE
    assert token not in repr(made) + str(made)
    await engine.renew(handle)


async def test_waitpoints_may_share_a_key_and_expire_at_once_or_at_the_end_of_time(
    engine: Engine, given: Given, rows: Rows, clock: Clock
) -> None:
    handle = await given.claimed()
    one, other = [await engine.create_waitpoint(handle, waitpoint_key="k", expires_in_ms=SOON) for _ in range(2)]
    assert one.waitpoint_id != other.waitpoint_id
    assert one.hmac_token != other.hmac_token
    assert len(await waitpoints(rows, handle.execution_id)) == 2
    made = await engine.create_waitpoint(handle, waitpoint_key="k", expires_in_ms=MAX_TIME)
    assert (await waitpoint(rows, made.waitpoint_id))["expires_at"] == MAX_TIME
    at_once = await engine.create_waitpoint(handle, waitpoint_key="k", expires_in_ms=0)
    assert (await waitpoint(rows, at_once.waitpoint_id))["expires_at"] == await clock.now()


async def test_wrong_arguments_of_a_waitpoint_are_refused(engine: Engine, given: Given, rows: Rows) -> None:
    handle = await given.claimed()
    wrong: list[dict[str, Any]] = [
        {"waitpoint_key": 1},
        {"waitpoint_key": None},
        {"waitpoint_key": "a\0b"},
        {"expires_in_ms": -1},
        {"expires_in_ms": MAX_TIME + 1},
        {"expires_in_ms": 1.5},
        {"expires_in_ms": None},
        {"expires_in_ms": True},
    ]
    async with rows.unchanged():
        for overrides in wrong:
            given_ = {"waitpoint_key": "k", "expires_in_ms": SOON, **overrides}
            await refused(engine.create_waitpoint(handle, **given_), "invalid_input", next(iter(overrides)))


async def test_a_waitpoint_needs_a_valid_lease(
    engine: Engine, given: Given, rows: Rows, connection: asyncpg.Connection
) -> None:
    async def refuse(handle: Any, code: str) -> None:
        async with rows.unchanged():
            await refused(engine.create_waitpoint(handle, waitpoint_key="k", expires_in_ms=SOON), code)

    handle = await given.claimed()
    replace = msgspec.structs.replace
    await refuse("handle", "invalid_input")
    await refuse(replace(handle, backend=Backend.VALKEY), "handle_from_other_backend")
    await refuse(replace(handle, kind=HandleKind.SUSPENDED), "lease_conflict")
    absent = handle.execution_id[:-36] + str(uuid4())
    await refuse(replace(handle, execution_id=absent), "execution_not_found")
    await refuse(replace(handle, lease_epoch=7), "lease_conflict")
    await refuse(replace(handle, lease_id=LeaseId(uuid4())), "lease_conflict")
    await connection.execute("update signing_key set is_current = false")
    await refuse(replace(handle, lease_id=LeaseId(uuid4())), "lease_conflict")
    await refuse(handle, "hmac_secret_not_initialized")
    await engine.complete(handle)
    await refuse(replace(handle, lease_epoch=7), "lease_conflict")
    await refuse(handle, "execution_not_active")
    revoked = await given.claimed()
    await revoke(engine, revoked.execution_id)
    await refuse(revoked, "lease_revoked")


async def test_an_expired_lease_cannot_create_a_waitpoint_and_is_marked(
    engine: Engine, given: Given, rows: Rows
) -> None:
    handle = await given.expired_lease()
    await refused(engine.create_waitpoint(handle, waitpoint_key="k", expires_in_ms=SOON), "lease_expired")
    assert vector(await rows.execution(handle.execution_id)) == EXPIRED_LEASE
    assert await event_texts(rows, handle.execution_id) == ["acquired", "expired"]
    assert await rows.of("waitpoint") == []


async def test_a_generated_id_that_is_in_use_is_refused(
    engine: Engine, given: Given, rows: Rows, monkeypatch: pytest.MonkeyPatch
) -> None:
    handle = await given.claimed()
    made = await engine.create_waitpoint(handle, waitpoint_key="k", expires_in_ms=SOON)
    monkeypatch.setattr(family, "uuid7", lambda: made.waitpoint_id)
    async with rows.unchanged():
        await refused(
            engine.create_waitpoint(handle, waitpoint_key="k", expires_in_ms=SOON), "waitpoint_already_exists"
        )


async def test_a_repeat_with_the_same_id_returns_the_same_waitpoint(engine: Engine, given: Given, rows: Rows) -> None:
    handle, wanted = await given.claimed(), uuid4()
    given_id: dict[str, Any] = {"waitpoint_key": "k", "expires_in_ms": SOON, "waitpoint_id": wanted}
    made = await engine.create_waitpoint(handle, **given_id)
    async with rows.unchanged():
        again = await engine.create_waitpoint(handle, **given_id)
    assert (again.waitpoint_id, again.hmac_token.reveal()) == (wanted, made.hmac_token.reveal())
    # In the same partition, but of another execution.
    other = await given.claimed()
    async with rows.unchanged():
        await refused(engine.create_waitpoint(other, **given_id), "waitpoint_already_exists")


# Closing.


async def test_a_pending_waitpoint_is_closed(engine: Engine, given: Given, rows: Rows, clock: Clock) -> None:
    handle = await given.claimed()
    made = await engine.create_waitpoint(handle, waitpoint_key="k", expires_in_ms=SOON)
    execution = await rows.execution(handle.execution_id)
    now = await clock.advance(seconds=1)
    one: dict[str, Any] = {"execution_id": handle.execution_id, "waitpoint_id": made.waitpoint_id}
    assert await engine.close_waitpoint(**one) == Closed()
    row = await waitpoint(rows, made.waitpoint_id)
    assert (row["state"], row["closed_at"], row["close_reason"]) == ("closed", now, "proactive_close")
    assert await rows.execution(handle.execution_id) == execution
    await clock.advance(seconds=1)
    async with rows.unchanged():
        assert await engine.close_waitpoint(**one, reason="again") == AlreadyClosed()


async def test_closing_an_active_waitpoint_does_not_resume_the_execution(
    engine: Engine, given: Given, rows: Rows
) -> None:
    handle = await given.claimed()
    outcome = await suspend_run(engine, handle)
    closed = await engine.close_waitpoint(
        execution_id=handle.execution_id, waitpoint_id=str(outcome.details.waitpoint_id), reason="no use"
    )
    assert closed == Closed()
    assert (await waitpoint(rows, outcome.details.waitpoint_id))["close_reason"] == "no use"
    assert vector(await rows.execution(handle.execution_id)) == SUSPENDED
    assert (await suspension(rows, handle.execution_id))["closed_at"] is None
    assert await engine.find_inconsistencies() == []


async def test_a_waitpoint_of_another_execution_is_not_found(engine: Engine, given: Given, rows: Rows) -> None:
    one, other = await given.claimed(), await given.claimed()
    made = await engine.create_waitpoint(one, waitpoint_key="k", expires_in_ms=SOON)
    async with rows.unchanged():
        for execution_id, waitpoint_id, code in (
            (other.execution_id, made.waitpoint_id, "waitpoint_not_found"),
            (one.execution_id, uuid4(), "waitpoint_not_found"),
            (one.execution_id[:-36] + str(uuid4()), made.waitpoint_id, "execution_not_found"),
            ("x", made.waitpoint_id, "invalid_input"),
            (one.execution_id, "x", "invalid_input"),
        ):
            await refused(engine.close_waitpoint(execution_id=execution_id, waitpoint_id=waitpoint_id), code)
        await refused(
            engine.close_waitpoint(
                execution_id=one.execution_id,
                waitpoint_id=made.waitpoint_id,
                reason=None,  # type: ignore[arg-type]
            ),
            "invalid_input",
        )


async def test_an_expired_waitpoint_is_already_closed_and_an_unknown_state_is_not_open(
    engine: Engine, given: Given, rows: Rows, connection: asyncpg.Connection
) -> None:
    handle = await given.claimed()
    made = await engine.create_waitpoint(handle, waitpoint_key="k", expires_in_ms=SOON)
    one: dict[str, Any] = {"execution_id": handle.execution_id, "waitpoint_id": made.waitpoint_id}
    await connection.execute("update waitpoint set state = 'expired'")
    async with rows.unchanged():
        assert await engine.close_waitpoint(**one) == AlreadyClosed()
    # A newer version may store another state.
    await connection.execute("alter type waitpoint_state add value 'resting'")
    await connection.execute("update waitpoint set state = 'resting'")
    async with rows.unchanged():
        await refused(engine.close_waitpoint(**one), "waitpoint_not_open")


# Tokens.


async def test_the_token_of_an_open_waitpoint_is_read(
    engine: Engine, given: Given, connection: asyncpg.Connection
) -> None:
    handle = await given.claimed()
    pending = await engine.create_waitpoint(handle, waitpoint_key="k", expires_in_ms=SOON)
    active = (await suspend_run(engine, handle)).details

    async def read(waitpoint_id: UUID | str, execution_id: str = handle.execution_id) -> str | None:
        token = await engine.read_waitpoint_token(execution_id=execution_id, waitpoint_id=waitpoint_id)
        return None if token is None else token.reveal()

    assert await read(pending.waitpoint_id) == pending.hmac_token.reveal()
    assert await read(str(active.waitpoint_id)) == active.waitpoint_token.reveal()
    assert await read(uuid4()) is None
    other = await given.claimed()
    assert await read(pending.waitpoint_id, other.execution_id) is None
    assert await read(pending.waitpoint_id, other.execution_id[:-36] + str(uuid4())) is None
    await engine.close_waitpoint(execution_id=handle.execution_id, waitpoint_id=pending.waitpoint_id)
    assert await read(pending.waitpoint_id) is None
    await connection.execute("update waitpoint set token = ''")
    assert await read(active.waitpoint_id) is None
    await refused(read("x"), "invalid_input")
    await refused(read(uuid4(), "x"), "invalid_input")


# Listing.


async def test_open_waitpoints_are_listed_without_their_tokens(
    engine: Engine, given: Given, rows: Rows, clock: Clock
) -> None:
    began = await clock.now()
    handle = await given.claimed()
    pending = await engine.create_waitpoint(handle, waitpoint_key="ahead", expires_in_ms=SOON)
    closed = await engine.create_waitpoint(handle, waitpoint_key="gone", expires_in_ms=SOON)
    await engine.close_waitpoint(execution_id=handle.execution_id, waitpoint_id=closed.waitpoint_id)
    now = await clock.advance(seconds=1)
    active = (await suspend_run(engine, handle, timeout_at=now + SOON)).details
    other = await given.claimed()
    await engine.create_waitpoint(other, waitpoint_key="foreign", expires_in_ms=SOON)
    page = await engine.list_pending_waitpoints(execution_id=handle.execution_id)
    assert page.next_cursor is None
    entries = [
        WaitpointInfo(
            waitpoint_id=pending.waitpoint_id,
            waitpoint_key="ahead",
            state=WaitpointState.PENDING,
            required_signal_names=(),
            created_at=began,
            activated_at=None,
            expires_at=began + SOON,
            execution_id=handle.execution_id,
            token_kid="k1",
            token_fingerprint=pending.hmac_token.reveal()[3:19],
        ),
        WaitpointInfo(
            waitpoint_id=active.waitpoint_id,
            waitpoint_key="wait",
            state=WaitpointState.ACTIVE,
            required_signal_names=("ready",),
            created_at=now,
            activated_at=now,
            expires_at=now + SOON,
            execution_id=handle.execution_id,
            token_kid="k1",
            token_fingerprint=active.waitpoint_token.reveal()[3:19],
        ),
    ]
    assert page.entries == sorted(entries, key=lambda entry: entry.waitpoint_id)


async def test_the_cursor_of_a_page_leads_to_the_next(engine: Engine, given: Given) -> None:
    handle = await given.claimed()
    outcome = await suspend_run(engine, handle, on_all(*"abcde"))
    ids = sorted([outcome.details.waitpoint_id, *(each.waitpoint_id for each in outcome.details.additional_waitpoints)])
    found: list[WaitpointId] = []
    after: WaitpointId | None = None
    for size in (2, 2, 1):
        page = await engine.list_pending_waitpoints(execution_id=handle.execution_id, after=after, limit=2)
        assert len(page.entries) == size
        found += [entry.waitpoint_id for entry in page.entries]
        after = page.next_cursor
    assert (found, after) == (ids, None)
    whole = await engine.list_pending_waitpoints(execution_id=handle.execution_id, limit=5)
    assert (len(whole.entries), whole.next_cursor) == (5, None)
    last = await engine.list_pending_waitpoints(execution_id=handle.execution_id, after=str(ids[-1]))
    assert (last.entries, last.next_cursor) == ([], None)


async def test_the_limit_of_a_page_is_between_one_and_a_thousand(engine: Engine, given: Given) -> None:
    handle = await given.claimed()
    await suspend_run(engine, handle, on_all(*"abc"))
    for limit, count in ((0, 1), (-5, 1), (10**9, 3), (None, 3)):
        page = await engine.list_pending_waitpoints(execution_id=handle.execution_id, limit=limit)
        assert len(page.entries) == count
    assert family.MAX_LIMIT == 1000
    wrong: list[dict[str, Any]] = [{"limit": "2"}, {"limit": 1.5}, {"limit": True}, {"after": "x"}]
    for overrides in wrong:
        await refused(engine.list_pending_waitpoints(execution_id=handle.execution_id, **overrides), "invalid_input")


async def test_an_execution_without_waitpoints_has_an_empty_list_and_an_unknown_one_is_refused(
    engine: Engine, given: Given
) -> None:
    execution_id = await given.created()
    assert (await engine.list_pending_waitpoints(execution_id=execution_id)).entries == []
    absent = execution_id[:-36] + str(uuid4())
    await refused(engine.list_pending_waitpoints(execution_id=absent), "execution_not_found")
    await refused(engine.list_pending_waitpoints(execution_id="x"), "invalid_input")


async def _expired(engine: Engine, handle: Handle, clock: Clock) -> object:
    await clock.advance(seconds=5)
    return await engine.expire_execution(execution_id=handle.execution_id, phase="execution_deadline")


async def _timed_out(engine: Engine, handle: Handle, clock: Clock) -> object:
    now = await clock.advance(seconds=1)
    await suspend_run(engine, handle, on_all("a", "b", timeout_at=now))
    return await engine.expire_suspension(handle.execution_id)


ENDINGS: dict[str, Callable[[Engine, Handle, Any], Awaitable[object]]] = {
    "completed": lambda engine, handle, _: engine.complete(handle),
    "completed in a batch": lambda engine, handle, _: engine.complete_many([(handle, b"x")]),
    "failed": lambda engine, handle, _: engine.fail(handle, reason="x", classification="permanent"),
    "cancelled": lambda engine, handle, _: engine.cancel(handle, "x"),
    "cancelled by an operator": lambda engine, handle, _: engine.cancel_execution(
        execution_id=handle.execution_id, reason="x"
    ),
    "expired": _expired,
    "timed out": _timed_out,
}


async def test_an_ended_execution_lists_no_waitpoint_and_returns_no_token(
    engine: Engine, given: Given, clock: Clock, subtests: pytest.Subtests
) -> None:
    for ending, end in ENDINGS.items():
        with subtests.test(ending):
            handle = await given.claimed(execution_deadline_at=await clock.now() + 5_000)
            made = [await engine.create_waitpoint(handle, waitpoint_key=key, expires_in_ms=SOON) for key in ("a", "b")]
            one: dict[str, Any] = {"execution_id": handle.execution_id, "waitpoint_id": made[0].waitpoint_id}
            assert await engine.read_waitpoint_token(**one) is not None
            assert len((await engine.list_pending_waitpoints(execution_id=handle.execution_id)).entries) == 2
            await end(engine, handle, clock)
            state = await engine.read_execution_state(handle.execution_id)
            assert state in ("completed", "failed", "cancelled", "expired")
            page = await engine.list_pending_waitpoints(execution_id=handle.execution_id, limit=1)
            assert (page.entries, page.next_cursor) == ([], None)
            assert await engine.read_waitpoint_token(**one) is None


async def test_a_waitpoint_without_a_token_is_omitted_and_logged(
    engine: Engine, given: Given, connection: asyncpg.Connection, caplog: pytest.LogCaptureFixture
) -> None:
    handle = await given.claimed()
    first, second = sorted(
        [await engine.create_waitpoint(handle, waitpoint_key="k", expires_in_ms=SOON) for _ in range(2)],
        key=lambda made: made.waitpoint_id,
    )
    await connection.execute("update waitpoint set token = '' where waitpoint_id = $1", first.waitpoint_id)
    page = await engine.list_pending_waitpoints(execution_id=handle.execution_id, limit=1)
    assert (page.entries, page.next_cursor) == ([], first.waitpoint_id)
    assert str(first.waitpoint_id) in caplog.text
    rest = await engine.list_pending_waitpoints(execution_id=handle.execution_id, after=page.next_cursor)
    assert [entry.waitpoint_id for entry in rest.entries] == [second.waitpoint_id]
    await connection.execute("update waitpoint set token = 'odd'")
    (one, _) = (await engine.list_pending_waitpoints(execution_id=handle.execution_id)).entries
    assert (one.token_kid, one.token_fingerprint) == ("", "")


async def test_a_row_that_the_store_rejects_is_not_shown_in_the_error(
    engine: Engine, given: Given, connection: asyncpg.Connection, caplog: pytest.LogCaptureFixture
) -> None:
    handle, secret = await given.claimed(), uuid4().hex
    await connection.execute("alter table waitpoint add constraint never check (created_at < 0)")
    calls: list[Callable[[], Awaitable[object]]] = [
        lambda: engine.create_waitpoint(handle, waitpoint_key=secret, expires_in_ms=1000),
        lambda: engine.suspend(handle, on_all(secret, "other")),
    ]
    for call in calls:
        with pytest.raises(EngineError) as caught:
            await call()
        printed = "".join(traceback.format_exception(caught.value))
        assert 'violates check constraint "never"' in printed
        for hidden in (secret, "DETAIL", "k1:"):
            assert hidden not in f"{caught.value} {caught.value!r} {printed} {caplog.text}"
