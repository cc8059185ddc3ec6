"""Resumes: what happens when the condition of a suspension is met, and what a resume answers."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from enum import StrEnum
from functools import lru_cache
from typing import Any

import msgspec

from flowfabric.model.condition import check_word
from flowfabric.model.errors import error
from flowfabric.model.policy_checks import MAX_MS, set_field
from flowfabric.model.states import PublicState
from flowfabric.model.text import check_range


class ResumeTarget(StrEnum):
    """What a met condition makes of the execution."""

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
        """Refuse what is no policy."""
        set_field(self, "resume_target", check_word(ResumeTarget, self.resume_target, "resume_policy.resume_target"))
        for name in ("consume_matched_signals", "retain_signal_buffer_until_closed", "close_waitpoint_on_resume"):
            if not isinstance(getattr(self, name), bool):
                raise error("invalid_input", f"resume_policy.{name}: must be true or false")
        if self.resume_delay_ms is not None:
            check_range(self.resume_delay_ms, "resume_policy.resume_delay_ms", 0, MAX_MS)

    def delay_ms(self, signal_delay_ms: int | None) -> int:
        """Return the pause between the closing signal and the resume."""
        return (self.resume_delay_ms or 0) if signal_delay_ms is None else signal_delay_ms


_RESUME_FIELDS = frozenset(each.name for each in fields(ResumePolicy))


def parse_resume_policy(value: object) -> ResumePolicy:
    """Return the policy a JSON object says; a field left out or null has its default."""
    if isinstance(value, ResumePolicy):
        return value
    if not isinstance(value, Mapping) or not set(value) <= _RESUME_FIELDS:
        raise error("invalid_input", "resume_policy: must be an object of its own fields")
    return ResumePolicy(**{name: given for name, given in value.items() if given is not None})


def resume_policy_json(policy: ResumePolicy) -> str:
    """Return the JSON text of a policy, as it is stored."""
    return msgspec.json.encode(asdict(policy)).decode()


@lru_cache(maxsize=1024)
def read_stored_resume_policy(text: str | None) -> ResumePolicy:
    """Return the policy a row holds, without what only a newer version that runs beside this one understands."""
    plain = msgspec.json.decode(text or "{}", type=dict[str, Any])
    return parse_resume_policy({name: given for name, given in plain.items() if name in _RESUME_FIELDS})


class ResumeTrigger(StrEnum):
    """What an operator says made a resume necessary; it is only told on."""

    SIGNAL = "signal"
    OPERATOR = "operator"
    AUTO_RESUME = "auto_resume"


@dataclass(frozen=True, kw_only=True, slots=True)
class Resumed:
    """The execution waits no more: it may be claimed, now or after the delay."""

    public_state: PublicState
