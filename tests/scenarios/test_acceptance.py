"""The acceptance checks 1 to 9 of the specification: suspend, signal and resume from end to end."""

from typing import Any
from uuid import UUID, uuid4

import pytest

from engine.state import all_cases
from fixtures import Clock, Given, Rows
from flowfabric import Engine
from flowfabric.conditions import (
    AllOf,
    ByName,
    Count,
    CountKind,
    Fresh,
    OperatorOnly,
    Single,
    SuspendArgs,
    TimeoutOnly,
    UsePending,
    all_of_waitpoints,
)
from flowfabric.engine.wait.deliver import Signals
from flowfabric.model.event import CompletionOutcome
from flowfabric.outcomes import AlreadySatisfied, SuspendDetails, Suspended

from .waiting import (
    APPENDED,
    BUFFERED,
    HOUR_MS,
    READY,
    RESUMABLE,
    SATISFIED,
    THREE,
    A,
    B,
    C,
    Waiting,
    args,
    completions,
    refused,
    suspended,
    vector,
    waitpoint_rows,
    waitpoint_states,
)


@pytest.fixture
async def engine(keyless: Engine) -> Engine:
    """An engine whose store has a signing key, `a`."""
    await keyless.seed_waitpoint_hmac_secret(kid="a", secret_hex=A)
    return keyless


async def rotate(engine: Engine, kid: str, secret_hex: str, grace_ms: int = HOUR_MS) -> None:
    (entry,) = await engine.rotate_waitpoint_hmac_secret_all(new_kid=kid, new_secret_hex=secret_hex, grace_ms=grace_ms)
    assert not isinstance(entry.result, Exception)


def tampered(text: str) -> str:
    return text[:-1] + ("0" if text[-1] != "0" else "1")


# 1


async def test_1_only_the_expected_signal_resumes_and_the_attempt_continues(
    engine: Engine, given: Given, rows: Rows
) -> None:
    run = await given.run()
    wait = await suspended(engine, run.handle, READY)
    assert await wait.effect("other") == (APPENDED, "no_op")
    assert await engine.read_execution_state(run.execution_id) == "suspended"
    assert await wait.effect("ready") == (SATISFIED, SATISFIED)
    assert await vector(rows, run.execution_id) == RESUMABLE
    claimed = await wait.claim()
    assert (claimed.attempt_id, claimed.attempt_index) == (run.attempt_id, run.attempt_index)
    assert claimed.lease_epoch > run.lease_epoch
    await engine.complete(claimed.handle, b"done")
    assert await engine.get_execution_result(run.execution_id) == b"done"
    assert await engine.find_inconsistencies() == []


# 2


async def test_2_a_repeated_suspend_returns_the_first_outcome(engine: Engine, given: Given, rows: Rows) -> None:
    handle = await given.claimed()
    both = all_of_waitpoints(["a", "b"])
    first = await engine.suspend(handle, args(both, keys=("a", "b"), idempotency_key="once"))
    assert isinstance(first, Suspended)
    async with rows.unchanged():
        second = await engine.suspend(handle, args(READY, idempotency_key="once"))
    assert second == first
    assert isinstance(second, Suspended)
    assert second.handle.opaque == first.handle.opaque
    assert second.details.waitpoint_token.reveal() == first.details.waitpoint_token.reveal()
    assert [each.waitpoint_token.reveal() for each in second.details.additional_waitpoints] == [
        each.waitpoint_token.reveal() for each in first.details.additional_waitpoints
    ]


async def test_2_an_idempotency_key_belongs_to_one_execution(engine: Engine, given: Given) -> None:
    handles = [await given.claimed(), await given.claimed()]
    assert len({handle.execution_id.partition("}")[0] for handle in handles}) == 1, "one partition"
    first, second = [await suspended(engine, handle, READY, idempotency_key="once") for handle in handles]
    assert first.details.suspension_id != second.details.suspension_id
    assert first.points["wp"] != second.points["wp"]


# 3


async def test_3_a_stale_fence_is_a_lease_conflict_and_changes_nothing(
    engine: Engine, given: Given, rows: Rows
) -> None:
    stale = await given.reclaimable()
    await given.claim(worker="other")
    async with rows.unchanged():
        await refused(engine.suspend(stale, args(READY)), "lease_conflict")
        await refused(engine.create_waitpoint(stale, waitpoint_key="wp", expires_in_ms=1000), "lease_conflict")


# 4


async def test_4_each_distinct_source_counts_once(engine: Engine, given: Given) -> None:
    two = Count(n=2, count_kind=CountKind.DISTINCT_SOURCES, waitpoints=("wp",))
    wait = await suspended(engine, await given.claimed(), two)
    assert await wait.effect("go", source_identity="ada") == (APPENDED, APPENDED)
    assert await wait.effect("go", source_identity="ada") == (APPENDED, "appended_to_waitpoint_duplicate")
    assert await wait.effect("go", source_identity="grace") == (SATISFIED, SATISFIED)


