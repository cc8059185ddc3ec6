"""Settings: read from FF_ variables, overridden by code, frozen, and with clear error messages."""

import json
import os
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
from pydantic import AliasChoices, SecretStr, ValidationError

from flowfabric.errors import SettingsError
from flowfabric.settings import Settings, SettingsFields


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("FF_")]:
        monkeypatch.delenv(name)


def test_without_variables_the_defaults_apply() -> None:
    settings = Settings()
    assert (
        settings.model_dump().items()
        >= {
            "database_url": None,
            "home": Path(".flowfabric"),
            "database_pool_size": 10,
            "schema_name": "flowfabric",
            "migrate_on_start": None,
            "lanes": ("default",),
            "flow_partitions": 256,
            "budget_partitions": 32,
            "quota_partitions": 32,
            "feed_retention_ms": 86_400_000,
            "instance_tag": "ff.instance_id",
            "lease_renewal_events": True,
            "lease_expiry_interval_ms": 1500,
            "delayed_promoter_interval_ms": 750,
            "attempt_timeout_interval_s": 2,
            "execution_deadline_interval_s": 5,
            "suspension_timeout_interval_s": 2,
            "pending_wp_expiry_interval_s": 5,
            "retention_trimmer_interval_s": 60,
            "max_concurrent_stream_ops": None,
        }.items()
    )


@pytest.mark.parametrize(
    ("variable", "text", "field", "value"),
    [
        ("FF_DATABASE_URL", "postgresql://host/db", "database_url", "postgresql://host/db"),
        ("FF_DATABASE_URL", "", "database_url", None),
        ("FF_HOME", "/srv/ff", "home", Path("/srv/ff")),
        ("FF_DATABASE_POOL_SIZE", "3", "database_pool_size", 3),
        ("FF_SCHEMA", "tenant_1", "schema_name", "tenant_1"),
        ("FF_MIGRATE_ON_START", "no", "migrate_on_start", False),
        ("FF_LANES", "fast, slow,,fast", "lanes", ("fast", "slow")),
        ("FF_FLOW_PARTITIONS", "32768", "flow_partitions", 32768),
        ("FF_FEED_RETENTION_MS", "1000", "feed_retention_ms", 1000),
        ("FF_INSTANCE_TAG", "my.tag", "instance_tag", "my.tag"),
        ("FF_LEASE_RENEWAL_EVENTS", "false", "lease_renewal_events", False),
        ("FF_CALLBACK_URL", "https://app.example/callbacks", "callback_url", "https://app.example/callbacks"),
        ("FF_CALLBACK_URL", "", "callback_url", None),
        ("FF_MAX_CONCURRENT_STREAM_OPS", "8", "max_concurrent_stream_ops", 8),
        ("FF_MAX_CONCURRENT_STREAM_OPS", "", "max_concurrent_stream_ops", None),
        ("FF_MAX_CONCURRENT_TAIL", "8", "max_concurrent_stream_ops", 8),
        ("FF_LEASE_EXPIRY_INTERVAL_MS", "200", "lease_expiry_interval_ms", 200),
    ],
)
def test_a_variable_sets_its_field(
    monkeypatch: pytest.MonkeyPatch, variable: str, text: str, field: str, value: object
) -> None:
    monkeypatch.setenv(variable, text)
    assert getattr(Settings(), field) == value


@pytest.mark.parametrize(
    ("variable", "text", "given"),
    [
        ("FF_DATABASE_URL", "postgresql://host/db", {"database_url": None}),
        ("FF_SCHEMA", "from_outside", {"schema_name": "from_code"}),
        ("FF_LANES", "outside", {"lanes": ("code",)}),
        ("FF_DATABASE_POOL_SIZE", "3", {"database_pool_size": 4}),
    ],
)
def test_code_overrides_the_environment(
    monkeypatch: pytest.MonkeyPatch, variable: str, text: str, given: dict[str, Any]
) -> None:
    monkeypatch.setenv(variable, text)
    settings = Settings(**given)
    assert {name: getattr(settings, name) for name in given} == given


