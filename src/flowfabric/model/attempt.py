"""Attempts as they are read, and the failure that a worker reports."""

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, replace
from enum import StrEnum
from typing import Self

from flowfabric.model.ids import AttemptId, ExecutionId, LeaseId, SuspensionId, WorkerId, WorkerInstanceId
from flowfabric.model.states import AttemptLifecycle, AttemptType
from flowfabric.model.text import cut_middle, storable

MAX_ERROR_TYPE_CHARACTERS = 256
MAX_MESSAGE_BYTES = 4 * 1024
MAX_TRACEBACK_BYTES = 16 * 1024


@dataclass(frozen=True, kw_only=True, slots=True)
class Attempt:
    """One attempt of an execution, running or ended."""

    attempt_id: AttemptId
    execution_id: ExecutionId
    attempt_index: int
    attempt_type: AttemptType
    attempt_state: AttemptLifecycle
    created_at: int
    started_at: int
    resumed_at: int | None
    suspended_at: int | None
    suspension_id: SuspensionId | None
    suspension_marker: str | None
    ended_at: int | None
    lease_id: LeaseId | None
    lease_epoch: int
    worker_id: WorkerId | None
    worker_instance_id: WorkerInstanceId | None
    failure_reason: str | None
    failure_category: str | None
    error_type: str | None
    """The class of the exception it failed with, such as `app.errors.CardDeclined`."""
    traceback: str | None
    retry_reason: str | None
    replay_reason: str | None
    replay_requested_by: str | None
    reclaim_reason: str | None
    previous_attempt_index: int | None
    replayed_from_attempt_index: int | None
    usage: Mapping[str, int]
    policy: str | None
    """The JSON of the attempt's own policy, or None if it uses that of the execution."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CurrentAttempt:
    """The latest attempt of an execution."""

    attempt_id: AttemptId
    attempt_index: int


class FailureClass(StrEnum):
    """The class of failure that a worker reports; its value is the failure category unless the reason has its own."""

    TRANSIENT = "transient"
    PERMANENT = "permanent"
    INFRA_CRASH = "infra_crash"
    TIMEOUT = "timeout"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class FailureReason:
    """Why an attempt failed.

    A non-empty `detail` is the failure category, instead of the one of the failure class.
    """

    message: str
    _: KW_ONLY
    detail: str | bytes | None = None
    error_type: str | None = None
    """The class of the exception, such as `app.errors.CardDeclined`."""
    traceback: str | None = None

    def bounded(self) -> Self:
        """Return the reason as it is stored: long texts cut, characters that Postgres cannot store replaced."""
        error_type, traceback = self.error_type, self.traceback
        if error_type is not None:
            error_type = storable(error_type[:MAX_ERROR_TYPE_CHARACTERS])
        if traceback is not None:
            traceback = cut_middle(traceback, MAX_TRACEBACK_BYTES, "\n... {} characters omitted ...\n")
        message = cut_middle(self.message, MAX_MESSAGE_BYTES, " ... {} characters omitted ... ")
        return replace(self, message=message, error_type=error_type, traceback=traceback)


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """How an attempt failed, as it is read."""

    message: str
    category: str | None
    error_type: str | None
    """The class of the exception, such as `app.errors.CardDeclined`."""
    traceback: str | None


def failure_category(reason: FailureReason, failure_class: FailureClass) -> str:
    """Return the category by which the retry policy decides: the reason's detail, or else the failure class."""
    detail = reason.detail
    if isinstance(detail, bytes):
        try:
            detail = detail.decode()
        except UnicodeDecodeError:
            detail = None
    return detail or failure_class.value
