"""Explain: which workers could run an execution, and which worker a grant reserves it for."""

from typing import Any, Literal, TypeAlias

import asyncpg
import pytest

from engine.state import claim, revoke
from fixtures import Clock, Explain, Given
from flowfabric.engine.engine import Engine
from flowfabric.model.explanation import (
    GrantedReason,
    LeaseLostReason,
    NoCapableWorkerReason,
    NoWorkerReason,
    QueuedReason,
)
from flowfabric.model.ids import LaneId
from flowfabric.model.states import LaneState

ALL = ("gpu", "ssd")
Unserved: TypeAlias = Literal["lane", "namespace", "kind"]


def requiring(*tokens: str) -> dict[str, Any]:
    return {"policy": {"routing_requirements": {"required_capabilities": list(tokens)}}}


def queued(workers: int = 0, lane_id: str = "default") -> QueuedReason:
    return QueuedReason(lane_id=LaneId(lane_id), lane_state=LaneState.ACTIVE, ahead=0, workers=workers)


def lacking(unserved: Unserved, seen: int = 0, lane_id: str = "default") -> NoWorkerReason:
    return NoWorkerReason(
        unserved=unserved,
        lane_id=LaneId(lane_id),
        namespace="tests",  # type: ignore[arg-type]
        execution_kind="job",
        workers_seen=seen,
    )


UNSERVED: dict[str, tuple[list[dict[str, Any]], Unserved, int, str]] = {
    "nobody": ([], "lane", 0, "no live worker serves lane '{lane}'"),
    "another-lane": ([{"lanes": ("other",)}], "lane", 0, "no live worker serves lane '{lane}'"),
    "expired": ([{"liveness_ttl_ms": 1}], "lane", 0, "no live worker serves lane '{lane}'"),
    "another-namespace": (
        [{"namespace": "other"}, {"namespace": "third"}],
        "namespace",
        2,
        "no live worker of its lane serves namespace 'tests'",
    ),
    "another-kind": (
        [{"kinds": ("other",)}, {"kinds": ()}, {"kinds": ("job",), "namespace": "other"}],
        "kind",
        2,
        "no live worker of its lane and namespace runs kind 'job'",
    ),
}


async def test_a_lane_namespace_or_kind_that_no_live_worker_serves_is_named(
    explain: Explain, given: Given, clock: Clock, subtests: pytest.Subtests
) -> None:
    for lane, (workers, unserved, seen, text) in UNSERVED.items():
        with subtests.test(lane):
            for nth, worker in enumerate(workers):
                await given.registered(worker_instance_id=f"{lane}-{nth}", **{"lanes": (lane,), **worker})
            await clock.advance(ms=1)
            found = await explain(await given.created(lane_id=lane))
            assert found.reasons == (queued(lane_id=lane), lacking(unserved, seen, lane))
            assert found.summary == f"waiting: 0 ahead of it on lane '{lane}'; {text.format(lane=lane)}"


async def test_the_workers_that_could_run_it_are_counted(explain: Explain, given: Given) -> None:
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
    "one-part": ([{"capabilities": ("ssd",)}], ("gpu",), 1),
    "two-parts": ([{"capabilities": ("ssd",)}, {"capabilities": ("gpu", "x")}], ALL, 2),
    "one-part-twice": ([{"capabilities": ("ssd",)}, {"capabilities": ("ssd",)}], ("gpu",), 2),
    "all-for-another-kind": (
        [{"capabilities": ("ssd",)}, {"capabilities": ALL, "kinds": ("x",)}],
        ("gpu",),
        1,
    ),
}


async def test_capabilities_that_no_live_worker_offers_are_named(
    explain: Explain, given: Given, subtests: pytest.Subtests
) -> None:
    for lane, (workers, missing, seen) in OFFERS.items():
        with subtests.test(lane):
            for nth, worker in enumerate(workers):
                await given.registered(worker_instance_id=f"{lane}-{nth}", **{"lanes": (lane,), **worker})
            found = await explain(await given.created(lane_id=lane, **requiring("ssd", "gpu")))
            assert found.reasons == (
                queued(lane_id=lane),
                NoCapableWorkerReason(missing=missing, workers_seen=seen),
            )
            named = " and ".join(missing)
            assert found.summary == f"waiting: 0 ahead of it on lane '{lane}'; {NONE_OFFERS} {named}"
    # Without any worker both the lane and the capabilities are named.
    found = await explain(await given.created(**requiring("gpu")))
    lacking_gpu = NoCapableWorkerReason(missing=("gpu",), workers_seen=0)
    assert found.reasons == (queued(), lacking("lane"), lacking_gpu)


