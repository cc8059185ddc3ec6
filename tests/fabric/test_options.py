"""The options of a task: what they change, and which values are refused."""

import re
from datetime import timedelta
from typing import Any

from fixtures import Rows
from flowfabric import Fabric, FixedBackoff, PublicState
from flowfabric.model.errors import InvalidInputError
from flowfabric.policy import DurabilityMode, StreamPolicy

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"capabilities": "gpu"}, "invalid_input: capabilities: [^,]*, got 'gpu'"),
    ({"capabilities": 5}, "invalid_input: capabilities: "),
    ({"timeout": "5"}, "invalid_input: timeout: expected seconds or a timedelta, got '5'"),
    ({"deadline": float("nan")}, "invalid_input: deadline: expected seconds or a timedelta"),
    ({"backoff": True, "retries": 1}, "invalid_input: backoff: expected seconds or a timedelta"),
    ({"retries": "3"}, "invalid_input: retries: must be a whole number from 0 to 2147483647, got '3'"),
    ({"retries": -1}, "invalid_input: retries: .*, got -1"),
    ({"retries": 1.5}, "invalid_input: retries: .*, got 1.5"),
    ({"retries": False}, "invalid_input: retries: .*, got False"),
    ({"backoff": -1, "retries": 1}, "invalid_input: backoff: must be 0 seconds or more, got -1"),
    ({"deadline": -1}, "invalid_input: deadline: must be 0 seconds or more, got -1"),
    ({"deadline": 1e300}, "invalid_input: deadline: must be at most 9007199254740 seconds, got 1e.300"),
    ({"timeout": 0}, "invalid_input: timeout: must be at least 0.001 seconds, got 0; leave it out for no limit"),
    ({"timeout": timedelta(0)}, "invalid_input: timeout: must be at least 0.001 seconds"),
    ({"timeout": -5}, "invalid_input: timeout: must be at least 0.001 seconds, got -5"),
    ({"delay": -5}, "invalid_input: delay: must be 0 seconds or more, got -5"),
    ({"priority": "high"}, "invalid_input: priority: must be a whole number, got 'high'"),
    ({"priority": True}, "invalid_input: priority: must be a whole number, got True"),
    ({"lane": 5}, "invalid_input: lane: must be text, got 5"),
    ({"lane": ""}, "invalid_input: lane: Empty: must be 1 to 64 printable ASCII characters, got ''"),
    ({"lane": "a b/é"}, "invalid_input: lane: NonPrintable.4.: .*, got 'a b/é'"),
    ({"tags": {"a": "b"}}, "invalid_tag_key: tag key 'a' must be namespaced, e.g. 'app.a': lower-case letters"),
    ({"tags": {"A b": "b"}}, "invalid_tag_key: tag key 'A b' must be namespaced, e.g. 'app.name'"),
    ({"tags": {"a": 1}}, "invalid_tag_key: tag key 'a'"),
    ({"tags": {"app.a": 1}}, "invalid_input: tags.app.a: must be text, got 1"),
    ({"tags": [("app.a", "b")]}, "invalid_input: tags: must be a mapping of text to text, e.g. .*, got "),
    (
        {"stream": {"retention_maxlen": 5}},
        r"invalid_input: stream: must be StreamPolicy\(...\), got {'retention_maxlen",
    ),
    ({"name": 5}, "invalid_input: name: must be text"),
]


async def test_options_change_one_submission_and_not_the_task(url: str) -> None:
    fabric = Fabric(url)

    @fabric.task(priority=1, lane="slow")
    async def job(priority: int) -> None: ...

    async with fabric:
        plain = await fabric.engine.read_execution_info((await job.submit(priority=99)).id)
        special = job.options(priority=5, lane="fast", tags={"app.a": "b"})
        changed = await fabric.engine.read_execution_info((await special.submit(priority=99)).id)
        later = await job.options(delay=timedelta(hours=1)).submit(priority=99)
        assert plain is not None
        assert changed is not None
        assert (plain.priority, plain.lane_id) == (1, "slow")
        assert (changed.priority, changed.lane_id) == (5, "fast")
        assert (await later.status()).state is PublicState.DELAYED


async def test_options_become_a_policy(url: str, rows: Rows) -> None:
    fabric = Fabric(url)

    @fabric.task(
        retries=4,
        backoff=FixedBackoff(delay_ms=7),
        timeout=1.5,
        deadline=timedelta(minutes=1),
        capabilities=["gpu"],
        stream=StreamPolicy(durability_mode=DurabilityMode.DURABLE, retention_maxlen=50),
    )
    async def job() -> None: ...

    async def stored(run: Any) -> Any:
        (row,) = await rows.of("execution", execution_id=run.id[-36:])
        return row

    async with fabric:
        row = await stored(await job.submit())
        # Any collection will do, also one that can be read only once.
        for kind in (list, tuple, set, iter):
            offering = job.options(capabilities=kind(["gpu", "cpu"]))
            for task in (offering, offering.options(priority=1)):
                policy = (await stored(await task.submit()))["policy"]
                assert (kind, '"required_capabilities": ["cpu", "gpu"]' in policy) == (kind, True)
        plain = job.options(stream=StreamPolicy())
        assert '"stream_policy"' not in (await stored(await plain.submit()))["policy"]
    assert row["payload_encoding"] == "json"
    for part in ('"max_retries": 4', '"delay_ms": 7', '"attempt_timeout_ms": 1500', '"execution_deadline_ms": 60000'):
        assert part in row["policy"]
    assert '"required_capabilities": ["gpu"]' in row["policy"]
    assert '"durability_mode": "durable", "retention_maxlen": 50' in row["policy"]


def test_a_task_with_a_wrong_option_is_not_declared() -> None:
    fabric = Fabric()

    async def job() -> None: ...

    wrong = []
    for options, text in REFUSED:
        try:
            fabric.task(**options)(job)
        except InvalidInputError as refused:
            if not re.match(text, str(refused)):
                wrong.append((options, str(refused)))
        else:
            wrong.append((options, "accepted"))
    assert wrong == []
    assert fabric.tasks == {}
