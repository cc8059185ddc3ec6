"""Submitting twice: by id, by key, within the key's window and after it, and in which order it is judged."""

from typing import Any

from engine.state import Creating, both_creates, claim, items, new, refused
from flowfabric.engine.engine import Engine
from flowfabric.engine.parts import parts_of
from flowfabric.model.execution import Created, Duplicate
from flowfabric.model.ids import ExecutionId, LaneId
from flowfabric.model.states import PublicState

DAY_MS = 86_400_000
FIRST = "{fp:7}:11111111-2222-3333-4444-555555555555"
SECOND = "{fp:7}:21111111-2222-3333-4444-555555555555"
ELSEWHERE = "{fp:8}:31111111-2222-3333-4444-555555555555"


@both_creates
async def test_an_id_twice_is_a_duplicate_that_writes_and_compares_nothing(
    engine: Engine, create: Creating, rows: Any, clock: Any
) -> None:
    await create(engine, **new(execution_id=FIRST))
    await clock.advance(seconds=1)
    other = new(execution_id=FIRST, namespace="others", execution_kind="other", priority=9, input_payload=b"other")
    other |= {
        "lane_id": "another lane",
        "idempotency_key": "k",
        "policy": {"max_reclaim_count": 1},
        "tags": {"a.b": "c"},
    }
    async with rows.unchanged():
        for arguments in (new(execution_id=FIRST), other):
            assert await create(engine, **arguments) == Duplicate(execution_id=FIRST)  # type: ignore[arg-type]


@both_creates
async def test_an_id_stays_taken_after_the_execution_ended(engine: Engine, create: Creating, rows: Any) -> None:
    await create(engine, **new(execution_id=FIRST))
    await engine.cancel_execution(execution_id=FIRST, reason="no")
    async with rows.unchanged():
        assert isinstance(await create(engine, **new(execution_id=FIRST)), Duplicate)


@both_creates
async def test_one_uuid_on_two_partitions_is_two_executions(engine: Engine, create: Creating) -> None:
    made = [await create(engine, **new(execution_id=f"{{fp:{at}}}:{FIRST[-36:]}")) for at in (1, 2)]
    assert [type(one) for one in made] == [Created, Created]


@both_creates
async def test_a_key_twice_names_the_first_execution(engine: Engine, create: Creating, rows: Any) -> None:
    first = await create(engine, **new(idempotency_key="k"))
    async with rows.unchanged():
        again = await create(engine, **new(idempotency_key="k", priority=9, tags={"a.b": "c"}))
        assert again == Duplicate(execution_id=first.execution_id)


@both_creates
async def test_a_key_names_its_execution_to_a_caller_with_another_id(
    engine: Engine, create: Creating, rows: Any
) -> None:
    await create(engine, **new(execution_id=FIRST, idempotency_key="k"))
    async with rows.unchanged():
        again = await create(engine, **new(execution_id=SECOND, idempotency_key="k"))
        assert again == Duplicate(execution_id=FIRST)  # type: ignore[arg-type]


@both_creates
async def test_the_key_is_judged_before_the_id(engine: Engine, create: Creating, rows: Any) -> None:
    await create(engine, **new(execution_id=FIRST, idempotency_key="k"))
    await create(engine, **new(execution_id=SECOND))
    async with rows.unchanged():
        again = await create(engine, **new(execution_id=SECOND, idempotency_key="k"))
        assert again == Duplicate(execution_id=FIRST)  # type: ignore[arg-type]


@both_creates
async def test_a_new_key_with_a_known_id_is_a_duplicate_and_the_key_stays_free(
    engine: Engine, create: Creating, rows: Any
) -> None:
    await create(engine, **new(execution_id=FIRST))
    async with rows.unchanged():
        again = await create(engine, **new(execution_id=FIRST, idempotency_key="k"))
        assert again == Duplicate(execution_id=FIRST)  # type: ignore[arg-type]
    assert isinstance(await create(engine, **new(execution_id=SECOND, idempotency_key="k")), Created)


@both_creates
async def test_a_key_belongs_to_its_namespace_and_lane(engine: Engine, create: Creating, rows: Any) -> None:
    await create(engine, **new(execution_id=FIRST, idempotency_key="k"))
    for arguments in (
        new(execution_id=SECOND, idempotency_key="k", namespace="others"),
        new(idempotency_key="k", lane_id="another lane"),
        new(idempotency_key="K"),
    ):
        assert isinstance(await create(engine, **arguments), Created), arguments
    async with rows.unchanged():
        for arguments in (new(idempotency_key="k"), new(execution_id=ELSEWHERE, idempotency_key="k")):
            assert await create(engine, **arguments) == Duplicate(execution_id=FIRST)  # type: ignore[arg-type]


