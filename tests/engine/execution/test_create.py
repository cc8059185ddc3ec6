"""Creating an execution: what is stored and what is returned."""

from typing import Any
from uuid import UUID

from engine.state import CREATES, DELAYED, WAITING, claim, create_in_many, create_one, items, new, refused, vector
from fixtures import Clock, Engines, Rows, uuid_of
from flowfabric.engine.engine import Engine
from flowfabric.model.execution import Created
from flowfabric.model.policy import ExecutionPolicy, RetryPolicy
from flowfabric.model.states import PublicState

UNTOUCHED = """
    attempt claim claim_grant event_each execution_input execution_result execution_tag idempotency_key listed retained
    timer
"""
"""The tables that a plain create does not write to."""
SET_LATER = """
    lease_id attempt_id attempt_type worker_no claimed_at lease_expires_at flow_id started_at completed_at delay_until
    deadline_at blocking_detail attempt_timeout_at suspension_timeout_at granted_until progress_pct progress_message
    progress_updated_at failure_reason failure_category cancelled_by result_payload
"""


async def test_a_new_execution_waits_for_a_worker_and_nothing_else_is_written(
    engine: Engine, rows: Rows, clock: Clock
) -> None:
    now = await clock.now()
    for name, create in CREATES.items():
        made = await create(engine, **new(priority=5))
        assert isinstance(made, Created)
        assert made.public_state is PublicState.WAITING
        row = await rows.execution(made.execution_id)
        assert vector(row) == WAITING, name
        counts = ("lease_epoch", "attempt_count", "retry_count", "replay_count", "reclaim_count")
        assert {row[count] for count in counts} == {0}
        assert row["priority"] == 5
        assert {row[stamp] for stamp in ("last_transition_at", "last_mutation_at")} == {now}
        assert {column: row[column] for column in SET_LATER.split() if row[column] is not None} == {}
        assert (row["created_at"], row["execution_kind"], row["creator_identity"]) == (now, "job", "test")
        assert (row["payload_encoding"], row["policy"], row["has_tags"]) == (None, None, False)
        (entry,) = await rows.of("ready", execution_id=row["execution_id"])
        (queue,) = await rows.of("queue", queue_no=row["queue_no"])
        assert entry == {
            **{column: row[column] for column in ("place", "queue_no", "partition_key", "execution_id")},
            "route_no": queue["route_no"],
            "granted_until": None,
        }
    for table in UNTOUCHED.split():
        assert await rows.of(table) == [], table
    assert len(await rows.of("execution")) == len(await rows.of("ready")) == len(CREATES)


async def test_a_generated_id_is_a_version_7_uuid_on_the_partition_of_its_lane(engine: Engine) -> None:
    for create in CREATES.values():
        for lane, partition in (("default", 86), ("workers-a", 193), ("workers-b", 162)):
            made = await create(engine, **new(lane_id=lane))
            tag, _, uuid = made.execution_id.partition("}:")
            assert tag == f"{{fp:{partition}"
            assert UUID(uuid).version == 7


async def test_generated_ids_rise(engine: Engine) -> None:
    made = [(await engine.create_execution(**new())).execution_id for _ in range(10)]
    made += [one.execution_id for one in await engine.create_many(items(*[new()] * 10)) if isinstance(one, Created)]
    assert made == sorted(made)
    assert len(set(made)) == 20


async def test_a_callers_id_is_kept_whatever_its_partition_or_version(engine: Engine, rows: Rows) -> None:
    for nth, create in enumerate(CREATES.values()):
        given = f"{{fp:7}}:{nth}1111111-2222-3333-4444-555555555555"
        made = await create(engine, **new(execution_id=given))
        assert made == Created(execution_id=given, public_state=PublicState.WAITING)  # type: ignore[arg-type]
        assert (await rows.execution(made.execution_id))["partition_key"] == 7
        upper_case = f"{{fp:0}}:{nth}BCDEFAB-2222-3333-4444-555555555555"
        assert (await create(engine, **new(execution_id=upper_case))).execution_id == upper_case.lower()


async def test_priority_is_clamped(engine: Engine, rows: Rows) -> None:
    for create in CREATES.values():
        for given, stored in ((-5, 0), (0, 0), (9000, 9000), (9001, 9000), (2**40, 9000), (-(2**40), 0)):
            made = await create(engine, **new(priority=given))
            assert (await rows.execution(made.execution_id))["priority"] == stored, given


async def test_a_payload_is_kept_byte_for_byte(engine: Engine) -> None:
    for payload in (b"", b"\x00", bytes(range(256)) * 16, b"\xff\xfe not text \x00", b"x" * 5_000_000):
        made = [await create_one(engine, **new(input_payload=payload))]
        made += [await create_in_many(engine, **new(input_payload=memoryview(payload)))]
        claimed = await claim(engine)
        assert [one.execution_id for one in claimed] == [one.execution_id for one in made]
        assert [one.input_payload for one in claimed] == [payload, payload]


