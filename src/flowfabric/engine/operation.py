"""Services: the objects whose methods are the operations of an engine, exposed without copying their signatures."""

import asyncio
import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, TypeVar, cast, overload

from flowfabric.loops import check_engine_loop, running_loop

Service = TypeVar("Service")
Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


class Services:
    """The objects that implement an engine's operations, one per class."""

    def __init__(self) -> None:
        self._by_class: dict[type, object] = {}

    def add(self, service: Service) -> Service:
        """Register an object under its class, and return it."""
        self._by_class[type(service)] = service
        return service

    def __getitem__(self, kind: type[Service]) -> Service:
        return cast("Service", self._by_class[kind])


class HasServices(Protocol):
    """An object that has services: an engine."""

    @property
    def _services(self) -> Services: ...

    @property
    def _loop(self) -> asyncio.AbstractEventLoop:
        """The event loop that the operations must be called in."""
        ...


class operation(Generic[Service, Arguments, Result]):
    """A descriptor that exposes a service's method on the engine with the same signature and docstring.

    Access through an engine, in its event loop, returns the bound method of its service, so a call adds no stack frame.
    Access from elsewhere returns a function that refuses to run in another event loop.
    """

    def __init__(self, method: Callable[Concatenate[Service, Arguments], Result]) -> None:
        owner, _, name = method.__qualname__.rpartition(".")
        kind: type[Service] = getattr(sys.modules[method.__module__], owner)

        def unbound(engine: HasServices, /, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
            return method(engine._services[kind], *args, **kwargs)

        if inspect.iscoroutinefunction(method):
            unbound = _coroutine_function(unbound)
        self._method = method
        self._unbound = functools.wraps(method)(unbound)
        self._kind = kind
        self._name = name

    def __set_name__(self, owner: type, name: str) -> None:
        """Let Python's errors about the arguments, and unawaited calls, be shown by the name that callers use."""
        for function in (self._method, self._unbound):
            function.__qualname__ = f"{owner.__qualname__}.{name}"

    @overload
    def __get__(self, engine: None, owner: type) -> Callable[Concatenate[HasServices, Arguments], Result]: ...
    @overload
    def __get__(self, engine: HasServices, owner: type) -> Callable[Arguments, Result]: ...
    def __get__(self, engine: HasServices | None, owner: type) -> Callable[..., Result]:
        if engine is None:
            return self._unbound
        bound: Callable[Arguments, Result] = getattr(engine._services[self._kind], self._name)
        return bound if running_loop() is engine._loop else _in_loop(engine._loop, bound)


def _in_loop(loop: asyncio.AbstractEventLoop, bound: Callable[..., Any]) -> Callable[..., Any]:
    """The same method, which refuses to run in another event loop than this one."""

    @functools.wraps(bound)
    def checked(*args: object, **kwargs: object) -> object:
        check_engine_loop(loop)
        return bound(*args, **kwargs)

    @functools.wraps(bound)
    async def checked_coroutine(*args: object, **kwargs: object) -> object:
        check_engine_loop(loop)
        return await bound(*args, **kwargs)

    return checked_coroutine if inspect.iscoroutinefunction(bound) else checked


def _coroutine_function(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function, recognised as a coroutine function."""

    async def unbound(*args: object, **kwargs: object) -> object:
        return await function(*args, **kwargs)

    return unbound
