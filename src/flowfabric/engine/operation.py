"""Expose the methods of the rooms as operations of the engine, without copying their signatures."""

import functools
import sys
from collections.abc import Callable, Coroutine
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, TypeVar, cast, overload

Room = TypeVar("Room")
Arguments = ParamSpec("Arguments")
Answer = TypeVar("Answer")


class Rooms:
    """The objects that implement an engine's operations, one per class."""

    def __init__(self) -> None:
        self._by_class: dict[type, object] = {}

    def add(self, room: Room) -> Room:
        """Register an object under its class, and return it."""
        self._by_class[type(room)] = room
        return room

    def __getitem__(self, kind: type[Room]) -> Room:
        return cast("Room", self._by_class[kind])


class Housed(Protocol):
    """An object that has rooms, such as an engine."""

    @property
    def _rooms(self) -> Rooms: ...


class operation(Generic[Room, Arguments, Answer]):
    """A descriptor that exposes a room's method on the engine with the same signature and docstring.

    Access through an engine returns the bound method of its room, so a call adds no stack frame.
    """

    def __init__(self, method: Callable[Concatenate[Room, Arguments], Coroutine[Any, Any, Answer]]) -> None:
        owner, _, name = method.__qualname__.rpartition(".")
        kind: type[Room] = getattr(sys.modules[method.__module__], owner)

        @functools.wraps(method)
        async def unbound(engine: Housed, /, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Answer:
            return await method(engine._rooms[kind], *args, **kwargs)

        self._unbound = unbound
        self._kind = kind
        self._name = name

    @overload
    def __get__(
        self, engine: None, owner: type
    ) -> Callable[Concatenate[Housed, Arguments], Coroutine[Any, Any, Answer]]: ...
    @overload
    def __get__(self, engine: Housed, owner: type) -> Callable[Arguments, Coroutine[Any, Any, Answer]]: ...
    def __get__(self, engine: Housed | None, owner: type) -> Callable[..., Coroutine[Any, Any, Answer]]:
        if engine is None:
            return self._unbound
        bound: Callable[Arguments, Coroutine[Any, Any, Answer]] = getattr(engine._rooms[self._kind], self._name)
        return bound
