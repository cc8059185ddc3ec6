"""Refused signals: the error code, the order of the checks, and no change except the time of a refused token."""

from typing import Any
from uuid import uuid4

import asyncpg
import pytest

from engine.sending import Waiting, running, signal_keys, signals, stamps_written, waiting
from engine.state import claim, refused
from engine.waits import on_all, suspend_args, suspend_run, token_of
from fixtures import Clock, Given, Rows
from flowfabric.engine.engine import Engine
from flowfabric.engine.parts import parts_of
from flowfabric.model.condition import OperatorOnly
from flowfabric.model.errors import EngineError
from flowfabric.model.ids import ExecutionId
from flowfabric.model.signal import MAX_PAYLOAD_BYTES, Accepted, NewSignal, SignalDuplicate
from flowfabric.model.token import WaitpointToken

OTHER_SECRET = "cd" * 32
ABSENT = "{fp:3}:11111111-1111-4111-8111-111111111111"


async def stamp(rows: Rows, execution_id: ExecutionId) -> int | None:
    """When a token was last refused at the execution."""
    found: int | None = (await rows.execution(execution_id))["last_hmac_validation_failed_at"]
    return found


async def stamped_only(
    engine: Engine, rows: Rows, clock: Clock, call: Any, code: str, execution_id: ExecutionId
) -> None:
    """Assert that the call is refused and changes nothing except last_hmac_validation_failed_at."""
    before = await rows.execution(execution_id)
    now = await clock.advance(seconds=1)
    async with rows.unchanged(without=["execution"]):
        await refused(call, code)
        await stamps_written(engine)
    assert await rows.execution(execution_id) == {**before, "last_hmac_validation_failed_at": now}


INVALID: list[tuple[dict[str, Any], str]] = [
    ({"execution_id": "nonsense"}, "MissingTag"),
    ({"execution_id": "{fp:40000}:11111111-1111-4111-8111-111111111111"}, "exceeds i16 range"),
    ({"waitpoint_id": "nonsense"}, "waitpoint_id"),
    ({"signal_id": 5}, "signal_id"),
    ({"signal_name": None}, "signal_name"),
    ({"signal_name": ""}, "signal_name"),
    ({"signal_name": "a\0b"}, "signal_name"),
    ({"signal_category": None}, "signal_category"),
    ({"source_type": 3}, "source_type"),
    ({"source_identity": "\ud800"}, "source_identity"),
    ({"target_scope": None}, "target_scope"),
    ({"payload": "text"}, "payload"),
    ({"payload_encoding": 1}, "payload_encoding"),
    ({"correlation_id": b"x"}, "correlation_id"),
    ({"idempotency_key": "k" * 1025}, "idempotency_key"),
    ({"created_at": 1.5}, "created_at"),
    ({"dedup_ttl_ms": -1}, "dedup_ttl_ms"),
    ({"dedup_ttl_ms": 2**53}, "dedup_ttl_ms: must be a whole number from 0 to 9007199254740991"),
    ({"dedup_ttl_ms": None}, "dedup_ttl_ms"),
    ({"resume_delay_ms": -1}, "resume_delay_ms"),
    ({"max_signals_per_execution": -1}, "max_signals_per_execution"),
    ({"signal_maxlen": 0}, "signal_maxlen"),
]


async def test_an_invalid_argument_is_refused(
    engine: Engine, given: Given, rows: Rows, subtests: pytest.Subtests
) -> None:
    wait = await waiting(engine, given)
    async with rows.unchanged():
        for overrides, detail in INVALID:
            with subtests.test(f"{overrides}"):
                await refused(engine.deliver_signal(**wait.signal(**overrides)), "invalid_input", detail)


async def test_a_payload_has_a_maximum_size(engine: Engine, given: Given, rows: Rows) -> None:
    wait = await waiting(engine, given)
    async with rows.unchanged():
        await refused(wait.send("other", payload=b"x" * (MAX_PAYLOAD_BYTES + 1)), "payload_too_large")
    await wait.send("other", payload=b"\xff" * MAX_PAYLOAD_BYTES)
    assert [row["payload"] for row in await signals(rows, wait.execution_id)] == [b"\xff" * 65_536]


