"""Steps of random flows on single members: claims, ends, and everything else that happens to a run."""

from collections.abc import Sequence

from engine.waits import suspend_args
from flowfabric.model.errors import EngineError

from .graph_faults import NO_FAULT, Fault
from .graph_flow import PlayedFlow
from .graph_model import HOUR_MS
from .graph_scripts import Step

RESULTS = (None, b"small", b"large" * 100)
"""A member has no result, one in its row, or one in a table of its own; the number of its end makes it unique."""
DONE = ("execution_not_active", "lease_conflict")
"""How a repeated call is refused whose first try has taken the lease of its caller."""


class MemberSteps(PlayedFlow):
    """The steps on members."""

    _results = 0

    def _result(self, value: int) -> bytes | None:
        self._results += 1
        found = RESULTS[value % len(RESULTS)]
        return None if found is None else found + str(self._results).encode()

    async def _claim(self, step: Step) -> bool:
        if found := self._in("waiting", "lost"):
            await self._lease(found[step.which % len(found)])
        return bool(found)

    async def _lease(self, number: int) -> None:
        self._store.parts.wakeups.watermarks.clear()
        found = await self._engine.claim_many(
            lanes=(f"lane-{number}",),
            worker_id="worker",
            worker_instance_id="worker-1",
            lease_ttl_ms=HOUR_MS - 1,
            limit=1,
        )
        assert [claimed.execution_id for claimed in found] == [self._ids[number]], "it can be claimed"
        (claimed,) = found
        assert claimed.input_payload == self._model.members[number].payload
        self._handles[number] = claimed.handle
        self._model.claim(number)

    async def _run(self, step: Step) -> bool:
        """Claim a member and end it: mostly in success."""
        if not (found := self._in("waiting", "lost")):
            return False
        number = found[step.which % len(found)]
        await self._lease(number)
        if step.value % 4 == 3:
            await self._fail_member(number, step.fault)
        else:
            await self._complete_members([number], step.value, step.fault)
        return True

    async def _complete(self, step: Step) -> bool:
        if found := self._in("active"):
            await self._complete_members([found[step.which % len(found)]], step.value, step.fault)
        return bool(found)

    async def _complete_together(self, step: Step) -> bool:
        """Complete every active member in one call: they share an entry of the cascade."""
        found = self._in("active")
        if len(found) > 1:
            await self._complete_members(found, step.value, step.fault)
        return len(found) > 1

    async def _complete_members(self, numbers: Sequence[int], value: int, fault: Fault = NO_FAULT) -> None:
        results = {number: self._result(value + nth) for nth, number in enumerate(numbers)}
        items = [(self._handles[each], results[each]) for each in numbers]
        verdicts = await self._repeated("complete", fault, lambda engine: engine.complete_many(items))
        assert verdicts is not None
        assert not any(isinstance(verdict, EngineError) for verdict in verdicts), verdicts
        for number in numbers:
            self._model.end(number, "success", results[number])

    async def _fail(self, step: Step) -> bool:
        if found := self._in("active"):
            await self._fail_member(found[step.which % len(found)], step.fault)
        return bool(found)

    async def _fail_member(self, number: int, fault: Fault = NO_FAULT) -> None:
        await self._repeated(
            "fail",
            fault,
            lambda engine: engine.fail(self._handles[number], reason="no luck", classification="permanent"),
        )
        self._model.end(number, "failed")

    async def _cancel(self, step: Step) -> bool:
        if found := self._live():
            number = found[step.which % len(found)]
            await self._repeated(
                "cancel",
                step.fault,
                lambda engine: engine.cancel_execution(execution_id=self._ids[number], reason="not wanted"),
            )
            self._model.end(number, "cancelled")
        return bool(found)

    async def _delay(self, step: Step) -> bool:
        if found := self._in("active"):
            number = found[step.which % len(found)]
            until = self._model.now + HOUR_MS // 2 + step.value % 2 * HOUR_MS
            await self._repeated(
                "delay", step.fault, lambda engine: engine.delay(self._handles[number], until), refusals=DONE
            )
            self._model.release(number, "delayed", until)
        return bool(found)

    async def _suspend(self, step: Step) -> bool:
        if found := self._in("active"):
            number = found[step.which % len(found)]
            arguments = suspend_args()
            await self._repeated(
                "suspend", step.fault, lambda engine: engine.suspend(self._handles[number], arguments), refusals=DONE
            )
            self._model.release(number, "suspended")
        return bool(found)

    async def _resume(self, step: Step) -> bool:
        if found := self._in("suspended"):
            number = found[step.which % len(found)]
            await self._repeated(
                "resume",
                step.fault,
                lambda engine: engine.resume_execution(execution_id=self._ids[number], trigger_type="operator"),
                refusals=("execution_not_suspended",),
            )
            self._model.release(number, "waiting")
        return bool(found)

    async def _wait_children(self, step: Step) -> bool:
        if found := self._in("active"):
            number = found[step.which % len(found)]
            await self._repeated(
                "wait for children",
                step.fault,
                lambda engine: engine.wait_children(self._handles[number]),
                refusals=DONE,
            )
            self._model.wait_children(number)
        return bool(found)

    async def _revoke(self, step: Step) -> bool:
        if found := self._in("active"):
            number = found[step.which % len(found)]
            await self._repeated(
                "revoke", step.fault, lambda engine: engine.revoke_lease(self._ids[number], reason="test")
            )
            self._model.members[number].phase = "lost"
        return bool(found)

    async def _pass_time(self, step: Step) -> bool:
        if step.which % 2:
            return False
        await self._store.clock.advance(ms=HOUR_MS)
        parts = self._store.parts
        while (await parts.lease_expiry.sweep_batch()).is_full:
            pass
        await parts.delays.promote_due()
        await parts.timeouts.expire_due()
        self._model.pass_time(HOUR_MS)
        return True
