"""Waitpoint tokens: signed secrets that authorise a caller to signal a waitpoint; never shown."""

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
    """A bearer secret that prints redacted and cannot be pickled; only `reveal` returns its text."""

    __slots__ = ("_text",)
    _text: str

    def __init__(self, text: str) -> None:
        """Wrap any text; whether it is a valid token is checked on use."""
        if not isinstance(text, str):
            raise error("invalid_token", f"expected the text of a token, got a {type(text).__name__}")
        object.__setattr__(self, "_text", text)

    def reveal(self) -> str:
        """Return the secret text, to send to the caller that is to signal."""
        return self._text

    @property
    def kid(self) -> str:
        """The kid of the key that signed it, unverified; empty if the text is not a token."""
        return self._split()[0]

    @property
    def fingerprint(self) -> str:
        """The start of the digest, which may be shown to identify the token; empty if the text is not a token."""
        return self._split()[1][:FINGERPRINT_LENGTH]

    def _split(self) -> tuple[str, str]:
        kid, _, digest = self._text.partition(":")
        return (kid, digest) if kid and digest else ("", "")

    def __str__(self) -> str:
        """Return the redacted text."""
        kid, digest = self._split()
        # An invalid kid is arbitrary text of the caller and is not shown.
        return f"{kid}:<REDACTED:len={len(digest)}>" if _is_kid(kid) and kid.isprintable() else "<REDACTED:malformed>"

    def __repr__(self) -> str:
        """Return the redacted text."""
        return f"WaitpointToken({self})"

    def __format__(self, spec: str) -> str:
        """Format the redacted text."""
        return format(str(self), spec)

    def __eq__(self, other: object) -> bool:
        """Compare in constant time."""
        if not isinstance(other, WaitpointToken):
            return NotImplemented
        return hmac.compare_digest(_bytes(self._text), _bytes(other._text))

    def __hash__(self) -> int:
        """Return a hash consistent with equality."""
        return hash((WaitpointToken, self._text))

    def __setattr__(self, name: str, value: object) -> NoReturn:
        """Reject every assignment: tokens are immutable."""
        raise AttributeError(f"cannot set {name!r}: a WaitpointToken is immutable")

    def __copy__(self) -> "WaitpointToken":
        """Return itself, as it does not change."""
        return self

    def __deepcopy__(self, memo: object) -> "WaitpointToken":
        """Return itself, as it does not change."""
        return self

    def __reduce__(self) -> NoReturn:
        """Reject pickling: a pickled secret ends up in files, queues and logs."""
        raise TypeError("a WaitpointToken cannot be pickled; pass the text of token.reveal() instead")


@dataclass(frozen=True, kw_only=True, slots=True)
class RingKey:
    """A stored key: the current one signs and verifies, a retired one verifies until it expires.

    The secret is empty if the stored one is unusable; only a token of this kid then fails with `corruption`.
    """

    key: SigningKey
    is_current: bool
    expires_at: int | None = None

    def verifies(self, now: int) -> bool:
        """Whether tokens signed by this key are still accepted."""
        return self.is_current or (self.expires_at is not None and self.expires_at >= now)


@dataclass(frozen=True, kw_only=True, slots=True)
class ParsedToken:
    """The two halves of a well-formed token."""

    kid: str
    digest: str


def sign_token(key: SigningKey, execution_id: ExecutionId, waitpoint_id: WaitpointId) -> WaitpointToken:
    """Return the token of a waitpoint, signed by the key."""
    return WaitpointToken(f"{key.kid}:{_usable(key).digest(_message(execution_id, waitpoint_id))}")


def parse_token(presented: WaitpointToken | str | None) -> ParsedToken:
    """Return the halves of a presented token; the error says whether it is missing or invalid, and nothing else."""
    text = presented.reveal() if isinstance(presented, WaitpointToken) else presented
    if text is None or text == "":
        raise error("missing_token", "pass the token of the waitpoint")
    if not isinstance(text, str):
        raise _invalid()
    kid, _, digest = text.partition(":")
    if not _is_kid(kid) or not _DIGEST.fullmatch(digest):
        raise _invalid()
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
    """Reject a token that is not the waitpoint's own; without a stored token, as for an unknown waitpoint, any token.

    `keys` holds the keys by kid: at least the signing key and the one that the token names.
    """
    text = presented.reveal() if isinstance(presented, WaitpointToken) else presented
    kid, _, digest = text.partition(":") if isinstance(text, str) else ("", "", "")
    found = keys.get(kid)
    if found is None or not _DIGEST.fullmatch(digest):
        # No stored key can have signed it: check the shape first, for missing_token and invalid_token.
        parse_token(presented)
        if keys:
            raise _invalid()
        raise error("hmac_secret_not_initialized", "no signing key is stored; set FF_WAITPOINT_HMAC_SECRET")
    if not found.verifies(now):
        raise error("token_expired", "the key that signed the token has expired")
    is_signed = _usable(found.key).has_signed(_message(execution_id, waitpoint_id), digest)
    is_stored = stored is not None and stored == (
        presented if isinstance(presented, WaitpointToken) else WaitpointToken(f"{kid}:{digest}")
    )
    if not (is_signed and is_stored):
        raise _invalid()


def _invalid() -> EngineError:
    # The same text for every cause: the caller must not learn whether the waitpoint exists.
    return error("invalid_token", "this is not the token of the waitpoint")


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
