"""Services: the objects whose methods are the operations of an engine, exposed without copying their signatures."""

import functools
import sys
from collections.abc import Callable, Coroutine
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, TypeVar, cast, overload

Service = TypeVar("Service")
Arguments = ParamSpec("Arguments")
Answer = TypeVar("Answer")


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


class operation(Generic[Service, Arguments, Answer]):
    """A descriptor that exposes a service's method on the engine with the same signature and docstring.

    Access through an engine returns the bound method of its service, so a call adds no stack frame.
    """

    def __init__(self, method: Callable[Concatenate[Service, Arguments], Coroutine[Any, Any, Answer]]) -> None:
        owner, _, name = method.__qualname__.rpartition(".")
        kind: type[Service] = getattr(sys.modules[method.__module__], owner)

        @functools.wraps(method)
        async def unbound(engine: HasServices, /, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Answer:
            return await method(engine._services[kind], *args, **kwargs)

        self._unbound = unbound
        self._kind = kind
        self._name = name

    @overload
    def __get__(
        self, engine: None, owner: type
    ) -> Callable[Concatenate[HasServices, Arguments], Coroutine[Any, Any, Answer]]: ...
    @overload
    def __get__(self, engine: HasServices, owner: type) -> Callable[Arguments, Coroutine[Any, Any, Answer]]: ...
    def __get__(self, engine: HasServices | None, owner: type) -> Callable[..., Coroutine[Any, Any, Answer]]:
        if engine is None:
            return self._unbound
        bound: Callable[Arguments, Coroutine[Any, Any, Answer]] = getattr(engine._services[self._kind], self._name)
        return bound
