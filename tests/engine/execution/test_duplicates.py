"""Duplicate submissions: found by id or by idempotency key within its window, and in which order this is checked."""

from typing import Any, NamedTuple

from engine.state import CREATES, claim, items, new, refused
from fixtures import Clock, Rows, uuid_of
from flowfabric.engine.engine import Engine
from flowfabric.engine.parts import parts_of
from flowfabric.model.execution import Created, Duplicate
from flowfabric.model.ids import ExecutionId, LaneId
from flowfabric.model.states import PublicState

DAY_MS = 86_400_000
FIRST = "{fp:7}:11111111-2222-3333-4444-555555555555"


class Names(NamedTuple):
    """The lane, the ids and the start of the keys that one form of create uses on a database that both share."""

    lane: str
    first: ExecutionId
    second: ExecutionId
    elsewhere: ExecutionId

    def new(self, **overrides: Any) -> dict[str, Any]:
        """The arguments of a create on this lane."""
        return new(**{"lane_id": self.lane, **overrides})


def names_of(lane: str) -> Names:
    """The names that a form of create uses."""
    nth = list(CREATES).index(lane)
    given = [
        f"{{fp:{partition}}}:{at}{nth}111111-2222-3333-4444-555555555555" for at, partition in enumerate((7, 7, 8))
    ]
    return Names(lane, *map(ExecutionId, given))


EACH = [(create, names_of(lane)) for lane, create in CREATES.items()]


async def test_a_create_with_an_id_in_use_is_a_duplicate_that_compares_and_writes_nothing(
    engine: Engine, rows: Rows, clock: Clock
) -> None:
    for create, names in EACH:
        await create(engine, **names.new(execution_id=names.first))
        await clock.advance(seconds=1)
        other = new(execution_id=names.first, namespace="others", execution_kind="other", priority=9)
        other |= {"lane_id": "another lane", "idempotency_key": "k", "policy": {"max_reclaim_count": 1}}
        other |= {"tags": {"a.b": "c"}, "input_payload": b"other"}
        async with rows.unchanged():
            for arguments in (names.new(execution_id=names.first), other):
                assert await create(engine, **arguments) == Duplicate(execution_id=names.first)
        await engine.cancel_execution(execution_id=names.first, reason="no")
        async with rows.unchanged():
            assert isinstance(await create(engine, **names.new(execution_id=names.first)), Duplicate)
        # The same UUID in another partition is another execution.
        moved = names.new(execution_id=names.first.replace("fp:7", "fp:8"))
        assert isinstance(await create(engine, **moved), Created)


async def test_a_duplicate_is_found_by_its_key_before_its_id(engine: Engine, rows: Rows) -> None:
    for create, names in EACH:
        minted = await create(engine, **names.new(idempotency_key="minted"))
        await create(engine, **names.new(execution_id=names.first, idempotency_key="k"))
        await create(engine, **names.new(execution_id=names.second))
        async with rows.unchanged():
            for arguments, found in (
                (names.new(idempotency_key="minted", priority=9, tags={"a.b": "c"}), minted.execution_id),
                (names.new(execution_id=names.elsewhere, idempotency_key="k"), names.first),
                (names.new(execution_id=names.second, idempotency_key="k"), names.first),
                (names.new(execution_id=names.second, idempotency_key="free"), names.second),
            ):
                assert await create(engine, **arguments) == Duplicate(execution_id=found), arguments
        # A duplicate by id does not use its key.
        assert isinstance(
            await create(engine, **names.new(execution_id=names.elsewhere, idempotency_key="free")), Created
        )


