"""The worker registry: registrations, heartbeats, deaths, their events, and the list of live workers."""

import asyncio
from typing import Any

import pytest

from engine.state import all_cases, refused, rounds
from fixtures import Clock, Engines, Given, Rows
from flowfabric.engine.engine import Engine
from flowfabric.model.lease import Marked
from flowfabric.model.worker import NotRegistered, Refreshed, Registered, WorkerCursor, WorkerEntry, WorkerPage

TTL = 60_000


def worker(**overrides: Any) -> dict[str, Any]:
    """The arguments of a registration."""
    return {
        "worker_id": "pool",
        "worker_instance_id": "pool-1",
        "lanes": ("default",),
        "capabilities": (),
        "liveness_ttl_ms": TTL,
        "namespace": "tests",
        **overrides,
    }


NAMED: dict[str, Any] = {"worker_instance_id": "pool-1", "namespace": "tests"}


async def event_kinds(rows: Rows) -> list[str]:
    """The kinds of the registry's events in order."""
    found = sorted(await rows.of("worker_event"), key=lambda row: (row["at"], row["kind"] != "registered"))
    return [row["kind"] for row in found]


async def test_a_first_registration_is_stored_with_an_event(engine: Engine, rows: Rows, clock: Clock) -> None:
    now = await clock.now()
    given = worker(worker_instance_id="worker-a", lanes=("b", "a", "b"), capabilities=["gpu", "cpu", "gpu"])
    assert await engine.register_worker(**given) == Registered()
    (entry,) = await rows.of("worker")
    assert (entry["worker_id"], entry["worker_instance_id"], entry["namespace"]) == ("pool", "worker-a", "tests")
    assert (entry["lanes"], entry["capabilities"]) == (["a", "b"], ["cpu", "gpu"])
    assert (entry["registered_at"], entry["last_heartbeat_at"], entry["lapses_at"]) == (now, now, now + TTL)
    # The hash of the instance id.
    assert entry["partition_key"] == 253
    (event,) = await rows.of("worker_event")
    assert (event["kind"], event["at"], event["worker_id"], event["reason"]) == ("registered", now, "pool", None)


async def test_a_live_worker_that_registers_again_is_refreshed(engine: Engine, rows: Rows, clock: Clock) -> None:
    began = await clock.now()
    assert await engine.register_worker(**worker()) == Registered()
    assert await engine.register_worker(**worker()) == Refreshed()
    now = await clock.advance(ms=TTL - 1)
    again = worker(lanes=("other",), capabilities=("gpu",), liveness_ttl_ms=5)
    assert await engine.register_worker(**again) == Refreshed()
    (entry,) = await rows.of("worker")
    assert (entry["lanes"], entry["capabilities"], entry["liveness_ttl_ms"]) == (["other"], ["gpu"], 5)
    assert (entry["registered_at"], entry["last_heartbeat_at"]) == (began, now)
    assert await event_kinds(rows) == ["registered", "heartbeat", "heartbeat"]


@pytest.mark.usefixtures("clock")
async def test_of_concurrent_registrations_one_is_the_first(engines: Engines, rows: Rows) -> None:
    several = [await engines() for _ in range(3)]
    repeats = rounds(6, whole=20)
    for at in repeats:
        given = worker(worker_instance_id=f"pool-{at}")
        answers = await asyncio.gather(*(engine.register_worker(**given) for engine in several))
        assert sorted(type(answer).__name__ for answer in answers) == ["Refreshed"] * 2 + ["Registered"]
    kinds = [row["kind"] for row in await rows.of("worker_event")]
    assert kinds.count("registered") == len(repeats)