@pytest.mark.parametrize(
    ("variable", "text"),
    [
        ("FF_HOME", ""),
        ("FF_DATABASE_POOL_SIZE", "0"),
        ("FF_DATABASE_POOL_SIZE", "ten"),
        ("FF_SCHEMA", "Not Plain"),
        ("FF_SCHEMA", "x" * 58),
        ("FF_MIGRATE_ON_START", "perhaps"),
        ("FF_LANES", " ,"),
        ("FF_LANES", ""),
        ("FF_FLOW_PARTITIONS", "0"),
        ("FF_BUDGET_PARTITIONS", "32769"),
        ("FF_QUOTA_PARTITIONS", "-1"),
        ("FF_FEED_RETENTION_MS", "1.5"),
        ("FF_INSTANCE_TAG", ""),
        ("FF_CALLBACK_URL", "app.example"),
        ("FF_LANES", "fast," + "x" * 65),
        ("FF_LANES", "bücher"),
        ("FF_LEASE_EXPIRY_INTERVAL_MS", "1.5"),
        ("FF_RETENTION_TRIMMER_INTERVAL_S", "0"),
    ],
)
def test_an_invalid_value_is_refused_with_the_name_of_its_variable(
    monkeypatch: pytest.MonkeyPatch, variable: str, text: str
) -> None:
    monkeypatch.setenv(variable, text)
    shown = text or "''"
    with pytest.raises(SettingsError, match=f"^{re.escape(variable)}={re.escape(shown)}: "):
        Settings()


def test_an_invalid_value_from_code_is_refused_with_the_name_of_its_variable() -> None:
    with pytest.raises(SettingsError, match=r"^FF_SCHEMA=Not Plain: "):
        Settings(schema_name="Not Plain")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"retention_ms": -1}, "FF_RETENTION_MS=-1: must be a whole number of at least 1"),
        ({"retention_ms": "abc"}, "FF_RETENTION_MS=abc: must be a whole number of at least 1"),
        ({"retention_ms": ""}, "FF_RETENTION_MS='': must be a whole number of at least 1"),
        ({"retention_ms": 1.5}, "FF_RETENTION_MS=1.5: must be a whole number of at least 1"),
        ({"retention_ms": float("inf")}, "FF_RETENTION_MS=inf: must be a whole number of at least 1"),
        ({"retention_ms": None}, "FF_RETENTION_MS=None: must be a whole number of at least 1"),
        (
            {"max_concurrent_stream_ops": 0},
            "FF_MAX_CONCURRENT_STREAM_OPS=0: must be a whole number of at least 1",
        ),
        ({"submit_patience_ms": -1}, "FF_SUBMIT_PATIENCE_MS=-1: must be a whole number of at least 0"),
        ({"flow_partitions": 32769}, "FF_FLOW_PARTITIONS=32769: must be a whole number from 1 to 32768"),
        ({"listen": "loud"}, "FF_LISTEN=loud: must be true or false"),
        ({"listen": []}, "FF_LISTEN=[]: must be true or false"),
        ({"migrate_on_start": "perhaps"}, "FF_MIGRATE_ON_START=perhaps: must be true or false"),
        ({"instance_tag": ""}, "FF_INSTANCE_TAG='': must not be empty"),
        ({"schema_name": 5}, "FF_SCHEMA=5: must be text"),
        ({"database_url": 5}, "FF_DATABASE_URL: must be text"),
        ({"secret_key": 5}, "FF_SECRET_KEY: must be text"),
        ({"home": 5}, "FF_HOME=5: must be a path"),
        ({"lanes": 5}, "FF_LANES=5: must be a list of names"),
        ({"lanes": [5]}, "FF_LANES=5: must be text"),
        (
            {"edge_cancel_dispatcher_interval_s": 3, "edge_cancel_reconciler_interval_s": 3},
            "FF_EDGE_CANCEL_RECONCILER_INTERVAL_S=3: must be greater than FF_EDGE_CANCEL_DISPATCHER_INTERVAL_S, which "
            "is 3",
        ),
        (
            {"edge_cancel_dispatcher_interval_s": 60},
            "FF_EDGE_CANCEL_RECONCILER_INTERVAL_S=10: must be greater than FF_EDGE_CANCEL_DISPATCHER_INTERVAL_S, which "
            "is 60",
        ),
    ],
)
def test_an_error_says_what_the_value_must_be(given: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError) as refused:
        Settings(**given)
    assert str(refused.value) == message


def test_of_two_variables_of_a_setting_the_first_one_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FF_MAX_CONCURRENT_TAIL", "5")
    monkeypatch.setenv("FF_MAX_CONCURRENT_STREAM_OPS", "6")
    assert Settings().max_concurrent_stream_ops == 6
    assert Settings(max_concurrent_stream_ops=7).max_concurrent_stream_ops == 7


def test_an_invalid_value_is_refused_with_the_name_of_the_variable_that_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FF_MAX_CONCURRENT_TAIL", "many")
    with pytest.raises(SettingsError, match="FF_MAX_CONCURRENT_TAIL=many: must be a whole number of at least 1"):
        Settings()