BAD_TOKENS: list[tuple[Any, str]] = [
    (None, "missing_token"),
    ("", "missing_token"),
    ("nonsense", "invalid_token"),
    (b"k1:ab", "invalid_token"),
    ("k1:" + "0" * 64, "invalid_token"),
    ("k9:" + "0" * 64, "invalid_token"),
    ("k1:" + "0" * 63, "invalid_token"),
    ("\0:" + "0" * 64, "invalid_token"),
]


async def test_a_bad_token_is_refused_recorded_and_not_repeated_in_the_error(
    engine: Engine, given: Given, rows: Rows, clock: Clock, subtests: pytest.Subtests
) -> None:
    wait = await waiting(engine, given)
    for token, code in BAD_TOKENS:
        with subtests.test(f"{token!r}"):
            await stamped_only(engine, rows, clock, wait.send(waitpoint_token=token), code, wait.execution_id)
    secret = "k1:" + "5ec3e7" * 10 + "abcd"
    with pytest.raises(EngineError) as caught:
        await wait.send(waitpoint_token=secret)
    assert "5ec3e7" not in repr(caught.value) + str(caught.value.__context__) + str(caught.value.__cause__)


async def test_without_the_token_every_refusal_is_the_same(
    engine: Engine, given: Given, rows: Rows, clock: Clock
) -> None:
    wait, other = await waiting(engine, given, on_all("a", "b")), await waiting(engine, given)
    ended = await waiting(engine, given)
    await ended.send("ready")
    (claimed,) = await claim(engine)
    await engine.complete(claimed.handle, b"done")
    wrong = "k1:" + "0" * 64
    unknown = uuid4()
    calls = {
        "no such waitpoint": wait.send(key="a", waitpoint_id=unknown),
        "no such waitpoint, well signed": wait.send(
            key="a", waitpoint_id=unknown, waitpoint_token=token_of(wait.execution_id, unknown)
        ),
        "waitpoint of another execution": wait.send(key="a", waitpoint_id=other.points["wait"].waitpoint_id),
        "with its own token": other.send(execution_id=wait.execution_id),
        "token of another waitpoint": wait.send(key="a", waitpoint_token=wait.points["b"].token),
        "closed waitpoint": ended.send(waitpoint_token=wrong),
    }
    answers = {}
    for name, call in calls.items():
        with pytest.raises(EngineError) as caught:
            await call
        answers[name] = (type(caught.value), caught.value.code, caught.value.detail)
    assert set(answers.values()) == {(type(caught.value), "invalid_token", "this is not the token of the waitpoint")}


DAMAGE = {
    "a policy of another type": """update suspension set resume_policy = '"broken"'""",
    "a policy with a wrong field": """update suspension set resume_policy = '{"resume_delay_ms": "soon"}'""",
    "a limit that is not a number": """update execution
        set policy = coalesce(policy, '{}') || '{"max_signals_per_execution": "many"}'""",
}


async def test_corrupt_rows_are_reported_only_to_callers_with_the_token(
    engine: Engine,
    given: Given,
    rows: Rows,
    clock: Clock,
    connection: asyncpg.Connection,
    subtests: pytest.Subtests,
) -> None:
    for name, damage in DAMAGE.items():
        with subtests.test(name):
            wait, first = await waiting(engine, given), await waiting(engine, given, on_all("a", "b"))
            sent = await first.send(key="a", idempotency_key="k")
            # No operation of this version stores what it cannot read.
            await connection.execute(damage)
            await stamped_only(
                engine, rows, clock, wait.send(waitpoint_token="k1:" + "0" * 64), "invalid_token", wait.execution_id
            )
            async with rows.unchanged():
                await refused(wait.send(waitpoint_id=uuid4()), "invalid_token")
                await refused(wait.send(), "corruption")
            async with rows.unchanged(without=["event"]):
                repeat = await first.send(key="a", idempotency_key="k")
                assert repeat == SignalDuplicate(existing_signal_id=sent.signal_id)


async def test_a_corrupt_condition_is_never_satisfied(
    engine: Engine, given: Given, rows: Rows, clock: Clock, connection: asyncpg.Connection
) -> None:
    wait = await waiting(engine, given)
    await connection.execute("update suspension set condition = '[1]'")
    await stamped_only(
        engine, rows, clock, wait.send(waitpoint_token="k1:" + "0" * 64), "invalid_token", wait.execution_id
    )
    assert await wait.effect_of() == "appended_to_waitpoint no_op"


