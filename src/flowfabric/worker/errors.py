"""What an attempt stores of the exception that ended it: the name of its class and its traceback."""

import traceback
from types import TracebackType

MAX_FRAMES = 1000
"""The most frames shown of one traceback; of a longer one, the first and the last frames are shown."""
MAX_OF_GROUP = 15
"""The most exceptions shown of one group."""

_WORKER = __name__.rpartition(".")[0]
_UNNAMED_MODULES = ("builtins", "__main__")


def error_type_of(error: BaseException) -> str:
    """Return the class name of an exception as a traceback shows it: `ValueError`, `app.errors.CardDeclined`."""
    kind = type(error)
    return kind.__qualname__ if kind.__module__ in _UNNAMED_MODULES else f"{kind.__module__}.{kind.__qualname__}"


def traceback_of(error: BaseException) -> str | None:
    """Return the traceback as `traceback.format_exception` prints it, with causes and groups, from the handler on.

    Return None if the exception itself cannot be printed.
    """
    try:
        # Without frames, which are filled in below.
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
    """The first and the last frames of a traceback that is too long."""

    omitted: int
    last: traceback.StackSummary

    def format(self, **options: bool) -> list[str]:
        return [
            *super().format(**options),
            f"  ... {self.omitted} frames omitted ...\n",
            *self.last.format(**options),
        ]


def _stack_of(trace: TracebackType | None) -> traceback.StackSummary:
    """Return the frames of a traceback without the leading frames of the worker itself."""
    while trace is not None and _is_worker_code(trace):
        trace = trace.tb_next
    depth = sum(1 for _ in traceback.walk_tb(trace))
    if depth <= MAX_FRAMES:
        return _summary(trace, None)
    ends = _Ends(_summary(trace, MAX_FRAMES // 2))
    ends.last = _summary(trace, -(MAX_FRAMES // 2))
    ends.omitted = depth - len(ends) - len(ends.last)
    return ends


def _is_worker_code(trace: TracebackType) -> bool:
    module = trace.tb_frame.f_globals.get("__name__")
    return isinstance(module, str) and module.startswith(f"{_WORKER}.")


def _summary(trace: TracebackType | None, limit: int | None) -> traceback.StackSummary:
    # From a dummy exception: `StackSummary.extract` loses the column positions.
    return traceback.TracebackException(Exception, Exception(), trace, limit=limit).stack