def test_one_error_lists_all_invalid_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FF_LISTEN", "loud")
    monkeypatch.setenv("FF_DATABASE_POOL_SIZE", "0")
    with pytest.raises(SettingsError, match=r"FF_DATABASE_POOL_SIZE=0: .*; FF_LISTEN=loud: "):
        Settings()


def test_an_error_does_not_show_the_password(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FF_DATABASE_URL", "mysql://user:pa55word@host/db")
    with pytest.raises(SettingsError, match=r"^FF_DATABASE_URL: must begin with postgresql://, as in "):
        Settings()
    assert "pa55word" not in repr(Settings(database_url="postgresql://user:pa55word@host/db"))


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("postgresql://user:pa55word@host/db", "postgresql://user:**********@host/db"),
        ("postgres://user:pa55word%3A%40@a:1,b:2/db?x=1", "postgres://user:**********@a:1,b:2/db?x=1"),
        ("postgresql://:pa55word@host/db", "postgresql://:**********@host/db"),
        (
            "postgresql://user@host/db?password=pa55word&sslmode=require&sslpassword=pa55word",
            "postgresql://user@host/db?password=**********&sslmode=require&sslpassword=**********",
        ),
        ("postgresql:///db?%70assword=pa55word", "postgresql:///db?%70assword=**********"),
        ("postgresql://user@host/db", "postgresql://user@host/db"),
        ("postgresql:///db?host=/run/postgresql", "postgresql:///db?host=/run/postgresql"),
        (None, None),
    ],
)
def test_dumped_settings_mask_the_password_of_the_url(url: str | None, shown: str | None) -> None:
    settings = Settings(database_url=url)
    dumped = [settings.model_dump(), settings.model_dump(mode="json"), json.loads(settings.model_dump_json())]
    assert [each["database_url"] for each in dumped] == [shown] * 3
    assert "pa55word" not in f"{dumped} {settings!r} {settings} {settings.model_dump_json()}"
    assert dict(settings)["database_url"] == shown
    assert "pa55word" not in f"{dict(settings)} {list(settings)} {[*settings]}"
    assert dict(settings).keys() == Settings.model_fields.keys()
    assert settings.database_url == url
    assert settings.model_copy().database_url == pickle.loads(pickle.dumps(settings)).database_url == url


def test_a_masked_url_is_refused() -> None:
    dumped = Settings(database_url="postgresql://user:pa55word@host/db").model_dump()
    with pytest.raises(SettingsError, match=r"^FF_DATABASE_URL: its password is masked by asterisks; "):
        Settings(database_url=dumped["database_url"])


