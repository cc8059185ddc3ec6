"""What users hold: tasks, submissions and runs."""

import asyncio
import pickle
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from flowfabric import (
    Context,
    Fabric,
    FixedBackoff,
    NoRetry,
    PublicState,
    RunCancelled,
    RunExpired,
    RunFailed,
    Settings,
)
from flowfabric.db.embedded import Embedded
from flowfabric.model.errors import ConflictError, InvalidInputError, NotFoundError
from flowfabric.outcomes import TerminalOutcome
from flowfabric.settings import SettingsError


@dataclass
class Point:
    x: int
    y: int


async def test_a_task_is_submitted_run_and_waited_for(url: str) -> None:
    fabric = Fabric(url)

    @fabric.task
    async def add(a: int, b: int) -> int:
        return a + b

    async with fabric, fabric.worker():
        runs = [await add.submit(n, b=1) for n in range(10)]
        assert [await run.result(timeout=60) for run in runs] == list(range(1, 11))
        assert (await runs[0].status()).state is PublicState.COMPLETED
        assert (await runs[0].status()).task == "add"


async def test_a_task_is_still_its_function() -> None:
    fabric = Fabric()

    @fabric.task(retries=3)
    async def add(a: int, b: int) -> int:
        """Add."""
        return a + b

    @fabric.task
    def subtract(a: int, b: int) -> int:
        return a - b

    assert await add(1, 2) == 3
    assert subtract(3, b=2) == 1
    assert (add.__name__, add.__doc__, repr(add)) == ("add", "Add.", "Task(add)")


async def test_results_have_the_type_the_function_names(url: str) -> None:
    fabric = Fabric(url)

    @fabric.task
    def mirror(point: Point) -> Point:
        return Point(point.y, point.x)

    @fabric.task
    async def raw(ctx: Context) -> bytes:
        return ctx.execution_id.encode()

    async with fabric, fabric.worker():
        assert await (await mirror.submit(Point(1, 2))).result(timeout=60) == Point(2, 1)
        run = await raw.submit()
        assert await run.result(timeout=60) == run.id.encode()
        assert await raw.run(run.id).result(timeout=60) == run.id.encode()


async def test_a_run_that_failed_says_why(url: str) -> None:
    fabric = Fabric(url)

    @fabric.task(retries=2, backoff=0.001)
    async def fail(ctx: Context) -> None:
        raise ValueError(f"attempt {ctx.attempt_index}")

    @fabric.task(retries=2)
    async def give_up() -> None:
        raise NoRetry("never")

    async with fabric, fabric.worker():
        run = await fail.submit()
        with pytest.raises(RunFailed, match="failed: ValueError: attempt 2") as failed:
            await run.result(timeout=60)
        assert (failed.value.execution_id, failed.value.outcome) == (run.id, TerminalOutcome.FAILED)
        with pytest.raises(RunFailed, match="NoRetry: never"):
            await (await give_up.submit()).result(timeout=60)


async def test_a_run_can_be_cancelled(url: str) -> None:
    fabric = Fabric(url)

    @fabric.task
    async def never() -> None: ...

    async with fabric:
        run = await never.submit()
        with pytest.raises(TimeoutError, match=r"has not ended within 0\.01 s"):
            await run.result(timeout=0.01)
        await run.cancel("changed my mind")
        with pytest.raises(RunCancelled, match="was cancelled: changed my mind"):
            await run.result(timeout=60)
        assert (await run.status()).state is PublicState.CANCELLED


async def test_options_change_a_submission_and_nothing_else(url: str) -> None:
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


async def test_a_key_submits_once(url: str) -> None:
    fabric = Fabric(url)

    @fabric.task
    async def pay(amount: int) -> int:
        return amount

    async with fabric:
        keyed = pay.options(idempotency_key="invoice-7")
        first, second = await asyncio.gather(keyed.submit(1), keyed.submit(1))
        assert first.id == second.id
        assert sorted([first.is_duplicate, second.is_duplicate]) == [False, True]


async def test_the_same_key_with_other_arguments_is_a_conflict(url: str) -> None:
    fabric = Fabric(url)

    @fabric.task
    async def pay(amount: int) -> int:
        return amount

    async with fabric:
        keyed = pay.options(idempotency_key="invoice-7")
        first = await keyed.submit(1)
        with pytest.raises(ConflictError) as refusal:
            await keyed.submit(2)
        assert refusal.value.code == "idempotency_conflict"
        assert str(refusal.value) == (
            f"idempotency_conflict: task 'pay': idempotency_key 'invoice-7' belongs to run {first.id}, which was "
            "submitted with other arguments; repeat the same call, or use another key"
        )
        assert str(pickle.loads(pickle.dumps(refusal.value))) == str(refusal.value)
        with pytest.raises(ConflictError, match=r"with other arguments and options \(retries, backoff, ") as refusal:
            await keyed.options(retries=1).submit(2)
        detail: Any = refusal.value.detail
        assert detail["execution_id"] == first.id
        again = await keyed.submit(1)
        assert (again.id, again.is_duplicate) == (first.id, True)


