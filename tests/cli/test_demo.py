"""`ff demo`: what it shows after it killed a worker."""

import os
import re
import subprocess
import sys

RUNS_PER_TASK = 30
"""Fewer than usual, which saves seconds."""


def run_demo(url: str) -> "subprocess.CompletedProcess[str]":
    program = f"from flowfabric.cli import demo; demo.RUNS_PER_TASK = {RUNS_PER_TASK}; demo.demo()"
    return subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "FF_DATABASE_URL": url, "TERM": "dumb", "COLUMNS": "60"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )


async def test_the_demo_loses_nothing_and_reports_it_in_plain_text(url: str) -> None:
    done = run_demo(url)
    assert (done.returncode, done.stderr) == (0, "")
    assert "\x1b" not in done.stdout
    said = re.search(r"Nothing was lost: 90 of 90 executions succeeded, (\d+) of them taken over", done.stdout)
    assert said is not None
    assert int(said.group(1)) >= 1
    assert "Submitted 90 executions and 10 flows of 6" in done.stdout
    assert "10 of 10 flows completed" in done.stdout
    assert "…" not in done.stdout
    assert re.search(r"task\W+done\W+attempts\W+retries\W+recovered\W+p50\s", done.stdout)
    assert re.search(r"charge\W+30/30\W+[78]\d\W+45\W", done.stdout)