def test_dumped_settings_mask_secrets() -> None:
    settings = Settings(waitpoint_hmac_secret="ab" * 32, secret_key="cd" * 32, secret_key_old="ef" * 32)
    text = f"{settings.model_dump()} {settings.model_dump_json()} {settings!r} {settings}"
    assert not any(secret in text for secret in ("abab", "cdcd", "efef"))


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://user:pa55word@host:99999/db",
        "postgresql://user:pa55word@host:0/db",
        "postgresql://user:pa55word@host:-1/db",
        "postgresql://user:pa55word@host:abc/db",
        "postgresql://user:pa55word@[::1/db",
        "postgresql://user:pa55word@[::1]:abc/db",
        "postgresql://user:pa55word@::1/db",
        "postgresql://user:pa55word/x@host/db",
        "postgresql://user:pa55word[@host/db",
        "postgresql://user:pa55word@a:1,b:x/db",
        "postgresql://user:pa55word@/db?host=/run&port=99999",
        "postgresql://user:pa55word℀@host/db",
    ],
    ids=range(12),
)
def test_an_unusable_url_is_refused_without_showing_its_password(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    monkeypatch.setenv("FF_DATABASE_URL", url)
    with pytest.raises(SettingsError, match=r"^FF_DATABASE_URL: ") as refused:
        Settings()
    assert "pa55word" not in f"{refused.value} {refused.value!r}"
    assert refused.value.__cause__ is None


@pytest.mark.parametrize(
    "url",
    [
        "postgresql:///db",
        "postgres://host",
        "postgresql://user:pa%2F55@host:65535/db?sslmode=require",
        "postgresql://user@[::1]:5432/db",
        "postgresql://a:1,b:2/db",
        "postgresql://user@/db?host=/run/postgresql&port=5433",
        "postgresql://%2Frun%2Fpostgresql/db",
    ],
)
def test_every_url_that_postgres_accepts_is_accepted(url: str) -> None:
    assert Settings(database_url=url).database_url == url


@pytest.mark.parametrize("name", ["FF_WAITPOINT_HMAC_SECRET", "FF_SECRET_KEY", "FF_SECRET_KEY_OLD"])
def test_a_secret_must_be_hex_and_is_never_shown(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv("FF_SECRET_KEY", "cd" * 32)
    monkeypatch.setenv(name, "pa55word")
    with pytest.raises(SettingsError, match=rf"^{name}: must be 64 hex digits, as "):
        Settings()
    monkeypatch.setenv(name, "ab" * 32)
    settings = Settings()
    assert "abab" not in f"{settings!r} {settings} {settings.model_dump()}"


def test_the_new_key_comes_before_the_old_one_which_needs_it() -> None:
    new, old = SecretStr("ab" * 32), SecretStr("cd" * 32)
    assert Settings().secret_keys == []
    assert Settings(secret_key=new).secret_keys == [b"\xab" * 32]
    assert Settings(secret_key=new, secret_key_old=old).secret_keys == [b"\xab" * 32, b"\xcd" * 32]
    for nothing in (None, SecretStr("")):
        with pytest.raises(
            SettingsError,
            match=r"^FF_SECRET_KEY_OLD: is set and FF_SECRET_KEY is not: set FF_SECRET_KEY to the new key",
        ):
            Settings(secret_key=nothing, secret_key_old=old)
    with pytest.raises(SettingsError, match=r"^FF_SECRET_KEY: must be 64 hex digits, as "):
        Settings(secret_key=SecretStr("short"), secret_key_old=old)


def test_an_unknown_setting_is_refused() -> None:
    given: dict[str, Any] = {"pool": 3}
    with pytest.raises(SettingsError, match="there is no setting pool"):
        Settings(**given)


def test_code_may_pass_every_setting_in_every_accepted_type() -> None:
    assert set(SettingsFields.__annotations__) == {*Settings.model_fields, "schema"}
    settings = Settings(schema="tenant", home="x", lanes=["a", "b"], secret_key="ab" * 32)
    assert (settings.schema_name, settings.home, settings.lanes) == ("tenant", Path("x"), ("a", "b"))
    assert settings.secret_keys == [b"\xab" * 32]
    with pytest.raises(SettingsError, match=r"^FF_SCHEMA=a-b: "):
        Settings(schema="a-b")
    with pytest.raises(SettingsError, match="there is no setting schema"):
        Settings(schema="a", schema_name="b")


def test_an_unknown_variable_is_logged_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("FF_DATABSE_URL", "postgresql://user:pa55word@host/db")
    monkeypatch.setenv("FF_QWERTY", "1")
    monkeypatch.setenv("FF_LISTEN", "false")
    monkeypatch.setenv("FF_TEST_POSTGRES", "16")
    monkeypatch.setenv("SCHEMA", "of_others")
    for _ in range(2):
        assert Settings().schema_name == "flowfabric"
    assert [record.getMessage() for record in caplog.records] == [
        "FF_DATABSE_URL is not a setting and has no effect; did you mean FF_DATABASE_URL?",
        "FF_QWERTY is not a setting and has no effect",
    ]


def test_known_variables_are_not_logged(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    values = {"FF_HOME": "x", "FF_SCHEMA": "x", "FF_TEST_POSTGRES": "18", "FF_TEST_DATABASE_URL": "x"}
    for name, field in Settings.model_fields.items():
        value = field.default
        alias = field.validation_alias
        variable = str(alias.choices[0] if isinstance(alias, AliasChoices) else alias or f"FF_{name.upper()}")
        values.setdefault(
            variable, "" if value is None else ",".join(value) if isinstance(value, tuple) else str(value)
        )
    del values["FF_MIGRATE_ON_START"]
    for variable, text in values.items():
        monkeypatch.setenv(variable, text)
    Settings()
    assert caplog.text == ""


def test_settings_are_frozen() -> None:
    settings = Settings()
    with pytest.raises((SettingsError, ValidationError), match="frozen"):
        settings.database_pool_size = 3


@pytest.mark.parametrize(
    ("url", "asked", "migrates"),
    [
        (None, None, True),
        (None, False, False),
        ("postgresql://host/db", None, False),
        ("postgresql://host/db", True, True),
    ],
)
def test_only_an_embedded_database_is_migrated_by_default(
    *, url: str | None, asked: bool | None, migrates: bool
) -> None:
    assert Settings(database_url=url, migrate_on_start=asked).migrates is migrates
