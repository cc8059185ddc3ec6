"""Runs every example and checks what it prints."""

import asyncio
import contextlib
import io
import os
import runpy
import subprocess
import sys
from pathlib import Path
from uuid import uuid4

import pytest

from fixtures import Eventually
from flowfabric import Fabric

EXAMPLES = Path(__file__).parents[1] / "examples"

PRINTED = {
    "hello.py": ["1 + 2 = 3"],
    "retries.py": [
        "charged 10 at attempt 3",
        "RunFailed: NoRetry: -1 is not an amount",
        "submitted once: True",
    ],
    "long_work.py": ["Report(pages=10, fence=1)"],
    "external_callback.py": [
        "with the token        k1:<REDACTED:len=64>",
        "the order is suspended: no worker is busy with it",
        "a forger says 'paid':     401 invalid_token (the log says TokenMismatch)",
        "the order is still suspended",
        "the provider says 'paid': 202 resume_condition_satisfied",
        "order A-7: paid",
    ],
    "deploy_approval.py": [
        "Ada says approve: appended_to_waitpoint",
        "Ada says approve: appended_to_waitpoint_duplicate",
        "Linus says reject: signal_ignored_matcher_failed",
        "the deploy is suspended",
        "Grace says approve: resume_condition_satisfied",
        "v42 is live, approved by Ada and Grace",
    ],
    "timeout_resume.py": [
        "run 1 asks: which colour?",
        "run 2 of the same attempt finds the signal 'timeout' from 'suspension_timeout'",
        "no answer, so: blue",
    ],
    "token_stream.py": [
        "before the disconnect: You asked: What ",
        "after it:              is the answer? The answer is forty-two. ",
        "10 tokens, none lost, none twice: 10",
    ],
    "sse.py": [
        r"before the disconnect: ['# Report\n', 'one\n\ntwo\n']",
        "after it:              ['three', ' and four']",
    ],
    "build_log.py": [
        "attempt 1 stdout: checkout 4f2a",
        "attempt 1 stdout: test 4f2a",
        "attempt 1 stderr: the test server does not answer",
        "attempt 2 stdout: checkout 4f2a",
        "attempt 2 stdout: test 4f2a",
        "{'commit': '4f2a', 'steps': {'checkout': 'done', 'compile': 'done', 'test': 'done'}}",
        "4f2a is built",
    ],
    "event_consumer.py": [
        "invoiced before the restart: 2",
        "invoiced after it: 5, every run of acme once: True",
    ],
    "flow_etl.py": [
        "submitted once: True",
        "2026-01-31: 5500 cents in 5 parts",
        "parts: [1500, 700, 900, 1100, 1300]",
        "8 runs have ended",
    ],
    "flow_judges.py": [
        "decision: publish",
        "judge 4 is cancelled: three verdicts are enough",
        "the flow has completed",
        "judges: cancelled, completed, completed, completed, failed",
    ],
    "llm_batch.py": [
        "within the ceiling: True",
        "every answer is counted once, at its true cost: True",
        "every other page was refused before its call: True",
        "still set aside: {}",
    ],
    "tenant_rates.py": [
        "the quiet tenant is served while the noisy one has a queue: True",
        "most at a time: {'noisy': 2, 'quiet': 1}",
    ],
    "ask_for_budget.py": [
        "what: forty-two",
        "it asks: budget research: usd_cents 80/100, 150 more asked for",
        "who: forty-two",
        "why: forty-two",
        "it asks: budget research: usd_cents 240/500, 1000 more asked for",
        "how: no answer (budget research: usd_cents 240/500, and a person has refused more)",
        "spent 240 of 500",
    ],
    "service.py": ["HELLO"],
}
"""What each example prints, among other lines."""


@pytest.fixture(autouse=True)
def _on_the_database_of_the_test(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FF_DATABASE_URL", url)


def run(name: str) -> list[str]:
    """Run an example as a program, in this process, and return the lines it prints."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    return printed.getvalue().splitlines()


async def missing(name: str) -> list[str]:
    """Run an example in a thread, and return the expected lines that it does not print."""
    lines = await asyncio.to_thread(run, name)
    return [f"{name}: {line}" for line in PRINTED[name] if line not in lines]


async def test_an_example_prints_what_it_should(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["example.py"])
    alone = [name for name in PRINTED if name != "service.py"]
    assert [line for name in alone for line in await missing(name)] == []


async def test_the_event_consumer_invoices_only_its_own_runs_when_it_is_started_again() -> None:
    assert [await missing("event_consumer.py") for _ in range(2)] == [[], []]


async def test_the_events_of_a_run_that_does_not_exist_are_not_found() -> None:
    example = runpy.run_path(str(EXAMPLES / "sse.py"))
    fabric: Fabric = example["fabric"]
    async with fabric, await asyncio.start_server(example["answer"], "127.0.0.1", 0) as server:
        for path, status in ((f"fp1-{uuid4()}", b"404"), ("favicon.ico", b"400")):
            reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
            writer.write(f"GET /{path} HTTP/1.1\r\n\r\n".encode())
            assert (await reader.read()).split()[1] == status
            writer.close()


def test_the_service_example_works_between_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["service.py"])
    worker = subprocess.Popen([sys.executable, str(EXAMPLES / "service.py"), "worker"], env=os.environ)
    try:
        assert run("service.py") == PRINTED["service.py"]
        worker.terminate()
        assert worker.wait(timeout=60) == 0
    finally:
        worker.kill()
        worker.wait()


async def test_an_example_that_an_operator_resumes_continues_without_a_signal(
    eventually: Eventually,
) -> None:
    example = runpy.run_path(str(EXAMPLES / "external_callback.py"))
    fabric: Fabric = example["fabric"]
    async with fabric, fabric.worker():
        submitted = await example["take_payment"].submit("A-7")

        async def is_suspended() -> bool:
            return bool((await submitted.status()).state == "suspended")

        await eventually(is_suspended)
        await fabric.engine.resume_execution(execution_id=submitted.id)
        assert await submitted.result(timeout=30) == "order A-7: not paid"


def test_no_example_and_no_page_assumes_that_there_is_a_signal() -> None:
    pages = [*EXAMPLES.glob("*.py"), *EXAMPLES.parent.glob("*.md"), *EXAMPLES.parent.glob("docs/*.md")]
    assert [page.name for page in pages if "resumed_signals()[" in page.read_text(encoding="utf-8")] == []


def test_every_example_is_run() -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} == set(PRINTED)