OTHERS: dict[str, tuple[dict[str, Any], str, int]] = {
    "lane": ({"lanes": ("other",)}, "no live worker serves lane 'lane'", 0),
    "namespace": ({"namespace": "other"}, "no live worker of its lane serves namespace 'tests'", 1),
    "kind": ({"kinds": ("other",)}, "no live worker of its lane and namespace runs kind 'job'", 1),
}
"""For each lane: a worker that cannot take the execution, why, and how many workers are seen on the lane."""


async def test_a_capability_that_only_unsuitable_workers_offer_is_missing(
    explain: Explain, given: Given, subtests: pytest.Subtests
) -> None:
    for lane, (other, text, on_lane) in OTHERS.items():
        with subtests.test(lane):
            execution_id = await given.created(lane_id=lane, **requiring("gpu"))
            await given.registered(
                worker_instance_id=f"other-{lane}", capabilities=("gpu",), **{"lanes": (lane,), **other}
            )
            found = await explain(execution_id)
            assert found.summary == f"waiting: 0 ahead of it on lane '{lane}'; {text}; {NONE_OFFERS} gpu"
            unserved = found.reasons[1]
            assert isinstance(unserved, NoWorkerReason)
            assert unserved.workers_seen == on_lane
            assert found.reasons[2] == NoCapableWorkerReason(missing=("gpu",), workers_seen=0)
            # A worker that only lacks the capability is counted.
            await given.registered(worker_instance_id=f"poor-{lane}", lanes=(lane,))
            found = await explain(execution_id)
            missing = NoCapableWorkerReason(missing=("gpu",), workers_seen=1)
            assert found.reasons == (queued(lane_id=lane), missing)
            assert found.summary == f"waiting: 0 ahead of it on lane '{lane}'; {NONE_OFFERS} gpu"


async def test_one_worker_that_offers_all_is_enough(explain: Explain, given: Given) -> None:
    execution_id = await given.created(**requiring("gpu", "ssd"))
    await given.registered(worker_instance_id="poor")
    await given.registered(worker_instance_id="rich", capabilities=("gpu", "more", "ssd"), lanes=("a", "default"))
    assert (await explain(execution_id)).reasons == (queued(1),)


async def test_a_revoked_lease_that_no_worker_can_reclaim_lacks_a_worker(explain: Explain, given: Given) -> None:
    handle = await given.claimed(**requiring("gpu"), capabilities=["gpu"])
    await given.registered()
    await revoke(given.engine, handle.execution_id)
    lost, *others = (await explain(handle.execution_id)).reasons
    assert isinstance(lost, LeaseLostReason)
    assert others == [queued(), NoCapableWorkerReason(missing=("gpu",), workers_seen=1)]


@pytest.mark.usefixtures("scans_are_free")
async def test_a_live_grant_is_explained_with_its_worker_and_end(
    engine: Engine, explain: Explain, given: Given, clock: Clock
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


async def test_a_grant_on_a_lost_lease_is_explained(
    engine: Engine, explain: Explain, given: Given, clock: Clock
) -> None:
    handle = await given.reclaimable()
    await engine.claim_for_worker(lane_id="default", worker_id="w", worker_instance_id="w-1")
    assert [reason.kind for reason in (await explain(handle.execution_id)).reasons] == ["lease_lost", "granted"]


async def test_a_grant_without_its_row_names_no_worker(
    engine: Engine, explain: Explain, given: Given, connection: asyncpg.Connection
) -> None:
    execution_id = await given.created()
    await engine.claim_for_worker(lane_id="default", worker_id="w", worker_instance_id="w-1")
    await connection.execute("delete from claim_grant")
    found = await explain(execution_id)
    (reason,) = found.reasons
    assert isinstance(reason, GrantedReason)
    assert reason.worker_id is None
    assert found.summary.startswith("waiting: reserved for a worker until ")