async def test_texts_are_kept_unchanged(engine: Engine, rows: Rows) -> None:
    strange = "ünïcode ✓ '\"\\ {},\t\n " + "x" * 100_000
    tags = {"app.note": strange, "app.empty": "", "a.b": "null"}
    texts = {"execution_kind": strange, "creator_identity": strange, "payload_encoding": strange}
    for create in CREATES.values():
        made = await create(engine, **new(namespace="täst '\\ {}", tags=tags, **texts))
        (claimed,) = await claim(engine)
        assert (claimed.execution_kind, claimed.payload_encoding, claimed.tags) == (strange, strange, tags)
        assert (await rows.execution(made.execution_id))["creator_identity"] == strange
        info = await engine.read_execution_info(made.execution_id)
        assert info is not None
        assert (info.namespace, info.execution_kind) == ("täst '\\ {}", strange)


async def test_items_of_one_call_may_differ_in_every_field(engine: Engine, rows: Rows, clock: Clock) -> None:
    now = await clock.now()
    plain = new(lane_id="mixed")
    rich = new(
        lane_id="mixed",
        namespace="others",
        execution_kind="other",
        input_payload=b"2",
        priority=3,
        creator_identity="somebody",
        payload_encoding="json",
        tags={"ff.instance_id": "i-1"},
        policy={"max_replay_count": 1},
        execution_deadline_at=now + 5,
        execution_id="{fp:3}:11111111-2222-3333-4444-555555555555",
    )
    verdicts = await engine.create_many(items(plain, rich, plain))
    assert [type(verdict) for verdict in verdicts] == [Created] * 3
    claimed = await claim(engine, "mixed")
    assert [one.execution_id for one in claimed] == [verdicts[at].execution_id for at in (1, 0, 2)]  # type: ignore[union-attr]
    assert [one.execution_kind for one in claimed] == ["other", "job", "job"]
    assert [one.payload_encoding for one in claimed] == ["json", None, None]
    assert [one.tags for one in claimed] == [{"ff.instance_id": "i-1"}, {}, {}]
    assert [one.policy for one in claimed] == [ExecutionPolicy(max_replay_count=1), None, None]
    stored = [await rows.execution(one.execution_id) for one in claimed]
    assert [row["instance_tag"] for row in stored] == ["i-1", None, None]
    assert [row["deadline_at"] for row in stored] == [now + 5, None, None]


async def test_items_of_one_shape_are_stored_the_same_way_in_a_mixed_batch(engine: Engine, rows: Rows) -> None:
    policy = ExecutionPolicy(max_replay_count=1)
    differing = {"execution_id", "place", "created_at", "last_transition_at", "last_mutation_at"}
    shared = new(lane_id="alike", payload_encoding="json", policy=policy)
    alike = [
        shared | {"input_payload": b"1", "priority": 3},
        shared | {"input_payload": b"2", "tags": {"ff.instance_id": "i-1", "team.name": "blue"}},
        shared | {"input_payload": b"3", "priority": 9_001, "tags": {"team.name": "red"}},
    ]

    async def stored(others: list[dict[str, Any]]) -> list[Any]:
        verdicts = await engine.create_many(items(*alike, *others))
        assert [type(verdict) for verdict in verdicts] == [Created] * (3 + len(others))
        found = []
        for verdict in verdicts[:3]:
            uuid = uuid_of(verdict.execution_id)  # type: ignore[union-attr]
            for table in ("execution", "ready", "execution_tag"):
                of_table = sorted(await rows.of(table, execution_id=uuid), key=str)
                found.append([{name: row[name] for name in row.keys() - differing} for row in of_table])
        return found

    assert await stored([]) == await stored([new(lane_id="others")])
    claimed = await claim(engine, "alike")
    assert [one.input_payload for one in claimed] == [b"3", b"3", b"1", b"1", b"2", b"2"]


async def test_the_instance_tag_is_configurable(engines: Engines, rows: Rows) -> None:
    engine = await engines(instance_tag="app.instance")
    tags = {"app.instance": "mine", "ff.instance_id": "theirs"}
    made = await engine.create_execution(**new(tags=tags))
    assert (await rows.execution(made.execution_id))["instance_tag"] == "mine"


async def test_a_policy_is_stored_in_every_form_it_can_be_given(engine: Engine) -> None:
    policy = ExecutionPolicy(retry_policy=RetryPolicy(max_retries=7), max_reclaim_count=3)
    forms: tuple[Any, ...] = (
        policy,
        {"retry_policy": {"max_retries": 7}, "max_reclaim_count": 3},
        b'{"retry_policy": {"max_retries": 7}, "max_reclaim_count": 3}',
    )
    empty: tuple[Any, ...] = (None, "", {}, {"routing_requirements": {"required_capabilities": []}})
    for create in CREATES.values():
        for form in forms:
            await create(engine, **new(policy=form))
        assert [one.policy for one in await claim(engine)] == [policy] * len(forms)
        # An empty policy requires nothing of a worker.
        for form in empty:
            await create(engine, **new(policy=form))
        assert len(await claim(engine)) == len(empty)


