"""The public names, and nothing else, are what `flowfabric` offers."""

import inspect
from collections.abc import Iterator
from importlib import import_module
from importlib.resources import files
from typing import Any, get_args, get_type_hints

import pytest

import flowfabric
from flowfabric import Context, Engine, Fabric, Flow, FlowRun, Run, Task, Worker
from flowfabric.model.support import NAMED_OPERATIONS

MODULES = (
    "flowfabric",
    "flowfabric.conditions",
    "flowfabric.errors",
    "flowfabric.feeds",
    "flowfabric.flows",
    "flowfabric.ids",
    "flowfabric.outcomes",
    "flowfabric.policy",
    "flowfabric.streams",
)


def offered() -> Iterator[tuple[str, str, Any]]:
    """Every public name: its module, the name and what it is."""
    for module in map(import_module, MODULES):
        for name in module.__all__:
            yield module.__name__, name, getattr(module, name)


def test_the_names_of_the_package_are_these() -> None:
    assert flowfabric.__all__ == [
        "Budget",
        "BudgetExceeded",
        "Callback",
        "Context",
        "Engine",
        "EngineError",
        "ExecutionId",
        "ExponentialBackoff",
        "Fabric",
        "FixedBackoff",
        "Flow",
        "FlowRun",
        "FlowRunCancelled",
        "FlowRunFailed",
        "FlowRunStatus",
        "FlowStatus",
        "InvalidInputError",
        "NewExecution",
        "NoRetry",
        "PublicState",
        "Reconciler",
        "Run",
        "RunCancelled",
        "RunError",
        "RunExpired",
        "RunFailed",
        "RunSkipped",
        "RunStatus",
        "Settings",
        "Task",
        "UnreadableResult",
        "WaitTimeout",
        "Worker",
        "__version__",
        "all_of",
        "any_of",
        "log_fields",
        "quorum",
        "verify_and_deliver",
    ]


@pytest.mark.parametrize("name", MODULES)
def test_a_public_module_lists_its_names_in_order_and_holds_no_others(name: str) -> None:
    module = import_module(name)
    listed = module.__all__
    # Constants first, as ruff sorts them.
    assert listed == sorted(listed, key=lambda each: (not each.isupper(), each))
    public = {each for each, value in vars(module).items() if not each.startswith("_") and not inspect.ismodule(value)}
    assert public == set(listed) - {"__version__"}


def test_one_name_is_one_thing() -> None:
    things: dict[str, set[int]] = {}
    for _, name, thing in offered():
        things.setdefault(name.lower(), set()).add(id(thing))
    assert {name for name, found in things.items() if len(found) > 1} == set()


def test_no_name_is_also_a_name_of_pydantic_or_of_the_language() -> None:
    import builtins

    import pydantic

    others = {name for name in dir(pydantic) if name[0].isupper()} | set(dir(builtins))
    assert {name for _, name, _ in offered()} & others == set()


def test_every_public_name_says_what_it_is() -> None:
    assert [name for _, name, thing in offered() if not (getattr(thing, "__doc__", None) or "").strip()] == []


def returned(kind: object) -> Iterator[type]:
    """The classes of this project within the annotation of a return type."""
    for part in (kind, *get_args(kind)):
        if isinstance(part, type) and part.__module__.startswith("flowfabric."):
            yield part
        elif part is not kind:
            yield from returned(part)


def test_what_operations_return_can_be_imported() -> None:
    public = {id(thing) for _, _, thing in offered()}
    operations = {name: getattr(Engine, name) for name in vars(Engine) if not name.startswith("_")}
    hidden = {
        f"{name}: {kind.__name__}"
        for name, method in operations.items()
        for kind in returned(get_type_hints(method).get("return"))
        if id(kind) not in public
    }
    assert len(operations) > 100
    assert hidden == set()


def test_every_public_dataclass_is_frozen() -> None:
    dataclasses = {name: kind for _, name, kind in offered() if hasattr(kind, "__dataclass_params__")}
    assert len(dataclasses) > 100
    assert [name for name, kind in dataclasses.items() if not kind.__dataclass_params__.frozen] == []


async def test_an_editor_completes_only_operations_of_an_engine(engine: Engine) -> None:
    extras = {name for name in dir(engine) if not name.startswith("_")} - NAMED_OPERATIONS
    assert extras == {
        "attach_budget",
        "attach_quota",
        "cancel_matching",
        "change_budget_limits",
        "change_priority_matching",
        "change_quota_policy",
        "connect",
        "count_executions",
        "create_many",
        "detach_budget",
        "detach_quota",
        "find_inconsistencies",
        "list_attachments",
        "list_attempts",
        "read_execution_status",
        "read_flow_summary",
        "release_reservation",
        "replay_matching",
        "set_lane_fairness",
        "reserve",
        "set_lane_state",
        "settings",
        "settle",
        "wait_for_ending",
        "wait_for_flow",
    }


async def test_an_editor_completes_only_what_users_need_of_the_rest(url: str) -> None:
    fabric = Fabric(url)

    @fabric.task
    async def job() -> None: ...

    async with fabric:
        run = await job.submit()
        flow = fabric.flow("jobs")
        flow.add(job)
        flow_run = await flow.submit()
        worker = fabric.worker()
        shown = {
            kind.__name__: [name for name in dir(thing) if not name.startswith("_")]
            for kind, thing in (
                (Fabric, fabric),
                (Task, job),
                (Run, run),
                (Worker, worker),
                (Flow, flow),
                (FlowRun, flow_run),
            )
        }
    shown["Context"] = [name for name in dir(Context) if not name.startswith("_")]
    assert shown == {
        "Fabric": [
            "budget",
            "engine",
            "flow",
            "flow_run",
            "lane",
            "namespace",
            "run",
            "run_worker",
            "task",
            "tasks",
            "worker",
        ],
        "Flow": ["add", "after", "id", "kind", "submit"],
        "FlowRun": ["cancel", "id", "is_duplicate", "replay", "result", "run", "runs", "status", "wait"],
        "Task": ["bind", "lane", "name", "options", "run", "submit", "submit_many"],
        "Run": [
            "approve_budget",
            "cancel",
            "explain",
            "id",
            "is_duplicate",
            "plain_id",
            "reject_budget",
            "replay",
            "result",
            "signal",
            "status",
            "stream",
            "summary",
        ],
        "Worker": [
            "capabilities",
            "kinds",
            "lanes",
            "namespace",
            "run",
            "running",
            "stop",
            "worker_id",
            "worker_instance_id",
        ],
        "Context": [
            "attempt",
            "attempt_index",
            "attempt_type",
            "callback",
            "consecutive_renewal_failures",
            "create_waitpoint",
            "execution_id",
            "execution_kind",
            "fence",
            "from_thread",
            "input_payload",
            "is_lease_healthy",
            "is_resumed",
            "lane_id",
            "lease_epoch",
            "lease_lost",
            "observe_signals",
            "priority",
            "progress",
            "reserve",
            "resumed_signals",
            "retry_count",
            "spend",
            "stream",
            "summary",
            "suspend",
            "tags",
            "wait_for_signal",
            "worker_instance_id",
        ],
    }


def test_dir_lists_the_public_names_and_modules() -> None:
    modules = [name.partition(".")[2] for name in MODULES if "." in name]
    assert dir(flowfabric) == sorted([*flowfabric.__all__, *modules])


def test_type_checkers_may_read_the_package() -> None:
    assert files("flowfabric").joinpath("py.typed").is_file()
