"""Hooks of `mkdocs`: build the site from pages that are written for GitHub.

The README, the changelog and other files outside `docs` become pages, and links between files of the repository become
links between pages. A link to a file that is not on the site is not changed, so that a strict build fails on it.
"""

import ast
import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]

OUTSIDE_FILES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "bench/README.md": "benchmark.md",
    "bench/results.png": "results.png",
    "src/flowfabric/db/schema.sql": "schema.sql",
    "LICENSE": "LICENSE.txt",
}
"""The files outside `docs` that are on the site: their paths in the repository and on the site."""
EXAMPLES = "examples"
EXAMPLES_PAGE = "examples.md"

_SOURCES = {uri: path for path, uri in OUTSIDE_FILES.items()}
_FENCED = re.compile(
    r"^(?P<start>[ \t]*(?P<fence>`{3,})\w*)[^\n`]*(?P<code>\n.*?^[ \t]*(?P=fence))[ \t]*$", re.MULTILINE | re.DOTALL
)
_LINK = re.compile(r"(?<=\]\()(?![a-z]+:)(?P<path>[^)\s#]+)(?P<anchor>#[^)\s]+)?(?=\))")


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add the pages and files that are kept outside `docs`."""
    for path, uri in OUTSIDE_FILES.items():
        files.append(File.generated(config, uri, abs_src_path=str(ROOT / path)))
    files.append(File.generated(config, EXAMPLES_PAGE, content=examples_page()))
    return files


def on_page_markdown(markdown: str, *, page: Page, **_: object) -> str:
    """Convert a page that is written for GitHub."""
    return for_site(markdown, page.file.src_uri)


def for_site(markdown: str, uri: str) -> str:
    """Return the text of a page with links between pages, and with code fences that name only their language."""
    parts, at = [], 0
    for fenced in _FENCED.finditer(markdown):
        # The highlighting extension does not understand a fence with a second word, such as `python program`.
        parts += [_with_links(markdown[at : fenced.start()], uri), fenced["start"], fenced["code"]]
        at = fenced.end()
    return "".join([*parts, _with_links(markdown[at:], uri)])


def _with_links(text: str, uri: str) -> str:
    folder = posixpath.dirname(_SOURCES.get(uri, f"docs/{uri}"))

    def on_site(link: re.Match[str]) -> str:
        target, anchor = _target(posixpath.normpath(posixpath.join(folder, link["path"])))
        if target is None:
            return link[0]
        return posixpath.relpath(target, posixpath.dirname(uri) or ".") + (link["anchor"] or anchor)

    return _LINK.sub(on_site, text)


def _target(path: str) -> tuple[str | None, str]:
    """Return the page or file of the site that shows a file of the repository, and the anchor within it."""
    folder, name = posixpath.split(path)
    if path == EXAMPLES:
        return EXAMPLES_PAGE, ""
    if folder == EXAMPLES and (ROOT / path).exists():
        return EXAMPLES_PAGE, f"#{name.replace('.', '')}"
    if path.startswith("docs/"):
        return path.removeprefix("docs/"), ""
    return OUTSIDE_FILES.get(path), ""


def examples_page() -> str:
    """Return a page with the programs in `examples`, each with its docstring as introduction."""
    parts = ["# Examples", "Small programs to start from, in the folder `examples`. The tests run all of them."]
    for path in sorted((ROOT / EXAMPLES).glob("*.py")):
        text = path.read_text(encoding="utf-8")
        module = ast.parse(text)
        code = "".join(text.splitlines(keepends=True)[module.body[0].end_lineno :]).strip()
        parts += [f"## {path.name}", ast.get_docstring(module) or "", f"```python\n{code}\n```"]
    return "\n\n".join(parts) + "\n"