async def test_equal_arguments_are_a_repeat_however_they_are_written(url: str, rows: Any) -> None:
    fabric = Fabric(url)

    @fabric.task
    async def job(a: Any, b: float = 0, several: set[int] | None = None) -> None: ...

    calls: list[list[tuple[tuple[Any, ...], dict[str, Any]]]] = [
        [((1,), {}), ((1, 0), {}), ((1,), {"b": 0.0, "several": None}), ((), {"a": 1})],
        [(({"x": 1, "y": {"p": 1, "q": 2}},), {}), (({"y": {"q": 2, "p": 1}, "x": 1}, 0), {})],
        # 0 and 8 share a slot of the hash table: the first one added comes first.
        [((2, 0, {0, 8}), {}), ((2, 0, {8, 0}), {})],
    ]
    async with fabric:
        for at, alike in enumerate(calls):
            keyed = job.options(idempotency_key=f"key {at}")
            runs = [await keyed.submit(*args, **kwargs) for args, kwargs in alike]
            assert {run.id for run in runs} == {runs[0].id}
            assert [run.is_duplicate for run in runs] == [False] + [True] * (len(runs) - 1)
        stored = {row["input_payload"] for row in await rows.of("execution")}
        assert b'{"a":1,"b":0.0,"several":null}' in stored
        await job.submit(1)
        assert b'{"a":1}' in {row["input_payload"] for row in await rows.of("execution")}


async def test_tasks_of_one_lane_do_not_share_keys(url: str) -> None:
    fabric = Fabric(url)

    async def job() -> None: ...

    # Names and keys that come to the same text where they are merely joined.
    pairs = [("a", "b/c"), ("a/b", "c"), ("a%2Fb", "c"), ("a", "c"), ("ä ö", "c"), ("", "a/c")]
    async with fabric:
        tasks = {name: fabric.task(name=name)(job) for name in {name for name, _ in pairs}}
        keyed = [tasks[name].options(idempotency_key=key) for name, key in pairs]
        assert [(await one.submit()).is_duplicate for one in keyed] == [False] * len(pairs)
        assert [(await one.submit()).is_duplicate for one in keyed] == [True] * len(pairs)


async def test_a_key_and_a_name_that_are_too_long_together_are_refused(url: str) -> None:
    fabric = Fabric(url)

    async def job() -> None: ...

    async with fabric:
        task = fabric.task(name="ä" * 100)(job)
        await task.options(idempotency_key="k" * (1023 - 600)).submit()
        with pytest.raises(InvalidInputError, match=r"idempotency_key: must be at most 1024 bytes .*, got 1025"):
            await task.options(idempotency_key="k" * (1024 - 600)).submit()
        with pytest.raises(InvalidInputError, match="idempotency_key: must be text"):
            await task.options(idempotency_key=5).submit()  # type: ignore[arg-type]


async def test_a_worker_serves_the_namespace_of_its_fabric(url: str) -> None:
    ours, theirs = Fabric(url, namespace="ours"), Fabric(url, namespace="theirs")

    async def job() -> str:
        return "done"

    tasks = [fabric.task(job) for fabric in (ours, theirs)]
    async with ours, theirs:
        waiting = await tasks[1].submit()
        async with ours.worker():
            assert await (await tasks[0].submit()).result(timeout=60) == "done"
            assert (await waiting.status()).state is PublicState.WAITING
        async with ours.worker(namespace=None):
            assert await waiting.result(timeout=60) == "done"


async def test_options_become_a_policy(url: str, rows: Any) -> None:
    fabric = Fabric(url)

    @fabric.task(
        retries=4, backoff=FixedBackoff(delay_ms=7), timeout=1.5, deadline=timedelta(minutes=1), capabilities=["gpu"]
    )
    async def job() -> None: ...

    async with fabric:
        run = await job.submit()
        (stored,) = await rows.of("execution", execution_id=run.id[-36:])
    assert stored["payload_encoding"] == "json"
    policy = stored["policy"]
    for part in ('"max_retries": 4', '"delay_ms": 7', '"attempt_timeout_ms": 1500', '"execution_deadline_ms": 60000'):
        assert part in policy
    assert '"required_capabilities": ["gpu"]' in policy


async def test_an_attempt_that_takes_too_long_is_ended(url: str) -> None:
    fabric = Fabric(url)

    @fabric.task(timeout=0.1)
    async def wait(ctx: Context) -> None:
        await ctx.lease_lost

    async with fabric, fabric.worker(lease_ttl=0.6):
        with pytest.raises(RunExpired, match="expired") as failed:
            await (await wait.submit()).result(timeout=60)
        assert failed.value.outcome is TerminalOutcome.EXPIRED


