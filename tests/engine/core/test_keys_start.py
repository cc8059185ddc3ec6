"""Signing keys at a start: which one is installed, and when a start is refused."""

import asyncio
import logging

import asyncpg
import pytest
from pydantic import SecretStr

from engine.core.test_keys import A, B, rotate
from engine.state import refused, rounds
from fixtures import Given, Rows
from flowfabric.engine.engine import Engine, second_engine
from flowfabric.errors import SettingsError
from flowfabric.model.errors import UnavailableError
from flowfabric.model.key import HmacKids
from flowfabric.settings import Settings


async def kids(settings: Settings) -> HmacKids:
    """The names of the keys after a start with these settings."""
    async with Engine.connect(settings=settings) as engine:
        return await engine.list_waitpoint_hmac_kids()


async def test_a_start_installs_the_configured_secret(url: str, rows: Rows) -> None:
    settings = Settings(database_url=url, waitpoint_hmac_secret=SecretStr(A))
    assert (await kids(settings)).current_kid == "k1"
    (stored,) = await rows.of("signing_key")
    assert stored["secret"] == bytes.fromhex(A)
    async with rows.unchanged():
        await kids(settings)


async def test_a_store_without_a_key_does_not_start_without_a_secret(url: str, rows: Rows) -> None:
    for secret in (None, SecretStr("")):
        with pytest.raises(UnavailableError, match="set FF_WAITPOINT_HMAC_SECRET to 64 hex digits"):
            await kids(Settings(database_url=url, waitpoint_hmac_secret=secret))
    assert await rows.of("signing_key") == []


async def test_concurrent_starts_install_one_key(keyless: Engine, url: str, connection: asyncpg.Connection) -> None:
    for _ in rounds(3, whole=10):
        await connection.execute("delete from signing_key")
        found = await asyncio.gather(
            *(kids(Settings(database_url=url, waitpoint_hmac_secret=SecretStr(A))) for _ in range(4))
        )
        assert found == [HmacKids(current_kid="k1", verifying=())] * 4


async def test_a_stored_key_is_kept_and_another_configured_secret_is_warned_of(
    keyless: Engine, url: str, rows: Rows, connection: asyncpg.Connection, caplog: pytest.LogCaptureFixture
) -> None:
    for kid in ("k1", "v9"):
        await connection.execute("delete from signing_key")
        await rotate(keyless, kid, A)
        caplog.clear()
        async with rows.unchanged():
            with caplog.at_level(logging.WARNING):
                await kids(Settings(database_url=url, waitpoint_hmac_secret=SecretStr(B)))
        assert "FF_WAITPOINT_HMAC_SECRET differs from every stored signing key and has no effect" in caplog.text
        assert A not in caplog.text
        assert B not in caplog.text
        caplog.clear()
        # The secret of a stored key may be configured, and none need be.
        for secret in (SecretStr(A), None):
            with caplog.at_level(logging.WARNING):
                assert (await kids(Settings(database_url=url, waitpoint_hmac_secret=secret))).current_kid == kid
        assert caplog.text == ""


async def test_a_malformed_stored_secret_fails_only_the_calls_that_sign_with_it(
    engine: Engine, url: str, given: Given, connection: asyncpg.Connection
) -> None:
    handle = await given.claimed()
    # What a broken version stored.
    await connection.execute("update signing_key set secret = 'short'")
    async with Engine.connect(settings=Settings(database_url=url)) as other:
        await refused(other.create_waitpoint(handle, waitpoint_key="wait", expires_in_ms=1000), "corruption")
        await other.complete(handle)


async def test_a_second_engine_does_not_seed_or_warn_again(url: str, caplog: pytest.LogCaptureFixture) -> None:
    async with Engine.connect(settings=Settings(database_url=url, waitpoint_hmac_secret=SecretStr(A))) as engine:
        await rotate(engine, "k2", B, grace_ms=0)
        with caplog.at_level(logging.WARNING):
            async with second_engine(engine) as other:
                assert (await other.list_waitpoint_hmac_kids()).current_kid == "k2"
    assert caplog.text == ""


@pytest.mark.parametrize("secret", ["short", "g" * 64])
def test_a_malformed_configured_secret_is_refused_without_being_shown(
    monkeypatch: pytest.MonkeyPatch, secret: str
) -> None:
    with pytest.raises(SettingsError, match="FF_WAITPOINT_HMAC_SECRET: must be 64 hex digits") as refusal:
        Settings(waitpoint_hmac_secret=SecretStr(secret))
    assert secret not in str(refusal.value)
    monkeypatch.setenv("FF_WAITPOINT_HMAC_SECRET", secret)
    with pytest.raises(SettingsError, match="FF_WAITPOINT_HMAC_SECRET") as refusal:
        Settings()
    assert secret not in str(refusal.value)


def test_settings_do_not_show_the_secret() -> None:
    settings = Settings(waitpoint_hmac_secret=SecretStr(A))
    assert A not in f"{settings!r} {settings} {settings.model_dump()}"
