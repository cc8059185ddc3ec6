"""Signing keys: seeded once, rotated with a grace period, listed by name, never shown."""

import logging
from typing import Any

import asyncpg
import pytest

from engine.state import all_cases, refused
from fixtures import Clock, Rows
from flowfabric.engine.core.keys import Keys
from flowfabric.engine.engine import Engine
from flowfabric.engine.parts import parts_of
from flowfabric.model.errors import ConflictError
from flowfabric.model.key import (
    AlreadyRotated,
    AlreadySeeded,
    HmacKids,
    Rotated,
    RotationEntry,
    Seeded,
    SigningKey,
    VerifyingKid,
)

A = "aa" * 32
B = "bb" * 32
C = "cc" * 32
NONE = HmacKids(current_kid=None, verifying=())


@pytest.fixture
async def engine(keyless: Engine) -> Engine:
    """An engine whose store has no key yet."""
    return keyless


async def seed(engine: Engine, kid: str = "v1", secret_hex: str = A) -> Seeded | AlreadySeeded:
    return await engine.seed_waitpoint_hmac_secret(kid=kid, secret_hex=secret_hex)


async def rotate(engine: Engine, kid: str, secret_hex: str, *, grace_ms: int = 60_000) -> Any:
    """The result of the one entry of a rotation."""
    (entry,) = await engine.rotate_waitpoint_hmac_secret_all(new_kid=kid, new_secret_hex=secret_hex, grace_ms=grace_ms)
    assert entry.partition == 0
    return entry.result


async def verifying(engine: Engine, kid: str) -> SigningKey | None:
    """The key that the engine would verify with."""
    keys = engine._services[Keys]
    return await parts_of(engine).lifecycle.store.transact(lambda transaction: keys.verifying(transaction, kid))


async def test_the_first_seed_installs_a_key_and_a_repeat_changes_nothing(
    engine: Engine, rows: Rows, clock: Clock
) -> None:
    assert await engine.list_waitpoint_hmac_kids() == NONE
    now = await clock.now()
    assert await seed(engine) == Seeded(kid="v1")
    assert await rows.of("signing_key") == [
        {"kid": "v1", "secret": bytes.fromhex(A), "is_current": True, "installed_at": now, "expires_at": None}
    ]
    async with rows.unchanged():
        assert await seed(engine) == AlreadySeeded(kid="v1", same_secret=True)
        assert await seed(engine, secret_hex=A.upper()) == AlreadySeeded(kid="v1", same_secret=True)
        assert await seed(engine, secret_hex=B) == AlreadySeeded(kid="v1", same_secret=False)
        await refused(
            seed(engine, "v2", B), "invalid_input", "the store already signs with 'v1', got 'v2'; call rotate"
        )
    assert await engine.list_waitpoint_hmac_kids() == HmacKids(current_kid="v1", verifying=())
    await rotate(engine, "v2", B)
    async with rows.unchanged():
        assert await seed(engine) == AlreadySeeded(kid="v1", same_secret=True)


async def test_wrong_arguments_are_refused_in_order_and_write_nothing(engine: Engine, rows: Rows) -> None:
    secrets: list[Any] = ["", "a" * 63, "a" * 65, "g" * 64, "a" * 63 + "\n", b"a" * 64, None, "٠" * 64]
    kids: list[Any] = ["", "a:b", ":", None, 7, "a\0b", "x" * 257, "\ud800"]
    graces: list[Any] = [-1, 2**53, 1.5, None, "1", True]
    async with rows.unchanged():
        with all_cases() as case:
            for secret in secrets:
                with case(f"secret {secret!r}"):
                    seeding = seed(engine, "v1", secret)
                    refusal = await refused(seeding, "invalid_input", "secret_hex must be 64 hex characters")
                    assert not secret or str(secret) not in str(refusal)
                    await refused(rotate(engine, "v1", secret, grace_ms=-1), "invalid_secret_hex")
            for kid in kids:
                with case(f"kid {kid!r}"):
                    await refused(seed(engine, kid), "invalid_input")
                    await refused(rotate(engine, kid, "", grace_ms=-1), "invalid_kid")
            for grace in graces:
                with case(f"grace {grace!r}"):
                    await refused(rotate(engine, "v1", A, grace_ms=grace), "invalid_grace_ms")


async def test_a_rotation_of_an_empty_store_installs_the_first_key(engine: Engine) -> None:
    entries = await engine.rotate_waitpoint_hmac_secret_all(new_kid="v1", new_secret_hex=A, grace_ms=0)
    assert entries == [RotationEntry(partition=0, result=Rotated(previous_kid=None, new_kid="v1", gc_count=0))]
    assert (await engine.list_waitpoint_hmac_kids()).current_kid == "v1"