@both_creates
async def test_lanes_of_one_partition_do_not_share_keys(engine: Engine, create: Creating) -> None:
    first = await create(engine, **new(idempotency_key="k"))
    partition = first.execution_id[:-36]
    partition_of = parts_of(engine).lifecycle.store.rules.partitions.of_lane
    here = partition_of(LaneId("default"))
    twin = next(lane for at in range(100_000) if partition_of(lane := LaneId(f"lane-{at}")) == here)
    second = await create(engine, **new(idempotency_key="k", lane_id=twin, input_payload=b"other"))
    assert isinstance(second, Created)
    assert second.execution_id[:-36] == partition


@both_creates
async def test_an_empty_key_is_no_key(engine: Engine, create: Creating, rows: Any) -> None:
    made = [await create(engine, **new(idempotency_key="")) for _ in range(2)]
    assert [type(one) for one in made] == [Created, Created]
    assert await rows.of("idempotency_key") == []


@both_creates
async def test_a_key_counts_for_a_day_and_not_a_moment_longer(
    engine: Engine, create: Creating, rows: Any, clock: Any
) -> None:
    now = await clock.now()
    first = await create(engine, **new(idempotency_key="k"))
    assert (await rows.of("idempotency_key"))[0]["expires_at"] == now + DAY_MS
    await clock.set(now + DAY_MS - 1)
    assert await create(engine, **new(idempotency_key="k")) == Duplicate(execution_id=first.execution_id)
    await clock.set(now + DAY_MS)
    second = await create(engine, **new(idempotency_key="k"))
    assert isinstance(second, Created)
    assert second.execution_id != first.execution_id
    (entry,) = await rows.of("idempotency_key")
    assert (str(entry["subject_id"]), entry["expires_at"]) == (second.execution_id[-36:], now + 2 * DAY_MS)
    assert await create(engine, **new(idempotency_key="k")) == Duplicate(execution_id=second.execution_id)


@both_creates
async def test_a_policy_decides_how_long_its_key_counts(engine: Engine, create: Creating, clock: Any) -> None:
    for key, given in (("minted", {}), ("given", {"execution_id": FIRST})):
        arguments = new(idempotency_key=key, policy={"dedup_window_ms": 1000}, **given)
        now = await clock.now()
        assert isinstance(await create(engine, **arguments), Created)
        await clock.set(now + 999)
        assert isinstance(await create(engine, **{**arguments, "execution_id": None, **given}), Duplicate)
        await clock.set(now + 1000)
        arguments["execution_id"] = SECOND if given else None
        assert isinstance(await create(engine, **arguments), Created)


@both_creates
async def test_a_window_of_nothing_records_no_key(engine: Engine, create: Creating, rows: Any) -> None:
    for window in (0, -1, -(2**53) + 1):
        arguments = new(idempotency_key="k", policy={"dedup_window_ms": window})
        made = [await create(engine, **arguments) for _ in range(2)]
        assert [type(one) for one in made] == [Created, Created]
    assert await rows.of("idempotency_key") == []


@both_creates
async def test_a_window_of_nothing_still_meets_a_key_recorded_before(
    engine: Engine, create: Creating, rows: Any
) -> None:
    await create(engine, **new(idempotency_key="k"))
    async with rows.unchanged():
        again = create(engine, **new(idempotency_key="k", policy={"dedup_window_ms": 0}))
        await refused(again, "idempotency_conflict", "policy")


@both_creates
async def test_a_key_outlives_the_end_and_the_retention_of_its_execution(
    engine: Engine, create: Creating, clock: Any, rows: Any
) -> None:
    policy = {"stream_policy": {"retention_ttl_ms": 1000}}
    first = await create(engine, **new(idempotency_key="k", policy=policy))
    (claimed,) = await claim(engine)
    await engine.complete(claimed.handle)
    again = new(idempotency_key="k", policy=policy)
    assert await create(engine, **again) == Duplicate(execution_id=first.execution_id)
    await clock.advance(seconds=2)
    assert await parts_of(engine).retention.trim() == 1
    assert await rows.of("execution") == []
    assert await create(engine, **again) == Duplicate(execution_id=first.execution_id)
    await refused(create(engine, **{**again, "input_payload": b"other"}), "idempotency_conflict", "payload")


