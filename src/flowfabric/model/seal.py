"""Secrets as they are stored: sealed under the deployment's key where it has one, else as they are."""

import secrets
from collections.abc import Sequence

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from flowfabric.model.key import SECRET_BYTES, unusable

_FORMAT = b"\x01"
_NONCE_BYTES = 12
_TAG_BYTES = 16
_SEALED_BYTES = len(_FORMAT) + _NONCE_BYTES + SECRET_BYTES + _TAG_BYTES
"""No secret is as long, so that the length alone tells what is sealed."""


class Seals:
    """Seals secrets with AES-256-GCM, each for the name it is stored under, and opens them again.

    The first key seals and all of them open; without any, secrets are stored as they are.
    """

    def __init__(self, keys: Sequence[bytes] = ()) -> None:
        self._ciphers = [AESGCM(key) for key in keys]

    def seal(self, kid: str, secret: bytes) -> bytes:
        """Return what is stored of a secret."""
        if not self._ciphers:
            return secret
        nonce = secrets.token_bytes(_NONCE_BYTES)
        return _FORMAT + nonce + self._ciphers[0].encrypt(nonce, secret, kid.encode())

    def open(self, kid: str, stored: bytes) -> bytes:
        """Return the secret that is stored, or refuse with `corruption` what cannot be opened."""
        if not is_sealed(stored):
            if len(stored) == SECRET_BYTES:
                return stored
            raise unusable(kid)
        for cipher in self._ciphers:
            if (secret := _opened(cipher, kid, stored)) is not None:
                return secret
        raise unusable(kid)

    def is_settled(self, kid: str, stored: bytes) -> bool:
        """Whether a secret that opens is sealed under the first key, or there is none to seal it under."""
        if not self._ciphers:
            return True
        return is_sealed(stored) and _opened(self._ciphers[0], kid, stored) is not None

    @property
    def has_key(self) -> bool:
        """Whether what is stored from now on is sealed."""
        return bool(self._ciphers)


def is_sealed(stored: bytes) -> bool:
    """Whether stored bytes are a sealed secret, whoever can open it."""
    return len(stored) == _SEALED_BYTES and stored.startswith(_FORMAT)


def _opened(cipher: AESGCM, kid: str, stored: bytes) -> bytes | None:
    nonce, ciphertext = stored[1 : 1 + _NONCE_BYTES], stored[1 + _NONCE_BYTES :]
    try:
        return cipher.decrypt(nonce, ciphertext, kid.encode())
    except InvalidTag:
        return None