async def test_a_worker_serves_the_lanes_of_the_tasks(url: str) -> None:
    fabric = Fabric(url, lane="main")

    @fabric.task(lane="other")
    async def elsewhere(ctx: Context) -> str:
        return ctx.lane_id

    @fabric.task
    async def here(ctx: Context) -> str:
        return ctx.lane_id

    async with fabric, fabric.worker() as worker:
        assert worker.lanes == ("main", "other")
        assert await (await elsewhere.submit()).result(timeout=60) == "other"
        assert await (await here.submit()).result(timeout=60) == "main"


async def test_fabrics_stand_side_by_side(url: str, empty_url: str) -> None:
    async with (
        Fabric(url) as one,
        Fabric(settings=Settings(database_url=empty_url, migrate_on_start=True)) as two,
    ):
        assert one.engine is not two.engine
        assert one.tasks is not two.tasks


async def test_a_fabric_can_be_opened_again(url: str) -> None:
    fabric = Fabric(url)
    for _ in range(2):
        async with fabric:
            await fabric.engine.ping()
            with pytest.raises(RuntimeError, match="already connected"):
                await fabric.__aenter__()
    with pytest.raises(RuntimeError, match="not connected"):
        _ = fabric.engine


async def test_the_embedded_store_needs_no_settings(tmp_path: Path) -> None:
    home = tmp_path / "home"
    fabric = Fabric(settings=Settings(home=home))

    @fabric.task
    async def hello() -> str:
        return "hello"

    async with fabric, fabric.worker():
        assert await (await hello.submit()).result(timeout=60) == "hello"
    (await asyncio.to_thread(Embedded.start, home)).release(discard=True)


async def test_names_are_unique() -> None:
    fabric = Fabric()

    @fabric.task
    async def job() -> None: ...

    with pytest.raises(ValueError, match="a task named 'job' already exists"):

        @fabric.task(name="job")
        async def another() -> None: ...


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"capabilities": "gpu"}, "invalid_input: capabilities: [^,]*, got 'gpu'"),
        ({"capabilities": 5}, "invalid_input: capabilities: "),
        ({"timeout": "5"}, "invalid_input: timeout: expected seconds or a timedelta, got '5'"),
        ({"deadline": float("nan")}, "invalid_input: deadline: expected seconds or a timedelta"),
        ({"backoff": True, "retries": 1}, "invalid_input: backoff: expected seconds or a timedelta"),
        ({"retries": "3"}, "invalid_policy_json: retries: must be a whole number from 0 to 2147483647, got '3'"),
        ({"retries": -1}, "invalid_policy_json: retries: .*, got -1"),
        ({"retries": 1.5}, "invalid_policy_json: retries: .*, got 1.5"),
        ({"retries": False}, "invalid_policy_json: retries: .*, got False"),
        ({"backoff": -1, "retries": 1}, "invalid_policy_json: backoff: must be 0 seconds or more, got -1"),
        ({"deadline": -1}, "invalid_policy_json: deadline: must be 0 seconds or more, got -1"),
        ({"deadline": 1e300}, "invalid_policy_json: deadline: must be at most 9007199254740 seconds, got 1e.300"),
        ({"timeout": 0}, "invalid_policy_json: timeout: must be at least 0.001 seconds; leave it out for none, got 0"),
        ({"timeout": timedelta(0)}, "invalid_policy_json: timeout: must be at least 0.001 seconds"),
        ({"timeout": -5}, "invalid_policy_json: timeout: must be at least 0.001 seconds; .*, got -5"),
        ({"delay": -5}, "invalid_input: delay: must be 0 seconds or more, got -5"),
        ({"lane": 5}, "invalid_input: lane: must be a string of 1 to 64 printable ASCII characters, got 5"),
        ({"lane": ""}, "invalid_input: lane: .*, got ''"),
        ({"lane": "a b/é"}, "invalid_input: lane: .*, got 'a b/é'"),
        (
            {"tags": {"a": "b"}},
            "invalid_tag_key: tags: key 'a' must be namespaced, such as 'app.a': a lower-case letter",
        ),
        ({"tags": {"A b": "b"}}, "invalid_tag_key: tags: key 'A b' must be namespaced, such as 'app.name'"),
        ({"tags": {"a": 1}}, "invalid_tag_key: tags: key 'a'"),
        ({"tags": {"app.a": 1}}, "invalid_input: tags: the value of 'app.a': must be text, got 1"),
        ({"tags": [("app.a", "b")]}, "invalid_input: tags: must be a dict of strings, such as .*, got "),
        ({"name": 5}, "invalid_input: name: must be text"),
    ],
    ids=str,
)
async def test_a_task_is_not_declared_with_something_of_another_kind(options: dict[str, Any], told: str) -> None:
    fabric = Fabric()

    async def job() -> None: ...

    with pytest.raises(InvalidInputError, match=told):
        fabric.task(**options)(job)
    assert fabric.tasks == {}


