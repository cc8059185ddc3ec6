"""Random scripts of flows: a graph, and steps that happen to it."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from hypothesis import strategies as st

from .graph_faults import CRASHES, LOCKS, NO_FAULT, SHARES, Fault
from .graph_model import HOUR_MS, Group

POLICIES = (
    *(Group() for _ in range(6)),
    Group(policy="any_of", cancels_siblings=True),
    Group(policy="any_of"),
    *(Group(policy="quorum", k=k, cancels_siblings=cancels) for k in (1, 2, 3) for cancels in (True, False)),
)
DEADLINES_MS = (None, None, None, HOUR_MS // 2, 3 * HOUR_MS // 2)
DELAYS_MS = (None, None, None, HOUR_MS // 2, 3 * HOUR_MS // 2)
_LOCKS = ("child", "group", *LOCKS)


@dataclass(frozen=True)
class Step:
    """A step of a script; the numbers choose among what is possible then."""

    name: str
    which: int
    value: int
    fault: Fault = NO_FAULT


@dataclass(frozen=True)
class Script:
    """A flow and what happens to it, also while it is submitted and while it comes to rest.

    Edges are `(upstream, downstream, passes data)`, policies are of POLICIES.
    """

    policies: Sequence[int]
    timings: Sequence[int]
    edges: Sequence[tuple[int, int, bool]]
    steps: Sequence[Step]
    edge_limit: int
    submission: Fault = NO_FAULT
    rest: Fault = NO_FAULT


WEIGHTS = {
    "run": 4,
    "claim": 14,
    "complete": 4,
    "complete together": 8,
    "fail": 2,
    "cancel": 2,
    "delay": 2,
    "suspend": 3,
    "resume": 6,
    "wait for children": 5,
    "revoke": 1,
    "pass time": 1,
    "add": 1,
    "stage": 3,
    "apply": 5,
    "settle": 9,
    "reconcile": 2,
    "drain siblings": 8,
    "reconcile siblings": 4,
    "replay": 5,
    "cancel the flow": 3,
    "cancel the header": 3,
    "cancel what is owed": 8,
}
"""Every step, and how often it is taken."""


def policy_of(group: Group) -> dict[str, object]:
    """The policy of a group, as an argument."""
    policy: dict[str, object] = {"kind": group.policy}
    if group.policy != "all_of":
        policy["on_satisfied"] = "cancel_remaining" if group.cancels_siblings else "let_run"
    if group.policy == "quorum":
        policy["k"] = group.k
    return policy


def random_script(rng: random.Random, length: int) -> Script:
    """A script of this length."""
    count = rng.randint(2, 6)
    pairs = [sorted(rng.sample(range(count), 2)) for _ in range(rng.randint(1, 2 * count))]
    names, weights = list(WEIGHTS), list(WEIGHTS.values())

    def crash() -> tuple[str, int] | None:
        # Rather late in a call: most calls are short.
        share = max(rng.randrange(SHARES), rng.randrange(SHARES))
        return (rng.choice(CRASHES), share) if rng.random() < 0.45 else None

    def fault() -> Fault:
        return Fault(crash(), (rng.choice(_LOCKS), rng.randrange(60)) if rng.random() < 0.25 else None)

    return Script(
        policies=[rng.randrange(len(POLICIES)) for _ in range(count)],
        timings=[rng.randrange(25) for _ in range(count)],
        edges=[(up, down, rng.random() < 0.5) for up, down in pairs],
        steps=[
            Step(name, rng.randrange(60), rng.randrange(60), fault()) for name in rng.choices(names, weights, k=length)
        ],
        edge_limit=rng.choice((1, 2, 3, 1000)),
        submission=Fault(crash()),
        rest=fault(),
    )


@st.composite
def scripts(draw: st.DrawFn, length: int) -> Script:
    """Scripts of Hypothesis, which tries to make them simple when one fails."""
    count = draw(st.integers(2, 6))
    numbers = st.integers(0, 59)
    edge = st.tuples(st.integers(0, count - 2), st.integers(1, count - 1), st.booleans())
    crash = st.one_of(st.none(), st.tuples(st.sampled_from(CRASHES), st.integers(0, SHARES - 1)))
    lock = st.one_of(st.none(), st.none(), st.tuples(st.sampled_from(_LOCKS), numbers))
    fault = st.builds(Fault, crash, lock)
    names = [name for name, weight in WEIGHTS.items() for _ in range(weight)]
    return Script(
        policies=draw(st.lists(st.integers(0, len(POLICIES) - 1), min_size=count, max_size=count)),
        timings=draw(st.lists(st.integers(0, 24), min_size=count, max_size=count)),
        edges=draw(st.lists(edge.filter(lambda each: each[0] < each[1]), min_size=1, max_size=2 * count)),
        steps=draw(
            st.lists(st.builds(Step, st.sampled_from(names), numbers, numbers, fault), min_size=length, max_size=length)
        ),
        edge_limit=draw(st.sampled_from((1, 2, 3, 1000))),
        submission=draw(st.builds(Fault, crash)),
        rest=draw(fault),
    )
