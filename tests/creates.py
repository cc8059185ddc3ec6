"""Creates for tests that care about little of what they create."""

from typing import Any

from flowfabric.model.execution import NewExecution


def new(**overrides: Any) -> NewExecution:
    """A create with what is not said at its default."""
    given: dict[str, Any] = {
        "namespace": "tests",
        "lane_id": "default",
        "execution_kind": "job",
        "input_payload": b"{}",
        "priority": 0,
        "creator_identity": "test",
    }
    return NewExecution(**{**given, **overrides})
