"""Starting with signing keys: which one is installed, and that a store without one is told of at once."""

import asyncio
import logging
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr

from engine.core.test_keys import A, B, rotate, seed, verifying
from engine.state import refused
from flowfabric.db.embedded import Embedded
from flowfabric.engine.engine import Engine, engine_beside
from flowfabric.model.errors import UnavailableError
from flowfabric.model.key import HmacKids
from flowfabric.model.support import NothingToPrepare
from flowfabric.settings import Settings, SettingsError


async def kids(settings: Settings) -> HmacKids:
    """The names of the keys after a start with these settings."""
    async with Engine.connect(settings=settings) as engine:
        return await engine.list_waitpoint_hmac_kids()


async def test_a_start_seeds_the_configured_secret(url: str, rows: Any) -> None:
    settings = Settings(database_url=url, waitpoint_hmac_secret=SecretStr(A))
    assert (await kids(settings)).current_kid == "k1"
    (stored,) = await rows.of("signing_key")
    assert stored["secret"] == bytes.fromhex(A)
    async with rows.unchanged():
        await kids(settings)


@pytest.mark.parametrize("secret", [None, ""], ids=["absent", "empty"])
async def test_a_store_without_a_key_is_not_started_without_a_secret(url: str, rows: Any, secret: str | None) -> None:
    given = None if secret is None else SecretStr(secret)
    with pytest.raises(UnavailableError, match="set FF_WAITPOINT_HMAC_SECRET to 64 hex digits"):
        await kids(Settings(database_url=url, waitpoint_hmac_secret=given))
    assert await rows.of("signing_key") == []


async def test_a_store_with_a_key_needs_no_secret(engine: Engine, url: str, rows: Any) -> None:
    await rotate(engine, "v9", A, grace_ms=0)
    async with rows.unchanged():
        assert (await kids(Settings(database_url=url, waitpoint_hmac_secret=None))).current_kid == "v9"


async def test_processes_that_start_at_once_install_one_key(keyless: Engine, url: str, connection: Any) -> None:
    for _ in range(10):
        await connection.execute("delete from signing_key")
        found = await asyncio.gather(
            *(kids(Settings(database_url=url, waitpoint_hmac_secret=SecretStr(A))) for _ in range(4))
        )
        assert found == [HmacKids(current_kid="k1", verifying=())] * 4


async def test_an_embedded_store_generates_its_first_key_and_keeps_it(tmp_path: Path) -> None:
    home = tmp_path / "home"
    secrets = []
    try:
        for _ in range(2):
            async with Engine.connect(settings=Settings(home=home, waitpoint_hmac_secret=None)) as engine:
                assert (await engine.list_waitpoint_hmac_kids()).current_kid == "k1"
                assert await engine.prepare() == NothingToPrepare()
                key = await verifying(engine, "k1")
                assert key is not None
                secrets.append(key.secret)
    finally:
        (await asyncio.to_thread(Embedded.start, home)).release(discard=True)
    assert secrets[0] == secrets[1]
    assert len(secrets[0]) == 32


@pytest.mark.parametrize("is_rotated", [False, True], ids=["other secret", "other key"])
async def test_a_stored_key_is_kept_over_another_configured_one_with_a_warning(
    keyless: Engine,
    url: str,
    rows: Any,
    caplog: pytest.LogCaptureFixture,
    is_rotated: bool,  # noqa: FBT001
) -> None:
    if is_rotated:
        await rotate(keyless, "v9", A)
    else:
        await seed(keyless, "k1", A)
    async with rows.unchanged():
        with caplog.at_level(logging.WARNING):
            await kids(Settings(database_url=url, waitpoint_hmac_secret=SecretStr(B)))
    assert "FF_WAITPOINT_HMAC_SECRET differs from every stored signing key and has no effect" in caplog.text
    assert A not in caplog.text
    assert B not in caplog.text


async def test_a_stored_secret_that_is_none_stops_only_who_signs_with_it(
    engine: Engine, url: str, given: Any, connection: Any
) -> None:
    handle = await given.claimed()
    # What a broken version stored.
    await connection.execute("update signing_key set secret = 'short'")
    async with Engine.connect(settings=Settings(database_url=url)) as other:
        await refused(other.create_waitpoint(handle, waitpoint_key="wait", expires_in_ms=1000), "corruption")
        await other.complete(handle)


async def test_the_secret_of_any_stored_key_may_be_configured(
    keyless: Engine, url: str, caplog: pytest.LogCaptureFixture
) -> None:
    await rotate(keyless, "v9", A)
    with caplog.at_level(logging.WARNING):
        assert (await kids(Settings(database_url=url, waitpoint_hmac_secret=SecretStr(A)))).current_kid == "v9"
    assert caplog.text == ""


async def test_an_engine_beside_another_does_not_seed_or_warn_again(url: str, caplog: pytest.LogCaptureFixture) -> None:
    async with Engine.connect(settings=Settings(database_url=url, waitpoint_hmac_secret=SecretStr(A))) as engine:
        await rotate(engine, "k2", B, grace_ms=0)
        with caplog.at_level(logging.WARNING):
            async with engine_beside(engine) as other:
                assert (await other.list_waitpoint_hmac_kids()).current_kid == "k2"
    assert caplog.text == ""


@pytest.mark.parametrize("secret", ["short", "g" * 64])
def test_a_configured_secret_that_is_none_is_refused_without_being_shown(
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
