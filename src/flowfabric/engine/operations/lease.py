"""Operations on leases."""

from collections.abc import Sequence

from flowfabric.engine.families import Families
from flowfabric.model.errors import EngineError
from flowfabric.model.handle import Handle
from flowfabric.model.outcomes import (
    Renewed,
)


class LeaseOperations(Families):
    """Operations on leases."""

    async def renew(self, handle: Handle) -> Renewed:
        """Extend a lease by the time its handle holds."""
        return await self.leases.renew(handle)

    async def renew_many(self, handles: Sequence[Handle]) -> list[Renewed | EngineError]:
        """Extend up to a thousand leases in one statement, each with its own verdict."""
        return await self.leases.renew_many(handles)
