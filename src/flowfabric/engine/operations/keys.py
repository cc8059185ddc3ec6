"""Operations on the keys that sign grants and tokens."""

from flowfabric.engine.families import Families
from flowfabric.model.keys import AlreadySeeded, HmacKids, RotationEntry, Seeded


class KeyOperations(Families):
    """Operations on signing keys; none of them gives a secret away."""

    async def seed_waitpoint_hmac_secret(self, *, kid: str, secret_hex: str) -> Seeded | AlreadySeeded:
        """Install the first signing key; one of that name stays as it is."""
        return await self._keys.seed(kid, secret_hex)

    async def rotate_waitpoint_hmac_secret_all(
        self, *, new_kid: str, new_secret_hex: str, grace_ms: int
    ) -> list[RotationEntry]:
        """Sign with a new key from now on; the one before it verifies for the grace."""
        return await self._keys.rotate(new_kid, new_secret_hex, grace_ms)

    async def list_waitpoint_hmac_kids(self) -> HmacKids:
        """The name of the key that signs, and of those that still verify."""
        return await self._keys.kids()
