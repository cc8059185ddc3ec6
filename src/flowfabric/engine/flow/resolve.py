"""Resolution of edges: what the end of an upstream execution means for the groups and children behind it."""

from collections.abc import Sequence
from uuid import UUID

from flowfabric.db.database import Transaction
from flowfabric.engine.flow.row import LockedFlow
from flowfabric.engine.store import Store
from flowfabric.model.errors import error
from flowfabric.model.event import CompletionOutcome


class ResolvedEdges:
    """What a resolution did."""


class Resolver:
    """Resolves applied edges of locked flows."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def resolve_edges(
        self, transaction: Transaction, flow: LockedFlow, edges: Sequence[tuple[UUID, CompletionOutcome]]
    ) -> ResolvedEdges:
        """Resolve edges."""
        raise error("unavailable", f"resolve_edges: {transaction} {flow} {edges}")

    async def after_commit(self, resolved: ResolvedEdges) -> None:
        """Wake workers."""
