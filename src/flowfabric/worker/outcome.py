"""The outcome of running a handler, and the text of a failure."""

import asyncio
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from flowfabric.engine.engine import Engine
from flowfabric.model.attempt import FailureClass, FailureReason
from flowfabric.model.errors import InvalidInputError
from flowfabric.worker.budget import BudgetExceeded
from flowfabric.worker.context import Context
from flowfabric.worker.errors import error_type_of, traceback_of
from flowfabric.worker.handler import Handler
from flowfabric.worker.running import Running
from flowfabric.worker.threads import Threads
from flowfabric.worker.upstreams import ENCODING as UPSTREAMS
from flowfabric.worker.upstreams import (
    ResultDeleted,
    ResultMisfit,
    UpstreamArguments,
    change_of,
    misfit_of,
    read_arguments,
)
from flowfabric.worker.waits import read_signals

PAYLOAD_DECODE = "extractor_payload_decode"
HANDLER_ERROR = "handler_error"
HANDLER_PANIC = "handler_panic"


class NoRetry(Exception):
    """Raise this in a task to fail for good, without the retries that are left."""


class Success(msgspec.Struct, frozen=True, gc=False):
    """The handler returned."""

    payload: bytes | None


class Failure(msgspec.Struct, frozen=True):
    """The handler could not be called, or raised."""

    reason: FailureReason
    classification: FailureClass = FailureClass.TRANSIENT
    error: BaseException | None = None
    """The exception to log with its traceback, if any."""


class Dropped(msgspec.Struct, frozen=True):
    """The run does not end here: it is suspended, stopped or handed back, and no result is written."""


class Postponed(msgspec.Struct, frozen=True):
    """The handler was not called because an earlier run does not return; the attempt continues later."""


Outcome = Success | Failure | Dropped | Postponed


async def outcome_of(running: Running, handler: Handler, engine: Engine, threads: Threads) -> Outcome:
    """Run the handler of an execution and return the outcome; only KeyboardInterrupt is raised."""
    claimed = running.claimed
    filled: UpstreamArguments | None = None
    if claimed.payload_encoding == UPSTREAMS:
        try:
            filled = await read_arguments(engine, running)
        except asyncio.CancelledError as error:
            return _outcome_of_error(running, error)
        except ResultDeleted as error:
            return _failure(_chain(error), None, error, FailureClass.PERMANENT, is_logged=False)
        except Exception as error:
            return _failure(_chain(error), PAYLOAD_DECODE, error, is_logged=False)
    try:
        context = None if handler.shape.context is None else Context(running, engine)
        args, kwargs = _bind(handler, claimed.input_payload, context, filled)
    except ResultMisfit as error:
        # Permanent: a retry would get the same stored results.
        return _failure(_chain(error), None, error, FailureClass.PERMANENT, is_logged=False)
    except Exception as error:
        return _failure(_chain(error), PAYLOAD_DECODE, error, is_logged=False)
    try:
        if claimed.has_waited and context is not None:
            running.signals = await read_signals(engine, running)
        if handler.is_async:
            result = await handler.function(*args, **kwargs)
        else:
            result = await threads.run(_call_in_thread, (running, handler.function, args, kwargs), {})
            if inspect.isawaitable(result):
                result = await result
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        try:
            return _outcome_of_error(running, error)
        except Exception:
            # The properties of the exception raise themselves.
            return Failure(FailureReason(type(error).__name__, detail=HANDLER_ERROR), FailureClass.TRANSIENT)
    if running.is_dropped:
        return Dropped()
    if running.overspent is not None:
        return _overspent(running.overspent)
    try:
        return Success(handler.encode_result(result))
    except Exception as error:
        # Permanent: the same code would return the same type again.
        reason = str(error.detail) if isinstance(error, InvalidInputError) else _chain(error)
        return _failure(reason, None, error, FailureClass.PERMANENT, is_logged=False)


def _bind(
    handler: Handler, payload: bytes, context: Context | None, filled: UpstreamArguments | None
) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """Return the arguments of a call; an error names the upstream result that does not fit."""
    if filled is None:
        return handler.bind(payload, context)
    try:
        bound = handler.bind(filled.payload, context)
    except InvalidInputError as refused:
        raise misfit_of(handler, filled) or refused from None
    if changed := change_of(handler, filled):
        raise changed
    return bound


def _call_in_thread(
    running: Running, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    running.is_in_thread = True
    try:
        return function(*args, **kwargs)
    finally:
        running.is_in_thread = False


def _outcome_of_error(running: Running, error: BaseException) -> Outcome:
    task = running.task
    # Cancelled by the worker. A CancelledError from something that the handler awaited is a failure.
    if running.is_dropped or (isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling()):
        return Dropped()
    if running.overspent is not None:
        return _overspent(running.overspent)
    match error:
        case _ if _is_permanent(error):
            return _failure(_chain(error), None, error, FailureClass.PERMANENT)
        case Exception() | asyncio.CancelledError():
            return _failure(_chain(error), HANDLER_ERROR, error)
        case SystemExit():
            return _failure(
                f"handler panicked: {_chain(error)} (sys.exit ends the attempt, not the worker)", HANDLER_PANIC, error
            )
        case _:
            return _failure(f"handler panicked: {_chain(error)}", HANDLER_PANIC, error)


def _overspent(exceeded: Exception) -> Failure:
    return _failure(_chain(exceeded), None, exceeded, FailureClass.PERMANENT)


def _failure(
    message: str,
    category: str | None,
    error: BaseException,
    classification: FailureClass = FailureClass.TRANSIENT,
    *,
    is_logged: bool = True,
) -> Failure:
    trace = traceback_of(error)
    reason = FailureReason(message, detail=category, error_type=error_type_of(error), traceback=trace)
    # A log that cannot print the exception would lose the line.
    return Failure(reason, classification, error if is_logged and trace is not None else None)


def _is_permanent(error: BaseException) -> bool:
    """Whether an error is not retried, or a group that holds such a one; `subgroup` fails on deeply nested groups."""
    found = [error]
    while found:
        one = found.pop()
        if isinstance(one, NoRetry) or (isinstance(one, BudgetExceeded) and one.is_final):
            return True
        if isinstance(one, BaseExceptionGroup):
            found += one.exceptions
    return False


def _chain(error: BaseException) -> str:
    try:
        return ": ".join(_text_of(link) for link in _links(error))
    except Exception:
        # Groups nested too deeply, or properties that raise.
        return type(error).__name__


def _text_of(error: BaseException) -> str:
    name = type(error).__name__
    if isinstance(error, BaseExceptionGroup):
        return f"{name}: {error.message}: {'; '.join(_chain(one) for one in error.exceptions)}"
    try:
        return f"{name}: {text}" if (text := str(error)) else name
    except Exception:
        return name


def _links(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and its causes, as a traceback shows them."""
    seen: set[int] = set()
    shown: BaseException | None = None
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        # The cancellation inside `asyncio.timeout` is how it works, not why the handler failed.
        if not (isinstance(link, asyncio.CancelledError) and isinstance(shown, TimeoutError)):
            yield (shown := link)
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)