async def test_4_distinct_signals_may_come_from_one_source(engine: Engine, given: Given) -> None:
    two = Count(n=2, count_kind=CountKind.DISTINCT_SIGNALS, waitpoints=("wp",))
    wait = await suspended(engine, await given.claimed(), two)
    assert await wait.effect("go", source_identity="ada") == (APPENDED, APPENDED)
    assert await wait.effect("go", source_identity="ada") == (SATISFIED, SATISFIED)


async def test_4_only_signals_that_match_are_counted(engine: Engine, given: Given) -> None:
    one = Count(n=1, count_kind=CountKind.DISTINCT_SOURCES, matcher=ByName("approve"), waitpoints=("wp",))
    wait = await suspended(engine, await given.claimed(), one)
    assert await wait.effect("reject") == (APPENDED, "signal_ignored_matcher_failed")
    assert await wait.effect("approve") == (SATISFIED, SATISFIED)


# 5


async def three(engine: Engine, given: Given, **overrides: Any) -> Waiting:
    return await suspended(engine, await given.claimed(), all_of_waitpoints(THREE), keys=THREE, **overrides)


async def test_5_each_of_three_waitpoints_has_its_own_token_and_all_are_needed(
    engine: Engine, given: Given, rows: Rows
) -> None:
    wait = await three(engine, given)
    assert len({token.reveal() for _, token in wait.points.values()}) == 3
    for key, other in (("a", "b"), ("b", "c"), ("c", "a")):
        await refused(wait.signal("x", key, waitpoint_token=wait.points[other][1]), "invalid_token")
    assert await wait.effect("x", "c") == (APPENDED, APPENDED)
    assert await wait.effect("x", "a") == (APPENDED, APPENDED)
    assert await wait.effect("x", "b") == (SATISFIED, SATISFIED)
    assert await waitpoint_states(rows, wait) == [("closed", "resumed")] * 3
    await refused(wait.signal("x", "a"), "target_not_signalable")


async def test_5_a_cancel_closes_all_three_waitpoints(engine: Engine, given: Given, rows: Rows) -> None:
    wait = await three(engine, given)
    await engine.cancel_execution(execution_id=wait.execution_id, reason="not wanted")
    assert await waitpoint_states(rows, wait) == [("closed", "cancelled")] * 3
    (row,) = await rows.of("suspension")
    assert (row["close_reason"], row["closed_at"] is None) == ("cancelled", False)
    await refused(wait.signal("x", "a"), "target_not_signalable")


async def test_5_a_timeout_closes_all_three_waitpoints(engine: Engine, given: Given, rows: Rows, clock: Clock) -> None:
    wait = await three(engine, given, timeout_at=await clock.now() + 1000)
    await clock.advance(seconds=2)
    await engine.expire_suspension(wait.execution_id)
    assert await waitpoint_states(rows, wait) == [("closed", "timed_out_fail")] * 3


# 6


def nested(depth: int) -> Any:
    condition: Any = READY
    for _ in range(depth):
        condition = AllOf((condition,))
    return condition


async def test_6_a_condition_is_at_most_four_levels_deep(engine: Engine, given: Given, rows: Rows) -> None:
    handle = await given.claimed()
    async with rows.unchanged():
        path = ".".join(["members[0]"] * 4)
        await refused(engine.suspend(handle, args(nested(5))), "invalid_input", f"depth 5 exceeds cap 4 at path {path}")
    wait = await suspended(engine, handle, nested(4))
    assert await wait.effect("ready") == (SATISFIED, SATISFIED)


def fresh(key: str = "wp", waitpoint_id: UUID | None = None) -> Fresh:
    return Fresh(waitpoint_id=waitpoint_id or uuid4(), waitpoint_key=key)


def count(n: int, *keys: str, kind: CountKind = CountKind.DISTINCT_SIGNALS, name: str | None = None) -> Count:
    return Count(n=n, count_kind=kind, matcher=None if name is None else ByName(name), waitpoints=keys)


TWICE = uuid4()
ANY = Single(waitpoint_key="wp")

