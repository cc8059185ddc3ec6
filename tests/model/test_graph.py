"""The test for cycles is exact, and names the nodes of a cycle in the order of its edges."""

from hypothesis import given
from hypothesis import strategies as st

from flowfabric.model.graph import find_cycle

NODES = 7
EDGES = st.lists(st.tuples(st.integers(0, NODES - 1), st.integers(0, NODES - 1)).filter(lambda e: e[0] != e[1]))


def has_cycle(edges: list[tuple[int, int]]) -> bool:
    """Whether some node reaches itself, found by repeating every step."""
    reached = set(edges)
    for _ in range(NODES):
        reached |= {(first, last) for first, middle in reached for start, last in edges if start == middle}
    return any(first == last for first, last in reached)


@given(EDGES)
def test_a_cycle_is_found_exactly_if_there_is_one(edges: list[tuple[int, int]]) -> None:
    cycle = find_cycle(NODES, [edge[0] for edge in edges], [edge[1] for edge in edges])
    assert bool(cycle) == has_cycle(edges)
    assert len(set(cycle)) == len(cycle)
    assert set(zip(cycle, [*cycle[1:], *cycle[:1]], strict=True)) <= set(edges)
    assert not cycle or cycle[0] == min(cycle)
