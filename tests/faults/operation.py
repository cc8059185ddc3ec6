"""One call of the engine that the fault sweeps make."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from flowfabric.engine.engine import Engine

from .scene import Subject

Prepare = Callable[[Subject], Awaitable[None]]
Call = Callable[[Engine, Subject], Awaitable[object]]


@dataclass(frozen=True, kw_only=True)
class Operation:
    """One call of the engine on a prepared subject."""

    name: str
    variant: str = ""
    prepare: Prepare
    call: Call
    is_idempotent: bool = True
    """Whether a second call leaves the same rows as one call."""
    is_read: bool = False

    @property
    def title(self) -> str:
        """The name of the operation and its variant."""
        return f"{self.name}, {self.variant}" if self.variant else self.name