async def test_an_instance_belongs_to_one_worker_id_until_its_registration_expires(
    engine: Engine, rows: Rows, clock: Clock
) -> None:
    await engine.register_worker(**worker())
    await clock.advance(ms=TTL - 1)
    another = worker(worker_id="another")
    async with rows.unchanged():
        await refused(engine.register_worker(**another), "invalid_input", "instance_id reassigned: 'pool-1'")
    now = await clock.advance(ms=1)
    assert await engine.register_worker(**another) == Registered()
    (entry,) = await rows.of("worker")
    assert (entry["worker_id"], entry["registered_at"]) == ("another", now)
    assert await event_kinds(rows) == ["registered", "registered"]
    # The same instance id in another namespace is another worker.
    assert await engine.register_worker(**worker(namespace="others")) == Registered()
    assert len(await rows.of("worker")) == 2


async def test_a_heartbeat_extends_a_live_registration(engine: Engine, rows: Rows, clock: Clock) -> None:
    began = await clock.now()
    await engine.register_worker(**worker())
    for _ in range(3):
        now = await clock.advance(ms=TTL - 1)
        assert await engine.heartbeat_worker(**NAMED) == Refreshed(next_expiry_ms=now + TTL)
    (entry,) = await rows.of("worker")
    assert (entry["registered_at"], entry["last_heartbeat_at"], entry["lapses_at"]) == (began, now, now + TTL)
    assert await event_kinds(rows) == ["registered", "heartbeat", "heartbeat", "heartbeat"]


async def test_an_absent_or_expired_worker_must_register_again(engine: Engine, rows: Rows, clock: Clock) -> None:
    await engine.register_worker(**worker())
    async with rows.unchanged():
        assert await engine.heartbeat_worker(worker_instance_id="pool-1", namespace="others") == NotRegistered()
        assert await engine.heartbeat_worker(worker_instance_id="pool-2", namespace="tests") == NotRegistered()
    await clock.advance(ms=TTL)
    async with rows.unchanged():
        assert await engine.heartbeat_worker(**NAMED) == NotRegistered()
        assert await engine.mark_worker_dead(**NAMED, reason="late") == NotRegistered()


async def test_a_worker_is_marked_dead_once(engine: Engine, rows: Rows, clock: Clock) -> None:
    await engine.register_worker(**worker())
    now = await clock.advance(seconds=1)
    assert await engine.mark_worker_dead(**NAMED, reason="it said goodbye – ✓") == Marked()
    assert await rows.of("worker") == []
    (event,) = await rows.of("worker_event", kind="marked_dead")
    assert (event["reason"], event["at"], event["worker_id"]) == ("it said goodbye – ✓", now, "pool")
    async with rows.unchanged():
        assert await engine.mark_worker_dead(**NAMED, reason="again") == NotRegistered()
        assert await engine.heartbeat_worker(**NAMED) == NotRegistered()
    assert await engine.register_worker(**worker()) == Registered()


async def test_of_concurrent_deaths_one_is_recorded(engines: Engines, rows: Rows) -> None:
    several = [await engines() for _ in range(3)]
    await several[0].register_worker(**worker())
    answers = await asyncio.gather(*(engine.mark_worker_dead(**NAMED, reason="x") for engine in several))
    assert sorted(type(answer).__name__ for answer in answers) == ["Marked", "NotRegistered", "NotRegistered"]
    assert len(await rows.of("worker_event", kind="marked_dead")) == 1


async def test_marking_a_worker_dead_does_not_touch_its_leases(engine: Engine, given: Given, rows: Rows) -> None:
    await given.registered()
    handle = await given.claimed()
    before = await rows.execution(handle.execution_id)
    await engine.mark_worker_dead(worker_instance_id="worker-1", namespace="tests", reason="gone")
    assert await rows.execution(handle.execution_id) == before
    await engine.complete(handle)