async def test_a_delay_in_the_future_delays(engine: Engine, rows: Rows, clock: Clock) -> None:
    for create in CREATES.values():
        until = await clock.now() + 1
        made = await create(engine, **new(delay_until=until))
        assert isinstance(made, Created)
        assert made.public_state is PublicState.DELAYED
        row = await rows.execution(made.execution_id)
        assert vector(row) == DELAYED
        assert (row["delay_until"], row["blocking_detail"]) == (until, f"delayed until {until}")
        assert (await rows.timers(made.execution_id), await rows.of("ready")) == ({"delay": until}, [])
        assert await claim(engine) == []
        await clock.advance(ms=1)
        (claimed,) = await claim(engine)
        assert claimed.execution_id == made.execution_id


async def test_a_delay_is_absolute_or_relative_and_overrides_that_of_the_policy(
    engine: Engine, rows: Rows, clock: Clock
) -> None:
    now = await clock.now()
    policy = {"delay_until": now + 60}
    given: list[tuple[dict[str, Any], int | None]] = [
        ({"delay_until": now}, None),
        ({"delay_until": now - 1}, None),
        ({"delay_until": 0}, None),
        ({"policy": policy}, now + 60),
        ({"policy": policy, "delay_until": now + 5}, now + 5),
        ({"policy": policy, "delay_until": now}, None),
        ({"delay_ms": 5}, now + 5),
        ({"delay_ms": 5, "policy": policy}, now + 5),
        ({"delay_ms": 5, "idempotency_key": "k"}, now + 5),
        ({"delay_ms": 0}, None),
        ({"delay_ms": 0, "policy": policy}, None),
    ]
    for lane, create in CREATES.items():
        for arguments, until in given:
            made = await create(engine, **new(lane_id=lane, **arguments))
            row = await rows.execution(made.execution_id)
            detail = None if until is None else f"delayed until {until}"
            expected = (WAITING if until is None else DELAYED, until, detail)
            assert (vector(row), row["delay_until"], row["blocking_detail"]) == expected, arguments
            assert await rows.timers(made.execution_id) == ({} if until is None else {"delay": until}), arguments
            assert len(await rows.of("ready", execution_id=row["execution_id"])) == (until is None), arguments


async def test_a_deadline_is_absolute_or_counted_from_creation(engine: Engine, rows: Rows, clock: Clock) -> None:
    now = await clock.now()
    policy = {"timeout_policy": {"execution_deadline_ms": 1000}}
    given: list[tuple[dict[str, Any], int | None]] = [
        ({}, None),
        ({"execution_deadline_at": now + 7}, now + 7),
        ({"execution_deadline_at": now - 7}, now - 7),
        ({"policy": policy}, now + 1000),
        ({"policy": policy, "execution_deadline_at": now + 7}, now + 7),
        ({"delay_until": now + 60, "execution_deadline_at": now + 7}, now + 7),
    ]
    for create in CREATES.values():
        for arguments, deadline in given:
            made = await create(engine, **new(**arguments))
            row = await rows.execution(made.execution_id)
            timers = await rows.timers(made.execution_id)
            timers.pop("delay", None)
            assert row["deadline_at"] == deadline, arguments
            # A deadline in the past is due from creation on.
            assert timers == ({} if deadline is None else {"deadline": max(deadline, now)}), arguments


async def test_the_retention_of_the_stream_policy_is_that_of_the_execution(engine: Engine, rows: Rows) -> None:
    for create in CREATES.values():
        made = await create(engine, **new(policy={"stream_policy": {"retention_ttl_ms": 5}}))
        assert (await rows.execution(made.execution_id))["retention_ms"] == 5


async def test_a_create_registers_its_lane_once(engine: Engine, rows: Rows, clock: Clock) -> None:
    for name, create in CREATES.items():
        now = await clock.now()
        await create(engine, **new(lane_id=name, creator_identity="first"))
        await clock.advance(seconds=1)
        await create(engine, **new(lane_id=name, creator_identity="second"))
        (lane,) = await rows.of("lane", lane_id=name)
        assert (lane["registered_by"], lane["registered_at"], lane["state"]) == ("first", now, "active")


async def test_a_lane_id_may_be_any_64_printable_characters(engine: Engine) -> None:
    for create in CREATES.values():
        for lane in (" ", "~", "a, b'\"{}" + "x" * 55):
            made = await create(engine, **new(lane_id=lane))
            (claimed,) = await claim(engine, lane)
            assert (claimed.execution_id, claimed.lane_id) == (made.execution_id, lane)


async def test_a_create_of_0_or_1001_items_is_refused(engine: Engine, rows: Rows) -> None:
    async with rows.unchanged():
        await refused(engine.create_many([]), "invalid_input", "must have 1 to 1000 items, got 0")
        await refused(
            engine.create_many(items(*[new()] * 1001)), "invalid_input", "must have 1 to 1000 items, got 1001"
        )
    assert len(await engine.create_many(items(*[new()] * 1000))) == 1000
