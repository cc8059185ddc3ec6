"""Signing keys: one signs, older ones verify until their grace ends, and no secret leaves the engine."""

import hmac
import logging
import secrets

from flowfabric.db.database import Record, Transaction
from flowfabric.db.statements import statements_beside
from flowfabric.engine.store import Store
from flowfabric.model.errors import EngineError, error
from flowfabric.model.keys import (
    AlreadySeeded,
    HmacKids,
    Noop,
    Rotated,
    RotationEntry,
    Seeded,
    SigningKey,
    VerifyingKid,
    check_grace,
    check_kid,
    check_secret,
)
from flowfabric.model.tokens import RingKey

SQL = statements_beside(__file__)

logger = logging.getLogger(__name__)

FIRST_KID = "k1"
_MOST_CACHED = 100


class Keys:
    """The store of signing keys."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._known: dict[tuple[str, int], SigningKey] = {}

    async def seed(self, kid: str, secret_hex: str) -> Seeded | AlreadySeeded:
        """Install the first key; a key of that name stays as it is."""
        kid = check_kid(kid, "invalid_input")
        secret = check_secret(secret_hex, "invalid_input")

        async def install(transaction: Transaction) -> Seeded | AlreadySeeded:
            stored, now = await self._locked(transaction)
            if kid in stored:
                return AlreadySeeded(kid=kid, same_secret=hmac.compare_digest(stored[kid]["secret"], secret))
            if current := _current(stored):
                raise error("invalid_input", f"kid: {current!r} signs already; rotate to change the key")
            await transaction.fetch(SQL.insert_key, kid=kid, secret=secret, now=now)
            return Seeded(kid=kid)

        return await self._store.transact(install)

    async def rotate(self, new_kid: str, new_secret_hex: str, grace_ms: int) -> list[RotationEntry]:
        """Sign with a new key from now on; the one before verifies for the grace, those past theirs are forgotten."""
        new_kid = check_kid(new_kid, "invalid_kid")
        secret = check_secret(new_secret_hex, "invalid_secret_hex")
        grace_ms = check_grace(grace_ms)

        async def rotate(transaction: Transaction) -> Rotated | Noop | EngineError:
            stored, now = await self._locked(transaction)
            if new_kid in stored:
                if hmac.compare_digest(stored[new_kid]["secret"], secret):
                    return Noop(kid=new_kid)
                return error("rotation_conflict", new_kid)
            spent = await transaction.fetch(SQL.take_spent_signing_keys, now=now)
            previous = _current(stored)
            if previous is not None:
                await transaction.fetch(SQL.retire_key, kid=previous, expires_at=now + grace_ms)
            await transaction.fetch(SQL.insert_key, kid=new_kid, secret=secret, now=now)
            return Rotated(previous_kid=previous, new_kid=new_kid, gc_count=len(spent))

        return [RotationEntry(partition=0, result=await self._store.transact(rotate))]

    async def kids(self) -> HmacKids:
        """The names of the keys that sign or verify."""
        rows = await self._store.fetch(SQL.list_kids)
        return HmacKids(
            current_kid=next((row["kid"] for row in rows if row["is_current"]), None),
            verifying=tuple(
                VerifyingKid(kid=row["kid"], expires_at_ms=row["expires_at"]) for row in rows if not row["is_current"]
            ),
        )

    async def seed_at_start(self, secret_hex: str | None, *, may_generate: bool) -> str | None:
        """Install the first key where there is none: the given one, else a generated one where that is allowed.

        Answers the name of the key it installed. A stored key stays: other processes and what is signed already
        depend on it.
        """
        if secret_hex is None and (not may_generate or (await self.kids()).current_kid is not None):
            return None
        try:
            seeded = await self.seed(FIRST_KID, secret_hex or secrets.token_hex(32))
        except EngineError as refused:
            if refused.code != "invalid_input":
                raise
            seeded = AlreadySeeded(kid=FIRST_KID, same_secret=False)
        if isinstance(seeded, Seeded):
            return seeded.kid
        if secret_hex is not None and not seeded.same_secret:
            logger.warning("the configured signing secret is not the stored one: the stored keys count")
        return None

    async def signing(self, transaction: Transaction, kid: str | None, installed_at: int) -> SigningKey:
        """The key of a name that the transaction has just read as the one that signs.

        Installed once, a key never changes, so that it is read only the first time.
        """
        if kid is None:
            raise error("hmac_secret_not_initialized")
        known = self._known.get((kid, installed_at))
        if known is None:
            rows = await transaction.fetch(SQL.read_key, kid=kid)
            if not rows:
                raise error("retry_exhausted", "the signing key was replaced just now")
            if len(self._known) >= _MOST_CACHED:
                self._known.clear()
            known = self._known[kid, installed_at] = SigningKey(kid=kid, secret=rows[0]["secret"])
        return known

    async def ring(self, transaction: Transaction) -> dict[str, RingKey]:
        """Every stored key by its name, with what says whether its signatures still count."""
        return {
            row["kid"]: RingKey(
                key=SigningKey(kid=row["kid"], secret=row["secret"]),
                is_current=row["is_current"],
                expires_at=row["expires_at"],
            )
            for row in await transaction.fetch(SQL.list_keys)
            if row["kid"] is not None
        }

    async def verifying(self, transaction: Transaction, kid: str) -> SigningKey | None:
        """The key of a name if it signs or its grace has not ended, else None."""
        rows = await transaction.fetch(SQL.read_key, kid=kid)
        return SigningKey(kid=kid, secret=rows[0]["secret"]) if rows and rows[0]["verifies"] else None

    @staticmethod
    async def _locked(transaction: Transaction) -> tuple[dict[str, Record], int]:
        await transaction.fetch(SQL.lock_keys)
        rows = await transaction.fetch(SQL.list_keys)
        return {row["kid"]: row for row in rows if row["kid"] is not None}, rows[0]["now"]


def _current(stored: dict[str, Record]) -> str | None:
    return next((kid for kid, row in stored.items() if row["is_current"]), None)
