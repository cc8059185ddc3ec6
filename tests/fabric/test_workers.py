"""The workers of a fabric: which lanes and namespaces they claim from."""

import re
from typing import Any

import pytest

from flowfabric import Context, Fabric, PublicState
from flowfabric.fabric.task import SubmitOptions, Task
from flowfabric.model.errors import InvalidInputError
from flowfabric.worker.options import WorkerOptions


async def test_a_worker_serves_the_lanes_of_the_tasks_and_the_namespace_of_its_fabric(url: str) -> None:
    ours, theirs = Fabric(url, namespace="ours", lane="main"), Fabric(url, namespace="theirs", lane="main")

    @ours.task(lane="other")
    async def elsewhere(ctx: Context) -> str:
        return ctx.lane_id

    async def here(ctx: Context) -> str:
        return ctx.lane_id

    our_task, their_task = ours.task(here), theirs.task(here)
    async with ours, theirs:
        waiting = await their_task.submit()
        async with ours.worker() as worker:
            assert worker.lanes == ("main", "other")
            assert await (await elsewhere.submit()).result(timeout=60) == "other"
            assert await (await our_task.submit()).result(timeout=60) == "main"
            assert (await waiting.status()).state is PublicState.WAITING
        async with ours.worker(namespace=None):
            assert await waiting.result(timeout=60) == "main"
        with pytest.raises(InvalidInputError, match="invalid_input: lanes: "):
            ours.worker(lanes="mail")


WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"concurency": 3}, TypeError, r"no such option: concurency; the options are: .*; did you mean concurrency\?"),
    ({"worker_id": ""}, InvalidInputError, "invalid_input: worker_id: must not be empty"),
    ({"worker_instance_id": ""}, InvalidInputError, "invalid_input: worker_instance_id: must not be empty"),
    ({"reconcile": "no"}, InvalidInputError, "invalid_input: reconcile: must be True or False, got 'no'"),
    ({"lease_ttl": 0}, InvalidInputError, "lease_ttl: must be at least 0.001 seconds, got 0$"),
    ({"poll_interval": 0}, InvalidInputError, "poll_interval: must be at least 0.001 seconds, got 0$"),
]


async def test_a_worker_with_a_wrong_option_is_refused(url: str) -> None:
    async with Fabric(url) as fabric:
        for options, refusal, text in WRONG:
            with pytest.raises(refusal, match=text):
                fabric.worker(**options)


async def test_run_worker_is_refused_inside_an_event_loop(url: str) -> None:
    with pytest.raises(RuntimeError, match=r"use `async with fabric, fabric\.worker\(\):`"):
        Fabric(url).run_worker()


@pytest.mark.parametrize(("call", "options"), [(Fabric.worker, WorkerOptions), (Task.options, SubmitOptions)])
def test_the_help_lists_every_option(call: Any, options: type) -> None:
    listed = re.findall(r"^ +(\w+): ", call.__doc__, re.MULTILINE)
    assert listed == list(options.__annotations__)
