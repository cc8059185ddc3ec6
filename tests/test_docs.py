"""The documents are true: their programs run, their links lead somewhere, and what they list is what there is.

A block marked `python program` is run by itself as a file. Those marked `python session` are run in their order, page
by page, with an `engine` at hand and `await` allowed anywhere. What a line prints is what the comment behind it says.
One marked `python pytest` is a file of tests, which pass.
"""

import ast
import asyncio
import contextlib
import io
import json
import logging
import os
import re
import runpy
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from inspect import iscoroutine
from pathlib import Path
from textwrap import indent
from typing import Any, NamedTuple

import pytest
from pydantic import AliasChoices
from pydantic.fields import FieldInfo

import flowfabric
from flowfabric import conditions, feeds, flows, outcomes, streams
from flowfabric import errors as public_errors
from flowfabric import ids as public_ids
from flowfabric import policy as public_policy
from flowfabric.bench.ratios import PEERS, RATIOS
from flowfabric.db.dump import SCHEMA_FILE
from flowfabric.db.embedded import Embedded
from flowfabric.engine.engine import Engine
from flowfabric.model import (
    attempt,
    budget,
    condition,
    edge,
    errors,
    execution,
    explanation,
    flow,
    grant,
    handle,
    ids,
    key,
    lane,
    lease,
    policy,
    resume,
    signal,
    stream,
    summary,
    support,
    suspension,
    tag,
    waitpoint,
    worker,
)
from flowfabric.model.errors import CODES, TransportKind
from flowfabric.reconcile.sweeps import SWEEPS
from flowfabric.settings import PREFIX, Settings

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
PAGES = sorted((*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), ROOT / "bench" / "README.md"))

ENGINE_PAGE = ROOT / "docs" / "engine.md"
ENGINE_PAGES = sorted(ROOT.glob("docs/engine*.md"))
"""The pages of the operations; the first one has the contents of all."""
SOURCE = ROOT / "src" / "flowfabric"

MODULES = (
    attempt,
    budget,
    condition,
    edge,
    errors,
    execution,
    explanation,
    flow,
    grant,
    handle,
    ids,
    key,
    lane,
    lease,
    policy,
    resume,
    signal,
    stream,
    summary,
    support,
    suspension,
    tag,
    waitpoint,
    worker,
)

PUBLIC = (flowfabric, conditions, public_errors, public_ids, outcomes, public_policy, feeds, flows, streams)
"""The modules users import from."""

_BLOCK = re.compile(r"^```(?P<mark>[^\n`]*)\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)
_PRINTED = re.compile(r"^\s*print\(.*\)  # (.*)$", re.MULTILINE)
_IMPORT = re.compile(r"from (flowfabric[\w.]*) import")
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)
_VARIABLE = re.compile(rf"\b{PREFIX}[A-Z_]*[A-Z]\b")
_ROW = re.compile(rf"^\| `({PREFIX}[A-Z_]+)` \| (.*?) \|", re.MULTILINE)