@pytest.mark.parametrize("kind", [list, tuple, set, iter], ids=["list", "tuple", "set", "iterator"])
async def test_capabilities_come_as_any_collection(url: str, rows: Any, kind: Any) -> None:
    fabric = Fabric(url)

    @fabric.task(capabilities=kind(["gpu", "cpu"]))
    async def job() -> None: ...

    async with fabric:
        run = await job.submit()
        again = await job.options(priority=1).submit()
    for one in (run, again):
        (stored,) = await rows.of("execution", execution_id=one.id[-36:])
        assert '"required_capabilities": ["cpu", "gpu"]' in stored["policy"]


async def test_a_fabric_told_something_of_another_kind_is_refused(url: str) -> None:
    wrong: list[dict[str, Any]] = [{"settings": "x"}, {"settings": {}}, {"lane": ["a"]}, {"namespace": None}]
    for options in wrong:
        with pytest.raises(InvalidInputError, match=f"invalid_input: {next(iter(options))}"):
            Fabric(url, **options)
    with pytest.raises(SettingsError, match="FF_DATABASE_URL: "):
        async with Fabric(5):  # type: ignore[arg-type]
            pass
    with pytest.raises(TypeError, match="expected a function, got 'name'"):
        Fabric().task("name")  # type: ignore[call-overload]
    fabric = Fabric(url)

    @fabric.task
    async def job() -> None: ...

    async with fabric:
        with pytest.raises(InvalidInputError, match="invalid_input: delay: "):
            await job.options(delay="soon").submit()  # type: ignore[arg-type]
        with pytest.raises(InvalidInputError, match="invalid_input: lanes: "):
            fabric.worker(lanes="mail")
        with pytest.raises(InvalidInputError, match="tags: "):
            await job.options(tags="a.b").submit()  # type: ignore[arg-type]
    with pytest.raises(InvalidInputError, match=r"'x' is not an execution id; write \{fp:<number>\}:<uuid> or "):
        job.run("x")


async def test_what_cannot_be_submitted_is_refused_at_once(url: str) -> None:
    fabric = Fabric(url)

    @fabric.task
    async def job(a: int) -> None: ...

    async with fabric:
        with pytest.raises(TypeError, match="missing a required argument: 'a'"):
            await job.submit()  # type: ignore[call-overload]
        with pytest.raises(TypeError, match="no such option: prio"):
            job.options(prio=1)  # type: ignore[call-arg]
        with pytest.raises(TypeError, match="no such option: retires"):
            fabric.task(retires=1)  # type: ignore[call-overload]
        with pytest.raises(TypeError, match="task 'job': no such argument: 'w'; its arguments are: a"):
            await job.submit(w=1)  # type: ignore[call-overload]
        with pytest.raises(InvalidInputError, match="lane: "):
            await job.options(lane="").submit(1)
        with pytest.raises(InvalidInputError, match="idempotency_key: must not be empty"):
            await job.options(idempotency_key="").submit(1)


async def test_an_execution_that_is_not_there_is_named(url: str) -> None:
    fabric = Fabric(url)

    @fabric.task
    async def job() -> None: ...

    async with fabric:
        missing = job.run("{fp:0}:00000000-0000-7000-8000-000000000000")
        for ask in (missing.status, missing.explain, missing.result):
            with pytest.raises(NotFoundError) as refused:
                await ask()
            assert str(refused.value) == f"not found: execution {missing.id}"
            assert refused.value.code == "execution_not_found"


async def test_a_run_of_another_task_gives_no_result(url: str) -> None:
    fabric = Fabric(url)

    @fabric.task
    async def a() -> int:
        return 1

    @fabric.task
    async def charge() -> int:
        return 2

    async with fabric, fabric.worker():
        run = await a.submit()
        assert await a.run(run.id).result(timeout=60) == 1
        with pytest.raises(InvalidInputError) as refused:
            await charge.run(run.id).result(timeout=60)
    assert refused.value.code == "invalid_input"
    assert f"{run.id} is a run of task 'a', not of 'charge'" in str(refused.value)


async def test_a_run_that_has_not_ended_says_where_it_stands(url: str) -> None:
    fabric = Fabric(url)

    @fabric.task
    async def job() -> None: ...

    async with fabric:
        run = await job.submit()
        with pytest.raises(TimeoutError) as late:
            await run.result(timeout=0.01)
        explanation = await run.explain()
    assert str(late.value) == f"{run.id} has not ended within 0.01 s: it is waiting; `await run.explain()` says why"
    assert (explanation.execution_id, explanation.public_state) == (run.id, PublicState.WAITING)