async def test_an_unknown_execution_or_a_foreign_waitpoint_changes_nothing(
    engine: Engine, given: Given, rows: Rows
) -> None:
    wait, other = await waiting(engine, given), await waiting(engine, given)
    async with rows.unchanged():
        await refused(wait.send(execution_id=ABSENT), "execution_not_found")
        await refused(wait.send(execution_id=ABSENT, waitpoint_token=""), "execution_not_found")
        await refused(wait.send(waitpoint_id=uuid4()), "invalid_token")
        await refused(wait.send(waitpoint_id=other.points["wait"].waitpoint_id), "invalid_token")
        await stamps_written(engine)


async def test_a_validly_signed_token_that_is_not_the_stored_one_is_refused(
    engine: Engine, given: Given, rows: Rows, clock: Clock, connection: asyncpg.Connection
) -> None:
    wait = await waiting(engine, given)
    # No operation changes the token of a waitpoint, but the holder of a key could sign another.
    await connection.execute("update waitpoint set token = 'k1:' || repeat('0', 64)")
    await stamped_only(engine, rows, clock, wait.send(), "invalid_token", wait.execution_id)


async def test_tokens_of_a_rotated_key_expire_after_its_grace_period(
    engine: Engine, given: Given, rows: Rows, clock: Clock
) -> None:
    wait = await waiting(engine, given, on_all("a", "b"))
    await engine.rotate_waitpoint_hmac_secret_all(new_kid="k2", new_secret_hex=OTHER_SECRET, grace_ms=1_000)
    await clock.advance(ms=1_000)
    assert isinstance(await wait.send("x", "a"), Accepted)
    await clock.advance(ms=1)
    await stamped_only(engine, rows, clock, wait.send("x", "b"), "token_expired", wait.execution_id)
    later = await waiting(engine, given)
    assert later.points["wait"].token.kid == "k2"
    assert isinstance(await later.send("ready"), Accepted)


async def test_an_unusable_or_missing_key_refuses_every_signal(
    engine: Engine, given: Given, rows: Rows, connection: asyncpg.Connection
) -> None:
    wait = await waiting(engine, given)
    await connection.execute("update signing_key set secret = '', installed_at = installed_at + 1")
    async with rows.unchanged():
        await refused(wait.send(), "corruption")
    # No operation deletes the last key.
    await connection.execute("delete from signing_key")
    async with rows.unchanged():
        await refused(wait.send(), "hmac_secret_not_initialized")


async def test_an_ended_execution_accepts_no_signal(engine: Engine, given: Given, rows: Rows) -> None:
    wait, early = await waiting(engine, given), await running(engine, given)
    for one in (wait, early):
        await engine.cancel_execution(execution_id=one.execution_id, reason="not wanted")
        async with rows.unchanged():
            await refused(one.send(), "target_not_signalable")


async def test_a_closed_suspension_accepts_no_signal(engine: Engine, given: Given, rows: Rows) -> None:
    wait = await waiting(engine, given)
    await wait.send("ready")
    async with rows.unchanged():
        await refused(wait.send("ready"), "target_not_signalable")
    (resumed,) = await claim(engine)
    async with rows.unchanged():
        await refused(wait.send("ready"), "target_not_signalable")
    await suspend_run(engine, resumed.handle)
    async with rows.unchanged():
        await refused(wait.send("ready"), "waitpoint_closed")


async def test_a_closed_or_expired_waitpoint_accepts_no_signal(
    engine: Engine, given: Given, rows: Rows, clock: Clock
) -> None:
    closed, expired = await running(engine, given), await running(engine, given, expires_in_ms=1_000)
    await engine.close_waitpoint(execution_id=closed.execution_id, waitpoint_id=closed.points["wait"].waitpoint_id)
    await clock.advance(ms=999)
    assert isinstance(await expired.send(), Accepted)
    await clock.advance(ms=1)
    async with rows.unchanged():
        await refused(closed.send(), "waitpoint_closed")
        await refused(expired.send(), "waitpoint_closed")
    await parts_of(engine).suspension_timeouts.close_pending()
    async with rows.unchanged():
        await refused(expired.send(), "waitpoint_closed")
    wait = await waiting(engine, given, on_all("a", "b"))
    await engine.close_waitpoint(execution_id=wait.execution_id, waitpoint_id=wait.points["a"].waitpoint_id)
    async with rows.unchanged():
        await refused(wait.send("x", "a"), "waitpoint_closed")
    assert isinstance(await wait.send("x", "b"), Accepted)


