"""Log fields that name the run a line is about, and a default log on stderr."""

import contextvars
import logging
import sys
import threading
from collections.abc import Callable
from typing import Any, TypedDict

from flowfabric.model.lease import ClaimedExecution

STDERR_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


class LogFields(TypedDict):
    """The fields of a log record that name its run; all of them are None outside of runs.

    They have a prefix because logging refuses an `extra` with the name of an existing field, and users have their own
    `task`.
    """

    ff_execution_id: str | None
    ff_attempt: int | None
    """The attempt, counted from 1 as `Context.attempt` is."""
    ff_task: str | None
    """The name of the task, which is the kind of the execution."""


_NO_RUN: LogFields = {"ff_execution_id": None, "ff_attempt": None, "ff_task": None}

current_run: contextvars.ContextVar[ClaimedExecution | None] = contextvars.ContextVar("flowfabric_run", default=None)
"""The execution whose handler runs in this context."""


def log_fields() -> LogFields:
    """Return the fields that name the current run, for loggers that do not use the `logging` module."""
    claimed = current_run.get()
    if claimed is None:
        return _NO_RUN.copy()
    return {
        "ff_execution_id": claimed.execution_id,
        "ff_attempt": claimed.attempt_index + 1,
        "ff_task": claimed.execution_kind,
    }


def log_about(
    claimed: ClaimedExecution,
    logger: logging.Logger,
    level: int,
    text: str,
    *values: object,
    error: BaseException | None = None,
) -> None:
    """Log a line with the fields of this execution, in whatever context it is written."""
    if not logger.isEnabledFor(level):
        return
    before = current_run.set(claimed)
    try:
        logger.log(level, text, *values, exc_info=error, stacklevel=2)
    finally:
        current_run.reset(before)


class _RecordFactory:
    """Wraps another record factory and adds the fields of the run."""

    def __init__(self, make: Callable[..., logging.LogRecord]) -> None:
        self._make = make

    def __call__(self, *args: Any, **kwargs: Any) -> logging.LogRecord:
        record = self._make(*args, **kwargs)
        record.__dict__.update(log_fields())
        return record


_installing = threading.Lock()


def add_fields_to_records() -> None:
    """Add the fields of the run to every log record of this process.

    This wraps the current record factory. It does nothing if that is already wrapped.
    """
    with _installing:
        factory = logging.getLogRecordFactory()
        if not isinstance(factory, _RecordFactory):
            logging.setLogRecordFactory(_RecordFactory(factory))


class _Formatter(logging.Formatter):
    """Appends the attempt to the lines of a run, and the task and the execution id unless the text has them."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        line = super().formatMessage(record)
        execution_id = getattr(record, "ff_execution_id", None)
        if execution_id is None:
            return line
        task = record.__dict__["ff_task"]
        # The worker writes a run as `<execution id> (<task>)`.
        named = "" if f"{execution_id} ({task})" in record.message else f"task={task} "
        run = "" if execution_id in record.message else f" execution_id={execution_id}"
        return f"{line} [{named}attempt={record.__dict__['ff_attempt']}{run}]"


def log_to_stderr_if_unconfigured() -> None:
    """Log to stderr from INFO on, unless a logger of this process already has a handler."""
    root = logging.getLogger()
    known = (root, *list(logging.Logger.manager.loggerDict.values()))
    handlers = [each for logger in known if isinstance(logger, logging.Logger) for each in logger.handlers]
    # Libraries add a NullHandler to their loggers.
    if all(isinstance(handler, logging.NullHandler) for handler in handlers):
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(_Formatter(STDERR_FORMAT))
        root.addHandler(handler)
        if root.level == logging.WARNING:
            root.setLevel(logging.INFO)
