"""The registry of workers: who is live, and what is told of it."""

import asyncio
from typing import Any

import pytest

from engine.state import refused
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


async def told(rows: Any) -> list[str]:
    """The history of the registry in order."""
    found = sorted(await rows.of("worker_event"), key=lambda row: (row["at"], row["kind"] != "registered"))
    return [row["kind"] for row in found]


async def test_a_first_registration_is_stored_and_told(engine: Engine, rows: Any, clock: Any) -> None:
    now = await clock.now()
    given = worker(lanes=("b", "a", "b"), capabilities=["gpu", "cpu", "gpu"])
    assert await engine.register_worker(**given) == Registered()
    (entry,) = await rows.of("worker")
    assert (entry["worker_id"], entry["worker_instance_id"], entry["namespace"]) == ("pool", "pool-1", "tests")
    assert (entry["lanes"], entry["capabilities"]) == (["a", "b"], ["cpu", "gpu"])
    assert (entry["registered_at"], entry["last_heartbeat_at"], entry["lapses_at"]) == (now, now, now + TTL)
    assert 0 <= entry["partition_key"] < 256
    (event,) = await rows.of("worker_event")
    assert (event["kind"], event["at"], event["worker_id"], event["reason"]) == ("registered", now, "pool", None)


async def test_the_partition_of_an_entry_is_that_of_its_instance(engine: Engine, rows: Any) -> None:
    await engine.register_worker(**worker(worker_instance_id="worker-a"))
    assert (await rows.of("worker"))[0]["partition_key"] == 253


async def test_a_live_worker_that_registers_again_is_refreshed(engine: Engine, rows: Any, clock: Any) -> None:
    began = await clock.now()
    await engine.register_worker(**worker())
    now = await clock.advance(ms=TTL - 1)
    again = worker(lanes=("other",), capabilities=("gpu",), liveness_ttl_ms=5)
    assert await engine.register_worker(**again) == Refreshed()
    (entry,) = await rows.of("worker")
    assert (entry["lanes"], entry["capabilities"], entry["liveness_ttl_ms"]) == (["other"], ["gpu"], 5)
    assert (entry["registered_at"], entry["last_heartbeat_at"]) == (began, now)
    assert await told(rows) == ["registered", "heartbeat"]


@pytest.mark.usefixtures("clock")
async def test_two_registrations_in_one_millisecond_are_one_and_its_refresh(engine: Engine, rows: Any) -> None:
    assert await engine.register_worker(**worker()) == Registered()
    assert await engine.register_worker(**worker()) == Refreshed()
    assert await told(rows) == ["registered", "heartbeat"]


@pytest.mark.usefixtures("clock")
async def test_of_registrations_at_once_one_is_the_first(engines: Any, rows: Any) -> None:
    several = [await engines() for _ in range(4)]
    for at in range(20):
        given = worker(worker_instance_id=f"pool-{at}")
        answers = await asyncio.gather(*(engine.register_worker(**given) for engine in several))
        assert sorted(type(answer).__name__ for answer in answers) == ["Refreshed"] * 3 + ["Registered"]
    kinds = [row["kind"] for row in await rows.of("worker_event")]
    assert kinds.count("registered") == 20


async def test_a_lapsed_worker_registers_anew_under_any_name(engine: Engine, rows: Any, clock: Any) -> None:
    await engine.register_worker(**worker())
    now = await clock.advance(ms=TTL)
    assert await engine.register_worker(**worker(worker_id="another")) == Registered()
    (entry,) = await rows.of("worker")
    assert (entry["worker_id"], entry["registered_at"]) == ("another", now)
    assert await told(rows) == ["registered", "registered"]


async def test_a_live_instance_cannot_be_taken_by_another_worker(engine: Engine, rows: Any, clock: Any) -> None:
    await engine.register_worker(**worker())
    await clock.advance(ms=TTL - 1)
    async with rows.unchanged():
        await refused(engine.register_worker(**worker(worker_id="another")), "invalid_input", "instance_id reassigned")


async def test_one_instance_id_in_two_namespaces_is_two_workers(engine: Engine, rows: Any) -> None:
    assert await engine.register_worker(**worker()) == Registered()
    assert await engine.register_worker(**worker(namespace="others", worker_id="another")) == Registered()
    assert len(await rows.of("worker")) == 2


async def test_a_heartbeat_keeps_a_live_worker_alive(engine: Engine, rows: Any, clock: Any) -> None:
    began = await clock.now()
    await engine.register_worker(**worker())
    for _ in range(3):
        now = await clock.advance(ms=TTL - 1)
        assert await engine.heartbeat_worker(**NAMED) == Refreshed(next_expiry_ms=now + TTL)
    (entry,) = await rows.of("worker")
    assert (entry["registered_at"], entry["last_heartbeat_at"], entry["lapses_at"]) == (began, now, now + TTL)
    assert await told(rows) == ["registered", "heartbeat", "heartbeat", "heartbeat"]


