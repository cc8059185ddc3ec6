"""What the guides list (options, methods, settings) is what the code has, with the same defaults."""

import ast
import inspect
import json
import re
from datetime import timedelta
from typing import Any, NamedTuple, cast, get_args, get_type_hints

from flowfabric import Fabric, Run, Task
from flowfabric.db.session import session_settings
from flowfabric.fabric.task import SubmitOptions, TaskOptions
from flowfabric.model import policy
from flowfabric.model.ids import ExecutionId
from flowfabric.worker.context import Context
from flowfabric.worker.options import WorkerOptions
from flowfabric.worker.worker import MAX_THREADS, Worker
from test_docs import ROOT, SOURCE

TASKS_PAGE = (ROOT / "docs" / "tasks.md").read_text(encoding="utf-8")
PGBOUNCER_PAGE = (ROOT / "docs" / "pgbouncer.md").read_text(encoding="utf-8")

NOT_REFUSED = {"application_name"}
"""The session settings that PgBouncer passes on."""
OF_HINTS = {"synchronous_commit"}
"""What the connections of hints ask for beside the session settings."""


# Behind PgBouncer.


def asked() -> dict[str, str]:
    settings = session_settings("flowfabric")
    return {name: value for name, value in settings.items() if name not in NOT_REFUSED}


def test_pgbouncer_is_told_to_ignore_what_sessions_ask_for() -> None:
    (ignored,) = re.findall(r"ignore_startup_parameters = (\S+)", PGBOUNCER_PAGE)
    assert sorted(ignored.split(",")) == sorted({*asked(), *OF_HINTS})


def test_the_role_has_the_settings_that_sessions_ask_for() -> None:
    lines = re.findall(r"alter role app in database app set (\w+) = '?(\w+?)'?;", PGBOUNCER_PAGE)
    given = {name: re.sub(r"^(\d+)s$", r"\g<1>000", value) for name, value in lines}
    wanted = {name: re.sub(r"^(\d+)s$", r"\g<1>000", value) for name, value in asked().items()}
    assert given == {name: value for name, value in wanted.items() if not name.startswith("tcp_")}


def test_pgbouncer_is_told_to_keep_more_statements_than_there_are() -> None:
    (kept,) = set(re.findall(r"max_prepared_statements = ([1-9]\d*)", PGBOUNCER_PAGE))
    files = [path for path in SOURCE.rglob("*.sql") if path.parent.name != "bench"]
    count = sum(len(re.findall(r"^-- name: ", path.read_text(encoding="utf-8"), re.MULTILINE)) for path in files)
    assert 100 < count < int(kept)


# Tasks, runs and workers.


class Row(NamedTuple):
    """A line of a table of options."""

    unit: str
    default: str

    @property
    def value(self) -> Any:
        """The default where it is written as code, else None."""
        return eval(self.default.strip("`"), vars(policy)) if re.fullmatch(r"`[^`]+`", self.default) else None


def options_below(heading: str) -> dict[str, Row]:
    rows = re.findall(r"^\| `(\w+)` \| (.*?) *\| (.*?) \|", section(heading), re.MULTILINE)
    return {name: Row(unit, default) for name, unit, default in rows}


def section(heading: str) -> str:
    text = TASKS_PAGE.partition(f"\n## {heading}\n")[2]
    assert text
    return text.partition("\n## ")[0]


def calls_below(heading: str, of: str, text: str = "") -> dict[str, ast.expr]:
    """What a table says can be got of an object: the name of each, with the expression that gets it."""
    cells = re.findall(r"^\| (`.*?`) \|", text or section(heading), re.MULTILINE)
    expressions = [ast.parse(one, mode="eval").body for cell in cells for one in re.findall(r"`([^`]+)`", cell)]
    awaited = [one.value if isinstance(one, ast.Await) else one for one in expressions]
    found = [(one.func if isinstance(one, ast.Call) else one, one) for one in awaited]
    return {
        at.attr: one
        for at, one in found
        if isinstance(at, ast.Attribute) and isinstance(at.value, ast.Name) and at.value.id == of
    }


def public(kind: type) -> set[str]:
    return {name for name in vars(kind) if not name.startswith("_")}


def seconds_of(options: type) -> set[str]:
    return {name for name, hint in get_type_hints(options).items() if timedelta in get_args(hint)}


ELSEWHERE = {"lane", "name", "parent"}
"""The options whose defaults come from elsewhere."""


def test_every_option_of_a_task_is_listed_with_its_unit() -> None:
    listed = options_below("Options of a task")
    assert list(listed) == list(get_type_hints(TaskOptions))
    assert {name for name, row in listed.items() if row.unit == "seconds"} == seconds_of(SubmitOptions)


