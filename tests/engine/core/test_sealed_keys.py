"""Secrets at rest: sealed under FF_SECRET_KEY, opened by whoever has it, and by nobody else."""

import asyncio
from typing import Any

import pytest
from pydantic import SecretStr

from engine.core.test_keys import A, B, C, rotate, seed, verifying
from engine.grants import claim_named, grant
from engine.sending import waiting
from engine.state import refused
from flowfabric.engine.engine import Engine, engine_beside
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


async def stored(rows: Any) -> dict[str, bytes]:
    """What the table holds of each secret."""
    return {row["kid"]: row["secret"] for row in await rows.of("signing_key")}


def shows(secrets: dict[str, bytes], *texts: str) -> bool:
    """Whether stored bytes hold one of these secrets, as bytes or as text."""
    whole = b" ".join(secrets.values())
    return any(bytes.fromhex(text) in whole or text.encode() in whole for text in texts)


async def test_the_table_never_holds_a_secret(engines: Any, rows: Any) -> None:
    engine = await engines(secret_key=ONE, waitpoint_hmac_secret=SecretStr(A))
    assert not shows(await stored(rows), A)
    await rotate(engine, "v2", B)
    await rotate(engine, "v3", C)
    secrets = await stored(rows)
    assert set(secrets) == {"k1", "v2", "v3"}
    assert not shows(secrets, A, B, C)
    assert {len(secret) for secret in secrets.values()} == {61}
    for kid, secret in (("k1", A), ("v2", B), ("v3", C)):
        key = await verifying(await engines(secret_key=ONE), kid)
        assert key is not None
        assert key.secret == bytes.fromhex(secret)


async def test_one_secret_is_never_sealed_the_same_twice(engines: Any, rows: Any) -> None:
    engine = await engines(secret_key=ONE, waitpoint_hmac_secret=SecretStr(A))
    await rotate(engine, "v2", A)
    secrets = await stored(rows)
    assert secrets["k1"][1:13] != secrets["v2"][1:13]
    assert secrets["k1"][13:] != secrets["v2"][13:]


async def test_repeats_compare_what_is_sealed(engines: Any, rows: Any) -> None:
    one, other = [await engines(secret_key=ONE, waitpoint_hmac_secret=SecretStr(A)) for _ in range(2)]
    assert isinstance(await rotate(one, "v2", B), Rotated)
    async with rows.unchanged():
        for engine in (one, other, await engines(secret_key=ONE)):
            assert await seed(engine, "k1", A) == AlreadySeeded(kid="k1", same_secret=True)
            assert await seed(engine, "k1", C) == AlreadySeeded(kid="k1", same_secret=False)
            assert await rotate(engine, "v2", B) == AlreadyRotated(kid="v2")
            assert (await rotate(engine, "v2", C)).code == "rotation_conflict"


async def test_grants_and_tokens_of_one_process_count_in_another(engines: Any, given: Any) -> None:
    # `given` has an engine without the key, which knows the stored secret since its start.
    sealing, other = [await engines(secret_key=ONE) for _ in range(2)]
    execution_id = await given.created()
    await grant(sealing, execution_id)
    await claim_named(other, execution_id)
    wait = await waiting(sealing, given)
    wait.engine = other
    assert isinstance(await wait.send(), Accepted)


async def test_a_start_seals_what_was_stored_before_and_those_that_run_go_on(
    engine: Engine, engines: Any, url: str, rows: Any, given: Any, connection: Any
) -> None:
    wait = await waiting(engine, given)
    await rotate(engine, "v2", B)
    assert shows(await stored(rows), B)
    idle = await engines()
    # One whose grace has ended is sealed too.
    await connection.execute("insert into signing_key values ('v0', $1, false, 1, 1)", bytes.fromhex(A))
    sealing = await engines(secret_key=ONE)
    secrets = await stored(rows)
    assert set(secrets) == {"k1", "v0", "v2"}
    assert not shows(secrets, "ab" * 32, A, B)
    async with rows.unchanged():
        assert await sealing.prepare() == NothingToPrepare()
        await started(url, secret_key=ONE)
    # A process without the key goes on with what it knows, and adds nothing in the open.
    wait.engine = idle
    assert isinstance(await wait.send(), Accepted)
    await waiting(idle, given, lane_id="idle")
    async with rows.unchanged():
        await refused(rotate(engine, "v3", C), "corruption", "FF_SECRET_KEY")
    assert isinstance(await rotate(sealing, "v3", C), Rotated)
    handle = await given.claimed(lane_id="other")
    async with rows.unchanged():
        await refused(engine.create_waitpoint(handle, waitpoint_key="w", expires_in_ms=1000), "corruption", "v3")


