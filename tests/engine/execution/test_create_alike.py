"""Creating many at once: what may go in one piece must be stored as if each had come alone."""

import asyncio
from typing import Any

import asyncpg
import pytest

from engine.state import claim, items, new
from flowfabric.engine.engine import Engine
from flowfabric.model.errors import EngineError, TransportError
from flowfabric.model.execution import Created
from flowfabric.model.policy import ExecutionPolicy, RoutingRequirements, TimeoutPolicy
from flowfabric.model.states import PublicState

FAR = 4_102_444_800_000
OF_ITS_OWN = {"execution_id", "place", "created_at", "last_transition_at", "last_mutation_at"}
DIFFERENT: dict[str, dict[str, Any]] = {
    "namespace": {"namespace": "others"},
    "lane": {"lane_id": "another"},
    "kind": {"execution_kind": "other"},
    "payload": {"input_payload": b"other"},
    "large payload": {"input_payload": b"other" * 100},
    "payload that is no bytes": {"input_payload": bytearray(b"other")},
    "priority": {"priority": 7},
    "priority too low": {"priority": -1},
    "priority too high": {"priority": 9_001},
    "creator": {"creator_identity": "somebody"},
    "encoding": {"payload_encoding": "json"},
    "tags": {"tags": {"ff.instance_id": "i-1", "team.name": "blue"}},
    "policy": {"policy": ExecutionPolicy(max_replay_count=1)},
    "policy as a mapping": {"policy": {"max_replay_count": 1}},
    "policy with a delay": {"policy": ExecutionPolicy(delay_until=FAR)},
    "policy with a deadline": {"policy": ExecutionPolicy(timeout_policy=TimeoutPolicy(execution_deadline_ms=FAR))},
    "policy with capabilities": {
        "policy": ExecutionPolicy(routing_requirements=RoutingRequirements(required_capabilities=("gpu",)))
    },
    "delay": {"delay_until": FAR},
    "delay from now": {"delay_ms": FAR},
    "deadline": {"execution_deadline_at": FAR},
    "key": {"idempotency_key": "k"},
}


async def stored(rows: Any, execution_id: str) -> list[Any]:
    """What the tables hold of an execution, but for what no two share."""
    found: list[Any] = []
    for table in ("execution", "execution_input", "ready", "timer", "execution_tag"):
        of_table = sorted(await rows.of(table, execution_id=execution_id[-36:]), key=str)
        found.append([{name: row[name] for name in row.keys() - OF_ITS_OWN} for row in of_table])
    return found


@pytest.mark.parametrize("different", DIFFERENT.values(), ids=DIFFERENT.keys())
@pytest.mark.parametrize("place", [0, 1, 2])
async def test_an_item_that_differs_in_one_field_is_stored_as_if_it_came_alone(
    engine: Engine, rows: Any, clock: Any, place: int, different: dict[str, Any]
) -> None:
    assert await clock.now() == await engine.server_time_ms()
    # Numbers of names are given once; the second round meets what is known.
    for nth in range(2):
        arguments = [new(), new(), new()]
        arguments[place] |= different | ({"idempotency_key": f"k{nth}"} if "idempotency_key" in different else {})
        made = await engine.create_many(items(*arguments))
        ids = [verdict.execution_id for verdict in made if isinstance(verdict, Created)]
        assert len(ids) == 3
    alone = [await engine.create_execution(**each) for each in (new(), new() | different)]
    plain, other = [await stored(rows, one.execution_id) for one in alone]
    for at, execution_id in enumerate(ids):
        assert await stored(rows, execution_id) == (other if at == place else plain)


async def test_a_delay_in_a_policy_that_all_share_delays_all(engine: Engine) -> None:
    policy = ExecutionPolicy(delay_until=FAR)
    for _ in range(2):
        made = await engine.create_many(items(*[new(policy=policy)] * 3))
        assert [getattr(verdict, "public_state", None) for verdict in made] == [PublicState.DELAYED] * 3


async def test_a_late_batch_is_claimed_in_its_place(engine: Engine, connection: asyncpg.Connection) -> None:
    await engine.create_many(items(*[new(priority=5)] * 3))
    assert len(await claim(engine)) == 3
    (later,) = await engine.create_many(items(new(priority=5)))
    # A batch whose places were drawn before those of what has been claimed meanwhile.
    await connection.execute("select setval('execution_sequence', 1)")
    low, high = await engine.create_many(items(new(), new(priority=5)))
    order = [(await claim(engine, limit=1))[0].execution_id for _ in range(3)]
    assert order == [one.execution_id for one in (high, later, low)]  # type: ignore[union-attr]


async def test_an_item_the_store_refuses_does_not_fail_those_it_came_with(
    engine: Engine, connection: asyncpg.Connection
) -> None:
    await engine.create_many(items(new()))
    await connection.execute("alter table execution add constraint no_poison check (input_payload <> 'poison')")
    verdicts = await engine.create_many(items(*[new()] * 50, new(input_payload=b"poison"), *[new()] * 49))
    assert [type(verdict) for verdict in verdicts[:50] + verdicts[51:]] == [Created] * 99
    assert isinstance(verdicts[50], EngineError)


@pytest.mark.usefixtures("patient_with_locks")
async def test_a_batch_whose_connection_is_lost_is_told_so_and_not_tried_again(
    engines: Any, connection: asyncpg.Connection, rows: Any, eventually: Any
) -> None:
    engine: Engine = await engines(submit_patience_ms=0)
    await engine.create_many(items(new()))
    async with connection.transaction():
        await connection.execute("lock table ready in access exclusive mode")
        creating = asyncio.create_task(engine.create_many(items(*[new()] * 3)))

        async def cut() -> bool:
            cuts = await connection.fetch(
                "select pg_terminate_backend(pid) from pg_stat_activity"
                " where datname = current_database() and wait_event_type = 'Lock'"
            )
            return bool(cuts)

        await eventually(cut)
        with pytest.raises(TransportError) as caught:
            await creating
    assert (caught.value.code, caught.value.outcome_unknown) == ("transport", True)
    assert len(await rows.of("execution")) == 1


@pytest.mark.parametrize("wrong", [None, {}, 5, "item"], ids=repr)
async def test_what_is_no_item_is_refused_among_those_that_are(engine: Engine, wrong: Any) -> None:
    for place in range(3):
        given: list[Any] = items(new(), new())
        given.insert(place, wrong)
        verdicts = await engine.create_many(given)
        assert [type(verdict) for verdict in verdicts if not isinstance(verdict, EngineError)] == [Created] * 2
        refusal = verdicts[place]
        assert isinstance(refusal, EngineError)
        assert refusal.code == "invalid_input"
        runs = [(one.handle, b"") for one in await claim(engine)]
        ended = await engine.complete_many([*runs[:1], wrong, *runs[1:]])
        assert [getattr(one, "code", None) for one in ended] == [None, "invalid_input", None]


@pytest.mark.parametrize("wrong", [5, None, "items", {}], ids=repr)
async def test_what_is_no_list_is_refused(engine: Engine, rows: Any, wrong: Any) -> None:
    async with rows.unchanged():
        for call in (
            lambda: engine.create_many(wrong),
            lambda: engine.complete_many(wrong),
            lambda: engine.renew_many(wrong),
            lambda: claim(engine, lanes=wrong),
        ):
            with pytest.raises(EngineError) as refusal:
                await call()
            assert refusal.value.code == "invalid_input"
