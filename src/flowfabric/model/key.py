"""Signing keys for grants and tokens: the key itself, its checks, and the answers of key operations."""

import hmac
import re
from dataclasses import dataclass, field

from flowfabric.model.errors import EngineError, error
from flowfabric.model.text import check_text, shown

SECRET_BYTES = 32
MAX_KID_BYTES = 256
MAX_GRACE_MS = 2**53 - 1

_SECRET = re.compile(r"[0-9a-fA-F]{64}")


@dataclass(frozen=True, kw_only=True, slots=True)
class SigningKey:
    """A secret and its key id; the secret never appears in the repr."""

    kid: str
    secret: bytes = field(repr=False)

    def digest(self, message: str) -> str:
        """Return the hex HMAC of the message; the kid is signed too, so the digest is valid under this kid only."""
        return hmac.digest(self.secret, f"{self.kid}:{message}".encode(), "sha256").hex()

    def has_signed(self, message: str, digest: str) -> bool:
        """Whether the digest is this key's for the message, compared in constant time."""
        return hmac.compare_digest(self.digest(message).encode(), digest.encode("utf-8", "replace"))


@dataclass(frozen=True, kw_only=True, slots=True)
class Seeded:
    """The key is stored and is now the signing key."""

    kid: str


@dataclass(frozen=True, kw_only=True, slots=True)
class AlreadySeeded:
    """A key with this kid was stored already; nothing changed."""

    kid: str
    same_secret: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Rotated:
    """The new key signs; the previous one verifies until its grace period ends."""

    previous_kid: str | None
    new_kid: str
    gc_count: int


@dataclass(frozen=True, kw_only=True, slots=True)
class AlreadyRotated:
    """The key was stored already, with the same secret."""

    kid: str


@dataclass(frozen=True, kw_only=True, slots=True)
class RotationEntry:
    """The result of a rotation; there is one key store, so the partition is always 0."""

    partition: int
    result: Rotated | AlreadyRotated | EngineError


@dataclass(frozen=True, kw_only=True, slots=True)
class VerifyingKid:
    """A retired key that still verifies until it expires."""

    kid: str
    expires_at_ms: int


@dataclass(frozen=True, kw_only=True, slots=True)
class HmacKids:
    """The kid of the signing key and those of the retired keys that still verify."""

    current_kid: str | None
    verifying: tuple[VerifyingKid, ...]


def check_kid(value: object, code: str) -> str:
    """Return the value if it is a key id: text without a colon, because a colon ends the kid in a token."""
    try:
        kid = check_text(value, "kid")
    except EngineError as refused:
        raise error(code, refused.detail) from None
    if not kid or ":" in kid:
        raise error(code, f"kid: must not be empty or contain ':', got {shown(kid)}")
    if (size := len(kid.encode())) > MAX_KID_BYTES:
        raise error(code, f"kid: must be at most {MAX_KID_BYTES} bytes long in UTF-8, got {size}")
    return kid


def check_secret(value: object, code: str) -> bytes:
    """Return the bytes of a secret given as 64 hex digits; the error does not show the value."""
    if not isinstance(value, str) or not _SECRET.fullmatch(value):
        raise error(code, "secret_hex must be 64 hex characters (256-bit secret); make one with `openssl rand -hex 32`")
    return bytes.fromhex(value)


def unusable(kid: str) -> EngineError:
    """Return the error for a stored secret that has the wrong length or cannot be decrypted."""
    return error(
        "corruption",
        f"the stored secret of kid {kid!r} is unusable: it is damaged, or encrypted under another FF_SECRET_KEY; "
        "start with the FF_SECRET_KEY it was stored under",
    )


def check_grace(value: object) -> int:
    """Return the value if it is a valid grace period, in which a retired key still verifies."""
    if type(value) is not int or not 0 <= value <= MAX_GRACE_MS:
        raise error(
            "invalid_grace_ms", f"grace_ms: must be a whole number from 0 to {MAX_GRACE_MS}, got {shown(value)}"
        )
    return value
