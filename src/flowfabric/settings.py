"""The configuration of a process: from the environment, overridden by code."""

import logging
import os
import re
from collections.abc import Generator, Sequence
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Self, TypedDict, Unpack
from urllib.parse import unquote

from pydantic import (
    AliasChoices,
    Field,
    ModelWrapValidatorHandler,
    SecretStr,
    ValidationError,
    ValidationInfo,
    field_serializer,
    field_validator,
    model_validator,
)
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

from flowfabric.db.address import check_url
from flowfabric.db.migrate import check_schema_name
from flowfabric.model.errors import EngineError
from flowfabric.model.flow import MAX_CANCEL_GRACE_MS
from flowfabric.model.ids import MAX_PARTITION_COUNT, check_lane_id
from flowfabric.model.key import check_secret
from flowfabric.model.text import did_you_mean

logger = logging.getLogger(__name__)

PREFIX = "FF_"
TEST_PREFIX = f"{PREFIX}TEST_"
"""The prefix of variables that only the tests of this package read."""

Count = Annotated[int, Field(ge=1)]
PartitionCount = Annotated[int, Field(ge=1, le=MAX_PARTITION_COUNT)]


# A database URL may contain a password.
_NEVER_SHOWN = frozenset(
    f"{PREFIX}{name}" for name in ("DATABASE_URL", "WAITPOINT_HMAC_SECRET", "SECRET_KEY", "SECRET_KEY_OLD")
)

_REQUIREMENTS = {
    "path_type": "must be a path",
    "string_too_short": "must not be empty",
    "string_type": "must be text",
    "tuple_type": "must be a list of names",
}
"""What a value must be, by the kind of Pydantic's error."""

_MASK = "*" * 10
_ADDRESS = re.compile(r"(?P<scheme>\w+://)(?P<server>[^/?#]*)(?P<path>[^?]*)(?P<query>.*)", re.DOTALL)


class SettingsError(RuntimeError):
    """An invalid setting; the message names its environment variable."""


class SettingsFields(TypedDict, total=False):
    """The keyword arguments of Settings, with every accepted type; others are read from the environment."""

    database_url: str | None
    home: Path | str
    database_pool_size: int
    statement_timeout_ms: int
    idle_in_transaction_timeout_ms: int
    submit_patience_ms: int
    schema: str
    """The same as `schema_name`."""
    schema_name: str
    migrate_on_start: bool | None
    lanes: Sequence[str]
    flow_partitions: int
    budget_partitions: int
    quota_partitions: int
    listen: bool
    retention_ms: int
    feed_retention_ms: int
    instance_tag: str
    lease_renewal_events: bool
    waitpoint_hmac_secret: SecretStr | str | None
    secret_key: SecretStr | str | None
    secret_key_old: SecretStr | str | None
    callback_url: str | None
    max_concurrent_stream_ops: int | None
    lease_expiry_interval_ms: int
    delayed_promoter_interval_ms: int
    attempt_timeout_interval_s: int
    execution_deadline_interval_s: int
    suspension_timeout_interval_s: int
    pending_wp_expiry_interval_s: int
    unblock_interval_s: int
    dependency_reconciler_interval_s: int
    edge_cancel_dispatcher_interval_s: int
    edge_cancel_reconciler_interval_s: int
    flow_projector_interval_s: int
    retention_trimmer_interval_s: int
    cancel_reconciler_interval_s: int
    quota_reconciler_interval_s: int
    cancel_grace_ms: int
    budget_reset_interval_s: int
    budget_reconciler_interval_s: int


