"""The public names, and nothing else, are what `flowfabric` offers."""

from importlib.resources import files

import flowfabric


def test_the_public_names_are_these() -> None:
    assert flowfabric.__all__ == sorted(flowfabric.__all__)
    assert set(flowfabric.__all__) == {
        "AttemptType",
        "BugError",
        "Cancelled",
        "ClaimedExecution",
        "Completed",
        "ConflictError",
        "ContentionError",
        "Context",
        "Created",
        "Duplicate",
        "Ended",
        "Engine",
        "EngineError",
        "ExecutionFailed",
        "ExecutionId",
        "ExecutionInfo",
        "ExecutionPolicy",
        "ExponentialBackoff",
        "Fabric",
        "FailureClass",
        "FailureReason",
        "FixedBackoff",
        "Handle",
        "LaneState",
        "Marked",
        "NewExecution",
        "NotFoundError",
        "NotRegistered",
        "OperationTimeoutError",
        "PermanentError",
        "PublicState",
        "Refreshed",
        "Registered",
        "Renewed",
        "ResourceExhaustedError",
        "RetryPolicy",
        "RetryScheduled",
        "RoutingRequirements",
        "Run",
        "Settings",
        "StateError",
        "StateVector",
        "StreamPolicy",
        "Task",
        "TerminalFailed",
        "TerminalOutcome",
        "TimeoutPolicy",
        "TransportError",
        "UnavailableError",
        "ValidationError",
        "Worker",
        "__version__",
    }


def test_every_public_name_says_what_it_is() -> None:
    undocumented = [name for name in flowfabric.__all__ if not (getattr(flowfabric, name).__doc__ or "").strip()]
    assert undocumented == []


def test_type_checkers_may_read_the_package() -> None:
    assert files("flowfabric").joinpath("py.typed").is_file()