async def test_a_rotation_retires_the_current_key_with_its_grace(engine: Engine, rows: Rows, clock: Clock) -> None:
    await seed(engine)
    now = await clock.advance(seconds=5)
    assert await rotate(engine, "v2", B, grace_ms=1000) == Rotated(previous_kid="v1", new_kid="v2", gc_count=0)
    stored = {row["kid"]: row for row in await rows.of("signing_key")}
    assert (stored["v1"]["is_current"], stored["v1"]["expires_at"]) == (False, now + 1000)
    assert (stored["v2"]["is_current"], stored["v2"]["expires_at"], stored["v2"]["installed_at"]) == (True, None, now)
    assert await engine.list_waitpoint_hmac_kids() == HmacKids(
        current_kid="v2", verifying=(VerifyingKid(kid="v1", expires_at_ms=now + 1000),)
    )


async def test_a_repeated_rotation_changes_nothing(engine: Engine, rows: Rows, clock: Clock) -> None:
    await seed(engine)
    await rotate(engine, "v2", B, grace_ms=0)
    await clock.advance(seconds=1)
    async with rows.unchanged():
        assert await rotate(engine, "v2", B) == AlreadyRotated(kid="v2")
        # Naming a retired key does not make it current again.
        assert await rotate(engine, "v1", A) == AlreadyRotated(kid="v1")
        for kid in ("v1", "v2"):
            conflict = await rotate(engine, kid, C)
            assert isinstance(conflict, ConflictError)
            assert (conflict.code, conflict.detail) == ("rotation_conflict", kid)


async def test_each_retired_key_verifies_until_the_end_of_its_own_grace(engine: Engine, clock: Clock) -> None:
    began = await clock.now()
    await seed(engine)
    await rotate(engine, "v2", B, grace_ms=10_000)
    await rotate(engine, "v3", C, grace_ms=5_000)
    assert await engine.list_waitpoint_hmac_kids() == HmacKids(
        current_kid="v3",
        verifying=(
            VerifyingKid(kid="v2", expires_at_ms=began + 5_000),
            VerifyingKid(kid="v1", expires_at_ms=began + 10_000),
        ),
    )
    assert await verifying(engine, "v1") == SigningKey(kid="v1", secret=bytes.fromhex(A))
    await clock.advance(ms=5_000)
    assert await verifying(engine, "v2") == SigningKey(kid="v2", secret=bytes.fromhex(B))
    await clock.advance(ms=1)
    assert await verifying(engine, "v2") is None
    assert [key.kid for key in (await engine.list_waitpoint_hmac_kids()).verifying] == ["v1"]
    assert await verifying(engine, "v3") == SigningKey(kid="v3", secret=bytes.fromhex(C))
    assert await verifying(engine, "unknown") is None


async def test_a_rotation_deletes_keys_past_their_grace(engine: Engine, rows: Rows, clock: Clock) -> None:
    await seed(engine)
    await rotate(engine, "v2", B, grace_ms=1000)
    await clock.advance(ms=1000)
    assert await rotate(engine, "v3", C, grace_ms=0) == Rotated(previous_kid="v2", new_kid="v3", gc_count=0)
    await clock.advance(ms=1)
    assert await rotate(engine, "v4", "dd" * 32, grace_ms=0) == Rotated(previous_kid="v3", new_kid="v4", gc_count=2)
    assert {row["kid"] for row in await rows.of("signing_key")} == {"v3", "v4"}


async def test_a_retired_key_without_an_expiry_does_not_verify(
    engine: Engine, rows: Rows, connection: asyncpg.Connection
) -> None:
    await seed(engine)
    await connection.execute("insert into signing_key values ('x', 'x', false, 1, null), ('y', 'y', false, 1, 0)")
    assert await verifying(engine, "x") is None
    assert await engine.list_waitpoint_hmac_kids() == HmacKids(current_kid="v1", verifying=())
    assert (await rotate(engine, "v2", B)).gc_count == 2


async def test_no_answer_and_no_log_contains_a_secret(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        answers = [
            await seed(engine),
            await seed(engine, secret_hex=B),
            await rotate(engine, "v2", B),
            await rotate(engine, "v2", C),
            await engine.list_waitpoint_hmac_kids(),
            await verifying(engine, "v2"),
            engine._services[Keys],
            vars(engine._services[Keys]),
        ]
    shown = f"{answers!r}{caplog.text}"
    for secret in (A, B, C):
        assert secret not in shown
        assert repr(bytes.fromhex(secret)) not in shown
