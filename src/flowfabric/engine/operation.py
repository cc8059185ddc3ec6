"""How the engine offers the methods of its rooms as operations of its own, without a second copy of each signature."""

import functools
import sys
from collections.abc import Callable, Coroutine
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, TypeVar, cast, overload

Room = TypeVar("Room")
Arguments = ParamSpec("Arguments")
Answer = TypeVar("Answer")


class Rooms:
    """The objects that do an engine's operations, one of each class."""

    def __init__(self) -> None:
        self._by_class: dict[type, object] = {}

    def add(self, room: Room) -> Room:
        """Keep an object to be found by its class."""
        self._by_class[type(room)] = room
        return room

    def __getitem__(self, kind: type[Room]) -> Room:
        return cast("Room", self._by_class[kind])


class Housed(Protocol):
    """Whatever has rooms."""

    @property
    def _rooms(self) -> Rooms: ...


class operation(Generic[Room, Arguments, Answer]):
    """A method of a room as an operation of the engine: same signature, same docstring, called on the engine.

    An engine gives the bound method of its own room, so that a call costs no further frame.
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
