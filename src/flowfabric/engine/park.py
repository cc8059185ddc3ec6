"""Parking: a run gives up its lease and its attempt goes on later, under another one."""

from flowfabric.engine.fence import usable
from flowfabric.engine.lease import LATEST_TIME
from flowfabric.engine.release import Parting, Releases
from flowfabric.engine.transition import Release
from flowfabric.model.handle import Handle
from flowfabric.model.text import check_range


class Park:
    """The operations that put a run aside without ending its attempt."""

    def __init__(self, releases: Releases) -> None:
        self._releases = releases

    async def delay(self, handle: Handle, delay_until: int) -> None:
        """Put a run aside until a time; one that has passed makes it due at once."""
        handle = usable(handle)
        check_range(delay_until, "delay_until", 0, LATEST_TIME)
        await self._park(Parting(handle.execution_id, Release.DELAYED, fence=handle, delay_until=delay_until))

    async def wait_children(self, handle: Handle) -> None:
        """Put a run aside until what it depends on has ended; where nothing is open it may go on at once."""
        handle = usable(handle)
        await self._park(Parting(handle.execution_id, _move_of_waiting(), fence=handle))

    async def hand_back(self, handle: Handle) -> None:
        """Give up a lease whose run cannot go on here; the next claim goes on with the same attempt."""
        handle = usable(handle)
        await self._park(Parting(handle.execution_id, Release.HANDED_BACK, fence=handle))

    async def _park(self, parting: Parting) -> None:
        verdict = await self._releases.one(parting)
        if not verdict.is_done:
            raise verdict.refusal()


def _move_of_waiting() -> Release:
    """Where waiting for children leads; only a member of a flow can have an open dependency, and there are no flows."""
    return Release.CHILDREN_DONE