@both_creates
async def test_duplicates_are_answered_before_tags_and_policy_are_looked_at(
    engine: Engine, create: Creating, rows: Any
) -> None:
    await create(engine, **new(execution_id=FIRST, idempotency_key="given"))
    minted = await create(engine, **new(idempotency_key="minted"))
    wrong_tags: list[dict[str, Any]] = [{"tags": {"NOT A KEY": "x"}}, {"tags": {"app.x": "\0"}}]
    wrong_policies: list[dict[str, Any]] = [
        {"policy": "{"},
        {"policy": {"routing_requirements": {"required_capabilities": ["a,b"]}}},
    ]
    async with rows.unchanged():
        for fault in wrong_tags + wrong_policies:
            by_id = await create(engine, **new(execution_id=FIRST, **fault))
            assert by_id == Duplicate(execution_id=FIRST)  # type: ignore[arg-type]
        for fault in wrong_tags:
            by_key = await create(engine, **new(execution_id=SECOND, idempotency_key="given", **fault))
            assert by_key == Duplicate(execution_id=FIRST)  # type: ignore[arg-type]
            by_minted_key = await create(engine, **new(idempotency_key="minted", **fault))
            assert by_minted_key == Duplicate(execution_id=minted.execution_id)
        # No stored policy equals one that is not valid.
        for fault in wrong_policies:
            by_key_too = create(engine, **new(idempotency_key="minted", **fault))
            await refused(by_key_too, "idempotency_conflict", "policy")


@both_creates
async def test_the_priority_is_judged_before_duplicates(engine: Engine, create: Creating) -> None:
    await create(engine, **new(execution_id=FIRST, idempotency_key="k"))
    for arguments in (new(execution_id=FIRST, priority="high"), new(idempotency_key="k", priority=None)):
        await refused(create(engine, **arguments), "invalid_input", "priority")


async def test_an_expired_key_with_wrong_tags_is_refused(engine: Engine, clock: Any, rows: Any) -> None:
    await engine.create_execution(**new(idempotency_key="k"))
    await clock.advance(ms=DAY_MS)
    async with rows.unchanged():
        await refused(engine.create_execution(**new(idempotency_key="k", tags={"X": ""})), "invalid_tag_key")


async def test_items_of_one_call_that_name_one_execution_are_judged_in_their_order(engine: Engine) -> None:
    verdicts = await engine.create_many(
        items(
            new(idempotency_key="k"),
            new(execution_id=FIRST),
            new(idempotency_key="k"),
            new(execution_id=FIRST),
            new(idempotency_key="k"),
        )
    )
    assert [type(one) for one in verdicts] == [Created, Created, Duplicate, Duplicate, Duplicate]
    assert {one.execution_id for one in verdicts[2::2]} == {verdicts[0].execution_id}  # type: ignore[union-attr]


async def test_the_first_of_two_items_with_one_key_wins_whoever_gave_the_ids(engine: Engine) -> None:
    for at in range(20):
        one, other = (f"{{fp:86}}:{which}1111111-2222-3333-4444-{at:012}" for which in "ab")
        for pair in ((one, None), (None, other), (other, one)):
            arguments = [new(execution_id=given, idempotency_key=f"{at} {pair}") for given in pair]
            first, second = await engine.create_many(items(*arguments))
            assert isinstance(first, Created), pair
            assert second == Duplicate(execution_id=first.execution_id)


async def test_the_first_of_several_items_with_one_id_wins_whatever_their_keys(engine: Engine, rows: Any) -> None:
    for at in range(20):
        for which, keys in (("a", (f"a{at}", None)), ("b", (None, f"b{at}")), ("c", (f"c{at}", f"d{at}"))):
            named = f"{{fp:86}}:{which}1111111-2222-3333-4444-{at:012}"
            verdicts = await engine.create_many(items(*(new(execution_id=named, idempotency_key=key) for key in keys)))
            assert [type(verdict) for verdict in verdicts] == [Created, Duplicate], keys
            kept = {entry["key"] for entry in await rows.of("idempotency_key", subject_id=named[-36:])}
            assert kept == {key for key in keys[:1] if key}


async def test_items_of_one_call_that_share_an_id_or_a_key_are_answered_in_their_order(engine: Engine) -> None:
    here = (await engine.create_execution(**new())).execution_id[:-36]
    given = ExecutionId(here + FIRST[-36:])
    # The third shares nothing with the first, and must not overtake the second for that.
    verdicts = await engine.create_many(
        items(new(execution_id=given), new(execution_id=given, idempotency_key="k"), new(idempotency_key="k"))
    )
    created = Created(execution_id=given, public_state=PublicState.WAITING)
    assert verdicts[:2] == [created, Duplicate(execution_id=given)]
    assert isinstance(verdicts[2], Created)
