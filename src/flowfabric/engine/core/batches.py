"""Items in batches, each for one transaction."""

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

Item = TypeVar("Item")


def in_batches(
    items: Iterable[Item], size_of: Callable[[Item], int], *, limit: int, count: int | None = None
) -> Iterator[list[Item]]:
    """Yield batches of at most `count` items with sizes of at most `limit` together, unless one alone is larger."""
    batch: list[Item] = []
    room = limit
    for item in items:
        size = size_of(item)
        if batch and (size > room or len(batch) == count):
            yield batch
            batch, room = [], limit
        batch.append(item)
        room -= size
    if batch:
        yield batch
