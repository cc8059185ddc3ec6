"""Stored secrets are encrypted with FF_SECRET_KEY, and cannot be used without it."""

import asyncio
from typing import Any

import asyncpg
import pytest
from pydantic import SecretStr

from engine.core.test_keys import A, B, C, rotate, seed, verifying
from engine.grants import claim_granted, issue_grant
from engine.sending import waiting
from engine.state import refused, rounds
from fixtures import Engines, Eventually, Given, Rows
from flowfabric.engine.engine import Engine, second_engine
from flowfabric.model.errors import UnavailableError
from flowfabric.model.key import AlreadyRotated, AlreadySeeded, HmacKids, Rotated
from flowfabric.model.seal import Seals
from flowfabric.model.signal import Accepted
from flowfabric.model.support import Applied, NothingToPrepare
from flowfabric.settings import Settings

ONE, OTHER = SecretStr("01" * 32), SecretStr("02" * 32)


async def started(url: str, **settings: Any) -> HmacKids:
    """The keys after a start with these settings."""
    async with Engine.connect(settings=Settings(database_url=url, **settings)) as engine:
        return await engine.list_waitpoint_hmac_kids()


async def stored(rows: Rows) -> dict[str, bytes]:
    """The stored form of each secret."""
    return {row["kid"]: row["secret"] for row in await rows.of("signing_key")}


def shows(secrets: dict[str, bytes], *texts: str) -> bool:
    """Whether stored bytes contain one of these secrets, as bytes or as text."""
    whole = b" ".join(secrets.values())
    return any(bytes.fromhex(text) in whole or text.encode() in whole for text in texts)


async def test_the_table_contains_no_plain_secret(engines: Engines, rows: Rows) -> None:
    engine = await engines(secret_key=ONE, waitpoint_hmac_secret=SecretStr(A))
    assert not shows(await stored(rows), A)
    await rotate(engine, "v2", B)
    await rotate(engine, "v3", C)
    secrets = await stored(rows)
    assert set(secrets) == {"k1", "v2", "v3"}
    assert not shows(secrets, A, B, C)
    assert {len(secret) for secret in secrets.values()} == {61}
    # Equal secrets are encrypted differently.
    await rotate(engine, "v4", A)
    secrets = await stored(rows)
    assert secrets["k1"][1:13] != secrets["v4"][1:13]
    assert secrets["k1"][13:] != secrets["v4"][13:]
    other = await engines(secret_key=ONE)
    for kid, secret in (("k1", A), ("v2", B), ("v3", C)):
        key = await verifying(other, kid)
        assert key is not None
        assert key.secret == bytes.fromhex(secret)


async def test_repeated_seeds_and_rotations_compare_decrypted_secrets(engines: Engines, rows: Rows) -> None:
    one, other = [await engines(secret_key=ONE, waitpoint_hmac_secret=SecretStr(A)) for _ in range(2)]
    assert isinstance(await rotate(one, "v2", B), Rotated)
    async with rows.unchanged():
        for engine in (one, other, await engines(secret_key=ONE)):
            assert await seed(engine, "k1", A) == AlreadySeeded(kid="k1", same_secret=True)
            assert await seed(engine, "k1", C) == AlreadySeeded(kid="k1", same_secret=False)
            assert await rotate(engine, "v2", B) == AlreadyRotated(kid="v2")
            assert (await rotate(engine, "v2", C)).code == "rotation_conflict"


async def test_grants_and_tokens_of_one_process_are_valid_in_another(engines: Engines, given: Given) -> None:
    # The engine of `given` has no secret key; it has cached the plain secret at its start.
    sealing, other = [await engines(secret_key=ONE) for _ in range(2)]
    execution_id = await given.created()
    await issue_grant(sealing, execution_id)
    await claim_granted(other, execution_id)
    wait = await waiting(sealing, given)
    wait.engine = other
    assert isinstance(await wait.send(), Accepted)


async def test_a_start_encrypts_plain_secrets_and_running_processes_go_on(
    engine: Engine, engines: Engines, url: str, rows: Rows, given: Given, connection: asyncpg.Connection
) -> None:
    wait = await waiting(engine, given)
    await rotate(engine, "v2", B)
    assert shows(await stored(rows), B)
    idle = await engines()
    # A key past its grace is encrypted too.
    await connection.execute("insert into signing_key values ('v0', $1, false, 1, 1)", bytes.fromhex(A))
    sealing = await engines(secret_key=ONE)
    secrets = await stored(rows)
    assert set(secrets) == {"k1", "v0", "v2"}
    assert not shows(secrets, "ab" * 32, A, B)
    async with rows.unchanged():
        assert await sealing.prepare() == NothingToPrepare()
        await started(url, secret_key=ONE)
    # A process without the secret key uses its cached keys, and cannot add a plain one.
    wait.engine = idle
    assert isinstance(await wait.send(), Accepted)
    await waiting(idle, given, lane_id="idle")
    async with rows.unchanged():
        await refused(rotate(engine, "v3", C), "corruption", "FF_SECRET_KEY")
    assert isinstance(await rotate(sealing, "v3", C), Rotated)
    handle = await given.claimed(lane_id="other")
    async with rows.unchanged():
        await refused(engine.create_waitpoint(handle, waitpoint_key="w", expires_in_ms=1000), "corruption", "v3")


