"""The arguments of `suspend`: conditions over signals, waitpoints, resume policies and timeouts."""

from flowfabric.model.condition import (
    AllOf,
    ByName,
    Count,
    CountKind,
    OperatorOnly,
    Single,
    TimeoutOnly,
    Wildcard,
    all_of_waitpoints,
)
from flowfabric.model.resume import ResumePolicy
from flowfabric.model.states import TimeoutBehavior
from flowfabric.model.suspension import SuspendArgs, SuspensionReason, SuspensionRequester
from flowfabric.model.waitpoint import Fresh, UsePending

__all__ = [
    "AllOf",
    "ByName",
    "Count",
    "CountKind",
    "Fresh",
    "OperatorOnly",
    "ResumePolicy",
    "Single",
    "SuspendArgs",
    "SuspensionReason",
    "SuspensionRequester",
    "TimeoutBehavior",
    "TimeoutOnly",
    "UsePending",
    "Wildcard",
    "all_of_waitpoints",
]
