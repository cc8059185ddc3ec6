"""The runs of flows: handles of submitted flows, to watch, await and cancel from any process."""

import contextlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal, TypeAlias, TypeVar, cast

from flowfabric.engine.parts import parts_of
from flowfabric.engine.read.members import DeletedMembers, FlowProgress, Members, UnmetMember, UnmetMembers
from flowfabric.fabric.errors import RUN_ERRORS, RunError
from flowfabric.fabric.node import Node
from flowfabric.fabric.run import UNSERVED_SECONDS, Run, RunFabric
from flowfabric.model.duration import Duration, milliseconds
from flowfabric.model.errors import EngineError, NotFoundError, error
from flowfabric.model.flow import MAX_NODES, CancellationPolicy, FlowStatus, parse_cancellation_policy
from flowfabric.model.ids import FlowId
from flowfabric.model.states import ENDED_STATES, PublicState, TerminalOutcome
from flowfabric.model.text import listed, shorten, shown
from flowfabric.pauses import pauses

Value = TypeVar("Value")
PolicyWord: TypeAlias = Literal["cancel_all", "cancel_pending", "flow_only"]

MAX_CAUSES = 10
"""How many runs the error of a flow holds."""
LONGEST_PAUSE_SECONDS = 600.0
"""The longest pause of a wait between two checks whether any worker can run what waits."""
_PENDING_STATES = frozenset(PublicState) - ENDED_STATES - {PublicState.ACTIVE, PublicState.SUSPENDED}
SIBLING_OF_IMPOSSIBLE_GROUP = "sibling_quorum_impossible"
"""Why a run was cancelled whose group could not get enough successes any more."""
_HAD_ENDED = frozenset({"execution_not_active", "execution_not_found"})


@dataclass(frozen=True, kw_only=True, slots=True)
class FlowRunStatus:
    """A snapshot of a flow, from `await flow_run.status()`."""

    id: str
    """The id of the flow."""
    kind: str
    """What it is a flow of."""
    state: FlowStatus
    """`active`, or how it ended: `completed`, `failed` or `cancelled`."""
    runs: Mapping[PublicState, int]
    """How many of its runs are in which state; states without a run are left out."""
    cancel_reason: str | None
    """Why it was cancelled."""
    created_at: datetime
    """When it was submitted."""

    @property
    def total(self) -> int:
        """How many runs it has."""
        return sum(self.runs.values())

    @property
    def ended(self) -> int:
        """How many of its runs have ended, with a result or without one."""
        return sum(count for state, count in self.runs.items() if state in ENDED_STATES)


class FlowRunError(Exception):
    """A flow ended without success: FlowRunFailed or FlowRunCancelled."""

    def __init__(self, flow_id: str, reason: str | None, causes: Sequence[tuple[str, RunError]] = ()) -> None:
        super().__init__(flow_id, reason, causes)
        self.flow_id = flow_id
        self.reason = reason
        self.causes = tuple(cause for _, cause in causes)
        """The errors of runs that failed, expired or were cancelled, at most ten; not those that followed from them."""
        self._tasks = tuple(task for task, _ in causes)


class FlowRunFailed(FlowRunError):
    """A flow has ended, and a final run, which no other run waits for, has not succeeded."""

    def __str__(self) -> str:
        """Return `flow <id> failed: <how many runs>: <task> <error>; ...`, with long errors cut."""
        named = [shorten(f"{task} {cause}") for task, cause in zip(self._tasks, self.causes, strict=True)]
        return f"flow {self.flow_id} failed: {self.reason}" + (f": {'; '.join(named)}" if named else "")


class FlowRunCancelled(FlowRunError):
    """A flow was cancelled."""

    def __str__(self) -> str:
        """Return `flow <id> was cancelled: <reason>`."""
        return f"flow {self.flow_id} was cancelled" + (f": {self.reason}" if self.reason else "")