async def test_what_a_start_does_with_the_keys_is_told(engines: Any, connection: Any) -> None:
    engine = await engines(secret_key=ONE, waitpoint_hmac_secret=SecretStr(A))
    await connection.execute("update signing_key set secret = $1", bytes.fromhex(A))
    assert await engine.prepare() == Applied(description="signing key k1 sealed")
    await connection.execute("delete from signing_key")
    assert await engine.prepare() == Applied(description="signing key k1")
    assert await engine.prepare() == NothingToPrepare()


async def test_an_engine_beside_one_that_runs_takes_the_keys_it_knows(
    engine: Engine, engines: Any, given: Any, connection: Any
) -> None:
    await engines(secret_key=ONE)
    async with engine_beside(engine) as other:
        await waiting(other, given)
    # The heartbeat of a worker connects whatever has become of the keys.
    await connection.execute("delete from signing_key")
    async with engine_beside(engine) as other:
        await refused(waiting(other, given), "hmac_secret_not_initialized")


@pytest.mark.parametrize(
    ("key", "told"),
    [
        (None, "FF_SECRET_KEY is not set: set it to the key that the signing key"),
        (OTHER, "FF_SECRET_KEY is not the key"),
    ],
    ids=["none", "other"],
)
async def test_nobody_starts_without_the_key_that_the_secrets_are_sealed_under(
    engines: Any, url: str, rows: Any, key: SecretStr | None, told: str
) -> None:
    await engines(secret_key=ONE)
    async with rows.unchanged():
        with pytest.raises(UnavailableError, match=told) as refusal:
            await started(url, secret_key=key)
    assert "01" * 32 not in str(refusal.value)


async def test_a_sealed_secret_counts_under_its_own_name_alone(engines: Any, url: str, connection: Any) -> None:
    engine = await engines(secret_key=ONE)
    await rotate(engine, "v2", B)
    await connection.execute(
        "update signing_key set secret = (select secret from signing_key where kid = 'v2') where kid = 'k1'"
    )
    with pytest.raises(UnavailableError, match="'k1'"):
        await started(url, secret_key=ONE)


async def test_the_key_is_changed_with_the_old_one_beside_it(engines: Any, url: str, rows: Any) -> None:
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


async def test_processes_that_seal_at_once_all_start(keyless: Engine, url: str, connection: Any, rows: Any) -> None:
    for _ in range(5):
        await connection.execute("delete from signing_key")
        await rotate(keyless, "v1", A)
        found = await asyncio.gather(*(started(url, secret_key=ONE) for _ in range(4)))
        assert {each.current_kid for each in found} == {"v1"}
        assert not shows(await stored(rows), A)


async def test_who_waits_to_seal_judges_the_secrets_as_they_are_then(
    keyless: Engine, url: str, connection: Any, rows: Any, eventually: Any
) -> None:
    await rotate(keyless, "v1", A)
    sealed = Seals([bytes.fromhex(OTHER.get_secret_value())]).seal("v1", bytes.fromhex(A))
    waits = "select exists (select from pg_locks where relation = 'signing_key'::regclass and not granted)"
    async with connection.transaction():
        # As another process does that seals under another key.
        await connection.execute("lock table signing_key in share row exclusive mode")
        starting = asyncio.create_task(started(url, secret_key=ONE))
        await eventually(lambda: connection.fetchval(waits))
        await connection.execute("update signing_key set secret = $1", sealed)
    with pytest.raises(UnavailableError, match="FF_SECRET_KEY is not the key"):
        await starting
    assert await stored(rows) == {"v1": sealed}


async def test_a_secret_is_opened_once(engines: Any, given: Any, connection: Any) -> None:
    engine = await engines(secret_key=ONE)
    wait = await waiting(engine, given)
    # What no process can open is not looked at by one that has opened it before.
    await connection.execute("update signing_key set secret = set_byte(secret, 60, 1 # get_byte(secret, 60))")
    assert isinstance(await wait.send(), Accepted)