class Block(NamedTuple):
    """A piece of code of a page."""

    page: Path
    line: int
    mark: str
    code: str

    @property
    def name(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def prints(self) -> list[str]:
        """What its lines say they print."""
        return _PRINTED.findall(self.code)


def blocks(page: Path) -> Iterator[Block]:
    text = page.read_text(encoding="utf-8")
    for found in _BLOCK.finditer(text):
        yield Block(page, text.count("\n", 0, found.start()) + 1, found["mark"].strip(), found["code"])


ALL = [block for page in PAGES for block in blocks(page)]
PROGRAMS = [block for block in ALL if block.mark == "python program"]
TEST_FILES = [block for block in ALL if block.mark == "python pytest"]
SESSIONS = [page for page in PAGES if any(block.mark == "python session" for block in blocks(page))]


def without_code(page: Path) -> str:
    return _BLOCK.sub("", page.read_text(encoding="utf-8"))


def anchors(page: Path) -> set[str]:
    """What a link can name within a page."""
    titles = _HEADING.findall(without_code(page))
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def relative(page: Path) -> str:
    return str(page.relative_to(ROOT))


# What is written as code runs.


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda block: block.name)
async def test_a_program_runs_and_prints_what_it_says(
    program: Block, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "program.py"
    file.write_text(program.code, encoding="utf-8")
    # An embedded server has a key to sign with; the server of the tests is given one.
    monkeypatch.setenv("FF_DATABASE_URL", url)
    monkeypatch.setattr(sys, "argv", [str(file)])
    # A program that sets up logging finds none set up.
    monkeypatch.setattr(logging.root, "handlers", [])
    level = logging.root.level
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as errors:
        try:
            # In a thread: the program has an event loop of its own.
            await asyncio.to_thread(runpy.run_path, str(file), run_name="__main__")
        finally:
            logging.root.setLevel(level)
    assert out.getvalue().splitlines() == program.prints
    assert "--- Logging error ---" not in errors.getvalue()


@pytest.mark.parametrize("page", SESSIONS, ids=relative)
async def test_a_session_runs_and_prints_what_it_says(page: Path, engine: Engine) -> None:
    names: dict[str, Any] = {"engine": engine}
    for block in blocks(page):
        if block.mark == "python session":
            assert await printed(block, names) == block.prints, block.name


async def printed(block: Block, names: dict[str, Any]) -> list[str]:
    code = compile(block.code, block.name, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    told = io.StringIO()
    with contextlib.redirect_stdout(told):
        running = eval(code, names)
        if iscoroutine(running):
            await running
    return told.getvalue().splitlines()


@pytest.mark.parametrize("tests", TEST_FILES, ids=lambda block: block.name)
def test_shown_tests_pass_on_the_server_they_start(tests: Block, tmp_path: Path) -> None:
    (tmp_path / "test_shown.py").write_text(tests.code, encoding="utf-8")
    base = tmp_path / "base"
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--basetemp", str(base), "-q", "test_shown.py"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", PREFIX))}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200, check=False
    )
    # As root the data of the server is outside the folder of the test.
    shutil.rmtree(Embedded.data_of(base / "flowfabric0").parent)
    written = len(re.findall(r"^(?:async )?def test_", tests.code, re.MULTILINE))
    assert written > 0
    assert f"\n{written} passed in " in done.stdout, done.stdout


def test_code_is_marked_by_a_known_word_and_is_python() -> None:
    code = [block for block in ALL if block.mark.startswith("python")]
    assert {block.mark for block in code} == {"python", "python program", "python session", "python pytest"}
    for block in code:
        compile(block.code, block.name, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)


def write_shown_code(folder: Path) -> list[str]:
    """Write the code of the pages to files, except the engine's sessions, which pass arguments as dicts."""
    for nth, program in enumerate([*PROGRAMS, *TEST_FILES]):
        (folder / f"program_{nth}.py").write_text(program.code, encoding="utf-8")
    for page in SESSIONS:
        if page not in ENGINE_PAGES:
            code = "".join(block.code for block in blocks(page) if block.mark == "python session")
            head = "from flowfabric import Engine\n\n\nasync def session(engine: Engine) -> None:\n"
            (folder / f"session_{page.stem}.py").write_text(head + indent(code, "    "), encoding="utf-8")
    files = sorted(map(str, folder.glob("*.py")))
    assert len(files) > 4
    return files