async def test_prepare_returns_what_it_did_with_the_keys(engines: Engines, connection: asyncpg.Connection) -> None:
    engine = await engines(secret_key=ONE, waitpoint_hmac_secret=SecretStr(A))
    await connection.execute("update signing_key set secret = $1", bytes.fromhex(A))
    assert await engine.prepare() == Applied(description="signing key k1 encrypted")
    await connection.execute("delete from signing_key")
    assert await engine.prepare() == Applied(description="signing key k1")
    assert await engine.prepare() == NothingToPrepare()


async def test_a_second_engine_uses_its_cached_keys(
    engine: Engine, engines: Engines, given: Given, connection: asyncpg.Connection
) -> None:
    await engines(secret_key=ONE)
    async with second_engine(engine) as other:
        await waiting(other, given)
    # The heartbeat of a worker connects even if no key is stored.
    await connection.execute("delete from signing_key")
    async with second_engine(engine) as other:
        await refused(waiting(other, given), "hmac_secret_not_initialized")


async def test_a_start_without_the_key_that_encrypted_the_secrets_is_refused(
    engines: Engines, url: str, rows: Rows
) -> None:
    await engines(secret_key=ONE)
    async with rows.unchanged():
        for key, text in (
            (None, "FF_SECRET_KEY is not set: set it to the key that the signing key 'k1' was encrypted with"),
            (OTHER, "FF_SECRET_KEY is not the key that the signing key 'k1' was encrypted with"),
        ):
            with pytest.raises(UnavailableError, match=text) as refusal:
                await started(url, secret_key=key)
            assert "01" * 32 not in str(refusal.value)


async def test_an_encrypted_secret_is_valid_only_under_its_own_name(
    engines: Engines, url: str, connection: asyncpg.Connection
) -> None:
    engine = await engines(secret_key=ONE)
    await rotate(engine, "v2", B)
    await connection.execute(
        "update signing_key set secret = (select secret from signing_key where kid = 'v2') where kid = 'k1'"
    )
    with pytest.raises(UnavailableError, match="'k1'"):
        await started(url, secret_key=ONE)


async def test_the_secret_key_is_replaced_by_a_start_with_the_old_one(engines: Engines, url: str, rows: Rows) -> None:
    first = await engines(secret_key=ONE, waitpoint_hmac_secret=SecretStr(A))
    await rotate(first, "v2", B)
    before = await stored(rows)
    await started(url, secret_key=OTHER, secret_key_old=ONE)
    after = await stored(rows)
    assert all(before[kid] != after[kid] for kid in ("k1", "v2"))
    async with rows.unchanged():
        await started(url, secret_key=OTHER)
        await started(url, secret_key=OTHER, secret_key_old=ONE)
        with pytest.raises(UnavailableError, match="FF_SECRET_KEY"):
            await started(url, secret_key=ONE)


async def test_concurrent_starts_that_encrypt_all_succeed(
    keyless: Engine, url: str, connection: asyncpg.Connection, rows: Rows
) -> None:
    for _ in rounds(2, whole=5):
        await connection.execute("delete from signing_key")
        await rotate(keyless, "v1", A)
        found = await asyncio.gather(*(started(url, secret_key=ONE) for _ in range(4)))
        assert {each.current_kid for each in found} == {"v1"}
        assert not shows(await stored(rows), A)


async def test_a_start_that_waited_for_the_lock_checks_the_secrets_again(
    keyless: Engine, url: str, connection: asyncpg.Connection, rows: Rows, eventually: Eventually
) -> None:
    await rotate(keyless, "v1", A)
    sealed = Seals([bytes.fromhex(OTHER.get_secret_value())]).seal("v1", bytes.fromhex(A))
    waits = "select exists (select from pg_locks where relation = 'signing_key'::regclass and not granted)"
    async with connection.transaction():
        # As another process does that encrypts with another key.
        await connection.execute("lock table signing_key in share row exclusive mode")
        starting = asyncio.create_task(started(url, secret_key=ONE))
        await eventually(lambda: connection.fetchval(waits))
        await connection.execute("update signing_key set secret = $1", sealed)
    with pytest.raises(UnavailableError, match="FF_SECRET_KEY is not the key"):
        await starting
    assert await stored(rows) == {"v1": sealed}


async def test_a_secret_is_decrypted_once(engines: Engines, given: Given, connection: asyncpg.Connection) -> None:
    engine = await engines(secret_key=ONE)
    wait = await waiting(engine, given)
    # A process that has decrypted it does not read the stored form again, here a damaged one.
    await connection.execute("update signing_key set secret = set_byte(secret, 60, 1 # get_byte(secret, 60))")
    assert isinstance(await wait.send(), Accepted)