WRONG: list[tuple[dict[str, Any], str, str]] = [
    *(({"lanes": wrong}, "invalid_input", "lanes") for wrong in ((), "default")),
    ({"lanes": ("x" * 65,)}, "invalid_input", "lane_id: TooLong(65)"),
    *(({"liveness_ttl_ms": wrong}, "invalid_input", "liveness_ttl_ms") for wrong in (0, -1, 1.5, "1", None, 2**63)),
    *(({"worker_id": wrong}, "invalid_input", "worker_id") for wrong in ("", "a b", "x" * 257, "\0", 5)),
    *(({"worker_instance_id": wrong}, "invalid_input", "worker_instance_id") for wrong in ("", "a\n", "ü" * 129, None)),
    *(({"namespace": wrong}, "invalid_input", "namespace") for wrong in ("\0", "\ud800", 5)),
    ({"kinds": "job"}, "invalid_input", "kinds"),
    ({"kinds": [5]}, "invalid_input", "kinds"),
    ({"serves_all_namespaces": None}, "invalid_input", "serves_all_namespaces: must be True or False, got None"),
    ({"capabilities": ["a,b"]}, "invalid_capabilities", "worker:comma_in_token"),
    ({"capabilities": [""]}, "invalid_capabilities", "worker:empty_token"),
    ({"capabilities": [f"t{at}" for at in range(257)]}, "invalid_capabilities", "worker:too_many_tokens"),
]


async def test_each_refusal_of_a_registration_has_its_code_and_writes_nothing(engine: Engine, rows: Rows) -> None:
    async with rows.unchanged():
        with all_cases() as case:
            for overrides, code, detail in WRONG:
                with case(f"{overrides!r:.100}"):
                    await refused(engine.register_worker(**worker(**overrides)), code, detail)


async def test_a_reason_is_short_and_has_no_control_characters(engine: Engine, rows: Rows) -> None:
    await engine.register_worker(**worker())
    async with rows.unchanged():
        for wrong in ("x" * 257, "ü" * 129, "tab\t", "line\n", "nul\0", "del\x7f", "c1\x85", "\ud800", 5):
            await refused(engine.mark_worker_dead(**NAMED, reason=wrong), "invalid_input", "reason")  # type: ignore[arg-type]
    for right in ("x" * 256, "two words", "", "no-break\u00a0space", "line\u2028separator"):
        assert await engine.mark_worker_dead(**NAMED, reason=right) == Marked(), repr(right)
        await engine.register_worker(**worker())


async def test_a_liveness_ttl_may_be_1_ms_or_the_longest(engine: Engine, clock: Clock) -> None:
    for ttl, answer in ((1, NotRegistered), (2**53 - 1, Refreshed)):
        assert await engine.register_worker(**worker(liveness_ttl_ms=ttl)) == Registered()
        assert await engine.heartbeat_worker(**NAMED) == Refreshed(next_expiry_ms=await clock.now() + ttl)
        await clock.advance(ms=1)
        assert isinstance(await engine.heartbeat_worker(**NAMED), answer)


async def test_a_live_worker_is_listed_with_what_it_registered(engine: Engine, clock: Clock) -> None:
    began = await clock.now()
    await engine.register_worker(**worker(lanes=("b", "a"), capabilities=("gpu", "cpu")))
    now = await clock.advance(seconds=1)
    await engine.heartbeat_worker(**NAMED)
    page = await engine.list_workers()
    assert page == WorkerPage(
        entries=[
            WorkerEntry(
                namespace="tests",  # type: ignore[arg-type]
                worker_instance_id="pool-1",  # type: ignore[arg-type]
                worker_id="pool",  # type: ignore[arg-type]
                lanes=("a", "b"),  # type: ignore[arg-type]
                capabilities=("cpu", "gpu"),
                kinds=None,
                serves_all_namespaces=False,
                last_heartbeat_ms=now,
                liveness_ttl_ms=TTL,
                registered_at_ms=began,
            )
        ],
        cursor=None,
    )


async def test_kinds_and_namespaces_are_listed_and_refreshed(engine: Engine) -> None:
    for given, listed in (
        ({"kinds": ("b", "a", "b")}, (("a", "b"), False)),
        ({"kinds": []}, ((), False)),
        ({"serves_all_namespaces": True}, (None, True)),
        ({}, (None, False)),
    ):
        await engine.register_worker(**{**worker(), **given})
        (entry,) = (await engine.list_workers()).entries
        assert (entry.kinds, entry.serves_all_namespaces) == listed