REFUSALS: dict[str, SuspendArgs] = {
    "waitpoints_empty": args(READY, waitpoints=[]),
    "waitpoint_key_mismatch": args(Single(waitpoint_key="other")),
    "additional_waitpoint_binding_must_be_fresh at waitpoints[1]": args(
        ANY,
        waitpoints=[fresh(), UsePending(waitpoint_id=uuid4())],
    ),
    "additional_waitpoint_binding_empty_key at waitpoints[1]": args(ANY, waitpoints=[fresh(), fresh("")]),
    "referenced_waitpoint_key_missing_binding: c": args(all_of_waitpoints(["a", "b", "c"]), keys=("a", "b")),
    "extra_binding_not_referenced_by_condition: c": args(all_of_waitpoints(["a", "b"]), keys=("a", "b", "c")),
    "referenced_waitpoint_key_missing_binding: x": args(all_of_waitpoints(["wp", "x"])),
    "extra_binding_not_referenced_by_condition: wp": args(AllOf((OperatorOnly(),))),
    "timeout_only_without_deadline": args(TimeoutOnly()),
    "resume_condition: empty signal name (use Wildcard instead)": args(Single(waitpoint_key="wp", matcher=ByName(""))),
    "timeout_at_in_past": args(READY, timeout_at=1),
    "allof_empty_members at path <root>": args(AllOf(())),
    "allof_empty_members at path members[1]": args(AllOf((ANY, AllOf(())))),
    "count_n_zero at path <root>": args(count(0, "wp")),
    "count_waitpoints_empty at path <root>": args(count(1)),
    "count_exceeds_waitpoint_set: n=2 > waitpoints.len()=1 at path <root>": args(
        count(2, "wp", "wp", kind=CountKind.DISTINCT_WAITPOINTS)
    ),
    "duplicate_waitpoint_binding": args(
        all_of_waitpoints(["a", "b"]), waitpoints=[fresh("a", TWICE), fresh("b", TWICE)]
    ),
}


async def test_6_inconsistent_arguments_are_refused(engine: Engine, given: Given, rows: Rows) -> None:
    handle = await given.claimed()
    with all_cases() as case:
        for detail, wrong in REFUSALS.items():
            with case(detail):
                async with rows.unchanged():
                    refusal = await refused(engine.suspend(handle, wrong), "invalid_input", detail)
                assert refusal.category == "validation"
    assert await engine.renew(handle)


async def test_6_an_empty_signal_name_is_refused_anywhere_in_the_condition(
    engine: Engine, given: Given, rows: Rows
) -> None:
    handle = await given.claimed()
    async with rows.unchanged():
        for condition in (AllOf((ANY, Single(waitpoint_key="wp", matcher=ByName("")))), count(1, "wp", name="")):
            await refused(engine.suspend(handle, args(condition)), "invalid_input", "empty signal name")


async def test_6_a_suspended_handle_is_refused_before_its_key_is_looked_up(
    engine: Engine, given: Given, rows: Rows
) -> None:
    wait = await suspended(engine, await given.claimed(), READY, idempotency_key="once")
    assert wait.handle is not None
    async with rows.unchanged():
        await refused(engine.suspend(wait.handle, args(READY, idempotency_key="once")), "already_suspended")


# 7


async def test_7_a_signal_buffered_before_the_suspend_satisfies_it_at_once(
    engine: Engine, given: Given, rows: Rows
) -> None:
    run = await given.run()
    pending = await engine.create_waitpoint(run.handle, waitpoint_key="wp", expires_in_ms=HOUR_MS)
    await rotate(engine, "b", B)
    early = Waiting(engine, run.handle, _details(pending))
    assert await early.effect("ready", payload=b"early") == (BUFFERED, BUFFERED)
    assert await engine.read_execution_state(run.execution_id) == "active"
    outcome = await engine.suspend(run.handle, args(READY, waitpoints=[UsePending(waitpoint_id=pending.waitpoint_id)]))
    assert isinstance(outcome, AlreadySatisfied)
    assert outcome.details is not None
    assert outcome.details.waitpoint_token == pending.hmac_token
    renewed = await engine.renew(run.handle)
    assert renewed.lease_epoch == run.lease_epoch
    (signal,) = await engine.observe_signals(run.handle)
    assert (signal.signal_name, signal.payload, signal.satisfier) == ("ready", b"early", True)
    (point,) = await waitpoint_rows(rows, run.execution_id)
    assert (point["state"], point["close_reason"]) == ("closed", "resumed")
    await engine.complete(run.handle, b"done")
    assert await completions(rows, run.execution_id) == [CompletionOutcome.SUCCESS]


async def test_7_the_token_of_a_pending_waitpoint_stays_valid_after_a_rotation(engine: Engine, given: Given) -> None:
    run = await given.run()
    pending = await engine.create_waitpoint(run.handle, waitpoint_key="wp", expires_in_ms=HOUR_MS)
    await rotate(engine, "b", B)
    wait = await suspended(engine, run.handle, READY, waitpoints=[UsePending(waitpoint_id=pending.waitpoint_id)])
    assert wait.points["wp"] == (pending.waitpoint_id, pending.hmac_token)
    assert await wait.effect("ready", waitpoint_token=pending.hmac_token) == (SATISFIED, SATISFIED)


