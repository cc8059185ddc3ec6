"""Tasks that serve many callers."""

import asyncio
import contextvars
from collections.abc import Coroutine
from typing import Any, TypeVar

Answer = TypeVar("Answer")


def create_shared_task(work: Coroutine[Any, Any, Answer]) -> "asyncio.Task[Answer]":
    """Run a coroutine in a task without the context variables of the caller, who is only the first of many it serves.

    Otherwise what it logs later would name the run of that first caller.
    """
    return asyncio.create_task(work, context=contextvars.Context())
