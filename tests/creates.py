"""Submissions with default arguments."""

from typing import Any

from flowfabric.model.execution import NewExecution


def new(**overrides: Any) -> NewExecution:
    """A submission; arguments that are not given have defaults."""
    defaults: dict[str, Any] = {
        "namespace": "tests",
        "lane_id": "default",
        "execution_kind": "job",
        "input_payload": b"{}",
        "priority": 0,
        "creator_identity": "test",
    }
    return NewExecution(**{**defaults, **overrides})
