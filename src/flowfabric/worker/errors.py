"""What is kept of the exception that ends an attempt: the name of its class and its traceback."""

import traceback
from types import TracebackType

MAX_FRAMES = 1000
"""Frames of one traceback that are shown; of more, the first half and the last half."""
MAX_OF_GROUP = 15
"""Exceptions of one group that are shown."""

_WORKER = __name__.rpartition(".")[0]
_UNNAMED_MODULES = ("builtins", "__main__")


def error_type_of(error: BaseException) -> str:
    """The qualified name of an exception's class, as a traceback shows it: `ValueError`, `app.errors.CardDeclined`."""
    kind = type(error)
    return kind.__qualname__ if kind.__module__ in _UNNAMED_MODULES else f"{kind.__module__}.{kind.__qualname__}"


def traceback_of(error: BaseException) -> str | None:
    """An exception with its causes and its group, as `traceback.format_exception` prints them, from the handler on.

    None where the exception itself keeps it from being printed.
    """
    try:
        # Without frames: those of each exception are filled in below.
        printed = traceback.TracebackException(
            type(error), error, error.__traceback__, limit=0, compact=True, max_group_width=MAX_OF_GROUP
        )
        pairs = [(printed, error)]
        while pairs:
            each, raised = pairs.pop()
            each.stack = _stack_of(raised.__traceback__)
            if each.__cause__ is not None and raised.__cause__ is not None:
                pairs.append((each.__cause__, raised.__cause__))
            if each.__context__ is not None and raised.__context__ is not None:
                pairs.append((each.__context__, raised.__context__))
            if each.exceptions is not None and isinstance(raised, BaseExceptionGroup):
                pairs += zip(each.exceptions[:MAX_OF_GROUP], raised.exceptions, strict=False)
        return "".join(printed.format())
    except Exception:
        return None


class _Ends(traceback.StackSummary):
    """The first and the last frames of a traceback that has too many."""

    left_out: int
    last: traceback.StackSummary

    def format(self, **options: bool) -> list[str]:
        return [
            *super().format(**options),
            f"  ... {self.left_out} frames left out ...\n",
            *self.last.format(**options),
        ]


def _stack_of(trace: TracebackType | None) -> traceback.StackSummary:
    """The frames of a traceback without those of the worker that come before the handler's."""
    while trace is not None and _is_worker_code(trace):
        trace = trace.tb_next
    depth = sum(1 for _ in traceback.walk_tb(trace))
    if depth <= MAX_FRAMES:
        return _summary(trace, None)
    ends = _Ends(_summary(trace, MAX_FRAMES // 2))
    ends.last = _summary(trace, -(MAX_FRAMES // 2))
    ends.left_out = depth - len(ends) - len(ends.last)
    return ends


def _is_worker_code(trace: TracebackType) -> bool:
    module = trace.tb_frame.f_globals.get("__name__")
    return isinstance(module, str) and module.startswith(f"{_WORKER}.")


def _summary(trace: TracebackType | None, limit: int | None) -> traceback.StackSummary:
    # Of any exception: `StackSummary.extract` does not know the columns that the lines are marked at.
    return traceback.TracebackException(Exception, Exception(), trace, limit=limit).stack
