"""Resumes: the policy for when the condition of a suspension is met, and the answers of a resume."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from enum import StrEnum
from functools import lru_cache
from typing import Any

import msgspec

from flowfabric.model.condition import check_enum
from flowfabric.model.errors import error
from flowfabric.model.policy_checks import MAX_MS, set_field
from flowfabric.model.states import PublicState
from flowfabric.model.text import check_range, shorten, shown


class ResumeTarget(StrEnum):
    """The lifecycle phase of the execution after its condition is met."""

    RUNNABLE = "runnable"


@dataclass(frozen=True, kw_only=True, slots=True)
class ResumePolicy:
    """What happens when the condition is met."""

    resume_target: ResumeTarget = ResumeTarget.RUNNABLE
    consume_matched_signals: bool = True
    retain_signal_buffer_until_closed: bool = False
    resume_delay_ms: int | None = None
    close_waitpoint_on_resume: bool = True

    def __post_init__(self) -> None:
        """Reject invalid fields."""
        set_field(self, "resume_target", check_enum(ResumeTarget, self.resume_target, "resume_policy.resume_target"))
        for name in ("consume_matched_signals", "retain_signal_buffer_until_closed", "close_waitpoint_on_resume"):
            if not isinstance(given := getattr(self, name), bool):
                raise error("invalid_input", f"resume_policy.{name}: must be true or false, got {shown(given)}")
        if self.resume_delay_ms is not None:
            check_range(self.resume_delay_ms, "resume_policy.resume_delay_ms", 0, MAX_MS)

    def delay_ms(self, signal_delay_ms: int | None) -> int:
        """Return the delay between the closing signal and the resume; that of the signal takes precedence."""
        return (self.resume_delay_ms or 0) if signal_delay_ms is None else signal_delay_ms


_RESUME_FIELDS = frozenset(each.name for each in fields(ResumePolicy))


def parse_resume_policy(value: object) -> ResumePolicy:
    """Return the policy of a JSON object; a missing or null field has its default."""
    if isinstance(value, ResumePolicy):
        return value
    if not isinstance(value, Mapping):
        raise error("invalid_input", f"resume_policy: must be an object, got {shown(value)}")
    for name in value:
        if name not in _RESUME_FIELDS:
            fields_text = ", ".join(sorted(_RESUME_FIELDS))
            raise error(
                "invalid_input", f"resume_policy.{shorten(str(name))}: unknown field; the fields are {fields_text}"
            )
    return ResumePolicy(**{name: given for name, given in value.items() if given is not None})


def resume_policy_json(policy: ResumePolicy) -> str:
    """Return the JSON text of a policy for storage."""
    return msgspec.json.encode(asdict(policy)).decode()


@lru_cache(maxsize=1024)
def read_stored_resume_policy(text: str | None) -> ResumePolicy:
    """Return the policy stored in a row; fields that only a newer version understands are ignored."""
    plain = msgspec.json.decode(text or "{}", type=dict[str, Any])
    return parse_resume_policy({name: given for name, given in plain.items() if name in _RESUME_FIELDS})


class ResumeTrigger(StrEnum):
    """What triggered a resume, as the operator states it; recorded in the event only."""

    SIGNAL = "signal"
    OPERATOR = "operator"
    AUTO_RESUME = "auto_resume"


@dataclass(frozen=True, kw_only=True, slots=True)
class Resumed:
    """The execution was resumed: it is claimable, now or after the delay."""

    public_state: PublicState