async def test_7_signals_buffered_before_the_suspend_are_counted(engine: Engine, given: Given) -> None:
    run = await given.run()
    pending = await engine.create_waitpoint(run.handle, waitpoint_key="wp", expires_in_ms=HOUR_MS)
    early = Waiting(engine, run.handle, _details(pending))
    assert await early.effect("go", source_identity="ada") == (BUFFERED, BUFFERED)
    two = Count(n=2, count_kind=CountKind.DISTINCT_SOURCES, waitpoints=("wp",))
    wait = await suspended(engine, run.handle, two, waitpoints=[UsePending(waitpoint_id=pending.waitpoint_id)])
    assert await wait.effect("go", source_identity="ada") == (APPENDED, "appended_to_waitpoint_duplicate")
    assert await wait.effect("go", source_identity="grace") == (SATISFIED, SATISFIED)


def _details(pending: Any) -> Any:
    return SuspendDetails(
        suspension_id=uuid4(),  # type: ignore[arg-type]
        attempt_index=0,
        waitpoint_id=pending.waitpoint_id,
        waitpoint_key="wp",
        waitpoint_token=pending.hmac_token,
    )


# 8


async def test_8_every_wrong_token_gets_the_same_refusal(engine: Engine, given: Given, rows: Rows) -> None:
    wait = await suspended(engine, await given.claimed(), READY)
    other = await suspended(engine, await given.claimed(), READY)
    over = await suspended(engine, await given.claimed(), READY)
    await over.signal("ready")
    right = wait.points["wp"][1]
    wrong = tampered(right.reveal())
    async with rows.unchanged(without=["execution"]):
        answers = [
            await refused(call, "invalid_token")
            for call in (
                wait.signal("ready", waitpoint_id=uuid4()),
                wait.signal("ready", waitpoint_id=uuid4(), waitpoint_token=wrong),
                wait.signal("ready", waitpoint_token=wrong),
                wait.signal("ready", waitpoint_token=other.points["wp"][1]),
                wait.signal("ready", waitpoint_id=other.points["wp"][0], waitpoint_token=other.points["wp"][1]),
                over.signal("ready", waitpoint_token=wrong),
                over.signal("ready", waitpoint_token=tampered(over.points["wp"][1].reveal())),
            )
        ]
    assert len({(type(answer), answer.code, str(answer)) for answer in answers}) == 1
    await engine._services[Signals].drain()
    for stamped in (wait, over):
        assert (await rows.execution(stamped.execution_id))["last_hmac_validation_failed_at"] is not None
    assert (await rows.execution(other.execution_id))["last_hmac_validation_failed_at"] is None
    await refused(wait.signal("ready", waitpoint_token=""), "missing_token")


# 9


async def test_9_every_key_verifies_until_its_grace_period_ends(engine: Engine, given: Given, clock: Clock) -> None:
    first = await suspended(engine, await given.claimed(), READY)
    second = await suspended(engine, await given.claimed(), READY)
    await rotate(engine, "b", B, grace_ms=10_000)
    await rotate(engine, "c", C, grace_ms=HOUR_MS)
    assert await first.effect("other") == (APPENDED, "no_op")
    assert await second.effect("ready") == (SATISFIED, SATISFIED)
    await clock.advance(seconds=11)
    await refused(first.signal("ready"), "token_expired")
    digest = first.points["wp"][1].reveal().partition(":")[2]
    await refused(first.signal("ready", waitpoint_token=f"unknown:{digest}"), "invalid_token")
    assert (await engine.resume_execution(execution_id=first.execution_id, trigger_type="operator")).public_state == (
        "resumable"
    )


@pytest.mark.parametrize(
    ("secret", "kid", "execution_id", "waitpoint_id", "token"),
    [
        (
            "ab" * 32,
            "k1",
            "{fp:7}:11111111-1111-4111-8111-111111111111",
            "22222222-2222-4222-8222-222222222222",
            "k1:9c61984969b7cf39e936a7504b69f19001cff0e5ad81e3780c166ef730684f62",
        ),
        (
            "00" * 32,
            "kid-b",
            "{fp:0}:00000000-0000-4000-8000-000000000001",
            "00000000-0000-4000-8000-000000000002",
            "kid-b:1446ab14e3f5b98600d1eb2acb687f015511928ec630cee6f9b14480ac4efd17",
        ),
    ],
)
async def test_9_tokens_match_the_test_vectors(
    engine: Engine, given: Given, secret: str, kid: str, execution_id: str, waitpoint_id: str, token: str
) -> None:
    await rotate(engine, kid, secret)
    handle = await given.claimed(execution_id=execution_id)
    wait = await suspended(engine, handle, READY, waitpoints=[fresh("wp", UUID(waitpoint_id))])
    assert wait.points["wp"][1].reveal() == token
