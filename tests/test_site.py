"""The site shows every page, highlights its code, loads nothing from elsewhere, and is not built with a broken link."""

import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import NamedTuple

import pytest

from test_docs import PAGES, README, ROOT, blocks, relative, without_code

SHOWN_AS = {
    "README.md": "index.html",
    "CHANGELOG.md": "changelog.html",
    "CONTRIBUTING.md": "contributing.html",
    "bench/README.md": "benchmark.html",
}
PARTS = ("mkdocs.yml", "README.md", "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "docs", "bench", "examples")
SCHEMA = "src/flowfabric/db/schema.sql"


FAULTS = [
    (
        "docs/operating.md",
        "[x](nowhere.md)",
        "'operating.md' contains a link 'nowhere.md', but the target is not found",
    ),
    (
        "docs/operating.md",
        "[x](engine.md#nowhere)",
        "'operating.md' contains a link 'engine.md#nowhere', but the doc 'engine.md' does not contain an anchor",
    ),
    (
        "docs/operating.md",
        "[x](#nowhere)",
        "'operating.md' contains a link '#nowhere', but there is no such anchor on this page",
    ),
    ("README.md", "[x](docs/nowhere.md)", "'index.md' contains a link 'nowhere.md', but the target is not found"),
    (
        "README.md",
        "[x](docs/engine.md#nowhere)",
        "'index.md' contains a link 'engine.md#nowhere', but the doc 'engine.md' does not contain an anchor",
    ),
    (
        "bench/README.md",
        "[x](../src/flowfabric/version.py)",
        "'benchmark.md' contains a link '../src/flowfabric/version.py', but the target is not found",
    ),
    ("docs/unlisted.md", "A page", "- unlisted.md"),
]
"""Faults: what is appended to which page, and a part of the report of the build about it."""


class Built(NamedTuple):
    """The folder of a built site, and how the build ended."""

    folder: Path
    exit_code: int
    report: str


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """A site that is built once for all tests, from a copy of the pages with some faults."""
    root = tmp_path_factory.mktemp("site")
    for part in PARTS:
        make: Callable[[Path, Path], object] = shutil.copytree if (ROOT / part).is_dir() else shutil.copyfile
        make(ROOT / part, root / part)
    (root / SCHEMA).parent.mkdir(parents=True)
    shutil.copyfile(ROOT / SCHEMA, root / SCHEMA)
    for page, text, _ in FAULTS:
        with (root / page).open("a", encoding="utf-8") as file:
            file.write(f"\n{text}\n")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(root / "site")]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=100, check=False)
    return Built(root / "site", done.returncode, done.stderr)


@pytest.fixture
def site(built: Built) -> Path:
    """The folder of the site."""
    return built.folder


def shown(site: Path, page: Path) -> str:
    name = SHOWN_AS.get(relative(page), f"{page.stem}.html")
    return (site / name).read_text(encoding="utf-8")


class Loaded(HTMLParser):
    """Collects what a browser loads to show a page."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.addresses: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        address = given.get("href") if tag == "link" else given.get("src")
        if address:
            self.addresses.append(address)


def is_external(address: str) -> bool:
    return re.match(r"([a-z]+:)?//", address) is not None


def test_every_page_is_on_the_site_with_its_code_highlighted(site: Path) -> None:
    wrong = []
    for page in PAGES:
        html = shown(site, page)
        found = Counter(re.findall(r'<div class="language-(\w+) highlight">', html))
        written = Counter((block.mark.split() or ["text"])[0] for block in blocks(page))
        # Blocks within lists are indented, and `blocks` does not see them.
        if written - found or "```" in html:
            wrong.append((relative(page), written - found))
    assert wrong == []


def test_what_follows_within_a_list_item_is_indented_for_github_and_for_the_site() -> None:
    # GitHub takes two or three spaces as well; the site needs four.
    too_little = re.compile(r"\n\n {1,3}\S.*|^ {1,3}(?:[-*]|\d+\.) .*", re.MULTILINE)
    found = {relative(page): too_little.findall(without_code(page)) for page in PAGES}
    assert {page: lines for page, lines in found.items() if lines} == {}


def test_every_example_is_on_the_site(site: Path) -> None:
    html = (site / "examples.html").read_text(encoding="utf-8")
    names = [path.name for path in (ROOT / "examples").glob("*.py")]
    assert len(names) > 3
    assert [name for name in names if f'<h2 id="{name.replace(".", "")}">' not in html] == []


def test_a_page_loads_nothing_from_elsewhere(site: Path) -> None:
    pages = sorted(site.glob("*.html"))
    assert len(pages) > len(PAGES)
    loaded = {page.name: Loaded(page.read_text(encoding="utf-8")).addresses for page in pages}
    assert all(len(addresses) > 3 for addresses in loaded.values())
    assert {name for name, addresses in loaded.items() if any(map(is_external, addresses))} == set()
    styles = "".join(path.read_text(encoding="utf-8") for path in site.rglob("*.css"))
    assert list(filter(is_external, re.findall(r"""(?:url\(|@import )["']?([^)"']+)""", styles))) == []


def test_what_a_page_loads_from_elsewhere_would_be_found() -> None:
    html = '<a href="https://a.example"><link href="//b.example/x.css"><script src="https://c.example/y.js"></script>'
    assert list(filter(is_external, Loaded(html).addresses)) == ["//b.example/x.css", "https://c.example/y.js"]


def test_a_broken_link_or_a_page_outside_the_navigation_fails_the_build(built: Built) -> None:
    assert [told for _, _, told in FAULTS if told not in built.report] == []
    # Nothing else is wrong with the pages.
    warnings = [line for line in built.report.splitlines() if line.startswith("WARNING")]
    assert (built.exit_code, len(warnings)) == (1, len(FAULTS)), built.report


def test_a_link_leads_to_the_page_that_shows_the_file(site: Path) -> None:
    front = shown(site, README)
    for written, there in (
        ("docs/engine.md", "engine.html"),
        ("docs/operating.md#logging", "operating.html#logging"),
        ("bench/README.md", "benchmark.html"),
        ("examples", "examples.html"),
        ("LICENSE", "LICENSE.txt"),
    ):
        assert f"]({written})" in README.read_text(encoding="utf-8")
        assert f'href="{there}"' in front
    assert 'href="examples.html#deploy_approvalpy"' in shown(site, ROOT / "docs" / "suspend.md")
    assert (site / "LICENSE.txt").read_bytes() == (ROOT / "LICENSE").read_bytes()


def test_the_site_describes_itself_as_the_package_does() -> None:
    (described,) = re.findall(r'^description = "(.*)"$', (ROOT / "pyproject.toml").read_text("utf-8"), re.MULTILINE)
    assert f'site_description: "{described}"\n' in (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