@pytest.mark.timeout(600)
def test_code_in_docs_passes_mypy(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml"), "--strict"]
    files = write_shown_code(tmp_path)
    done = subprocess.run([*command, *files], cwd=ROOT, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.timeout(600)
def test_code_in_docs_passes_pyright(tmp_path: Path) -> None:
    write_shown_code(tmp_path)
    checks = {"typeCheckingMode": "strict", "pythonVersion": "3.11", "extraPaths": [str(ROOT / "src")]}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(checks), encoding="utf-8")
    command = [sys.executable, "-m", "basedpyright", "--pythonpath", sys.executable, "--project", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stdout


def test_the_front_page_shows_code_that_runs() -> None:
    assert len([block for block in PROGRAMS if block.page == README]) >= 2


# What is linked is there.


def test_every_link_within_the_project_leads_somewhere() -> None:
    found = {relative(page): list(broken(page, _LINK.findall(without_code(page)))) for page in PAGES}
    assert {page: links for page, links in found.items() if links} == {}


def broken(page: Path, links: Sequence[str]) -> Iterator[str]:
    for link in links:
        if re.match(r"[a-z]+:", link):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            yield link


def test_a_broken_link_would_be_found() -> None:
    assert list(broken(README, ["nowhere.md", "docs/engine.md#no-such-heading", "docs/engine.md#errors"])) == [
        "nowhere.md",
        "docs/engine.md#no-such-heading",
    ]


# What is listed is what there is.


def variables_of(name: str, field: FieldInfo) -> list[str]:
    """The variables of a setting; a page lists the first one."""
    alias = field.validation_alias
    return [*map(str, alias.choices)] if isinstance(alias, AliasChoices) else [str(alias or f"{PREFIX}{name.upper()}")]


def variables() -> dict[str, str]:
    """The variable of every setting, with its default as its page writes it."""
    found = {}
    for name, field in Settings.model_fields.items():
        variable, *_ = variables_of(name, field)
        match field.default:
            case None:
                found[variable] = "unset"
            case bool() as is_on:
                found[variable] = f"`{str(is_on).lower()}`"
            case tuple() as words:
                found[variable] = f"`{','.join(words)}`"
            case value:
                found[variable] = f"`{value}`"
    return found


def test_the_page_of_settings_lists_each_with_its_default() -> None:
    page = ROOT / "docs" / "configuration.md"
    assert dict(_ROW.findall(page.read_text(encoding="utf-8"))) == variables()


def test_every_variable_a_page_names_is_a_setting() -> None:
    known = {each for name, field in Settings.model_fields.items() for each in variables_of(name, field)} | set(
        _VARIABLE.findall((ROOT / "tests" / "conftest.py").read_text(encoding="utf-8"))
    )
    named = {relative(page): set(_VARIABLE.findall(page.read_text(encoding="utf-8"))) for page in PAGES}
    assert {page: names - known for page, names in named.items() if names - known} == {}


def engine_text() -> str:
    """The text of all pages of the operations."""
    return "\n".join(page.read_text(encoding="utf-8") for page in ENGINE_PAGES)


def engine_contents() -> str:
    return ENGINE_PAGE.read_text(encoding="utf-8").partition("\n## ")[0]


def test_every_operation_is_described_and_stands_in_the_contents() -> None:
    contents = engine_contents()
    described = engine_text().replace(contents, "")
    operations = [name for name in vars(Engine) if not name.startswith("_") and callable(getattr(Engine, name))]
    assert len(operations) > 20
    assert [name for name in operations if not re.search(rf"`(?:[Ee]ngine\.)?{name}\b", described)] == []
    assert [name for name in operations if f"`{name}`" not in contents] == []


def test_the_contents_of_the_engines_pages_are_their_headings_in_their_order() -> None:
    listed: dict[str, list[str]] = {page.name: [] for page in ENGINE_PAGES}
    for title, page in re.findall(r"^- \[(.*?)\]\((.*?)#", engine_contents(), re.MULTILINE):
        listed[page or ENGINE_PAGE.name].append(title)
    headings = {page.name: re.findall(r"^## (.*)$", without_code(page), re.MULTILINE) for page in ENGINE_PAGES}
    assert len(headings) > 1
    assert listed == headings


def test_the_table_of_codes_holds_those_the_engine_raises_each_in_its_category() -> None:
    table = ENGINE_PAGE.read_text(encoding="utf-8").partition("| codes you can meet today |")[2].partition("\n\n")[0]
    rows = re.findall(r"^\| `(\w+)` \| `\w+` \| (.*) \|$", table, re.MULTILINE)
    listed = {(category, code) for category, codes in rows for code in re.findall(r"`(\w+)`", codes)}
    # The code of a transport error is its kind; its name is that of the category.
    kinds = {("transport", kind.value) for kind in TransportKind}
    assert {pair for pair in listed if pair[0] != "transport"} == {(CODES[code][0], code) for code in raised()}
    assert {pair for pair in listed if pair[0] == "transport"} <= kinds


def raised() -> set[str]:
    """The codes that the engine, its statements and its model name; the layers above only read them."""
    words: set[str] = set()
    for layer in ("db", "engine", "model"):
        for file in (SOURCE / layer).rglob("*.py"):
            if file.name != "errors.py":
                nodes = ast.walk(ast.parse(file.read_text(encoding="utf-8")))
                words |= {
                    node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)
                }
        for file in (SOURCE / layer).rglob("*.sql"):
            words |= set(re.findall(r"'(\w+)'", file.read_text(encoding="utf-8")))
    # A phase of an execution and a reason of `AlreadySatisfied` have the name of a code.
    return (words & set(CODES)) - {"terminal", "no_active_lease"}


def test_the_names_of_the_engines_pages_are_public() -> None:
    named = set(re.findall(r"`([A-Z][a-z]\w+)[`(]", engine_text()))
    ours = {name for name in named for module in MODULES if isinstance(getattr(module, name, None), type)}
    assert len(ours) > 20
    assert ours - {name for module in PUBLIC for name in module.__all__} == set()


def test_the_pages_import_from_public_modules() -> None:
    public = {module.__name__ for module in PUBLIC}
    imports = [(page, name) for page in PAGES for block in blocks(page) for name in _IMPORT.findall(block.code)]
    assert [(relative(page), name) for page, name in imports if name not in public] == []


def test_every_sweep_is_described_with_its_interval() -> None:
    text = (ROOT / "docs" / "operating.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `([a-z_]+)` \| [^|]+ \| ([\d.]+) s \|", text, re.MULTILINE))
    defaults = Settings.model_construct()
    assert rows == {sweep.name: f"{sweep.every(defaults).total_seconds():g}" for sweep in SWEEPS}


