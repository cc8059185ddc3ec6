"""Grants: the signed right of one worker to lease one execution for a short time."""

import hashlib
import re
from dataclasses import dataclass, field
from enum import StrEnum

from flowfabric.model.errors import EngineError, error
from flowfabric.model.ids import ExecutionId, LaneId, LeaseId, parse_execution_id, partition_text, split_execution_id
from flowfabric.model.key import SigningKey, check_kid

MIN_GRANT_TTL_MS = 1
MAX_GRANT_TTL_MS = 60_000
DEFAULT_GRANT_TTL_MS = 5_000

_PREFIX = "pg:"
_RECLAIM_PREFIX = "pg:reclaim:"
_EXPIRES = re.compile(r"0|[1-9][0-9]{0,18}")
_DIGEST = re.compile(r"[0-9a-f]{64}")


class GrantKind(StrEnum):
    """What a grant is for: a waiting execution, or one whose lease was lost."""

    CLAIM = "claim"
    RECLAIM = "reclaim"


class GrantFailure(StrEnum):
    """Why a grant key is rejected."""

    MALFORMED = "Malformed"
    EXPIRED = "Expired"
    UNKNOWN_KID = "UnknownKid"
    UNKNOWN_GRANT = "UnknownGrant"
    SIGNATURE_MISMATCH = "SignatureMismatch"

    def refusal(self) -> EngineError:
        """Return the error that the claim raises; its detail begins with the failure."""
        code = "claim_grant_expired" if self is GrantFailure.EXPIRED else "invalid_claim_grant"
        return error(code, f"{self.value}: {_EXPLAINED[self]}")


_EXPLAINED = {
    GrantFailure.MALFORMED: "this is not a grant key; pass the grant_key of the grant unchanged",
    GrantFailure.EXPIRED: "the grant has expired; request a new one",
    GrantFailure.UNKNOWN_KID: "the key that signed the grant is no longer stored; request a new grant",
    GrantFailure.UNKNOWN_GRANT: "no such grant for this execution and worker, or it was used; request a new one",
    GrantFailure.SIGNATURE_MISMATCH: "the signature does not match the grant; pass the grant unchanged",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class ClaimGrant:
    """An execution reserved for one worker until the grant expires."""

    execution_id: ExecutionId
    partition_key: str
    grant_key: str = field(repr=False)
    expires_at_ms: int

    def for_resume(self, lane_id: str) -> "ResumeGrant":
        """Return this grant in the form that claim_from_resume_grant accepts."""
        return ResumeGrant(
            execution_id=self.execution_id,
            partition_key=self.partition_key,
            grant_key=self.grant_key,
            expires_at_ms=self.expires_at_ms,
            lane_id=LaneId(lane_id),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class ResumeGrant:
    """A claim grant on an execution whose attempt is resumed."""

    execution_id: ExecutionId
    partition_key: str
    grant_key: str = field(repr=False)
    expires_at_ms: int
    lane_id: LaneId


@dataclass(frozen=True, kw_only=True, slots=True)
class ReclaimGrant:
    """An execution whose lease was lost, reserved for one worker until the grant expires."""

    execution_id: ExecutionId
    partition_key: str
    grant_key: str = field(repr=False)
    expires_at_ms: int
    lane_id: LaneId


@dataclass(frozen=True, kw_only=True, slots=True)
class ResumeToken:
    """A resume grant with the worker that presents it and the lease it requests."""

    grant: ResumeGrant
    worker_id: str
    worker_instance_id: str
    lease_ttl_ms: int = 30_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Granted:
    """The execution is reserved for the worker."""

    execution_id: ExecutionId
    grant: ClaimGrant | ReclaimGrant


@dataclass(frozen=True, kw_only=True, slots=True)
class NoWork:
    """There is no execution for this worker."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GrantedClaim:
    """The lease that issue_grant_and_claim acquired."""

    lease_id: LeaseId
    lease_epoch: int
    attempt_index: int


@dataclass(frozen=True, kw_only=True, slots=True)
class NotReclaimable:
    """This worker cannot reclaim the execution; `detail` says why."""

    execution_id: ExecutionId
    detail: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ReclaimCapExceeded:
    """The execution was reclaimed as often as allowed and has ended."""

    execution_id: ExecutionId
    reclaim_count: int


@dataclass(frozen=True, kw_only=True, slots=True)
class GrantNotFound:
    """The execution has no live reclaim grant."""

    execution_id: ExecutionId


@dataclass(frozen=True, kw_only=True, slots=True)
class GrantKey:
    """The parsed text of a grant key; its signature is not verified yet."""

    kind: GrantKind
    execution_id: ExecutionId
    expires_at_ms: int
    kid: str
    digest: str

    def is_signed_by(self, key: SigningKey, worker_id: str, worker_instance_id: str) -> bool:
        """Whether this key signed the grant for this worker."""
        return key.has_signed(
            _message(self.kind, self.execution_id, worker_id, worker_instance_id, self.expires_at_ms), self.digest
        )


def sign_grant(
    key: SigningKey,
    kind: GrantKind,
    execution_id: ExecutionId,
    *,
    worker_id: str,
    worker_instance_id: str,
    expires_at_ms: int,
) -> str:
    """Return the grant key: the execution, the expiry, and a signature over both and the worker."""
    digest = key.digest(_message(kind, execution_id, worker_id, worker_instance_id, expires_at_ms))
    prefix = _RECLAIM_PREFIX if kind is GrantKind.RECLAIM else _PREFIX
    return f"{prefix}{execution_id}:{expires_at_ms}:{key.kid}:{digest}"


def parse_grant_key(text: object) -> GrantKey:
    """Return the parsed grant key; it is split from the right because the execution id contains colons."""
    if not isinstance(text, str):
        raise GrantFailure.MALFORMED.refusal()
    parts = text.rsplit(":", 3)
    if len(parts) != 4:
        raise GrantFailure.MALFORMED.refusal()
    head, expires, kid, digest = parts
    kind, prefix = GrantKind.CLAIM, _PREFIX
    if head.startswith(_RECLAIM_PREFIX):
        kind, prefix = GrantKind.RECLAIM, _RECLAIM_PREFIX
    if not head.startswith(prefix) or not _EXPIRES.fullmatch(expires) or not _DIGEST.fullmatch(digest):
        raise GrantFailure.MALFORMED.refusal()
    named = head.removeprefix(prefix)
    try:
        check_kid(kid, "invalid_kid")
        execution_id = parse_execution_id(named)
    except EngineError:
        raise GrantFailure.MALFORMED.refusal() from None
    if execution_id != named:
        raise GrantFailure.MALFORMED.refusal()
    return GrantKey(kind=kind, execution_id=execution_id, expires_at_ms=int(expires), kid=kid, digest=digest)


def grant_id(grant_key: str) -> bytes:
    """Return the hash under which a grant is stored, so that the database does not hold the grant key."""
    return hashlib.sha256(grant_key.encode("utf-8", "replace")).digest()


def _message(
    kind: GrantKind, execution_id: ExecutionId, worker_id: str, worker_instance_id: str, expires_at_ms: int
) -> str:
    _, uuid = split_execution_id(execution_id)
    suffix = "|reclaim" if kind is GrantKind.RECLAIM else ""
    return f"{partition_text(execution_id)}|{uuid}|{worker_id}|{worker_instance_id}|{expires_at_ms}{suffix}"
