"""Cases of a test that run one after the other on one database."""

import functools
import inspect
import os
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Self

import asyncpg
import pytest

from flowfabric.engine.engine import Engine

SWEEPS_WHOLE = os.environ.get("FF_TEST_SWEEP") == "whole"
"""Run every round of the races and every case of the samples."""

Test = Callable[..., Awaitable[None]]

_EMPTY = """
with executions as (delete from execution),
     inputs as (delete from execution_input),
     results as (delete from execution_result),
     tags as (delete from execution_tag),
     attempts as (delete from attempt),
     entries as (delete from ready),
     claims as (delete from claim),
     grants as (delete from claim_grant),
     timers as (delete from timer),
     listings as (delete from listed),
     keys as (delete from idempotency_key),
     suspensions as (delete from suspension),
     waitpoints as (delete from waitpoint),
     signals as (delete from signal),
     batches as (delete from retained),
     streams as (delete from stream),
     frames as (delete from stream_frame),
     summaries as (delete from stream_summary),
     lanes as (update lane set state = 'active' where state <> 'active')
delete from event
"""


class Emptied:
    """Deletes the executions of a test's database; lanes, kinds and workers stay, because engines cache them."""

    def __init__(self, engine: Engine, connection: asyncpg.Connection, *, checks: bool) -> None:
        self._engine = engine
        self._connection = connection
        self._checks = checks

    async def check(self) -> None:
        """Fail if the rows are inconsistent, unless the test alters rows itself."""
        if self._checks:
            assert await self._engine.find_inconsistencies() == []

    async def __call__(self) -> None:
        """Delete the executions."""
        await self._connection.execute(_EMPTY)


class Cases:
    """Runs the cases of a loop and reports every failing one at the end.

    `with Cases() as cases: for case in ...: with cases(case): ...`
    """

    def __init__(self) -> None:
        self._failures: list[str] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        assert kind is not None or not self._failures, "\n" + "\n".join(self._failures)

    @contextmanager
    def __call__(self, case: object) -> Iterator[None]:
        """Run one case."""
        try:
            yield
        except (Exception, pytest.fail.Exception) as failure:
            self._failures.append(f"{case}: {type(failure).__name__} {failure}")


def in_turn(names: str, given_cases: Iterable[Any]) -> Callable[[Test], Test]:
    """Run a test for each case like `pytest.mark.parametrize`, but on one database, which is emptied between cases.

    Every failing case is reported. Decorators may be stacked.
    """
    arguments = [name.strip() for name in names.split(",")]
    listed = [case if len(arguments) > 1 else (case,) for case in given_cases]

    def decorate(test: Test) -> Test:
        given = inspect.signature(test).parameters
        is_innermost = "emptied" not in given

        @functools.wraps(test)
        async def run_each(**fixtures: Any) -> None:
            emptied: Emptied = fixtures.pop("emptied") if is_innermost else fixtures["emptied"]
            with Cases() as cases:
                for case in listed:
                    with cases(case):
                        await test(**fixtures, **dict(zip(arguments, case, strict=True)))
                        await emptied.check()
                    await emptied()

        kept = [
            parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
            for name, parameter in given.items()
            if name not in arguments
        ]
        if is_innermost:
            kept.append(inspect.Parameter("emptied", inspect.Parameter.KEYWORD_ONLY))
        run_each.__signature__ = inspect.Signature(kept)  # type: ignore[attr-defined]
        return run_each

    return decorate
