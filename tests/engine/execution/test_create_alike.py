"""Batches of similar submissions are stored as if each had been submitted alone."""

import asyncio
import itertools
from typing import Any

import asyncpg
import pytest

from engine.state import all_cases, claim, items, new, refused
from fixtures import Engines, Eventually, Rows, uuid_of
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
    "payload as a bytearray": {"input_payload": bytearray(b"other")},
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


NAMES = ("namespace", "lane_id", "execution_kind")


async def stored(rows: Rows) -> dict[str, list[Any]]:
    """What the tables hold of each execution, without the columns that no two executions share."""
    found: dict[str, list[Any]] = {}
    for nth, table in enumerate(("execution", "execution_input", "ready", "timer", "execution_tag")):
        for row in sorted(await rows.of(table), key=str):
            of_execution = found.setdefault(str(row["execution_id"]), [[] for _ in range(5)])
            of_execution[nth].append({name: row[name] for name in row.keys() - OF_ITS_OWN})
    return found


@pytest.mark.usefixtures("clock")
async def test_an_item_that_differs_in_one_field_is_stored_as_if_it_came_alone(engine: Engine, rows: Rows) -> None:
    batches: dict[str, list[str]] = {}
    alone: dict[str, list[str]] = {}
    for (name, fields), place in itertools.product(DIFFERENT.items(), range(3)):
        case = f"{name} at {place}"
        # Names that no other case uses, so that the first batch registers them and the second finds them known.
        plain = new(lane_id=case)
        different = plain | {field: f"{value} {place}" if field in NAMES else value for field, value in fields.items()}
        keyed = "idempotency_key" in different
        for nth in range(2):
            batch = [plain, plain, plain]
            batch[place] = different | ({"idempotency_key": f"{nth}"} if keyed else {})
            made = await engine.create_many(items(*batch))
            batches[case] = [verdict.execution_id for verdict in made if isinstance(verdict, Created)]
            assert len(batches[case]) == 3, case
        alone[case] = [(await engine.create_execution(**each)).execution_id for each in (plain, different)]
    found = await stored(rows)
    with all_cases() as check:
        for case, made_ids in batches.items():
            with check(case):
                plain_row, different_row = [found[uuid_of(execution_id)] for execution_id in alone[case]]
                for at, execution_id in enumerate(made_ids):
                    expected = different_row if case.endswith(f"at {at}") else plain_row
                    assert found[uuid_of(execution_id)] == expected


async def test_a_delay_in_a_shared_policy_delays_every_item(engine: Engine) -> None:
    policy = ExecutionPolicy(delay_until=FAR)
    for _ in range(2):
        made = await engine.create_many(items(*[new(policy=policy)] * 3))
        assert [getattr(verdict, "public_state", None) for verdict in made] == [PublicState.DELAYED] * 3


async def test_a_batch_with_lower_places_than_claimed_ones_is_claimed_in_order(
    engine: Engine, connection: asyncpg.Connection
) -> None:
    await engine.create_many(items(*[new(priority=5)] * 3))
    assert len(await claim(engine)) == 3
    (later,) = await engine.create_many(items(new(priority=5)))
    # As if the places of the next batch had been drawn before those of the claimed executions.
    await connection.execute("select setval('execution_sequence', 1)")
    low, high = await engine.create_many(items(new(), new(priority=5)))
    order = [(await claim(engine, limit=1))[0].execution_id for _ in range(3)]
    assert order == [one.execution_id for one in (high, later, low)]  # type: ignore[union-attr]


async def test_an_item_that_the_store_rejects_does_not_fail_the_others(
    engine: Engine, connection: asyncpg.Connection
) -> None:
    await engine.create_many(items(new()))
    await connection.execute("alter table execution add constraint no_poison check (input_payload <> 'poison')")
    verdicts = await engine.create_many(items(*[new()] * 50, new(input_payload=b"poison"), *[new()] * 49))
    assert [type(verdict) for verdict in verdicts[:50] + verdicts[51:]] == [Created] * 99
    assert isinstance(verdicts[50], EngineError)


@pytest.mark.usefixtures("patient_with_locks")
async def test_a_batch_whose_connection_is_lost_reports_an_unknown_outcome_and_is_not_retried(
    engines: Engines, connection: asyncpg.Connection, rows: Rows, eventually: Eventually
) -> None:
    engine = await engines(submit_patience_ms=0)
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


async def test_a_value_that_is_no_item_is_refused_in_its_place(engine: Engine) -> None:
    wrong_items: list[Any] = [None, {}, 5, "item"]
    with all_cases() as case:
        for wrong, place in itertools.product(wrong_items, range(3)):
            with case(f"{wrong!r} at {place}"):
                given: list[Any] = items(new(), new())
                given.insert(place, wrong)
                verdicts = await engine.create_many(given)
                assert [type(verdict) for verdict in verdicts if not isinstance(verdict, EngineError)] == [Created] * 2
                assert getattr(verdicts[place], "code", None) == "invalid_input"
                runs = [(one.handle, b"") for one in await claim(engine)]
                ended = await engine.complete_many([*runs[:1], wrong, *runs[1:]])
                assert [getattr(one, "code", None) for one in ended] == [None, "invalid_input", None]


async def test_a_value_that_is_no_list_is_refused(engine: Engine, rows: Rows) -> None:
    wrong_lists: list[Any] = [5, None, "items", {}]
    async with rows.unchanged():
        with all_cases() as case:
            for wrong in wrong_lists:
                with case(repr(wrong)):
                    await refused(engine.create_many(wrong), "invalid_input")
                    await refused(engine.complete_many(wrong), "invalid_input")
                    await refused(engine.renew_many(wrong), "invalid_input")
                    await refused(claim(engine, lanes=wrong), "invalid_input")
