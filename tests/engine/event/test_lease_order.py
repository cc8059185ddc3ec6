"""The events of one execution are delivered in the order in which they happened, except renewals."""

import asyncio

import pytest

from engine.state import claim
from fixtures import Clock, Eventually, Given
from flowfabric.engine.engine import Engine
from flowfabric.engine.parts import parts_of
from flowfabric.feeds import LeaseAcquired, LeaseEvent, LeaseExpired, LeaseReleased, LeaseRenewed

from .following import HOLDS, SLOW, held_commits, is_quiet, take, waits_for_commit

pytestmark = pytest.mark.usefixtures("patient_with_locks", "fast_polls")


def hold(kind: str) -> str:
    """Lets a test delay the commits of events of one kind."""
    assert HOLDS.count("for each row") == 1
    return HOLDS.replace("for each row", f"for each row when (new.kind = '{kind}')")


class TestRenewals:
    """A renewal does not lock its execution."""

    @pytest.fixture
    def alteration(self) -> str:
        """Delays commits of renewals."""
        return hold("renewed")

    async def test_a_renewal_that_is_committed_late_is_delivered_after_the_release_of_its_lease(
        self, engine: Engine, given: Given, url: str, eventually: Eventually
    ) -> None:
        async with engine.subscribe_lease_history() as events:
            handle = await given.claimed(lane_id=SLOW)
            async with held_commits(url) as holder:
                renewing = asyncio.create_task(engine.renew(handle))
                await eventually(lambda: waits_for_commit(holder))
                await engine.complete(handle)
                acquired, released = await take(events, 2)
                assert isinstance(acquired, LeaseAcquired)
                assert isinstance(released, LeaseReleased)
                assert await is_quiet(events)
            await renewing
            (renewed,) = await take(events, 1)
            assert isinstance(renewed, LeaseRenewed)
            assert (renewed.execution_id, renewed.lease_id) == (released.execution_id, released.lease_id)


class TestOthers:
    """Every other event locks its execution until it is committed."""

    @pytest.fixture(params=["acquired", "expired", "released"])
    def kind(self, request: pytest.FixtureRequest) -> str:
        """The kind of event whose commits are delayed."""
        return str(request.param)

    @pytest.fixture
    def alteration(self, kind: str) -> str:
        """Delays commits of these events."""
        return hold(kind)

    async def test_what_happens_next_to_an_execution_waits_for_the_commit_of_its_event(
        self, engine: Engine, given: Given, clock: Clock, url: str, eventually: Eventually, kind: str
    ) -> None:
        execution_id = await given.created(lane_id=SLOW)
        expected: list[type[LeaseEvent]]
        async with engine.subscribe_lease_history() as events:
            async with held_commits(url) as holder:
                happening: asyncio.Task[object]
                if kind == "acquired":
                    happening = asyncio.create_task(claim(engine, lanes=(SLOW,)))
                    expected = [LeaseAcquired, LeaseReleased]
                else:
                    (run,) = await claim(engine, lanes=(SLOW,), lease_ttl_ms=1000)
                    await take(events, 1)
                    if kind == "expired":
                        await clock.advance(seconds=61)
                        happening = asyncio.create_task(parts_of(engine).lease_expiry.sweep())
                        expected = [LeaseExpired]
                    else:
                        until = await clock.now() + 60_000
                        happening = asyncio.create_task(engine.delay(run.handle, delay_until=until))
                        expected = [LeaseReleased]
                await eventually(lambda: waits_for_commit(holder))
                cancelling = asyncio.create_task(engine.cancel_execution(execution_id=execution_id, reason="test"))
                done, _ = await asyncio.wait((cancelling,), timeout=0.2)
                assert not done
                assert await is_quiet(events)
            await asyncio.gather(happening, cancelling)
            assert [type(event) for event in await take(events, len(expected))] == expected
            assert await is_quiet(events)
