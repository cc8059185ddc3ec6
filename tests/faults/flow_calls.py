"""Calls of the operations on flows, for the fault sweeps."""

from collections.abc import Awaitable, Callable
from typing import Any

from flowfabric.engine.engine import Engine
from flowfabric.engine.parts import parts_of
from flowfabric.model.errors import EngineError

from .preparations import LARGE_INPUT, delayed_until
from .scene import MINUTE, Subject


def submit_flow(engine: Engine, subject: Subject, **overrides: Any) -> Awaitable[object]:
    """Submit a flow of three members, two of them ahead of the third."""
    fields = ("lane_id", "execution_kind", "input_payload", "creator_identity", "policy")
    member = {field: subject.new(input_payload=LARGE_INPUT)[field] for field in fields}
    return engine.submit_flow(
        flow_kind="dag",
        namespace="tests",
        nodes=[
            {"name": "first", **member, "tags": {"ff.instance_id": "one"}},
            {"name": "late", **member, "delay_ms": MINUTE},
            {"name": "last", **member, "execution_deadline_at": delayed_until(subject)},
        ],
        edges=[{"upstream": name, "downstream": "last"} for name in ("first", "late")],
        groups={"last": {"kind": "any_of", "on_satisfied": "let_run"}},
        tags={"app.key": "value"},
        **overrides,
    )


def cancel_graph(cancel: Callable[..., Awaitable[object]], subject: Subject, policy: str) -> Awaitable[object]:
    """Cancel the flow of a subject by one of the operations that do it."""
    return cancel(subject.flow_id, reason="x", cancellation_policy=policy)


async def cancel_many(engine: Engine, subject: Subject) -> None:
    """Cancel the execution of a subject among many, and raise its error."""
    (result,) = await parts_of(engine).cancel_many.cancel([subject.execution_id], reason="x")
    if isinstance(result, EngineError):
        raise result
