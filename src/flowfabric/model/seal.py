"""Encryption of stored secrets under the deployment's key; without a key they are stored in plain."""

import secrets
from collections.abc import Sequence

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from flowfabric.model.key import SECRET_BYTES, unusable

_FORMAT = b"\x01"
_NONCE_BYTES = 12
_TAG_BYTES = 16
_SEALED_BYTES = len(_FORMAT) + _NONCE_BYTES + SECRET_BYTES + _TAG_BYTES
"""Longer than a plain secret, so the length tells whether a stored secret is sealed."""


class Seals:
    """Seals (encrypts) secrets with AES-256-GCM, bound to their kid, and opens (decrypts) them.

    The first key seals and every key opens; without keys, secrets are stored in plain.
    """

    def __init__(self, keys: Sequence[bytes] = ()) -> None:
        self._ciphers = [AESGCM(key) for key in keys]

    def seal(self, kid: str, secret: bytes) -> bytes:
        """Return the bytes to store for a secret."""
        if not self._ciphers:
            return secret
        nonce = secrets.token_bytes(_NONCE_BYTES)
        return _FORMAT + nonce + self._ciphers[0].encrypt(nonce, secret, kid.encode())

    def open(self, kid: str, stored: bytes) -> bytes:
        """Return the secret of stored bytes; raise `corruption` if they cannot be opened."""
        if not is_sealed(stored):
            if len(stored) == SECRET_BYTES:
                return stored
            raise unusable(kid)
        for cipher in self._ciphers:
            if (secret := _opened(cipher, kid, stored)) is not None:
                return secret
        raise unusable(kid)

    def needs_sealing(self, kid: str, stored: bytes) -> bool:
        """Whether there is a key to seal with and stored bytes are in plain or sealed under another key."""
        if not self._ciphers:
            return False
        return not is_sealed(stored) or _opened(self._ciphers[0], kid, stored) is None

    @property
    def has_key(self) -> bool:
        """Whether secrets are sealed when they are stored."""
        return bool(self._ciphers)


def is_sealed(stored: bytes) -> bool:
    """Whether stored bytes are a sealed secret, under any key."""
    return len(stored) == _SEALED_BYTES and stored.startswith(_FORMAT)


def _opened(cipher: AESGCM, kid: str, stored: bytes) -> bytes | None:
    nonce, ciphertext = stored[1 : 1 + _NONCE_BYTES], stored[1 + _NONCE_BYTES :]
    try:
        return cipher.decrypt(nonce, ciphertext, kid.encode())
    except InvalidTag:
        return None
