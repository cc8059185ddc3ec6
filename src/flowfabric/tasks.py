"""Asyncio tasks that serve many callers."""

import asyncio
import contextvars
from collections.abc import Coroutine
from typing import Any, TypeVar

Answer = TypeVar("Answer")


def create_shared_task(work: Coroutine[Any, Any, Answer]) -> "asyncio.Task[Answer]":
    """Run a coroutine in a task that does not inherit the context variables of its creator.

    Otherwise its log lines would name the run of the caller that happened to start it.
    """
    return asyncio.create_task(work, context=contextvars.Context())
