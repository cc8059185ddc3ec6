"""The errors of runs: how a run ended without a result."""

from collections.abc import Mapping
from typing import ClassVar

from flowfabric.model.errors import InvalidInputError
from flowfabric.model.ids import ExecutionId
from flowfabric.model.states import PublicState, TerminalOutcome

_TEXTS = {
    "attempt_timeout": "its last attempt took longer than its timeout",
    "execution_deadline": "it did not end before its deadline",
    "suspension_timeout:fail": "no signal ended its wait in time",
    "suspension_timeout:cancel": "no signal ended its wait in time",
    "suspension_timeout:expire": "no signal ended its wait in time",
    "dependency_impossible": "what it waits for did not succeed; `await run.explain()` says what",
    "sibling_quorum_satisfied": "enough of the runs that it was grouped with have succeeded without it",
    "sibling_quorum_impossible": "too many of the runs that it was grouped with did not succeed",
}
"""The reasons that the engine gives for the end of an execution, in words."""


class RunError(Exception):
    """A run ended without a result; the subclass says how: RunFailed, RunCancelled, RunExpired or RunSkipped.

    `reason` says why. After a failure, `error_type` and `traceback` describe the exception of the last attempt.
    """

    outcome: ClassVar[TerminalOutcome]
    verb: ClassVar[str]

    def __init__(
        self,
        execution_id: ExecutionId,
        reason: str | None,
        *,
        error_type: str | None = None,
        traceback: str | None = None,
    ) -> None:
        super().__init__(execution_id, reason)
        self.execution_id = execution_id
        self.reason = reason
        self.error_type = error_type
        self.traceback = traceback
        if traceback:
            self.add_note(f"In the worker:\n{traceback.rstrip()}")

    def __str__(self) -> str:
        """Return `<execution id> failed: <reason>`, with the reasons of the engine in words."""
        return f"{self.execution_id} {self.verb}" + (f": {_TEXTS.get(self.reason, self.reason)}" if self.reason else "")


class RunFailed(RunError):
    """The last attempt of a run failed."""

    outcome = TerminalOutcome.FAILED
    verb = "failed"


class RunCancelled(RunError):
    """A run was cancelled."""

    outcome = TerminalOutcome.CANCELLED
    verb = "was cancelled"


class RunExpired(RunError):
    """A run exceeded its deadline, the timeout of its last attempt, or the timeout of a wait that expires the run."""

    outcome = TerminalOutcome.EXPIRED
    verb = "expired"


class RunSkipped(RunError):
    """A run was skipped because a run it depends on did not succeed."""

    outcome = TerminalOutcome.SKIPPED
    verb = "was skipped"


RUN_ERRORS: Mapping[TerminalOutcome, type[RunError]] = {
    kind.outcome: kind for kind in (RunFailed, RunCancelled, RunExpired, RunSkipped)
}
# Each of these outcomes has a public state of the same name.
RUN_ERRORS_BY_STATE = {PublicState(outcome): kind for outcome, kind in RUN_ERRORS.items()}


class UnreadableResult(InvalidInputError):
    """A run succeeded, but its stored result does not fit the return type that its task has now."""

    def __init__(self, execution_id: ExecutionId, unreadable: InvalidInputError) -> None:
        super().__init__(unreadable.code, unreadable.detail)
        self.execution_id = execution_id
        self.args = (execution_id, unreadable)

    def __str__(self) -> str:
        """Return `<code>: <execution id>: <detail>`."""
        return f"{self.code}: {self.execution_id}: {self.detail}"