LIMITS: list[tuple[int | None, int | None, int]] = [
    (None, 3, 3),
    (3, None, 3),
    (3, 5, 3),
    (5, 3, 3),
    (3, 0, 3),
    (0, 3, 3),
    (0, None, 5),
    (0, 0, 5),
    (None, 0, 5),
]
"""The limit of the policy, the limit of the signal, and how many of five signals are accepted; 0 is no limit."""


async def test_the_lower_of_both_limits_bounds_the_signals_of_an_execution(
    engine: Engine, given: Given, rows: Rows, subtests: pytest.Subtests
) -> None:
    for of_policy, of_signal, accepted in LIMITS:
        with subtests.test(f"policy {of_policy}, signal {of_signal}"):
            policy = {} if of_policy is None else {"max_signals_per_execution": of_policy}
            wait = await waiting(engine, given, suspend_args(resume_condition=OperatorOnly()), policy=policy)
            for _ in range(accepted):
                assert isinstance(await wait.send("x", max_signals_per_execution=of_signal), Accepted)
            if accepted < 5:
                async with rows.unchanged():
                    await refused(wait.send("x", max_signals_per_execution=of_signal), "signal_limit_exceeded")


async def test_the_limit_counts_all_signals_of_an_execution_without_duplicates(
    engine: Engine, given: Given, rows: Rows
) -> None:
    wait = await running(engine, given, policy={"max_signals_per_execution": 3})
    for _ in range(3):
        first = await wait.send("x", idempotency_key="k", signal_maxlen=1)
    assert isinstance(first, SignalDuplicate)
    outcome = await suspend_run(engine, wait.handle, on_all("a", "b"))
    wait.on(outcome.details)
    await wait.send("x", "a")
    await wait.send("x", "b")
    (resumed,) = await claim(engine)
    again = Waiting(engine, wait.handle).on((await suspend_run(engine, resumed.handle)).details)
    async with rows.unchanged():
        await refused(again.send("ready"), "signal_limit_exceeded")
    async with rows.unchanged(without=["event"]):
        assert isinstance(await wait.send("x", idempotency_key="k"), SignalDuplicate)


async def test_signals_trimmed_from_the_log_count_towards_the_limit(engine: Engine, given: Given, rows: Rows) -> None:
    wait = await waiting(engine, given, suspend_args(resume_condition=OperatorOnly()))
    for _ in range(4):
        await wait.send("x", signal_maxlen=1)
    assert len(await signals(rows, wait.execution_id)) == 1
    async with rows.unchanged():
        await refused(wait.send("x", max_signals_per_execution=4), "signal_limit_exceeded")


TEXTS = (
    "signal_name",
    "signal_category",
    "source_type",
    "source_identity",
    "correlation_id",
    "target_scope",
    "payload_encoding",
)


async def test_texts_of_a_signal_have_a_maximum_length(
    engine: Engine, given: Given, rows: Rows, subtests: pytest.Subtests
) -> None:
    wait = await waiting(engine, given)
    for field in TEXTS:
        for letter in ("x", "\N{GRINNING FACE}"):
            with subtests.test(f"{field} of {letter}"):
                async with rows.unchanged():
                    for length in (1025, 100_000):
                        refusal = await refused(wait.send(**{"name": "x", field: letter * length}), "invalid_input")
                        assert refusal.detail == f"{field}: must be at most 1024 characters long, got {length}"
                await wait.send(**{"name": "x", field: letter * 1024})
                assert (await signals(rows, wait.execution_id))[-1][field] == letter * 1024
    assert isinstance(await wait.send("x", **dict.fromkeys(TEXTS[1:], "x" * 1024)), Accepted)


# Approvals.


async def approve(wait: Waiting, name: str = "approved", **overrides: Any) -> Any:
    return await wait.engine.deliver_approval_signal(
        **{
            "execution_id": wait.execution_id,
            "waitpoint_id": wait.points["wait"].waitpoint_id,
            "signal_name": name,
            "idempotency_suffix": "1",
            **overrides,
        }
    )