async def test_the_listed_defaults_of_a_task_are_what_is_submitted_without_options(url: str) -> None:
    listed = options_below("Options of a task")
    (lane,) = re.findall(r"`\"(\w+)\"`", listed["lane"].default)
    defaults = {name: row.value for name, row in listed.items() if row.value is not None}
    assert set(defaults) == {"priority", "retries", "backoff", "stream"}
    assert {name for name, row in listed.items() if row.default == "none"} == set(listed) - {*defaults, *ELSEWHERE}
    fabric = Fabric(url)

    @fabric.task
    async def job() -> None: ...

    async with fabric:
        for task in (job, job.options(lane=lane, **defaults)):
            for retries in (None, 1):
                await (task if retries is None else task.options(retries=retries)).submit()
        claimed = await fabric.engine.claim_many(lanes=[lane], worker_id="w", worker_instance_id="w-1", limit=10)
    first, retried, second, retried_too = [
        (one.execution_kind, one.priority, one.policy, dict(one.tags)) for one in claimed
    ]
    assert first == second == ("job", 0, None, {})
    assert retried == retried_too != first


def test_every_option_of_a_worker_is_listed_with_its_unit_and_default() -> None:
    listed = options_below("Options of a worker")
    assert list(listed) == list(get_type_hints(WorkerOptions))
    assert {name for name, row in listed.items() if row.unit == "seconds"} == seconds_of(WorkerOptions)
    parameters = inspect.signature(Worker).parameters
    for name, row in listed.items():
        default = parameters[name].default
        assert row.value == (None if default in (None, (), inspect.Parameter.empty) else default), name
    assert f"`{MAX_THREADS}`" in listed["threads"].default


def test_every_method_of_a_run_is_listed_with_its_arguments() -> None:
    listed = calls_below("Runs", "run")
    instance = vars(Run(Fabric(), ExecutionId(""), cast(Any, None), is_duplicate=False))
    assert set(listed) == public(Run) | {name for name in instance if not name.startswith("_")}
    for name, call in listed.items():
        method = getattr(Run, name, None)
        if inspect.isfunction(method):
            assert isinstance(call, ast.Call)
            written = {each.arg: ast.literal_eval(each.value) for each in call.keywords}
            parameters = list(inspect.signature(method).parameters.values())[1 + len(call.args) :]
            assert written == {each.name: each.default for each in parameters}, name


def test_every_method_of_a_task_is_listed() -> None:
    assert set(calls_below("Using a task", "task")) == public(Task) - {"lane"}


def test_everything_of_a_context_is_listed_on_its_page_or_on_that_of_waiting() -> None:
    waiting = (ROOT / "docs" / "suspend.md").read_text(encoding="utf-8").partition("| of `ctx` |")[2]
    listed = calls_below("The context", "ctx")
    of_waits = calls_below("", "ctx", waiting.partition("\n\n")[0])
    assert len(of_waits) > 3
    assert set(listed) | set(of_waits) == public(Context)
    assert set(listed) & set(of_waits) == set()


FIGURES = {
    "raw limit": ("raw_insert100", "raw_claim100_complete100"),
    "**FlowFabric**": ("submit_batch_100", "worker_end_to_end"),
    "PgQueuer": ("pgqueuer_submit_batch", "pgqueuer_worker_end_to_end_best"),
    "awa": ("awa_submit_batch", "awa_worker_end_to_end"),
    "Absurd": (None, "absurd_worker_end_to_end"),
    "Procrastinate": ("procrastinate_submit_batch", "procrastinate_worker_end_to_end"),
    "DBOS": (None, "dbos_worker_end_to_end"),
}
"""The figures of the benchmark that the rows of the README's table show, by the beginning of the row."""


def test_the_figures_of_the_readme_are_those_of_the_benchmark() -> None:
    text = (ROOT / "README.md").read_text()
    measured = json.loads((ROOT / "bench/results.json").read_text())["figures"]
    rows = re.findall(r"^\| (.+?) \| (.+?) \| (.+?) \|$", text.partition("## How fast it is")[2], re.MULTILINE)
    shown = {name: cells for name, *cells in rows}
    wrong = []
    for beginning, figures in FIGURES.items():
        (cells,) = (cells for name, cells in shown.items() if name.startswith(beginning))
        for figure, cell in zip(figures, cells, strict=True):
            expected = None if figure is None else measured[figure]["value"]
            if (cell == "–") != (expected is None) or (
                expected and abs(float(cell.strip("*").replace(",", "")) - expected) > expected / 50
            ):
                wrong.append((beginning, figure, cell, expected))
    assert wrong == []
    assert len(shown) == len(FIGURES)
    slots, batch = (round(measured[name]["value"], -3) for name in ("worker_default_slots", "submit_batch"))
    words = " ".join(text.split())
    assert f"64 slots FlowFabric runs {slots:,.0f}. In batches of 1,000 it accepts {batch:,.0f} a second" in words
    soak = json.loads((ROOT / "bench/soak.json").read_text())["ratios"]["soak_last_tenth/soak_first_tenth"]
    assert f"takes {measured['submit_to_result']['value']:.1f} ms from `submit`" in words
    assert f"reaches {soak:.2f} of the rate" in words
    share = measured["flow_fan_rate"]["value"] / measured["flow_fan_plain"]["value"]
    assert f"is stored in {measured['flow_fan_submit']['value']:.1f} s, and runs at {share:.2f} of the rate" in words
    assert f"starts {measured['flow_hop_p50']['value']:.1f} ms after the one before it" in words
