"""The stored outcome of a suspend, which a repeated call with the same idempotency key returns."""

from typing import TypeAlias

import msgspec

from flowfabric.model.errors import EngineError
from flowfabric.model.handle import Handle
from flowfabric.model.ids import SuspensionId, WaitpointId, parse_uuid
from flowfabric.model.lease import AlreadySatisfied
from flowfabric.model.signal import SignalEffect
from flowfabric.model.states import HandleKind
from flowfabric.model.suspension import AlreadyMet, SuspendDetails, Suspended
from flowfabric.model.token import WaitpointToken
from flowfabric.model.waitpoint import AdditionalWaitpoint

SuspendOutcome: TypeAlias = Suspended | AlreadyMet

# Stored under the name of the base class.
_ALREADY_MET = AlreadySatisfied.__name__


class _AdditionalWaitpoint(msgspec.Struct):
    waitpoint_id: str
    waitpoint_key: str
    token: str


class _Details(msgspec.Struct):
    suspension_id: str
    waitpoint_id: str
    waitpoint_key: str
    token: str
    extras: list[_AdditionalWaitpoint]


class _Record(msgspec.Struct):
    variant: str
    details: _Details
    handle_opaque_hex: str | None


_decode = msgspec.json.Decoder(_Record).decode


def already_met(details: SuspendDetails) -> AlreadyMet:
    """Return the outcome of a suspend whose condition is already met by earlier signals."""
    return AlreadyMet(reason=SignalEffect.RESUME_CONDITION_SATISFIED, details=details)


def outcome_json(outcome: SuspendOutcome) -> str:
    """Return an outcome as JSON text for storage. It contains the tokens of the waitpoints in clear text."""
    details = outcome.details
    record = _Record(
        variant=Suspended.__name__ if isinstance(outcome, Suspended) else _ALREADY_MET,
        details=_Details(
            suspension_id=str(details.suspension_id),
            waitpoint_id=str(details.waitpoint_id),
            waitpoint_key=details.waitpoint_key,
            token=details.waitpoint_token.reveal(),
            extras=[
                _AdditionalWaitpoint(str(each.waitpoint_id), each.waitpoint_key, each.waitpoint_token.reveal())
                for each in details.additional_waitpoints
            ],
        ),
        handle_opaque_hex=outcome.handle.opaque.hex() if isinstance(outcome, Suspended) else None,
    )
    return msgspec.json.encode(record).decode()


def read_stored_outcome(text: str | None, attempt_index: int | None) -> SuspendOutcome | None:
    """Return the outcome stored for an attempt, or None if there is none or it cannot be read."""
    if text is None or attempt_index is None:
        return None
    try:
        return _outcome(_decode(text), attempt_index)
    except (msgspec.MsgspecError, EngineError, ValueError):
        return None


def _outcome(record: _Record, attempt_index: int) -> SuspendOutcome | None:
    details = SuspendDetails(
        attempt_index=attempt_index,
        suspension_id=SuspensionId(parse_uuid(record.details.suspension_id, "suspension_id")),
        waitpoint_id=WaitpointId(parse_uuid(record.details.waitpoint_id, "waitpoint_id")),
        waitpoint_key=record.details.waitpoint_key,
        waitpoint_token=WaitpointToken(record.details.token),
        additional_waitpoints=tuple(
            AdditionalWaitpoint(
                waitpoint_id=WaitpointId(parse_uuid(each.waitpoint_id, "waitpoint_id")),
                waitpoint_key=each.waitpoint_key,
                waitpoint_token=WaitpointToken(each.token),
            )
            for each in record.details.extras
        ),
    )
    if record.variant == _ALREADY_MET:
        return already_met(details)
    if record.variant == Suspended.__name__ and record.handle_opaque_hex is not None:
        handle = Handle.decode(bytes.fromhex(record.handle_opaque_hex), HandleKind.SUSPENDED)
        return Suspended(details=details, handle=handle)
    return None