async def test_a_key_belongs_to_its_namespace_and_lane(engine: Engine, rows: Rows) -> None:
    partition_of = parts_of(engine).lifecycle.store.rules.partitions.of_lane
    for create, names in EACH:
        await create(engine, **names.new(execution_id=names.first, idempotency_key="k"))
        here = partition_of(LaneId(names.lane))
        of_partition = (lane for at in range(100_000) if partition_of(lane := LaneId(f"{names.lane}{at}")) == here)
        for arguments in (
            names.new(execution_id=names.second, idempotency_key="k", namespace="others"),
            names.new(idempotency_key="k", lane_id=f"another {names.lane}"),
            names.new(idempotency_key="k", lane_id=next(of_partition), input_payload=b"other"),
            names.new(idempotency_key="K"),
        ):
            assert isinstance(await create(engine, **arguments), Created), arguments
        async with rows.unchanged():
            for given in (None, names.elsewhere):
                again = await create(engine, **names.new(execution_id=given, idempotency_key="k"))
                assert again == Duplicate(execution_id=names.first)


async def test_an_empty_key_or_a_window_of_zero_records_no_key(engine: Engine, rows: Rows) -> None:
    for create, names in EACH:
        for arguments in (
            names.new(idempotency_key=""),
            *(names.new(idempotency_key="k", policy={"dedup_window_ms": window}) for window in (0, -1, -(2**53) + 1)),
        ):
            made = [await create(engine, **arguments) for _ in range(2)]
            assert [type(one) for one in made] == [Created, Created]
    assert await rows.of("idempotency_key") == []
    for create, names in EACH:
        await create(engine, **names.new(idempotency_key="k"))
        async with rows.unchanged():
            again = create(engine, **names.new(idempotency_key="k", policy={"dedup_window_ms": 0}))
            await refused(again, "idempotency_conflict", "policy")


async def test_a_key_is_valid_for_a_day_or_for_the_window_of_its_policy(
    engine: Engine, rows: Rows, clock: Clock
) -> None:
    for create, names in EACH:
        for window, policy in ((DAY_MS, None), (1000, {"dedup_window_ms": 1000})):
            key = f"{names.lane} {window}"
            keyed = names.new(idempotency_key=key, policy=policy)
            now = await clock.now()
            first = await create(engine, **keyed)
            await clock.set(now + window - 1)
            assert await create(engine, **keyed) == Duplicate(execution_id=first.execution_id)
            await clock.set(now + window)
            second = await create(engine, **keyed)
            assert isinstance(second, Created)
            assert second.execution_id != first.execution_id
            (entry,) = await rows.of("idempotency_key", key=key)
            assert (str(entry["subject_id"]), entry["expires_at"]) == (uuid_of(second.execution_id), now + 2 * window)
            assert await create(engine, **keyed) == Duplicate(execution_id=second.execution_id)
        # With an id of the caller's own.
        own = names.new(idempotency_key="own", policy={"dedup_window_ms": 1000})
        now = await clock.now()
        assert isinstance(await create(engine, **own, execution_id=names.first), Created)
        await clock.set(now + 999)
        assert isinstance(await create(engine, **own, execution_id=names.second), Duplicate)
        await clock.set(now + 1000)
        assert isinstance(await create(engine, **own, execution_id=names.second), Created)


async def test_a_key_outlives_the_retention_of_its_execution(engine: Engine, clock: Clock, rows: Rows) -> None:
    policy = {"stream_policy": {"retention_ttl_ms": 1000}}
    for create, names in EACH:
        again = names.new(idempotency_key="k", policy=policy)
        first = await create(engine, **again)
        (claimed,) = await claim(engine, names.lane)
        await engine.complete(claimed.handle)
        assert await create(engine, **again) == Duplicate(execution_id=first.execution_id)
        await clock.advance(seconds=2)
        assert (await parts_of(engine).retention.trim_batch()).done == 1
        assert await rows.of("execution") == []
        assert await create(engine, **again) == Duplicate(execution_id=first.execution_id)
        await refused(create(engine, **{**again, "input_payload": b"other"}), "idempotency_conflict", "payload")


