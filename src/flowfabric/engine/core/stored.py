"""Reading of stored fields: a missing or unknown value is reported as corruption, never replaced by a default."""

from enum import StrEnum
from typing import TypeVar

from flowfabric.db.database import Record
from flowfabric.model.errors import EngineError, error
from flowfabric.model.states import (
    AttemptState,
    BlockingReason,
    EligibilityState,
    LifecyclePhase,
    OwnershipState,
    PublicState,
    StateVector,
    TerminalOutcome,
)

Word = TypeVar("Word", bound=StrEnum)
Value = TypeVar("Value")


def corruption(context: str, field: str, message: str) -> EngineError:
    """The error for a stored field that cannot be read."""
    return error("corruption", f"{context}: {field}: {message}")


def literal(words: type[Word], value: str, *, context: str, field: str) -> Word:
    """The enum member of a stored literal."""
    try:
        return words(value)
    except ValueError:
        raise corruption(context, field, f"unknown literal {value!r}") from None


def required(value: Value | None, *, context: str, field: str) -> Value:
    """Return a stored field; raise if it is null."""
    if value is None:
        raise corruption(context, field, "is missing")
    return value


def vector(row: Record, context: str) -> StateVector:
    """The state vector of a row."""
    return StateVector(
        lifecycle_phase=literal(LifecyclePhase, row["lifecycle_phase"], context=context, field="lifecycle_phase"),
        ownership_state=literal(OwnershipState, row["ownership_state"], context=context, field="ownership_state"),
        eligibility_state=literal(
            EligibilityState, row["eligibility_state"], context=context, field="eligibility_state"
        ),
        blocking_reason=literal(BlockingReason, row["blocking_reason"], context=context, field="blocking_reason"),
        terminal_outcome=literal(TerminalOutcome, row["terminal_outcome"], context=context, field="terminal_outcome"),
        attempt_state=literal(AttemptState, row["attempt_state"], context=context, field="attempt_state"),
        public_state=literal(PublicState, row["public_state"], context=context, field="public_state"),
    )
