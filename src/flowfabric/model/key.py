"""Keys that sign grants and tokens: what one is, how it is named, and what operations on them answer."""

import hmac
import re
from dataclasses import dataclass, field

from flowfabric.model.errors import EngineError, error
from flowfabric.model.text import check_text

SECRET_BYTES = 32
MAX_KID_BYTES = 256
MAX_GRACE_MS = 2**53 - 1

_SECRET = re.compile(r"[0-9a-fA-F]{64}")


@dataclass(frozen=True, kw_only=True, slots=True)
class SigningKey:
    """A secret and the name it signs under; the secret is never shown."""

    kid: str
    secret: bytes = field(repr=False)

    def digest(self, message: str) -> str:
        """The hex digest of a message; the name is part of what is signed, so it counts under this name only."""
        return hmac.digest(self.secret, f"{self.kid}:{message}".encode(), "sha256").hex()

    def has_signed(self, message: str, digest: str) -> bool:
        """Whether a digest is this key's of a message, compared in constant time."""
        return hmac.compare_digest(self.digest(message).encode(), digest.encode("utf-8", "replace"))


@dataclass(frozen=True, kw_only=True, slots=True)
class Seeded:
    """The key is installed and signs."""

    kid: str


@dataclass(frozen=True, kw_only=True, slots=True)
class AlreadySeeded:
    """A key of that name is stored already; nothing changed."""

    kid: str
    same_secret: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Rotated:
    """The new key signs; the previous one verifies until its grace ends."""

    previous_kid: str | None
    new_kid: str
    gc_count: int


@dataclass(frozen=True, kw_only=True, slots=True)
class AlreadyRotated:
    """The key was stored already, with the same secret."""

    kid: str


@dataclass(frozen=True, kw_only=True, slots=True)
class RotationEntry:
    """What a rotation came to; the store of keys is one, and its partition is 0."""

    partition: int
    result: Rotated | AlreadyRotated | EngineError


@dataclass(frozen=True, kw_only=True, slots=True)
class VerifyingKid:
    """A key that signs no more and verifies until it expires."""

    kid: str
    expires_at_ms: int


@dataclass(frozen=True, kw_only=True, slots=True)
class HmacKids:
    """The names of the keys: the one that signs, and those that still verify."""

    current_kid: str | None
    verifying: tuple[VerifyingKid, ...]


def check_kid(value: object, code: str) -> str:
    """Return the name of a key: text without a colon, which separates it from what it signed."""
    try:
        kid = check_text(value, "kid")
    except EngineError as refused:
        raise error(code, refused.detail) from None
    if not kid or ":" in kid:
        raise error(code, "kid: must not be empty or contain ':'")
    if len(kid.encode()) > MAX_KID_BYTES:
        raise error(code, f"kid: longer than {MAX_KID_BYTES} bytes")
    return kid


def check_secret(value: object, code: str) -> bytes:
    """Return the bytes of a secret written as 64 hex digits; a refusal does not repeat it."""
    if not isinstance(value, str) or not _SECRET.fullmatch(value):
        raise error(code, "secret_hex must be 64 hex characters (256-bit secret)")
    return bytes.fromhex(value)


def unusable(kid: str) -> EngineError:
    """Return the error for a stored secret that is none, or is sealed and cannot be opened."""
    return error("corruption", f"the stored secret of kid {kid!r} is unusable: not one, or of another FF_SECRET_KEY")


def check_grace(value: object) -> int:
    """Return how long a key that signs no more still verifies."""
    if type(value) is not int or not 0 <= value <= MAX_GRACE_MS:
        raise error("invalid_grace_ms", f"grace_ms: 0 to {MAX_GRACE_MS}, got {value!r}")
    return value