async def test_an_absent_lapsed_or_foreign_worker_must_register_again(engine: Engine, rows: Any, clock: Any) -> None:
    await engine.register_worker(**worker())
    async with rows.unchanged():
        assert await engine.heartbeat_worker(worker_instance_id="pool-1", namespace="others") == NotRegistered()
        assert await engine.heartbeat_worker(worker_instance_id="pool-2", namespace="tests") == NotRegistered()
    await clock.advance(ms=TTL)
    async with rows.unchanged():
        assert await engine.heartbeat_worker(**NAMED) == NotRegistered()
        assert await engine.mark_worker_dead(**NAMED, reason="late") == NotRegistered()


async def test_a_worker_is_marked_dead_once(engine: Engine, rows: Any, clock: Any) -> None:
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


async def test_of_deaths_at_once_one_is_told(engines: Any, rows: Any) -> None:
    several = [await engines() for _ in range(3)]
    await several[0].register_worker(**worker())
    answers = await asyncio.gather(*(engine.mark_worker_dead(**NAMED, reason="x") for engine in several))
    assert sorted(type(answer).__name__ for answer in answers) == ["Marked", "NotRegistered", "NotRegistered"]
    assert len(await rows.of("worker_event", kind="marked_dead")) == 1


async def test_the_registry_never_touches_a_lease(engine: Engine, given: Any, rows: Any) -> None:
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
    ({"capabilities": ["a,b"]}, "invalid_capabilities", "worker:comma_in_token"),
    ({"capabilities": [""]}, "invalid_capabilities", "worker:empty_token"),
    ({"capabilities": [f"t{at}" for at in range(257)]}, "invalid_capabilities", "worker:too_many_tokens"),
]


async def test_each_refusal_of_a_registration_has_its_word_and_leaves_no_trace(engine: Engine, rows: Any) -> None:
    async with rows.unchanged():
        for overrides, code, detail in WRONG:
            await refused(engine.register_worker(**worker(**overrides)), code, detail)


async def test_a_reason_is_short_and_has_no_control_characters(engine: Engine, rows: Any) -> None:
    await engine.register_worker(**worker())
    async with rows.unchanged():
        for wrong in ("x" * 257, "ü" * 129, "tab\t", "line\n", "nul\0", "del\x7f", "c1\x85", "\ud800", 5):
            await refused(engine.mark_worker_dead(**NAMED, reason=wrong), "invalid_input", "reason")  # type: ignore[arg-type]
    for right in ("x" * 256, "two words", "", "no-break\u00a0space", "line\u2028separator"):
        assert await engine.mark_worker_dead(**NAMED, reason=right) == Marked(), repr(right)
        await engine.register_worker(**worker())


@pytest.mark.parametrize("ttl", [1, 2**53 - 1])
async def test_the_shortest_and_the_longest_life(engine: Engine, clock: Any, ttl: int) -> None:
    assert await engine.register_worker(**worker(liveness_ttl_ms=ttl)) == Registered()
    assert await engine.heartbeat_worker(**NAMED) == Refreshed(next_expiry_ms=await clock.now() + ttl)
    await clock.advance(ms=1)
    expected = NotRegistered if ttl == 1 else Refreshed
    assert isinstance(await engine.heartbeat_worker(**NAMED), expected)


async def test_a_live_worker_is_listed_with_what_it_registered(engine: Engine, clock: Any) -> None:
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


async def test_kinds_and_namespaces_are_listed_and_renewed(engine: Engine) -> None:
    for given, listed in (
        ({"kinds": ("b", "a", "b")}, (("a", "b"), False)),
        ({"kinds": []}, ((), False)),
        ({"serves_all_namespaces": True}, (None, True)),
        ({}, (None, False)),
    ):
        await engine.register_worker(**{**worker(), **given})
        (entry,) = (await engine.list_workers()).entries
        assert (entry.kinds, entry.serves_all_namespaces) == listed


async def test_wrong_kinds_and_namespaces_are_refused(engine: Engine, rows: Any) -> None:
    wrong: list[dict[str, Any]] = [{"kinds": "job"}, {"kinds": [5]}, {"serves_all_namespaces": None}]
    async with rows.unchanged():
        for one in wrong:
            (field,) = one
            await refused(engine.register_worker(**{**worker(), **one}), "invalid_input", field)


async def test_a_lapsed_or_dead_worker_is_not_listed(engine: Engine, clock: Any) -> None:
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


async def test_a_list_of_one_namespace_goes_on_behind_an_instance(engine: Engine, clock: Any) -> None:
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


@pytest.mark.parametrize(
    "wrong",
    [
        {"limit": -1},
        {"limit": "1"},
        {"namespace": "\0"},
        {"namespace": 5},
        {"after": "w-1"},
        {"after": 5},
        {"namespace": "tests", "after": "\0"},
        {"namespace": "tests", "after": WorkerCursor(namespace="others", worker_instance_id="w")},
        {"after": WorkerCursor(namespace=5, worker_instance_id="w")},  # type: ignore[arg-type]
    ],
)
async def test_what_is_no_page_of_workers_is_refused(engine: Engine, rows: Any, wrong: dict[str, Any]) -> None:
    async with rows.unchanged():
        await refused(engine.list_workers(**wrong), "invalid_input")
        assert await engine.list_workers(limit=0) == WorkerPage(entries=[], cursor=None)


async def test_of_two_names_for_one_instance_at_once_one_is_refused(engines: Any, rows: Any) -> None:
    several = [await engines() for _ in range(3)]
    for at in range(10):
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
    assert len(await rows.of("worker_event")) == 10
