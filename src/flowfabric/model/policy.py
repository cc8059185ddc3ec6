"""Execution policies: retries, timeouts, routing and limits. Every instance is valid."""

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields
from enum import StrEnum
from functools import lru_cache
from typing import Any, TypeVar, cast

import msgspec

from flowfabric.model.errors import EngineError, error
from flowfabric.model.policy_checks import (
    INT32,
    MAX_MS,
    array,
    check_optional_whole,
    check_optional_words,
    check_part,
    check_tokens,
    check_whole,
    check_words,
    choice,
    has_ascii_control,
    set_field,
    text_of,
    texts,
    wrong,
)
from flowfabric.model.states import TimeoutBehavior
from flowfabric.model.text import has_space_or_control, shorten, shown

DAY_MS = 86_400_000
DEFAULT_RETRY_DELAY_MS = 1000
DEFAULT_RECLAIM_CAP = 1000
"""How often an execution without a policy may be reclaimed."""
POLICY_RECLAIM_CAP = 100
"""How often an execution may be reclaimed whose policy sets no max_reclaim_count."""

_LARGEST_CACHED_TEXT = 4096


class DurabilityMode(StrEnum):
    """Whether a stream frame is on disk before it is acknowledged."""

    BUFFERED = "buffered"
    DURABLE = "durable"


@dataclass(frozen=True, kw_only=True, slots=True)
class FixedBackoff:
    """The same delay before every retry."""

    delay_ms: int = DEFAULT_RETRY_DELAY_MS

    def __post_init__(self) -> None:
        """Reject invalid fields."""
        check_whole(self.delay_ms, "retry_policy.backoff.delay_ms")


@dataclass(frozen=True, kw_only=True, slots=True)
class ExponentialBackoff:
    """A delay that grows with every retry up to a maximum; with jitter it is random within its upper half."""

    initial_delay_ms: int = 1000
    max_delay_ms: int = 60_000
    multiplier: float = 2.0
    jitter: bool = False

    def __post_init__(self) -> None:
        """Reject invalid fields."""
        check_whole(self.initial_delay_ms, "retry_policy.backoff.initial_delay_ms")
        check_whole(self.max_delay_ms, "retry_policy.backoff.max_delay_ms")
        multiplier: object = self.multiplier
        if isinstance(multiplier, bool) or not isinstance(multiplier, int | float):
            raise wrong("retry_policy.backoff.multiplier", f"must be a number, got {shown(multiplier)}")
        if not 0 < multiplier <= MAX_MS:
            raise wrong(
                "retry_policy.backoff.multiplier", f"must be above 0 and at most {MAX_MS}, got {shown(multiplier)}"
            )
        set_field(self, "multiplier", float(multiplier))
        if not isinstance(self.jitter, bool):
            raise wrong("retry_policy.backoff.jitter", f"must be true or false, got {shown(self.jitter)}")


Backoff = FixedBackoff | ExponentialBackoff