def test_every_sweep_follows_the_settings_that_its_description_names() -> None:
    text = (ROOT / "docs" / "operating.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([a-z_]+)` \| [^|]+ \| [\d.]+ s \| ([^|]*)\|$", text, re.MULTILINE)
    named = {sweep: re.findall(r"FF_(\w+)", variables) for sweep, variables in rows}
    fields = sorted({variable.lower() for variables in named.values() for variable in variables})
    values: dict[str, Any] = {field: 100 + nth for nth, field in enumerate(fields)}
    settings, defaults = Settings.model_construct(**values), Settings.model_construct()
    for sweep in SWEEPS:
        seconds = [
            values[variable.lower()] / (1000 if variable.endswith("_MS") else 1) for variable in named[sweep.name]
        ]
        expected = min(seconds) if seconds else sweep.every(defaults).total_seconds()
        assert sweep.every(settings).total_seconds() == expected, sweep.name


def test_every_table_is_described() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    tables = re.findall(r"^create table (\w+)", SCHEMA_FILE.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(tables) > 10
    assert [name for name in tables if not re.search(rf"^\|[^|]*`{name}`", text, re.MULTILINE)] == []


def test_every_target_of_make_a_page_names_is_there() -> None:
    known = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    named = {
        target
        for page in PAGES
        for target in re.findall(r"(?:^|`)make ([a-z-]+)", page.read_text("utf-8"), re.MULTILINE)
    }
    assert {"demo", "test"} <= named
    assert named - known == set()


def test_help_lists_every_target_of_make() -> None:
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    (phony,) = re.findall(r"^\.PHONY: (.*)$", text, re.MULTILINE)
    assert set(re.findall(r'@echo "make ([\w-]+)', text)) == set(phony.split()) - {"help"}


def test_every_ratio_of_the_benchmark_is_described_with_both_sizes_of_batch() -> None:
    text = (ROOT / "bench" / "README.md").read_text(encoding="utf-8").partition("## Ratios")[2]
    rows = dict(re.findall(r"^\| (`.*?`) \| (.*?) \|", text, re.MULTILINE))
    described = {name: sizes for names, sizes in rows.items() for name in re.findall(r"`([^`]+)`", names)}
    # A quick run compares a smaller backlog.
    ratios = {re.sub(rf"/({'|'.join(PEERS)})$", "/<peer>", name) for name in RATIOS if "100k" not in name}
    assert set(described) == ratios
    assert {name for name, sizes in described.items() if "," not in sizes} <= {
        "soak_last_tenth/soak_first_tenth",
        "count_1m_ended/group_by_1m_ended",
        "count_1m_waiting/group_by_1m_waiting",
        "feed_catch_up_last/feed_catch_up_first",
    }
