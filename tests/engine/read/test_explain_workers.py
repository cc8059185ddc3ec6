"""Who could run an execution, and who it is reserved for: what an explanation says of workers and grants."""

from typing import Any, Literal

import asyncpg
import pytest

from engine.state import claim, revoke
from flowfabric.engine.engine import Engine
from flowfabric.model.explanation import (
    GrantedReason,
    LeaseLostReason,
    NoCapableWorkerReason,
    NoWorkerReason,
    QueuedReason,
)
from flowfabric.model.states import LaneState

ALL = ("gpu", "ssd")


def requiring(*tokens: str) -> dict[str, Any]:
    return {"policy": {"routing_requirements": {"required_capabilities": list(tokens)}}}


def queued(workers: int = 0) -> QueuedReason:
    return QueuedReason(lane_id="default", lane_state=LaneState.ACTIVE, ahead=0, workers=workers)  # type: ignore[arg-type]


def lacking(unserved: Literal["lane", "namespace", "kind"], seen: int = 0) -> NoWorkerReason:
    return NoWorkerReason(
        unserved=unserved,
        lane_id="default",  # type: ignore[arg-type]
        namespace="tests",  # type: ignore[arg-type]
        execution_kind="job",
        workers_seen=seen,
    )


UNSERVED: dict[str, tuple[list[dict[str, Any]], NoWorkerReason, str]] = {
    "nobody": ([], lacking("lane"), "no live worker serves lane 'default'"),
    "another lane": ([{"lanes": ("other",)}], lacking("lane"), "no live worker serves lane 'default'"),
    "lapsed": ([{"liveness_ttl_ms": 1}], lacking("lane"), "no live worker serves lane 'default'"),
    "another namespace": (
        [{"namespace": "other"}, {"namespace": "third"}],
        lacking("namespace", 2),
        "no live worker of its lane serves namespace 'tests'",
    ),
    "another kind": (
        [{"kinds": ("other",)}, {"kinds": ()}, {"kinds": ("job",), "namespace": "other"}],
        lacking("kind", 2),
        "no live worker of its lane and namespace runs kind 'job'",
    ),
}


@pytest.mark.parametrize("case", UNSERVED)
async def test_a_lane_namespace_or_kind_that_no_live_worker_serves_is_named(
    explain: Any, given: Any, clock: Any, case: str
) -> None:
    workers, reason, told = UNSERVED[case]
    for nth, worker in enumerate(workers):
        await given.registered(worker_instance_id=f"worker-{nth}", **worker)
    await clock.advance(ms=1)
    found = await explain(await given.created())
    assert found.reasons == (queued(), reason)
    assert found.summary == f"waiting: 0 ahead of it on lane 'default'; {told}"


async def test_the_workers_that_would_take_it_are_counted(explain: Any, given: Any) -> None:
    execution_id = await given.created(**requiring("gpu"))
    workers: list[dict[str, Any]] = [
        {"capabilities": ALL},
        {"capabilities": ("gpu",), "kinds": ("job", "other")},
        {"capabilities": ("gpu",), "namespace": "other", "serves_all_namespaces": True},
        {"capabilities": ("gpu",), "namespace": "other"},
        {"capabilities": ("gpu",), "kinds": ("other",)},
        {"capabilities": ("gpu",), "lanes": ("other",)},
        {"capabilities": ("ssd",)},
    ]
    for nth, worker in enumerate(workers):
        await given.registered(worker_instance_id=f"worker-{nth}", **worker)
    assert (await explain(execution_id)).reasons == (queued(3),)


NONE_OFFERS = "no live worker of its lane, namespace and kind offers"

OFFERS: dict[str, tuple[list[dict[str, Any]], tuple[str, ...], int]] = {
    "one offers a part": ([{"capabilities": ("ssd",)}], ("gpu",), 1),
    "two offer parts and none all": ([{"capabilities": ("ssd",)}, {"capabilities": ("gpu", "x")}], ALL, 2),
    "two offer the same part": ([{"capabilities": ("ssd",)}, {"capabilities": ("ssd",)}], ("gpu",), 2),
    "one offers all and runs another kind": (
        [{"capabilities": ("ssd",)}, {"capabilities": ALL, "kinds": ("x",)}],
        ("gpu",),
        1,
    ),
}


@pytest.mark.parametrize("case", OFFERS)
async def test_capabilities_that_no_live_worker_offers_are_named(explain: Any, given: Any, case: str) -> None:
    workers, missing, seen = OFFERS[case]
    for nth, worker in enumerate(workers):
        await given.registered(worker_instance_id=f"worker-{nth}", **worker)
    found = await explain(await given.created(**requiring("ssd", "gpu")))
    assert found.reasons == (queued(), NoCapableWorkerReason(missing=missing, workers_seen=seen))
    named = " and ".join(missing)
    assert found.summary == f"waiting: 0 ahead of it on lane 'default'; {NONE_OFFERS} {named}"


