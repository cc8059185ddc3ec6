"""Wrong arguments of reads and of the worker registry are refused with an engine error, never another exception."""

import math
from collections.abc import Awaitable, Callable
from typing import Any
from uuid import uuid4

import pytest

from engine.state import refused
from fixtures import Given, Rows
from flowfabric.engine.engine import Engine
from flowfabric.model.errors import EngineError
from flowfabric.model.worker import WorkerCursor

WRONG: dict[str, Any] = {
    "none": None,
    "number": 5,
    "negative": -1,
    "empty text": "",
    "bytes": b"",
    "some bytes": b"ab",
    "empty list": [],
    "object": object(),
    "true": True,
    "not a number": math.nan,
    "infinity": math.inf,
    "past 64 bits": 2**63,
    "more digits than are shown": 10**5000,
    "nul": "\x00",
    "lone surrogate": "\ud800",
    "list of wrong": [None, 5, "\ud800"],
    "mapping": {"a": 1},
    "pair": ("\ud800", "\x00"),
    "nested": [["a"]],
}

ID = f"{{fp:1}}:{uuid4()}"
REGISTRATION = {
    "worker_id": "pool",
    "worker_instance_id": "pool-1",
    "lanes": ("default",),
    "liveness_ttl_ms": 60_000,
    "namespace": "tests",
    "capabilities": (),
}
OPERATIONS: dict[str, dict[str, Any]] = {
    **{
        name: {"execution_id": ID}
        for name in (
            "read_execution_state",
            "read_execution_info",
            "read_execution_status",
            "get_execution_result",
            "describe_execution",
            "explain",
            "read_execution_context",
            "read_current_attempt_index",
            "read_total_attempt_count",
            "resolve_execution_flow_id",
            "get_execution_namespace",
            "list_attempts",
        )
    },
    "read_exec_core_fields": {"execution_id": ID, "names": ["priority"]},
    "list_executions": {
        "namespace": "tests",
        "lane_id": "default",
        "public_state": "waiting",
        "execution_kind": "job",
        "tag": ("a.b", "c"),
        "flow_id": str(uuid4()),
        "created_after": 0,
        "created_before": 1,
        "completed_after": 0,
        "completed_before": 1,
        "order": "newest",
        "cursor": None,
        "limit": 5,
    },
    "count_executions": {
        "by": ("lane", "kind"),
        "namespace": "tests",
        "lane_id": "default",
        "public_state": "waiting",
        "execution_kind": "job",
    },
    "find_inconsistencies": {"limit": 5},
    "wait_for_ending": {"execution_id": ID, "timeout": 0},
    "set_lane_state": {"lane_id": "default", "state": "active"},
    "list_lanes": {"cursor": "default", "limit": 5},
    "register_worker": REGISTRATION,
    "heartbeat_worker": {"worker_instance_id": "pool-1", "namespace": "tests"},
    "mark_worker_dead": {"worker_instance_id": "pool-1", "namespace": "tests", "reason": "gone"},
    "list_workers": {"namespace": "tests", "after": "pool-0", "limit": 5},
    # Last: it closes the engine.
    "shutdown_prepare": {"grace_ms": 1000},
}
REFUSALS = {"invalid_input", "invalid_tag_key", "invalid_capabilities", "execution_not_found", "unavailable"}


async def test_a_wrong_argument_raises_nothing_but_an_engine_error(engine: Engine, subtests: pytest.Subtests) -> None:
    for name, arguments in OPERATIONS.items():
        for argument in arguments:
            with subtests.test(f"{name}({argument})"):
                refusals: dict[str, EngineError] = {}
                for title, wrong in WRONG.items():
                    try:
                        await getattr(engine, name)(**{**arguments, argument: wrong})
                    except EngineError as caught:
                        refusals[title] = caught
                assert refusals
                for title, refusal in refusals.items():
                    assert refusal.code in REFUSALS, (title, refusal)
                    # The message can be encoded.
                    assert str(refusal).encode()


Call = Callable[[Engine], Awaitable[object]]


def lanes(value: Any) -> Call:
    return lambda engine: engine.register_worker(**{**REGISTRATION, "lanes": value})


def ttl(value: Any) -> Call:
    return lambda engine: engine.register_worker(**{**REGISTRATION, "liveness_ttl_ms": value})


NAMED: dict[str, tuple[Call, str]] = {
    "lanes of a number": (lanes(5), "lanes: expected a list or another collection, got 5"),
    "lanes of a text": (lanes("ab"), "lanes: expected a list or another collection, got 'ab'"),
    "no lanes": (lanes([]), "lanes: must contain at least one lane id"),
    "liveness past its end": (
        ttl(2**53),
        f"liveness_ttl_ms: must be a whole number from 1 to {2**53 - 1}, got {2**53}",
    ),
    "liveness of nothing": (ttl(0), f"liveness_ttl_ms: must be a whole number from 1 to {2**53 - 1}, got 0"),
    "no cursor of lanes": (lambda engine: engine.list_lanes(cursor=""), "a lane id, got ''"),
    "lanes below none": (lambda engine: engine.list_lanes(limit=-1), "limit: must be a whole number of at least 0"),
    "a true number of lanes": (lambda engine: engine.list_lanes(limit=True), "got True"),
    "workers below none": (lambda engine: engine.list_workers(limit=-1), "limit: must be a whole number of at least 0"),
    "executions below none": (
        lambda engine: engine.list_executions(limit=-1),
        "limit: must be a whole number of at least 0, got -1",
    ),
    "no names": (lambda engine: engine.read_exec_core_fields(ID, None), "names: expected a list or another collection"),  # type: ignore[arg-type]
    "a name": (
        lambda engine: engine.read_exec_core_fields(ID, "priority"),
        "names: expected a list or another collection",
    ),
    "a cursor of texts": (
        lambda engine: engine.list_workers(after=WorkerCursor(namespace=5, worker_instance_id="x")),  # type: ignore[arg-type]
        "after: must be text",
    ),
}


async def test_a_refusal_names_the_field_the_value_and_what_is_allowed(
    engine: Engine, rows: Rows, subtests: pytest.Subtests
) -> None:
    async with rows.unchanged():
        for case, (call, detail) in NAMED.items():
            with subtests.test(case):
                await refused(call(engine), "invalid_input", detail)


async def test_a_limit_above_the_maximum_is_reduced_to_it(engine: Engine) -> None:
    for limit in (2**63, 10**400):
        assert len((await engine.list_lanes(limit=limit)).lanes) == 1
        assert (await engine.list_workers(limit=limit)).entries == []
        assert (await engine.list_executions(limit=limit)).executions == []


async def test_names_may_be_an_iterator(engine: Engine, given: Given) -> None:
    execution_id = await given.created(priority=3)
    found = await engine.read_exec_core_fields(execution_id, (name for name in ("priority", "execution_kind")))
    assert found == {"priority": "3", "execution_kind": "job"}