class Settings(BaseSettings):
    """The configuration of one process; `database_pool_size` is `FF_DATABASE_POOL_SIZE` and so on."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, frozen=True, extra="forbid", populate_by_name=True)

    database_url: Annotated[str | None, Field(repr=False)] = None
    home: Path = Path(".flowfabric")
    database_pool_size: Count = 10
    statement_timeout_ms: Count = 6_000
    idle_in_transaction_timeout_ms: Count = 5_000
    submit_patience_ms: Annotated[int, Field(ge=0)] = 5_000
    schema_name: Annotated[str, Field(validation_alias="FF_SCHEMA")] = "flowfabric"
    migrate_on_start: bool | None = None
    lanes: Annotated[tuple[str, ...], NoDecode] = ("default",)
    flow_partitions: PartitionCount = 256
    budget_partitions: PartitionCount = 32
    quota_partitions: PartitionCount = 32
    listen: bool = True
    retention_ms: Count = 86_400_000
    feed_retention_ms: Count = 86_400_000
    instance_tag: Annotated[str, Field(min_length=1)] = "ff.instance_id"
    lease_renewal_events: bool = True
    waitpoint_hmac_secret: SecretStr | None = None
    secret_key: SecretStr | None = None
    secret_key_old: SecretStr | None = None
    callback_url: str | None = None
    max_concurrent_stream_ops: Annotated[
        int | None,
        Field(ge=1, validation_alias=AliasChoices("FF_MAX_CONCURRENT_STREAM_OPS", "FF_MAX_CONCURRENT_TAIL")),
    ] = None
    lease_expiry_interval_ms: Count = 1_500
    delayed_promoter_interval_ms: Count = 750
    attempt_timeout_interval_s: Count = 2
    execution_deadline_interval_s: Count = 5
    suspension_timeout_interval_s: Count = 2
    pending_wp_expiry_interval_s: Count = 5
    unblock_interval_s: Count = 5
    dependency_reconciler_interval_s: Count = 15
    edge_cancel_dispatcher_interval_s: Count = 1
    edge_cancel_reconciler_interval_s: Count = 10
    flow_projector_interval_s: Count = 15
    retention_trimmer_interval_s: Count = 60
    cancel_reconciler_interval_s: Count = 15
    quota_reconciler_interval_s: Count = 30
    cancel_grace_ms: Annotated[int, Field(ge=0, le=MAX_CANCEL_GRACE_MS)] = 30_000
    budget_reset_interval_s: Count = 15
    budget_reconciler_interval_s: Count = 30

    def __init__(self, **given: Unpack[SettingsFields]) -> None:
        """Read settings that are not given from the environment; log a warning for unknown FF_ variables."""
        values: dict[str, Any] = {**given}
        if "schema_name" not in values and "schema" in values:
            values["schema_name"] = values.pop("schema")
        super().__init__(**values)
        _warn_about_unknown(tuple(sorted(name for name in map(str.upper, os.environ) if _is_unknown(name))))

    def __iter__(self) -> Generator[tuple[str, Any], None, None]:
        """Names and values as they may be shown: the database URL without its passwords."""
        for name, value in super().__iter__():
            yield name, _masked(value) if name == "database_url" and value is not None else value

    @property
    def migrates(self) -> bool:
        """Whether this process migrates the schema when it starts; by default only an embedded one."""
        return self.database_url is None if self.migrate_on_start is None else self.migrate_on_start

    @property
    def secret_keys(self) -> list[bytes]:
        """The keys for stored secrets: the first encrypts, both decrypt."""
        given = (self.secret_key, self.secret_key_old)
        return [bytes.fromhex(key.get_secret_value()) for key in given if key is not None]

    @field_validator("database_url")
    @classmethod
    def _postgres_url(cls, url: str | None) -> str | None:
        if not url:
            return None
        if _MASK in url and _masked(url) == url:
            raise ValueError("its password is masked by asterisks; pass settings.database_url, not a dumped value")
        return check_url(url)

    @field_serializer("database_url")
    def _without_password(self, url: str | None) -> str | None:
        return None if url is None else _masked(url)

    @field_validator("callback_url")
    @classmethod
    def _http_url(cls, url: str | None) -> str | None:
        if url and not url.startswith(("https://", "http://")):
            raise ValueError("must begin with https:// or http://, for example https://app.example/callbacks")
        return url or None

    @field_validator("home", mode="before")
    @classmethod
    def _not_empty(cls, home: object) -> object:
        if home == "":
            raise ValueError("must name a folder; leave it unset to use .flowfabric")
        return home

    @field_validator("max_concurrent_stream_ops", mode="before")
    @classmethod
    def _unset_if_empty(cls, value: object) -> object:
        return None if value == "" else value

    @field_validator("schema_name")
    @classmethod
    def _valid_schema(cls, schema: str) -> str:
        return check_schema_name(schema)

    @field_validator("lanes", mode="before")
    @classmethod
    def _split_commas(cls, lanes: object) -> object:
        return lanes.split(",") if isinstance(lanes, str) else lanes

    @field_validator("lanes")
    @classmethod
    def _valid_lanes(cls, lanes: tuple[str, ...]) -> tuple[str, ...]:
        named = tuple(dict.fromkeys(lane.strip() for lane in lanes if lane.strip()))
        if not named:
            raise ValueError("must name at least one lane; leave it unset to use the lane default")
        try:
            return tuple(check_lane_id(lane) for lane in named)
        except EngineError as refused:
            raise ValueError(str(refused.detail)) from None

    @field_validator("waitpoint_hmac_secret", "secret_key", "secret_key_old")
    @classmethod
    def _hex_secret(cls, secret: SecretStr | None) -> SecretStr | None:
        if secret is None or not secret.get_secret_value():
            return None
        try:
            check_secret(secret.get_secret_value(), "invalid_input")
        except EngineError:
            raise ValueError("must be 64 hex digits, as `openssl rand -hex 32` prints them") from None
        return secret

    @field_validator("secret_key_old")
    @classmethod
    def _needs_new_key(cls, old: SecretStr | None, info: ValidationInfo) -> SecretStr | None:
        if old is not None and info.data.get("secret_key", old) is None:
            raise ValueError("is set and FF_SECRET_KEY is not: set FF_SECRET_KEY to the new key, or leave both unset")
        return old

    @field_validator("edge_cancel_reconciler_interval_s")
    @classmethod
    def _slower_than_dispatcher(cls, interval: int, info: ValidationInfo) -> int:
        # Absent if it is invalid itself.
        dispatcher = info.data.get("edge_cancel_dispatcher_interval_s", 0)
        if interval <= dispatcher:
            raise ValueError(f"must be greater than FF_EDGE_CANCEL_DISPATCHER_INTERVAL_S, which is {dispatcher}")
        return interval

    @model_validator(mode="wrap")
    @classmethod
    def _report_variables(cls, values: object, build: ModelWrapValidatorHandler[Self]) -> Self:
        try:
            return build(values)
        except ValidationError as invalid:
            raise SettingsError("; ".join(_message(cls, error) for error in invalid.errors())) from None


def _masked(url: str) -> str:
    """The URL with asterisks in place of its passwords."""
    found = _ADDRESS.fullmatch(url)
    if found is None:
        return _MASK
    login, at, hosts = found["server"].rpartition("@")
    user, colon, _ = login.partition(":")
    parts = []
    for part in found["query"].removeprefix("?").split("&"):
        name, equals, _ = part.partition("=")
        parts.append(f"{name}={_MASK}" if equals and "password" in unquote(name).lower() else part)
    query = f"?{'&'.join(parts)}" if found["query"] else ""
    return f"{found['scheme']}{user}{colon}{_MASK if colon else ''}{at}{hosts}{found['path']}{query}"


def _message(settings: type[Settings], error: ErrorDetails) -> str:
    name, value = str(error["loc"][0]), error["input"]
    fields = settings.model_fields.items()
    found = next((each for each in fields if name == each[0] or name in _variables(*each)), None)
    if found is None:
        return f"there is no setting {name}{did_you_mean(name, settings.model_fields)}"
    field = found[1]
    # Pydantic names the first variable of a setting, whichever has the value.
    variable = next((each for each in _variables(*found) if each in os.environ), _variables(*found)[0])
    shown = "" if variable in _NEVER_SHOWN else f"={value}" if str(value).strip() else f"={str(value)!r}"
    return f"{variable}{shown}: {_requirement(error, field)}"


def _requirement(error: ErrorDetails, field: FieldInfo) -> str:
    """What the value of a field must be, in our words for the kinds of errors that have Pydantic's."""
    kind = error["type"]
    if kind.startswith("int_") or kind in ("greater_than_equal", "less_than_equal", "finite_number"):
        return f"must be a whole number{_bounds(field)}"
    if kind.startswith("bool_"):
        return "must be true or false"
    return _REQUIREMENTS.get(kind) or error["msg"].removeprefix("Value error, ")


def _bounds(field: FieldInfo) -> str:
    rules = field.metadata
    least = next((rule.ge for rule in rules if hasattr(rule, "ge")), None)
    most = next((rule.le for rule in rules if hasattr(rule, "le")), None)
    if least is None:
        return ""
    return f" of at least {least}" if most is None else f" from {least} to {most}"


@cache
def variables() -> tuple[str, ...]:
    """The environment variables of all settings."""
    return tuple(each for name, field in Settings.model_fields.items() for each in _variables(name, field))


def _variables(name: str, field: FieldInfo) -> tuple[str, ...]:
    """The variables of a setting; the first one wins."""
    alias = field.validation_alias
    if isinstance(alias, AliasChoices):
        return tuple(map(str, alias.choices))
    return (str(alias or f"{PREFIX}{name.upper()}"),)


def _is_unknown(name: str) -> bool:
    return name.startswith(PREFIX) and not name.startswith(TEST_PREFIX) and name not in variables()


@cache
def _warn_about_unknown(names: tuple[str, ...]) -> None:
    """Log a warning for each of these variables; the cache makes it once per set of names."""
    for name in names:
        hint = did_you_mean(name, variables(), cutoff=0.8)
        logger.warning("%s is not a setting and has no effect%s", name, hint)