async def test_without_any_worker_both_the_lane_and_the_capabilities_are_named(explain: Any, given: Any) -> None:
    found = await explain(await given.created(**requiring("gpu")))
    lacking_gpu = NoCapableWorkerReason(missing=("gpu",), workers_seen=0)
    assert found.reasons == (queued(), lacking("lane"), lacking_gpu)


@pytest.mark.parametrize(
    ("other", "told", "on_lane"),
    [
        ({"lanes": ("other",)}, "no live worker serves lane 'default'", 0),
        ({"namespace": "other"}, "no live worker of its lane serves namespace 'tests'", 1),
        ({"kinds": ("other",)}, "no live worker of its lane and namespace runs kind 'job'", 1),
    ],
)
async def test_a_capability_that_only_other_workers_offer_is_not_called_unoffered_by_all(
    explain: Any, given: Any, other: dict[str, Any], told: str, on_lane: int
) -> None:
    execution_id = await given.created(**requiring("gpu"))
    await given.registered(worker_instance_id="other", capabilities=("gpu",), **other)
    found = await explain(execution_id)
    assert found.summary == f"waiting: 0 ahead of it on lane 'default'; {told}; {NONE_OFFERS} gpu"
    assert found.reasons[1].workers_seen == on_lane
    assert found.reasons[2] == NoCapableWorkerReason(missing=("gpu",), workers_seen=0)
    # One that would take it but for the capability is counted.
    await given.registered(worker_instance_id="poor")
    found = await explain(execution_id)
    assert found.reasons == (queued(), NoCapableWorkerReason(missing=("gpu",), workers_seen=1))
    assert found.summary == f"waiting: 0 ahead of it on lane 'default'; {NONE_OFFERS} gpu"


async def test_one_worker_that_offers_all_is_enough(explain: Any, given: Any) -> None:
    execution_id = await given.created(**requiring("gpu", "ssd"))
    await given.registered(worker_instance_id="poor")
    await given.registered(worker_instance_id="rich", capabilities=("gpu", "more", "ssd"), lanes=("a", "default"))
    assert (await explain(execution_id)).reasons == (queued(1),)


async def test_a_revoked_lease_that_nobody_can_take_over_lacks_a_worker(
    explain: Any, given: Any, connection: asyncpg.Connection
) -> None:
    handle = await given.claimed(**requiring("gpu"), capabilities=["gpu"])
    await given.registered()
    await revoke(connection, handle.execution_id)
    lost, *others = (await explain(handle.execution_id)).reasons
    assert isinstance(lost, LeaseLostReason)
    assert others == [queued(), NoCapableWorkerReason(missing=("gpu",), workers_seen=1)]


async def test_a_live_grant_is_told_with_its_worker_and_its_end(
    engine: Engine, explain: Any, given: Any, clock: Any
) -> None:
    execution_id = await given.created()
    until = await clock.now() + 5_000
    grantee: dict[str, Any] = {"lane_id": "default", "worker_id": "w", "worker_instance_id": "w-1"}
    await engine.claim_for_worker(**grantee, grant_ttl_ms=5_000)
    found = await explain(execution_id)
    assert found.reasons == (GrantedReason(worker_id="w", worker_instance_id="w-1", until=until),)  # type: ignore[arg-type]
    assert found.summary.startswith("waiting: reserved for worker 'w-1' until ")
    assert await claim(engine) == []
    await clock.set(until)
    assert (await explain(execution_id)).reasons == (queued(), lacking("lane"))
    assert len(await claim(engine)) == 1
    assert [reason.kind for reason in (await explain(execution_id)).reasons] == ["running"]


async def test_a_grant_on_a_lost_lease_is_told(engine: Engine, explain: Any, given: Any, clock: Any) -> None:
    handle = await given.reclaimable()
    await engine.claim_for_worker(lane_id="default", worker_id="w", worker_instance_id="w-1")
    assert [reason.kind for reason in (await explain(handle.execution_id)).reasons] == ["lease_lost", "granted"]


async def test_a_grant_whose_entry_is_gone_names_no_worker(
    engine: Engine, explain: Any, given: Any, connection: asyncpg.Connection
) -> None:
    execution_id = await given.created()
    await engine.claim_for_worker(lane_id="default", worker_id="w", worker_instance_id="w-1")
    await connection.execute("delete from claim_grant")
    found = await explain(execution_id)
    assert [(reason.kind, reason.worker_id) for reason in found.reasons] == [("granted", None)]
    assert found.summary.startswith("waiting: reserved for a worker until ")
