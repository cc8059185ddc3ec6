"""The examples do what they say."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


def environment(url: str) -> dict[str, str]:
    return {**os.environ, "FF_DATABASE_URL": url}


def start(name: str, url: str, *arguments: str) -> "subprocess.Popen[bytes]":
    return subprocess.Popen([sys.executable, str(EXAMPLES / name), *arguments], env=environment(url))


def run(name: str, url: str) -> str:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name)],
        env=environment(url),
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return done.stdout


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("hello.py", ["1 + 2 = 3"]),
        (
            "retries.py",
            [
                "charged 10 at attempt 3",
                "failed: PermanentError: -1 is not an amount",
                "submitted once: True",
            ],
        ),
        ("long_work.py", ["Report(pages=10, fence=1)"]),
    ],
)
async def test_an_example_says(url: str, name: str, says: list[str]) -> None:
    lines = run(name, url).splitlines()
    assert [line for line in says if line not in lines] == []


async def test_the_service_example_works_between_processes(url: str) -> None:
    worker = start("service.py", url, "worker")
    try:
        assert run("service.py", url).strip() == "HELLO"
        worker.terminate()
        assert worker.wait(timeout=20) == 0
    finally:
        worker.kill()
        worker.wait()


def test_every_example_is_run() -> None:
    text = Path(__file__).read_text(encoding="utf-8")
    assert [path.name for path in EXAMPLES.glob("*.py") if f'"{path.name}"' not in text] == []
