"""Run the cases of a test in a loop: one test per rule, which reports every failing case."""

import functools
import inspect
import os
from collections.abc import Callable, Iterable
from typing import Any

import pytest

RUNS_WHOLE_SWEEPS = os.environ.get("FF_TEST_SWEEP") == "whole"
"""Whether to run the largest volumes and all examples of the properties."""

Test = Callable[..., None]


def for_each(names: str, cases: Iterable[Any]) -> Callable[[Test], Test]:
    """Run a test once for each case, like `pytest.mark.parametrize` but as one test. Decorators may be stacked."""
    arguments = [name.strip() for name in names.split(",")]
    listed = [case if len(arguments) > 1 else (case,) for case in cases]

    def decorate(test: Test) -> Test:
        @functools.wraps(test)
        def run_each(**others: Any) -> None:
            failures: list[str] = []
            for case in listed:
                try:
                    test(**others, **dict(zip(arguments, case, strict=True)))
                except (Exception, pytest.fail.Exception) as failure:
                    failures.append(f"{case}: {type(failure).__name__} {failure}")
            assert not failures, "\n" + "\n".join(failures)

        kept = [each for name, each in inspect.signature(test).parameters.items() if name not in arguments]
        run_each.__signature__ = inspect.Signature(kept)  # type: ignore[attr-defined]
        return run_each

    return decorate
