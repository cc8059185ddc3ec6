"""The examples do what they say."""

import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from flowfabric import Fabric

EXAMPLES = Path(__file__).parents[1] / "examples"


def environment(url: str) -> dict[str, str]:
    # An embedded server has a key to sign with; the server of the tests is given one.
    return {**os.environ, "FF_DATABASE_URL": url}


def start(name: str, url: str, *arguments: str) -> "subprocess.Popen[bytes]":
    return subprocess.Popen([sys.executable, str(EXAMPLES / name), *arguments], env=environment(url))


def run(name: str, url: str) -> str:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name)],
        env=environment(url),
        capture_output=True,
        text=True,
        timeout=100,
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
                "RunFailed: NoRetry: -1 is not an amount",
                "submitted once: True",
            ],
        ),
        ("long_work.py", ["Report(pages=10, fence=1)"]),
        (
            "external_callback.py",
            [
                "with the token        k1:<REDACTED:len=64>",
                "the order is suspended: no worker is busy with it",
                "a forger says 'paid':     401 invalid_token (the log says TokenMismatch)",
                "the order is still suspended",
                "the provider says 'paid': 202 resume_condition_satisfied",
                "order A-7: paid",
            ],
        ),
        (
            "deploy_approval.py",
            [
                "Ada says approve: appended_to_waitpoint",
                "Ada says approve: appended_to_waitpoint_duplicate",
                "Linus says reject: signal_ignored_matcher_failed",
                "the deploy is suspended",
                "Grace says approve: resume_condition_satisfied",
                "v42 is live, approved by Ada and Grace",
            ],
        ),
        (
            "timeout_resume.py",
            [
                "run 1 asks: which colour?",
                "run 2 of the same attempt finds the signal 'timeout' from 'suspension_timeout'",
                "no answer, so: blue",
            ],
        ),
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
        assert worker.wait(timeout=60) == 0
    finally:
        worker.kill()
        worker.wait()


async def test_an_example_that_an_operator_resumes_goes_on_without_a_signal(
    url: str, monkeypatch: pytest.MonkeyPatch, eventually: Any
) -> None:
    monkeypatch.setenv("FF_DATABASE_URL", url)
    example = runpy.run_path(str(EXAMPLES / "external_callback.py"))
    fabric: Fabric = example["fabric"]
    async with fabric, fabric.worker():
        submitted = await example["take_payment"].submit("A-7")

        async def is_suspended() -> bool:
            return bool((await submitted.status()).state == "suspended")

        await eventually(is_suspended)
        await fabric.engine.resume_execution(execution_id=submitted.id)
        assert await submitted.result(timeout=30) == "order A-7: not paid"


def test_nothing_that_is_shown_counts_on_a_signal() -> None:
    pages = [*EXAMPLES.glob("*.py"), *EXAMPLES.parent.glob("*.md"), *EXAMPLES.parent.glob("docs/*.md")]
    assert [page.name for page in pages if "resumed_signals()[" in page.read_text(encoding="utf-8")] == []


def test_every_example_is_run() -> None:
    text = Path(__file__).read_text(encoding="utf-8")
    assert [path.name for path in EXAMPLES.glob("*.py") if f'"{path.name}"' not in text] == []