async def test_an_expired_or_dead_worker_is_not_listed(engine: Engine, clock: Clock) -> None:
    await engine.register_worker(**worker())
    await engine.register_worker(**worker(worker_instance_id="pool-2", liveness_ttl_ms=2 * TTL))
    await clock.advance(ms=TTL)
    assert [entry.worker_instance_id for entry in (await engine.list_workers()).entries] == ["pool-2"]
    await engine.mark_worker_dead(worker_instance_id="pool-2", namespace="tests", reason="gone")
    assert (await engine.list_workers()).entries == []


async def test_workers_are_listed_by_namespace_and_instance_page_by_page(engine: Engine) -> None:
    names = sorted((space, f"{letter}-{at}") for space in ("B", "a", "ä") for letter in "aBz" for at in range(2))
    for space, instance in reversed(names):
        await engine.register_worker(**worker(namespace=space, worker_instance_id=instance))
    for limit in (1, 2, 5, 17, 1000):
        seen: list[tuple[str, str]] = []
        cursor: WorkerCursor | None = None
        while True:
            page = await engine.list_workers(after=cursor, limit=limit)
            seen += [(entry.namespace, entry.worker_instance_id) for entry in page.entries]
            cursor = page.cursor
            if cursor is None:
                break
            assert len(page.entries) == limit
        assert seen == names
    assert (await engine.list_workers(limit=len(names))).cursor is None


async def test_a_list_of_one_namespace_continues_after_an_instance(engine: Engine, clock: Clock) -> None:
    for space in ("tests", "others"):
        for at in range(4):
            await engine.register_worker(**worker(namespace=space, worker_instance_id=f"w-{at}"))
    page = await engine.list_workers(namespace="tests", limit=2)
    assert [entry.worker_instance_id for entry in page.entries] == ["w-0", "w-1"]
    await engine.mark_worker_dead(worker_instance_id="w-1", namespace="tests", reason="gone")
    for after in ("w-1", page.cursor):
        page = await engine.list_workers(namespace="tests", after=after)
        assert [(entry.namespace, entry.worker_instance_id) for entry in page.entries] == [
            ("tests", "w-2"),
            ("tests", "w-3"),
        ]
    assert (await engine.list_workers(namespace="unknown")).entries == []
    await clock.advance(ms=TTL)
    assert (await engine.list_workers()).entries == []


WRONG_PAGES: list[dict[str, Any]] = [
    {"limit": -1},
    {"limit": "1"},
    {"namespace": "\0"},
    {"namespace": 5},
    {"after": "w-1"},
    {"after": 5},
    {"namespace": "tests", "after": "\0"},
    {"namespace": "tests", "after": WorkerCursor(namespace="others", worker_instance_id="w")},
    {"after": WorkerCursor(namespace=5, worker_instance_id="w")},  # type: ignore[arg-type]
]


async def test_a_wrong_limit_namespace_or_cursor_is_refused(engine: Engine, rows: Rows) -> None:
    async with rows.unchanged():
        with all_cases() as case:
            for wrong in WRONG_PAGES:
                with case(repr(wrong)):
                    await refused(engine.list_workers(**wrong), "invalid_input", [*wrong][-1])
        assert await engine.list_workers(limit=0) == WorkerPage(entries=[], cursor=None)


async def test_of_concurrent_worker_ids_for_one_instance_all_but_one_are_refused(engines: Engines, rows: Rows) -> None:
    several = [await engines() for _ in range(3)]
    repeats = rounds(5, whole=10)
    for at in repeats:
        answers = await asyncio.gather(
            *(
                engine.register_worker(**worker(worker_instance_id=f"pool-{at}", worker_id=f"name{nth}"))
                for nth, engine in enumerate(several)
            ),
            return_exceptions=True,
        )
        assert sorted(type(answer).__name__ for answer in answers) == [
            "InvalidInputError",
            "InvalidInputError",
            "Registered",
        ]
    assert len(await rows.of("worker_event")) == len(repeats)