async def test_an_operator_approves_without_the_token(engine: Engine, given: Given, rows: Rows, clock: Clock) -> None:
    condition = {"Single": {"waitpoint_key": "wait", "matcher": {"ByName": "approved"}}}
    wait = await waiting(engine, given, resume_condition=condition)
    now = await clock.advance(seconds=1)
    assert (await approve(wait, "rejected", lane_id="default")).disposition == "no_op"
    first = await approve(wait, signal_dedup_ttl_ms=5_000)
    assert first.effect == "resume_condition_satisfied"
    assert await approve(wait) == SignalDuplicate(existing_signal_id=first.signal_id)
    stored = (await signals(rows, wait.execution_id))[1]
    shown = ("signal_category", "source_type", "source_identity", "payload", "target_scope", "idempotency_key")
    assert [stored[name] for name in shown] == ["approval", "operator", "", None, "execution", "approval:approved:1"]
    assert (stored["created_at"], (await signal_keys(rows, subject_id=first.signal_id))[0]["expires_at"]) == (
        now,
        now + 5_000,
    )


async def test_an_approval_needs_a_matching_lane_and_a_waitpoint_of_the_execution(
    engine: Engine, given: Given, rows: Rows, connection: asyncpg.Connection
) -> None:
    wait, other = await waiting(engine, given), await waiting(engine, given)
    detail = "lane_mismatch: args.lane_id=elsewhere exec_core.lane_id=default"
    async with rows.unchanged():
        await refused(approve(wait, execution_id=ABSENT), "execution_not_found")
        await refused(approve(wait, lane_id="elsewhere"), "invalid_input", detail)
        await refused(approve(wait, waitpoint_id=uuid4()), "waitpoint_not_found")
        await refused(approve(wait, waitpoint_id=other.points["wait"].waitpoint_id), "waitpoint_not_found")
        await refused(approve(wait, maxlen=0), "invalid_input", "signal_maxlen")
        for ttl in (-1, 2**53, None, 1.5):
            await refused(
                approve(wait, signal_dedup_ttl_ms=ttl),
                "invalid_input",
                "signal_dedup_ttl_ms: must be a whole number from 0 to",
            )
        await refused(approve(wait, idempotency_suffix=None), "invalid_input", "idempotency_suffix")
        await refused(approve(wait, signal_name=3), "invalid_input", "signal_name")
    await approve(wait, "x")
    async with rows.unchanged():
        await refused(approve(wait, max_signals_per_execution=1), "signal_limit_exceeded")
    # No suspend of this version stores a waitpoint without its token.
    await connection.execute("update waitpoint set token = ''")
    async with rows.unchanged():
        await refused(approve(wait), "waitpoint_not_found")


async def test_an_approval_is_refused_after_the_key_has_expired(
    engine: Engine, given: Given, rows: Rows, clock: Clock
) -> None:
    wait = await waiting(engine, given)
    await engine.rotate_waitpoint_hmac_secret_all(new_kid="k2", new_secret_hex=OTHER_SECRET, grace_ms=0)
    await clock.advance(ms=1)
    await stamped_only(engine, rows, clock, approve(wait), "token_expired", wait.execution_id)


# Reading signals.


async def test_signals_are_read_only_with_a_handle_of_a_stored_execution(
    engine: Engine, given: Given, connection: asyncpg.Connection
) -> None:
    wait = await waiting(engine, given)
    await refused(engine.observe_signals("handle"), "invalid_input", "handle")  # type: ignore[arg-type]
    await refused(engine.observe_signals(wait.handle, suspension_id="one"), "invalid_input", "suspension_id")
    for table in ("suspension", "execution"):
        await connection.execute(f"delete from {table}")
    await refused(engine.observe_signals(wait.handle), "execution_not_found")
    await refused(engine.observe_signals(wait.handle, suspension_id=uuid4()), "execution_not_found")


def test_a_new_signal_shows_no_token() -> None:
    signal = NewSignal.of(
        execution_id=ABSENT, waitpoint_id=uuid4(), waitpoint_token="k1:" + "ab" * 32, signal_name="x", payload=b"secret"
    )
    assert isinstance(signal.waitpoint_token, WaitpointToken)
    assert "abab" not in repr(signal)
    assert "secret" not in repr(signal)