async def test_duplicates_are_found_after_the_priority_is_checked_and_before_tags_and_policy(
    engine: Engine, rows: Rows
) -> None:
    wrong_tags: list[dict[str, Any]] = [{"tags": {"NOT A KEY": "x"}}, {"tags": {"app.x": "\0"}}]
    wrong_policies: list[dict[str, Any]] = [
        {"policy": "{"},
        {"policy": {"routing_requirements": {"required_capabilities": ["a,b"]}}},
    ]
    for create, names in EACH:
        await create(engine, **names.new(execution_id=names.first, idempotency_key="given"))
        minted = await create(engine, **names.new(idempotency_key="minted"))
        async with rows.unchanged():
            for fault in wrong_tags + wrong_policies:
                by_id = await create(engine, **names.new(execution_id=names.first, **fault))
                assert by_id == Duplicate(execution_id=names.first)
            for fault in wrong_tags:
                by_key = await create(engine, **names.new(execution_id=names.second, idempotency_key="given", **fault))
                assert by_key == Duplicate(execution_id=names.first)
                by_minted_key = await create(engine, **names.new(idempotency_key="minted", **fault))
                assert by_minted_key == Duplicate(execution_id=minted.execution_id)
            # An invalid policy equals no stored one.
            for fault in wrong_policies:
                by_key_too = create(engine, **names.new(idempotency_key="minted", **fault))
                await refused(by_key_too, "idempotency_conflict", "policy")
            for named in (
                {"execution_id": names.first, "priority": "high"},
                {"idempotency_key": "k", "priority": None},
            ):
                await refused(create(engine, **names.new(**named)), "invalid_input", "priority")


async def test_an_expired_key_with_wrong_tags_is_refused(engine: Engine, clock: Clock, rows: Rows) -> None:
    await engine.create_execution(**new(idempotency_key="k"))
    await clock.advance(ms=DAY_MS)
    async with rows.unchanged():
        await refused(engine.create_execution(**new(idempotency_key="k", tags={"X": ""})), "invalid_tag_key")


async def test_duplicates_within_one_call_are_found_in_the_order_of_the_items(engine: Engine) -> None:
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


async def test_the_first_of_two_items_with_one_key_wins_with_or_without_own_ids(engine: Engine) -> None:
    for at in range(3):
        one, other = (f"{{fp:86}}:{which}1111111-2222-3333-4444-{at:012}" for which in "ab")
        for pair in ((one, None), (None, other), (other, one)):
            arguments = [new(execution_id=given, idempotency_key=f"{at} {pair}") for given in pair]
            first, second = await engine.create_many(items(*arguments))
            assert isinstance(first, Created), pair
            assert second == Duplicate(execution_id=first.execution_id)


async def test_the_first_of_two_items_with_one_id_wins_whatever_their_keys(engine: Engine, rows: Rows) -> None:
    for at in range(3):
        for which, keys in (("a", (f"a{at}", None)), ("b", (None, f"b{at}")), ("c", (f"c{at}", f"d{at}"))):
            named = f"{{fp:86}}:{which}1111111-2222-3333-4444-{at:012}"
            verdicts = await engine.create_many(items(*(new(execution_id=named, idempotency_key=key) for key in keys)))
            assert [type(verdict) for verdict in verdicts] == [Created, Duplicate], keys
            kept = {entry["key"] for entry in await rows.of("idempotency_key", subject_id=uuid_of(named))}
            assert kept == {key for key in keys[:1] if key}


async def test_an_item_does_not_overtake_one_it_shares_a_key_with(engine: Engine) -> None:
    here = (await engine.create_execution(**new())).execution_id[:-36]
    given = ExecutionId(here + uuid_of(FIRST))
    # The third shares nothing with the first, and must not overtake the second for that.
    verdicts = await engine.create_many(
        items(new(execution_id=given), new(execution_id=given, idempotency_key="k"), new(idempotency_key="k"))
    )
    created = Created(execution_id=given, public_state=PublicState.WAITING)
    assert verdicts[:2] == [created, Duplicate(execution_id=given)]
    assert isinstance(verdicts[2], Created)
