"""Start-time fair queueing: clients are served in turns by their weights, and nobody saves up turns while idle."""

from collections.abc import Iterator, Mapping
from heapq import heapify, heappop, heapreplace
from typing import TypeVar


class Client:
    """Who is served in turns; the lowest virtual time is served next, and a turn costs one over the weight."""

    PATIENCE = 1_000
    """Among equals a newcomer is served first, but not before one that has waited for this many turns."""

    def __init__(self) -> None:
        self.weight = 1.0
        self.virtual_time = 0.0
        self.number = 0
        """Decides among equals."""
        self.round = -1
        """The last round in which it had entries."""
        self.was_ready = False
        """Whether it could be served in that round."""

    def leave(self) -> None:
        """Record that it has no entries left; if it gets new ones before the next round, they count as new."""
        self.round = -1


C = TypeVar("C", bound=Client)
Parent = TypeVar("Parent", bound=Client)


class Schedule:
    """The virtual time of all clients together."""

    def __init__(self) -> None:
        self.virtual_time = 0.0
        """When the last entry that was served started."""
        self._highest = 0.0
        self._count = 0
        self._round = 0

    def begin(self, waiting: Mapping[C, bool]) -> list[C]:
        """Start a round with all clients that have entries; return those that may be served now, as the mapping says.

        Who had no entries starts level with the lowest of the others, so idle time earns no turns. Who had some but
        could not be served is moved up to what was served meanwhile: if nobody could be served, all keep their place.
        """
        stayed = [client for client in waiting if client.round == self._round]
        if not stayed:
            # Nobody was left waiting, so all are even.
            self.virtual_time = self._highest
        for client in stayed:
            if waiting[client] and not client.was_ready:
                client.virtual_time = max(client.virtual_time, self.virtual_time)
        level = min((client.virtual_time for client in stayed if waiting[client]), default=self.virtual_time)
        for client, is_ready in waiting.items():
            if client.round != self._round:
                client.virtual_time = max(client.virtual_time, level)
                client.number = self._next_number()
            client.round = self._round + 1
            client.was_ready = is_ready
        self._round += 1
        return [client for client, is_ready in waiting.items() if is_ready]

    def charge(self, client: Client, turns: int) -> None:
        """Charge a client for turns that it has used."""
        started = client.virtual_time + (turns - 1) / client.weight
        self.virtual_time = max(self.virtual_time, started)
        client.virtual_time += turns / client.weight
        client.number = self._next_number() + client.PATIENCE
        self._highest = max(self._highest, client.virtual_time)

    def _next_number(self) -> int:
        self._count += 1
        return self._count


def in_turn(offers: Mapping[C, int]) -> Iterator[C]:
    """Yield each client as often as it has entries, in the order of the turns; no client is charged."""
    clients = [(client, count) for client, count in offers.items() if count]
    used = [0] * len(clients)
    heap = [(client.virtual_time, client.number, index) for index, (client, _) in enumerate(clients)]
    heapify(heap)
    while heap:
        _, number, index = heap[0]
        client, count = clients[index]
        yield client
        used[index] += 1
        if used[index] == count:
            heappop(heap)
        else:
            heapreplace(heap, (client.virtual_time + used[index] / client.weight, number + client.PATIENCE, index))


def nested_turns(offers: Mapping[Parent, Mapping[C, int]]) -> Iterator[C]:
    """Yield each client as often as it has entries, in the order of the turns of the parents and within each parent."""
    turns = {parent: in_turn(clients) for parent, clients in offers.items()}
    for parent in in_turn({parent: sum(clients.values()) for parent, clients in offers.items()}):
        yield next(turns[parent])
