"""The steps of the state machine: rules of Hypothesis that random walks take too."""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule


class Step(NamedTuple):
    """A step for random walks: how often it is taken, and the values of its arguments."""

    name: str
    weight: int
    needs_lease: bool
    choices: dict[str, tuple[Any, ...]]


STEPS: list[Step] = []
Function = TypeVar("Function", bound=Callable[..., None])


def step(*, weight: int = 1, needs_lease: bool = False, **choices: tuple[Any, ...]) -> Callable[[Function], Any]:
    """Make a method a step of Hypothesis and of random walks."""

    def register(function: Function) -> Any:
        STEPS.append(Step(function.__name__, weight, needs_lease, choices))
        strategies: dict[str, Any] = {name: st.sampled_from(values) for name, values in choices.items()}
        decorate: Any = rule(**strategies)
        has_lease: Any = precondition(lambda machine: bool(machine.leases))
        return has_lease(decorate(function)) if needs_lease else decorate(function)

    return register
