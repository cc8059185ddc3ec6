"""Waitpoint tokens: what lets a caller signal a waitpoint, signed under a named key and never shown."""

import hmac
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NoReturn

from flowfabric.model.errors import EngineError, error
from flowfabric.model.ids import ExecutionId, WaitpointId
from flowfabric.model.key import SigningKey, check_kid, unusable

FINGERPRINT_LENGTH = 16

_DIGEST = re.compile(r"[0-9a-fA-F]{64}")


class WaitpointToken:
    """A bearer secret that prints and formats redacted and cannot be pickled; only `reveal` gives its text."""

    __slots__ = ("_text",)
    _text: str

    def __init__(self, text: str) -> None:
        """Hold a text, whether or not it is a token."""
        if not isinstance(text, str):
            raise error("invalid_token")
        object.__setattr__(self, "_text", text)

    def reveal(self) -> str:
        """Return the secret itself, to be handed to whoever is to signal."""
        return self._text

    @property
    def kid(self) -> str:
        """The name of the key it claims to be signed under; empty where it is no token."""
        return self._split()[0]

    @property
    def fingerprint(self) -> str:
        """What may be shown to tell it from others; empty where it is no token."""
        return self._split()[1][:FINGERPRINT_LENGTH]

    def _split(self) -> tuple[str, str]:
        kid, _, digest = self._text.partition(":")
        return (kid, digest) if kid and digest else ("", "")

    def __str__(self) -> str:
        """Read redacted."""
        kid, digest = self._split()
        # A name that no key can have is text of the caller's, which may be anything.
        return f"{kid}:<REDACTED:len={len(digest)}>" if _is_kid(kid) and kid.isprintable() else "<REDACTED:malformed>"

    def __repr__(self) -> str:
        """Read redacted."""
        return f"WaitpointToken({self})"

    def __format__(self, spec: str) -> str:
        """Read redacted, laid out as asked."""
        return format(str(self), spec)

    def __eq__(self, other: object) -> bool:
        """Compare in constant time."""
        if not isinstance(other, WaitpointToken):
            return NotImplemented
        return hmac.compare_digest(_bytes(self._text), _bytes(other._text))

    def __hash__(self) -> int:
        """Agree with equality."""
        return hash((WaitpointToken, self._text))

    def __setattr__(self, name: str, value: object) -> NoReturn:
        """Refuse: a token does not change."""
        raise AttributeError(f"a token does not change: {name}")

    def __copy__(self) -> "WaitpointToken":
        """Return itself, as it does not change."""
        return self

    def __deepcopy__(self, memo: object) -> "WaitpointToken":
        """Return itself, as it does not change."""
        return self

    def __reduce__(self) -> NoReturn:
        """Refuse: a pickled secret ends up in files, queues and logs."""
        raise TypeError("a WaitpointToken cannot be pickled; send token.reveal() to whoever is to signal")


@dataclass(frozen=True, kw_only=True, slots=True)
class RingKey:
    """A stored key: it signs, or it verifies until it expires; without an expiry it does not verify.

    Its secret is empty where the stored one cannot be used, which only a token of its name meets.
    """

    key: SigningKey
    is_current: bool
    expires_at: int | None = None

    def verifies(self, now: int) -> bool:
        """Whether what it signed still counts."""
        return self.is_current or (self.expires_at is not None and self.expires_at >= now)


@dataclass(frozen=True, kw_only=True, slots=True)
class ParsedToken:
    """The two halves of a text that has the shape of a token."""

    kid: str
    digest: str


def sign_token(key: SigningKey, execution_id: ExecutionId, waitpoint_id: WaitpointId) -> WaitpointToken:
    """Return the one token of a waitpoint under a key."""
    return WaitpointToken(f"{key.kid}:{_usable(key).digest(_message(execution_id, waitpoint_id))}")


def parse_token(presented: WaitpointToken | str | None) -> ParsedToken:
    """Return the halves of a presented token; says whether it is missing, and nothing else."""
    text = presented.reveal() if isinstance(presented, WaitpointToken) else presented
    if text is None or text == "":
        raise error("missing_token")
    if not isinstance(text, str):
        raise error("invalid_token")
    kid, _, digest = text.partition(":")
    if not _is_kid(kid) or not _DIGEST.fullmatch(digest):
        raise error("invalid_token")
    return ParsedToken(kid=kid, digest=digest)


def verify_token(
    presented: WaitpointToken | str | None,
    keys: Mapping[str, RingKey],
    *,
    execution_id: ExecutionId,
    waitpoint_id: WaitpointId,
    stored: WaitpointToken | None,
    now: int,
) -> None:
    """Refuse a token that is not the waitpoint's own; without a stored one, as for an unknown waitpoint, every token.

    `keys` holds the keys by name, at least the one that signs and the one the token names.
    """
    text = presented.reveal() if isinstance(presented, WaitpointToken) else presented
    kid, _, digest = text.partition(":") if isinstance(text, str) else ("", "", "")
    found = keys.get(kid)
    if found is None or not _DIGEST.fullmatch(digest):
        # Of what no stored key can have signed, the shape tells why it is refused.
        parse_token(presented)
        raise error("invalid_token" if keys else "hmac_secret_not_initialized")
    if not found.verifies(now):
        raise error("token_expired")
    is_signed = _usable(found.key).has_signed(_message(execution_id, waitpoint_id), digest)
    is_stored = stored is not None and stored == (
        presented if isinstance(presented, WaitpointToken) else WaitpointToken(f"{kid}:{digest}")
    )
    if not (is_signed and is_stored):
        raise error("invalid_token")


def _message(execution_id: ExecutionId, waitpoint_id: WaitpointId) -> str:
    return f"{execution_id}:{waitpoint_id}"


def _usable(key: SigningKey) -> SigningKey:
    if not key.secret:
        raise unusable(key.kid)
    return key


def _is_kid(kid: str) -> bool:
    try:
        check_kid(kid, "invalid_token")
    except EngineError:
        return False
    return True


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")
