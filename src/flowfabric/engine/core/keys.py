"""Signing keys: the current one signs, retired ones verify until their grace period ends."""

import hmac
import logging
import secrets
from collections.abc import Mapping, Sequence

from flowfabric.db.database import Record, Transaction
from flowfabric.db.statements import statements_beside
from flowfabric.engine.store import Store
from flowfabric.model.errors import EngineError, error
from flowfabric.model.key import (
    SECRET_BYTES,
    AlreadyRotated,
    AlreadySeeded,
    HmacKids,
    Rotated,
    RotationEntry,
    Seeded,
    SigningKey,
    VerifyingKid,
    check_grace,
    check_kid,
    check_secret,
)
from flowfabric.model.seal import Seals, is_sealed
from flowfabric.model.token import RingKey

SQL = statements_beside(__file__)

logger = logging.getLogger(__name__)

FIRST_KID = "k1"
_MAX_CACHED = 100


class Keys:
    """The operations on signing keys; no answer contains a secret."""

    def __init__(self, store: Store, seals: Seals, known: dict[tuple[str, int], SigningKey]) -> None:
        self._store = store
        self._seals = seals
        self.known = known
        """The keys that this process has read, by name and time of installation.

        A key never changes, so its secret is decrypted once, and remains usable if another process encrypts it later.
        """

    async def seed_waitpoint_hmac_secret(self, *, kid: str, secret_hex: str) -> Seeded | AlreadySeeded:
        """Install the first signing key; a stored key of the same name is not changed."""
        kid = check_kid(kid, "invalid_input")
        secret = check_secret(secret_hex, "invalid_input")

        async def install(transaction: Transaction) -> Seeded | AlreadySeeded:
            stored, now = await self._locked(transaction)
            if kid in stored:
                return AlreadySeeded(kid=kid, same_secret=self._has_secret(stored[kid], secret))
            if current := _current(stored):
                raise error(
                    "invalid_input",
                    f"kid: the store already signs with {current!r}, got {kid!r};"
                    " call rotate_waitpoint_hmac_secret_all to replace it",
                )
            await self._install(transaction, stored, kid, secret, now)
            return Seeded(kid=kid)

        return await self._store.transact(install)

    async def rotate_waitpoint_hmac_secret_all(
        self, *, new_kid: str, new_secret_hex: str, grace_ms: int
    ) -> list[RotationEntry]:
        """Sign with a new key from now on; the previous key verifies for `grace_ms` more."""
        new_kid = check_kid(new_kid, "invalid_kid")
        secret = check_secret(new_secret_hex, "invalid_secret_hex")
        grace_ms = check_grace(grace_ms)

        async def rotate(transaction: Transaction) -> Rotated | AlreadyRotated | EngineError:
            stored, now = await self._locked(transaction)
            if new_kid in stored:
                if self._has_secret(stored[new_kid], secret):
                    return AlreadyRotated(kid=new_kid)
                return error("rotation_conflict", new_kid)
            expired = await transaction.fetch(SQL.take_expired_signing_keys, now=now)
            previous = _current(stored)
            if previous is not None:
                await transaction.fetch(SQL.retire_key, kid=previous, expires_at=now + grace_ms)
            await self._install(transaction, stored, new_kid, secret, now)
            return Rotated(previous_kid=previous, new_kid=new_kid, gc_count=len(expired))

        return [RotationEntry(partition=0, result=await self._store.transact(rotate))]

    async def list_waitpoint_hmac_kids(self) -> HmacKids:
        """The names of the signing key and of the retired keys that still verify."""
        rows = await self._store.fetch(SQL.list_kids)
        return HmacKids(
            current_kid=next((row["kid"] for row in rows if row["is_current"]), None),
            verifying=tuple(
                VerifyingKid(kid=row["kid"], expires_at_ms=row["expires_at"]) for row in rows if not row["is_current"]
            ),
        )

    async def prepare(self, secret_hex: str | None, *, may_generate: bool) -> list[str]:
        """Check at a start that a key signs and stored secrets decrypt; encrypt plain ones; return what was done.

        If no key signs, install the configured one, or a generated one if `may_generate`. A stored key is never
        replaced: other processes and existing signatures depend on it.
        """
        stored = await self._usable()
        done: list[str] = []
        if _current(stored) is None or self._keys_to_encrypt(stored):

            async def write(transaction: Transaction) -> list[str]:
                stored, now = await self._locked(transaction)
                self._check_usable(stored)
                return await self._write_keys(transaction, stored, now, secret_hex, may_generate=may_generate)

            done = await self._store.transact(write)
            stored = await self._usable()
        if secret_hex is not None and _current(stored) is not None:
            secret = check_secret(secret_hex, "invalid_input")
            verifying = [self._opened_or_empty(row).secret for row in stored.values() if row["verifies"]]
            if not any(hmac.compare_digest(each, secret) for each in verifying):
                logger.warning(
                    "FF_WAITPOINT_HMAC_SECRET differs from every stored signing key and has no effect:"
                    " the stored keys are used; rotate to change the key"
                )
        return done

    async def check(self, secret_hex: str | None, *, may_generate: bool) -> None:
        """Raise what `prepare` would raise, and change nothing."""
        _check_given(await self._usable(), secret_hex, may_generate=may_generate)

    async def _write_keys(
        self,
        transaction: Transaction,
        stored: Mapping[str, Record],
        now: int,
        secret_hex: str | None,
        *,
        may_generate: bool,
    ) -> list[str]:
        done: list[str] = []
        for key in self._keys_to_encrypt(stored):
            await transaction.fetch(SQL.set_secret, kid=key.kid, secret=self._seals.seal(key.kid, key.secret))
            done.append(f"signing key {key.kid} encrypted")
        if _check_given(stored, secret_hex, may_generate=may_generate):
            secret = check_secret(secret_hex or secrets.token_hex(SECRET_BYTES), "invalid_input")
            await self._install(transaction, stored, FIRST_KID, secret, now)
            done.append(f"signing key {FIRST_KID}")
        return done

    async def signing(self, transaction: Transaction, kid: str | None, installed_at: int) -> SigningKey:
        """The current signing key, whose name and time of installation the transaction has just read."""
        if kid is None:
            raise error("hmac_secret_not_initialized")
        known = self.known.get((kid, installed_at))
        if known is None:
            rows = await transaction.fetch(SQL.read_key, kid=kid)
            if not rows:
                raise error("retry_exhausted", f"the signing key {kid!r} was replaced during the call; call again")
            known = self._opened(rows[0])
        return known

    def ring(self, rows: Sequence[Record]) -> dict[str, RingKey]:
        """The keys of stored rows by name, each with its expiry and whether it is the current one."""
        return {
            kid: RingKey(key=self._opened_or_empty(row), is_current=row["is_current"], expires_at=row["expires_at"])
            for kid, row in _by_kid(rows).items()
        }

    async def verifying(self, transaction: Transaction, kid: str) -> SigningKey | None:
        """The key of this name if it signs or its grace period has not ended, else None."""
        rows = await transaction.fetch(SQL.read_key, kid=kid)
        return self._opened(rows[0]) if rows and rows[0]["verifies"] else None

    async def _install(
        self, transaction: Transaction, stored: Mapping[str, Record], kid: str, secret: bytes, now: int
    ) -> None:
        if not self._seals.has_key and any(is_sealed(row["secret"]) for row in stored.values()):
            raise error(
                "corruption", "the stored signing keys are encrypted: set FF_SECRET_KEY in this process to add one"
            )
        await transaction.fetch(SQL.insert_key, kid=kid, secret=self._seals.seal(kid, secret), now=now)

    def _opened(self, row: Record) -> SigningKey:
        cache_key = row["kid"], row["installed_at"]
        known = self.known.get(cache_key)
        if known is None:
            key = SigningKey(kid=row["kid"], secret=self._seals.open(row["kid"], row["secret"]))
            if len(self.known) >= _MAX_CACHED:
                self.known.clear()
            known = self.known[cache_key] = key
        return known

    def _opened_or_empty(self, row: Record) -> SigningKey:
        try:
            return self._opened(row)
        except EngineError:
            return SigningKey(kid=row["kid"], secret=b"")

    def _has_secret(self, row: Record, secret: bytes) -> bool:
        return hmac.compare_digest(self._opened(row).secret, secret)

    def _keys_to_encrypt(self, stored: Mapping[str, Record]) -> list[SigningKey]:
        """The keys still to be encrypted, except retired ones that cannot be decrypted."""
        rows = [row for kid, row in stored.items() if self._seals.needs_sealing(kid, row["secret"])]
        return [key for row in rows if (key := self._opened_or_empty(row)).secret]

    async def _usable(self) -> dict[str, Record]:
        stored = _by_kid(await self._store.fetch(SQL.list_keys))
        self._check_usable(stored)
        return stored

    def _check_usable(self, stored: Mapping[str, Record]) -> None:
        """Cache the keys that sign or verify; raise if one of them is encrypted under another FF_SECRET_KEY.

        A malformed plain secret does not prevent a start: it fails the calls that sign or verify with it.
        """
        for kid, row in stored.items():
            if not row["verifies"]:
                continue
            try:
                self._seals.open(kid, row["secret"])
                self._opened(row)
            except EngineError:
                if not is_sealed(row["secret"]):
                    continue
                given = "is not the key" if self._seals.has_key else "is not set: set it to the key"
                raise error(
                    "unavailable", f"FF_SECRET_KEY {given} that the signing key {kid!r} was encrypted with"
                ) from None

    @staticmethod
    async def _locked(transaction: Transaction) -> tuple[dict[str, Record], int]:
        await transaction.fetch(SQL.lock_keys)
        rows = await transaction.fetch(SQL.list_keys)
        return _by_kid(rows), rows[0]["now"]


def _check_given(stored: Mapping[str, Record], secret_hex: str | None, *, may_generate: bool) -> bool:
    """Whether the first key has to be installed; raise if there is none to install."""
    is_missing = _current(stored) is None and FIRST_KID not in stored
    if is_missing and secret_hex is None and not may_generate:
        raise error(
            "unavailable",
            "no signing key is stored: set FF_WAITPOINT_HMAC_SECRET to 64 hex digits (openssl rand -hex 32),"
            " the same for every process",
        )
    return is_missing


def _by_kid(rows: Sequence[Record]) -> dict[str, Record]:
    return {row["kid"]: row for row in rows if row["kid"] is not None}


def _current(stored: Mapping[str, Record]) -> str | None:
    return next((kid for kid, row in stored.items() if row["is_current"]), None)