class FlowRun:
    """A handle of a submitted flow: watch it, await it or cancel it, from any process.

    `flow.submit()` returns one. `fabric.flow_run(id)` finds one that was submitted earlier.
    """

    def __init__(
        self,
        fabric: RunFabric,
        flow_id: FlowId,
        nodes: Sequence[Node] = (),
        runs: Sequence[Run[Any]] = (),
        *,
        is_duplicate: bool = False,
    ) -> None:
        self._fabric = fabric
        self._flow_id = flow_id
        self._nodes = nodes
        self._runs = runs
        """The runs of the nodes, in their order."""
        self.is_duplicate = is_duplicate
        """Whether the flow had been submitted before."""
        if is_duplicate:
            for run in runs:
                run._absence += ", or the flow that is stored under this id has another graph"

    def __repr__(self) -> str:
        """Return `FlowRun(<flow id>)`."""
        return f"FlowRun({self.id})"

    def __eq__(self, other: object) -> bool:
        """Return whether both are handles of the same flow."""
        return self._flow_id == other._flow_id if isinstance(other, FlowRun) else NotImplemented

    def __hash__(self) -> int:
        """Return a hash of the id."""
        return hash(self._flow_id)

    @property
    def id(self) -> str:
        """The id of the flow."""
        return str(self._flow_id)

    def run(self, node: Value) -> Run[Value]:
        """Return the run of a node: `await flow_run.run(node).result()`."""
        if not isinstance(node, Node):
            raise TypeError(f"run: expected a node made by flow.add(...), got {shown(node)}")
        if not self._nodes:
            raise error(
                "invalid_input",
                "run: this FlowRun was found by its id and does not know the nodes of the flow; use the one that "
                "flow.submit() returned, or fabric.run(execution_id)",
            )
        if not node._index < len(self._nodes) or self._nodes[node._index] is not node:
            raise error("invalid_input", f"run: {node!r} is not a node of this flow")
        return cast("Run[Value]", self._runs[node._index])

    async def runs(self) -> list[Run[Any]]:
        """Return all runs of the flow: in the order of the nodes, or by their ids if the flow was found by its id."""
        if self._runs:
            return list(self._runs)
        members = await self._members.list_members(self._flow_id)
        if not members and await self._read_progress() is None:
            raise self._not_found()
        return [Run(self._fabric, execution_id, None) for execution_id in members]

    async def status(self) -> FlowRunStatus:
        """Count the runs of the flow by their state."""
        found = await self._progress()
        return FlowRunStatus(
            id=self.id,
            kind=found.flow_kind,
            state=await self._ended_state(found.status) if found.has_ended else found.status,
            runs=found.members,
            cancel_reason=found.cancel_reason,
            created_at=datetime.fromtimestamp(found.created_at / 1000, UTC),
        )

    async def wait(self, timeout: Duration | None = None) -> FlowStatus:
        """Wait until every run of the flow has ended, and return how: `completed`, `failed` or `cancelled`.

        It is completed if the final runs, which no other run waits for, have all succeeded: runs whose failure an
        `any_of` or a quorum tolerates do not make it fail. Raises TimeoutError if it does not end in time.
        """
        return await self._ended_state(await self._wait(timeout))

    async def result(self, timeout: Duration | None = None) -> None:
        """Wait until the flow has ended, and return if it completed; read results with `flow_run.run(node).result()`.

        Raises FlowRunFailed, which names the runs that failed, FlowRunCancelled, or TimeoutError if time runs out.
        """
        ended = await self._wait(timeout)
        if ended is FlowStatus.CANCELLED:
            raise FlowRunCancelled(self.id, (await self._progress()).cancel_reason)
        if (failure := await self._failure(ended, with_errors=True)) is not None:
            raise failure

    async def cancel(
        self,
        reason: str = "cancelled by its submitter",
        *,
        policy: CancellationPolicy | PolicyWord = CancellationPolicy.CANCEL_ALL,
    ) -> None:
        """Cancel the flow and its runs; they end in the background, and `await flow_run.wait()` waits for that.

        With the policy `cancel_pending`, runs that have started go on, and with `flow_only` all of them do. A flow that
        is cancelled already keeps its reason, and those of its runs that the policy covers and that have not ended are
        cancelled. Raises StateError (`flow_already_terminal`) if the flow has completed or failed.
        """
        covered = parse_cancellation_policy(policy)
        found = await self._progress()
        if found.status is FlowStatus.CANCELLED:
            await self._cancel_again(reason, covered)
        elif found.has_ended:
            raise error("flow_already_terminal", f"flow {self.id} has already ended")
        else:
            await self._fabric.engine.cancel_flow(flow_id=self._flow_id, reason=reason, cancellation_policy=covered)

    async def _cancel_again(self, reason: str, policy: CancellationPolicy) -> None:
        """Cancel the runs of a cancelled flow that have not ended: replayed ones, and those spared before."""
        if policy is CancellationPolicy.FLOW_ONLY:
            return
        states = _PENDING_STATES if policy is CancellationPolicy.CANCEL_PENDING else None
        done = await self._fabric.engine.cancel_matching(flow_id=self._flow_id, public_state=states, reason=reason)
        for code, count in done.refused.items():
            if code not in _HAD_ENDED:
                raise error(code, f"{count} runs of flow {self.id} could not be cancelled; repeat the call")

    async def replay(
        self, reason: str | None = None, *, by: str | None = None, allow_cancelled_flow: bool = False
    ) -> list[Run[Any]]:
        """Run again what failed, expired or was cancelled, and what was skipped because of it; return these runs.

        Runs that have succeeded keep their results, and runs that were cancelled because their group had enough results
        stay cancelled. Does nothing if the flow has completed. The runs are replayed one
        by one; if one of them is refused, those before it stay replayed. The runs of a cancelled flow are replayed only
        with `allow_cancelled_flow`. Raises NotFoundError (`execution_not_found`) if retention has deleted runs.
        """
        unmet = await self._unmet(limit=MAX_NODES)
        status, deleted = (await self._progress()).status, await self._deleted()
        if not unmet.final_count and (status is FlowStatus.COMPLETED or not deleted.final_count):
            return []
        if deleted.count:
            raise error(
                "execution_not_found",
                f"flow {self.id} cannot be replayed: {_deleted_text(deleted)}; submit it again, or replay single runs "
                "with run.replay()",
            )
        order = {run.id: nth for nth, run in enumerate(self._runs)}
        # What failed first, so that nothing that was skipped finds an upstream run that has ended.
        again = sorted(
            (each for each in unmet.first if _runs_again(each)),
            key=lambda each: (not each.is_cause, order.get(each.execution_id, 0), each.execution_id),
        )
        runs = [Run[Any](self._fabric, each.execution_id, None) for each in again]
        for run in runs:
            await run.replay(reason, by=by, allow_cancelled_flow=allow_cancelled_flow)
        return runs

    async def _wait(self, timeout: Duration | None) -> FlowStatus:
        seconds = None if timeout is None else milliseconds(timeout, "timeout") / 1000
        deadline = None if seconds is None else time.monotonic() + seconds
        for pause in pauses(UNSERVED_SECONDS, LONGEST_PAUSE_SECONDS):
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            is_last = left is not None and left <= pause
            try:
                ended = await self._fabric.engine.wait_for_flow(
                    self._flow_id, timeout_ms=round((left if left is not None and is_last else pause) * 1000)
                )
            except NotFoundError:
                raise self._not_found() from None
            if ended is not None:
                return ended.status
            if is_last:
                break
            await self._warn_if_unserved()
        raise TimeoutError(f"flow {self.id} has not ended within {seconds:g} s{await self._counts_text()}")

    async def _warn_if_unserved(self) -> None:
        """Log a warning for each queue in which runs of the flow wait, if no worker can run them."""
        with contextlib.suppress(EngineError):
            for member in await self._members.list_unserved(self._flow_id):
                # One of many waiting callers is enough.
                if time.monotonic() >= self._fabric._unserved_queues.get(member.queue_no, 0.0):
                    self._fabric._unserved_queues[member.queue_no] = time.monotonic() + UNSERVED_SECONDS
                    await Run[Any](self._fabric, member.execution_id, None)._log_if_unserved()

    async def _ended_state(self, status: FlowStatus) -> FlowStatus:
        """Return how a flow has ended, by its final runs; to the engine it has failed if any run has."""
        if status not in (FlowStatus.COMPLETED, FlowStatus.FAILED):
            return status
        return FlowStatus.COMPLETED if await self._failure(status) is None else FlowStatus.FAILED

    async def _failure(self, status: FlowStatus, *, with_errors: bool = False) -> FlowRunFailed | None:
        """Return the error of a flow that has ended with this status of the engine, or None if it completed.

        Of runs that retention has deleted, only the status tells whether all of them succeeded.
        """
        unmet = await self._unmet(with_errors=with_errors)
        if status is FlowStatus.COMPLETED and not unmet.final_count:
            return None
        deleted = await self._deleted()
        if not unmet.final_count and not deleted.final_count:
            return None
        reason = f"{unmet.count} of {deleted.of} runs did not succeed"
        if not unmet.final_count:
            reason = f"a run did not succeed, and whether the final runs did is not known: {_deleted_text(deleted)}"
        elif deleted.count:
            reason += f", and {_deleted_text(deleted)}"
        causes = [(each.execution_kind, _error_of(each)) for each in unmet.first if each.is_cause]
        return FlowRunFailed(self.id, reason, causes)

    @property
    def _members(self) -> Members:
        return parts_of(self._fabric.engine).members

    async def _unmet(self, *, limit: int = MAX_CAUSES, with_errors: bool = False) -> UnmetMembers:
        return await self._members.list_unmet(self._flow_id, limit=limit, with_errors=with_errors)

    async def _deleted(self) -> DeletedMembers:
        found = await self._members.count_deleted(self._flow_id)
        if found is None:
            raise self._not_found()
        return found

    async def _read_progress(self) -> FlowProgress | None:
        return await self._members.read_progress(self._flow_id)

    async def _progress(self) -> FlowProgress:
        found = await self._read_progress()
        if found is None:
            raise self._not_found()
        return found

    async def _counts_text(self) -> str:
        try:
            found = await self._progress()
        except EngineError:
            return ", and the database does not answer now"
        counts = [f"{count} {state.value.replace('_', ' ')}" for state, count in found.members.items()]
        return f": its runs are {listed(counts)}"

    def _not_found(self) -> EngineError:
        return error("flow_not_found", f"{self.id}: it was not submitted to this store, or its retention is over")


def _runs_again(member: UnmetMember) -> bool:
    """Whether a replay of the flow needs a run: not a sibling of a group that had enough successes without it."""
    return member.is_cause or member.outcome is TerminalOutcome.SKIPPED or member.reason == SIBLING_OF_IMPOSSIBLE_GROUP


def _error_of(member: UnmetMember) -> RunError:
    return RUN_ERRORS[member.outcome](
        member.execution_id, member.reason, error_type=member.error_type, traceback=member.traceback
    )


def _deleted_text(deleted: DeletedMembers) -> str:
    return f"retention has deleted {deleted.count} of its {deleted.of} runs"