@dataclass(frozen=True, kw_only=True, slots=True)
class RetryPolicy:
    """How often a failed attempt is retried, after which delays, and for which failure categories (empty: all)."""

    max_retries: int = 3
    backoff: Backoff = ExponentialBackoff()
    retryable_categories: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Reject invalid fields."""
        check_whole(self.max_retries, "retry_policy.max_retries", high=INT32)
        check_part(self.backoff, Backoff, "retry_policy.backoff")
        set_field(self, "retryable_categories", texts(self.retryable_categories, "retry_policy.retryable_categories"))


@dataclass(frozen=True, kw_only=True, slots=True)
class TimeoutPolicy:
    """How long an attempt and the whole execution may take."""

    attempt_timeout_ms: int | None = None
    execution_deadline_ms: int | None = None
    max_reclaim_count: int = POLICY_RECLAIM_CAP

    def __post_init__(self) -> None:
        """Reject invalid fields."""
        check_optional_whole(self.attempt_timeout_ms, "timeout_policy.attempt_timeout_ms")
        check_optional_whole(self.execution_deadline_ms, "timeout_policy.execution_deadline_ms")
        check_whole(self.max_reclaim_count, "timeout_policy.max_reclaim_count", high=INT32)


@dataclass(frozen=True, kw_only=True, slots=True)
class SuspensionPolicy:
    """When a suspension without its own deadline times out, and what happens then."""

    default_timeout_ms: int | None = None
    timeout_behavior: TimeoutBehavior = TimeoutBehavior.FAIL

    def __post_init__(self) -> None:
        """Reject invalid fields."""
        check_optional_whole(self.default_timeout_ms, "suspension_policy.default_timeout_ms")
        given: object = self.timeout_behavior
        word = TimeoutBehavior.AUTO_RESUME_WITH_TIMEOUT_SIGNAL if given == "auto_resume" else given
        set_field(self, "timeout_behavior", choice(TimeoutBehavior, word, "suspension_policy.timeout_behavior"))


@dataclass(frozen=True, kw_only=True, slots=True)
class FallbackTier:
    """One provider and model to fall back to."""

    provider: str
    model: str
    timeout_ms: int | None = None

    def __post_init__(self) -> None:
        """Reject invalid fields."""
        check_words(self.provider, "fallback_policy.tiers.provider")
        check_words(self.model, "fallback_policy.tiers.model")
        check_optional_whole(self.timeout_ms, "fallback_policy.tiers.timeout_ms")


@dataclass(frozen=True, kw_only=True, slots=True)
class FallbackPolicy:
    """The tiers a worker may fall back to, best first."""

    tiers: tuple[FallbackTier, ...] = ()

    def __post_init__(self) -> None:
        """Reject invalid fields."""
        tiers = array(self.tiers, "fallback_policy.tiers")
        for tier in tiers:
            check_part(tier, FallbackTier, "fallback_policy.tiers")
        set_field(self, "tiers", tiers)


@dataclass(frozen=True, kw_only=True, slots=True)
class RoutingRequirements:
    """What a worker must offer; capabilities are kept sorted and without duplicates."""

    required_capabilities: tuple[str, ...] = ()
    preferred_locality: str | None = None
    isolation_level: str | None = None

    def __post_init__(self) -> None:
        """Reject invalid fields."""
        set_field(
            self, "required_capabilities", check_tokens(self.required_capabilities, "required", has_ascii_control)
        )
        check_optional_words(self.preferred_locality, "routing_requirements.preferred_locality")
        check_optional_words(self.isolation_level, "routing_requirements.isolation_level")


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamPolicy:
    """How the stream of an attempt is kept; `retention_ttl_ms` is also the retention of the execution."""

    durability_mode: DurabilityMode = DurabilityMode.BUFFERED
    retention_maxlen: int = 10_000
    retention_ttl_ms: int | None = None

    def __post_init__(self) -> None:
        """Reject invalid fields."""
        set_field(
            self, "durability_mode", choice(DurabilityMode, self.durability_mode, "stream_policy.durability_mode")
        )
        check_whole(self.retention_maxlen, "stream_policy.retention_maxlen", high=INT32)
        check_optional_whole(self.retention_ttl_ms, "stream_policy.retention_ttl_ms")


@dataclass(frozen=True, kw_only=True, slots=True)
class ExecutionPolicy:
    """Retries, timeouts, routing and limits of an execution; fixed when it is created."""

    priority: int = 0
    delay_until: int | None = None
    retry_policy: RetryPolicy | None = None
    timeout_policy: TimeoutPolicy | None = None
    max_reclaim_count: int = POLICY_RECLAIM_CAP
    suspension_policy: SuspensionPolicy | None = None
    fallback_policy: FallbackPolicy | None = None
    max_replay_count: int = 10
    budget_ids: tuple[str, ...] = ()
    quota_policy_id: str | None = None
    routing_requirements: RoutingRequirements | None = None
    dedup_window_ms: int | None = None
    stream_policy: StreamPolicy | None = None
    max_signals_per_execution: int = 10_000

    def __post_init__(self) -> None:
        """Reject invalid fields."""
        check_whole(self.priority, "priority", low=-INT32 - 1, high=INT32)
        check_optional_whole(self.delay_until, "delay_until")
        check_whole(self.max_reclaim_count, "max_reclaim_count", high=INT32)
        check_whole(self.max_replay_count, "max_replay_count", high=INT32)
        check_whole(self.max_signals_per_execution, "max_signals_per_execution", high=INT32)
        check_optional_whole(self.dedup_window_ms, "dedup_window_ms", low=-MAX_MS)
        for name, part in _PARTS.items():
            check_part(getattr(self, name), part | None, name)
        set_field(self, "budget_ids", texts(self.budget_ids, "budget_ids"))
        if self.quota_policy_id is not None:
            set_field(self, "quota_policy_id", text_of(self.quota_policy_id, "quota_policy_id"))

    @property
    def required_capabilities(self) -> tuple[str, ...]:
        """The capabilities a worker must offer, sorted."""
        return () if self.routing_requirements is None else self.routing_requirements.required_capabilities


_PARTS: Mapping[str, type] = {
    "retry_policy": RetryPolicy,
    "timeout_policy": TimeoutPolicy,
    "suspension_policy": SuspensionPolicy,
    "fallback_policy": FallbackPolicy,
    "routing_requirements": RoutingRequirements,
    "stream_policy": StreamPolicy,
}


def parse_policy(value: ExecutionPolicy | Mapping[str, object] | str | bytes | None) -> ExecutionPolicy | None:
    """Return the policy in a JSON object or JSON text; None for None, empty text and null."""
    if value is None or isinstance(value, ExecutionPolicy):
        return value
    if isinstance(value, str | bytes):
        return _parse_cached(value) if len(value) <= _LARGEST_CACHED_TEXT else _parse_text(value)
    return _read_policy(value)


@lru_cache(maxsize=1024)
def read_stored_policy(text: str | None) -> ExecutionPolicy | None:
    """Return the policy stored in a row; fields that only a newer version understands are ignored."""
    if not text:
        return None
    try:
        return _parse_text(text)
    except EngineError:
        plain = _known(ExecutionPolicy, cast(Mapping[str, object], _decode(text)))
    kept: dict[str, object] = {}
    for name, value in plain.items():
        with contextlib.suppress(EngineError):
            _read_policy({name: value})
            kept[name] = value
    return _read_policy(kept)


def _known(part: type, plain: Mapping[str, object]) -> dict[str, object]:
    names = {field.name for field in fields(part)}
    return {
        name: _known(_PARTS[name], value) if name in _PARTS and isinstance(value, Mapping) else value
        for name, value in plain.items()
        if name in names
    }


def parse_retry_policy(value: RetryPolicy | Mapping[str, object] | str | bytes | None) -> RetryPolicy | None:
    """Return the retry policy in a JSON object or JSON text; None for None, empty text and null."""
    if value is None or isinstance(value, RetryPolicy):
        return value
    plain = _decode(value) if isinstance(value, str | bytes) else value
    return None if plain is None else _read_retry_policy(plain)


def _parse_text(text: str | bytes) -> ExecutionPolicy | None:
    plain = _decode(text)
    return None if plain is None else _read_policy(plain)


_parse_cached = lru_cache(maxsize=1024)(_parse_text)


@lru_cache(maxsize=1024)
def policy_json(policy: ExecutionPolicy) -> str:
    """Return the compact JSON text of a policy, without the fields that hold their default."""
    return msgspec.json.encode(_plain(policy)).decode()


def _decode(text: str | bytes) -> object:
    if not text:
        return None
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        raise error("invalid_policy_json", f"malformed: expected a JSON object, got {shown(text)}") from None


Part = TypeVar("Part")


def _read(
    part: Callable[..., Part], plain: object, path: str, readers: Mapping[str, Callable[[object], object]] | None = None
) -> Part:
    if not isinstance(plain, Mapping):
        raise wrong(path or "policy", f"must be an object, got {shown(plain)}")
    prefix = f"{path}." if path else ""
    known = {field.name: field for field in fields(cast(Any, part))}
    given: dict[str, object] = {}
    for key, value in plain.items():
        if key not in known:
            raise wrong(f"{prefix}{shorten(str(key))}", f"unknown field; the fields are {', '.join(known)}")
        if value is not None:
            given[key] = readers[key](value) if readers and key in readers else value
    for name, field in known.items():
        if field.default is MISSING and name not in given:
            raise wrong(f"{prefix}{name}", "is missing and has no default")
    return part(**given)


def _read_policy(plain: object) -> ExecutionPolicy:
    return _read(ExecutionPolicy, plain, "", _READERS)


def _read_retry_policy(plain: object) -> RetryPolicy:
    return _read(RetryPolicy, plain, "retry_policy", {"backoff": _read_backoff})


def _read_backoff(plain: object) -> Backoff:
    path = "retry_policy.backoff"
    if not isinstance(plain, Mapping):
        raise wrong(path, f"must be an object, got {shown(plain)}")
    numbers = {name: value for name, value in plain.items() if name != "type"}
    match plain.get("type"):
        case "fixed":
            return _read(FixedBackoff, numbers, path)
        case "exponential":
            for name in ("initial_delay_ms", "max_delay_ms", "multiplier"):
                if numbers.get(name) is None:
                    needed = "an exponential backoff needs initial_delay_ms, max_delay_ms and multiplier"
                    raise wrong(f"{path}.{name}", f"is missing; {needed}")
            return _read(ExponentialBackoff, numbers, path)
    raise wrong(f"{path}.type", f"must be 'fixed' or 'exponential', got {shown(plain.get('type'))}")


def _read_fallback_policy(plain: object) -> FallbackPolicy:
    path = "fallback_policy.tiers"

    def read_tiers(tiers: object) -> object:
        return tuple(_read(FallbackTier, tier, path) for tier in array(tiers, path))

    return _read(FallbackPolicy, plain, "fallback_policy", {"tiers": read_tiers})


def _read_routing_requirements(plain: object) -> RoutingRequirements:
    if not isinstance(plain, Mapping):
        raise error("invalid_policy_json", f"routing_requirements:not_object: expected an object, got {shown(plain)}")
    return _read(RoutingRequirements, plain, "routing_requirements")


_READERS: Mapping[str, Callable[[object], object]] = {
    "retry_policy": _read_retry_policy,
    "timeout_policy": lambda plain: _read(TimeoutPolicy, plain, "timeout_policy"),
    "suspension_policy": lambda plain: _read(SuspensionPolicy, plain, "suspension_policy"),
    "fallback_policy": _read_fallback_policy,
    "routing_requirements": _read_routing_requirements,
    "stream_policy": lambda plain: _read(StreamPolicy, plain, "stream_policy"),
}


def _plain(value: Any) -> object:
    match value:
        case None | str() | int() | float():
            return value
        case tuple():
            return [_plain(item) for item in value]
        case FixedBackoff():
            return {"type": "fixed", "delay_ms": value.delay_ms}
        case ExponentialBackoff():
            # Stored in full: reading an exponential backoff requires these three.
            numbers = {
                "initial_delay_ms": value.initial_delay_ms,
                "max_delay_ms": value.max_delay_ms,
                "multiplier": value.multiplier,
            }
            return {"type": "exponential", **numbers, **({"jitter": True} if value.jitter else {})}
    return {
        field.name: _plain(item) for field in fields(value) if (item := getattr(value, field.name)) != field.default
    }


def check_capabilities(values: object) -> tuple[str, ...]:
    """Return the capabilities a worker offers, sorted and without duplicates."""
    if isinstance(values, list | tuple):
        try:
            return _check_cached(tuple(values))
        except TypeError:
            # An item that cannot be hashed is not text either: this names it.
            return _check_offered(values)
    return _check_offered(values)


def _check_offered(values: object) -> tuple[str, ...]:
    return check_tokens(values, "worker", has_space_or_control)


_check_cached = lru_cache(maxsize=1024)(_check_offered)


def reclaim_cap(policy: ExecutionPolicy | None, argument: int | None = None) -> int:
    """Return how often an execution may be reclaimed."""
    if policy is not None:
        return policy.max_reclaim_count
    return DEFAULT_RECLAIM_CAP if argument is None else argument


def dedup_window_ms(policy: ExecutionPolicy | None) -> int:
    """Return how long an idempotency key is kept; at 0 or less it is not recorded."""
    return DAY_MS if policy is None or policy.dedup_window_ms is None else policy.dedup_window_ms
