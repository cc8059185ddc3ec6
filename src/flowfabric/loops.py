"""Event loops: an object that belongs to one refuses calls that run in another."""

import asyncio


def running_loop() -> asyncio.AbstractEventLoop | None:
    """Return the event loop that runs in this thread, if any."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def check_loop(loop: asyncio.AbstractEventLoop | None, subject: str, advice: str = "") -> None:
    """Raise RuntimeError if this thread runs another event loop than this one; `advice` is what else to do.

    What was made outside of any loop has none, and is not checked.
    """
    if loop is not None and running_loop() not in (loop, None):
        raise RuntimeError(
            f"{subject} in another event loop; {advice}run the call there: `asyncio.run_coroutine_threadsafe(call, "
            "loop)`, in a `def` task `ctx.from_thread(call)`"
        )


def check_engine_loop(loop: asyncio.AbstractEventLoop | None) -> None:
    """Raise RuntimeError for a call of an engine that runs in another event loop than the one of the engine."""
    check_loop(loop, "the engine is connected", "connect an Engine in each event loop, or ")
