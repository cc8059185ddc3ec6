"""Connections to Postgres: their session settings and timeouts."""

import asyncio
import contextlib
import socket
from dataclasses import dataclass
from typing import Any

import asyncpg

from flowfabric.db.faults import without_values
from flowfabric.db.unreachable import unreachable

CONNECT_SECONDS = 5.0
ANSWER_SECONDS = 2.0
"""How much longer than statement_timeout the client waits before it considers the connection dead."""
KEEPALIVE_IDLE_SECONDS = 5
KEEPALIVE_INTERVAL_SECONDS = 2
KEEPALIVE_COUNT = 3
UNACKNOWLEDGED_MS = 10_000
"""How long sent data may stay unacknowledged before the kernel ends the connection."""
STATEMENT_CACHE_SIZE = 500
"""More prepared statements than the package has, so that none is evicted."""

_TCP_OPTIONS = {
    # TCP_KEEPIDLE on Linux, TCP_KEEPALIVE on macOS.
    "TCP_KEEPIDLE": KEEPALIVE_IDLE_SECONDS,
    "TCP_KEEPALIVE": KEEPALIVE_IDLE_SECONDS,
    "TCP_KEEPINTVL": KEEPALIVE_INTERVAL_SECONDS,
    "TCP_KEEPCNT": KEEPALIVE_COUNT,
    "TCP_USER_TIMEOUT": UNACKNOWLEDGED_MS,
}

_SESSION = {
    "application_name": "flowfabric",
    # A statement that waits longer for a row fails, and its transaction is retried.
    "lock_timeout": "2s",
    # Every plan is a nested loop over indexes: a plan made while a table is empty is still used when the table is full,
    # and must not scan it.
    "enable_seqscan": "off",
    "enable_bitmapscan": "off",
    "enable_hashjoin": "off",
    "enable_mergejoin": "off",
    "plan_cache_mode": "force_generic_plan",
    "jit": "off",
    # The server notices a client that vanished, and releases its locks.
    "tcp_keepalives_idle": str(KEEPALIVE_IDLE_SECONDS),
    "tcp_keepalives_interval": str(KEEPALIVE_INTERVAL_SECONDS),
    "tcp_keepalives_count": str(KEEPALIVE_COUNT),
    "tcp_user_timeout": str(UNACKNOWLEDGED_MS),
}

_NOT_COMPARED = frozenset(name for name in _SESSION if name.startswith("tcp_")) | {"application_name"}
# set_config returns the value in the same form as current_setting.
_IGNORED = """
select name from (select name, value, current_setting(name) as current
                    from unnest($1::text[], $2::text[]) as requested(name, value) offset 0) s
 where current <> set_config(name, value, true)
 order by name
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """The timeouts of a session."""

    statement_ms: int = 6_000
    """statement_timeout: the server cancels a statement that runs longer; 0 means no limit."""
    idle_in_transaction_ms: int = 5_000
    """idle_in_transaction_session_timeout: the server ends a session that waits longer for its next statement."""

    @property
    def answer_seconds(self) -> float | None:
        """How long the client waits for an answer; None means no limit."""
        return self.statement_ms / 1000 + ANSWER_SECONDS if self.statement_ms else None

    @property
    def silent_ms(self) -> int | None:
        """How long a session may wait for its client within a statement: longer than any statement may run."""
        return None if self.answer_seconds is None else round(self.answer_seconds * 1000)


NO_LIMITS = Limits(statement_ms=0, idle_in_transaction_ms=0)
"""For migrations, whose statements may take as long as they need."""


def session_settings(schema: str, limits: Limits | None = None) -> dict[str, str]:
    """The settings of every session."""
    limits = limits or Limits()
    return {
        **_SESSION,
        "search_path": schema,
        "statement_timeout": str(limits.statement_ms),
        "idle_in_transaction_session_timeout": str(limits.idle_in_transaction_ms),
    }


async def connect(url: str, *, schema: str, limits: Limits | None = None, **settings: str) -> Any:
    """Open a connection with the session settings of the pool; every call on it times out after the limit.

    Raises Unreachable, which names the server, the reason and what to do.
    """
    limits = limits or Limits()
    try:
        return await asyncpg.connect(
            url,
            server_settings={**session_settings(schema, limits), **settings},
            timeout=CONNECT_SECONDS,
            command_timeout=limits.answer_seconds,
            # Prepare every statement once per connection, regardless of its length and age.
            statement_cache_size=STATEMENT_CACHE_SIZE,
            max_cacheable_statement_size=0,
            max_cached_statement_lifetime=0,
            connection_class=_Connection,
        )
    except Exception as error:
        fault = unreachable(error, url, seconds=CONNECT_SECONDS)
        if fault is None:
            raise
        raise fault from without_values(error)


async def close(connection: Any, *, seconds: float) -> None:
    """Close a connection; give up waiting for it after these seconds."""
    with contextlib.suppress(Exception):
        # The driver's own timeout does not cover its wait for a statement that was cancelled before.
        async with asyncio.timeout(seconds):
            await connection.close()


async def ignored_settings(connection: Any, schema: str, limits: Limits) -> tuple[str, ...]:
    """The requested session settings that are not in effect, because a pooler ignores them."""
    # TCP settings have no effect on a Unix socket, and behind a pooler they apply to its connection.
    requested = {name: value for name, value in session_settings(schema, limits).items() if name not in _NOT_COMPARED}
    rows = await connection.fetch(_IGNORED, list(requested), list(requested.values()))
    return tuple(row["name"] for row in rows)


class _Connection(asyncpg.Connection):
    """A connection whose socket detects a dead server."""

    __slots__ = ()

    def __init__(self, protocol: Any, transport: asyncio.Transport, *rest: Any) -> None:
        super().__init__(protocol, transport, *rest)
        _keep_alive(transport.get_extra_info("socket"))


def _keep_alive(given: socket.socket) -> None:
    """Let the kernel probe an idle connection and close it if its data is not acknowledged."""
    if given.family == getattr(socket, "AF_UNIX", None):
        return
    # Duplicate the descriptor: the socket objects of some event loops do not allow all options.
    with socket.fromfd(given.fileno(), given.family, given.type) as same:
        same.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _TCP_OPTIONS.items():
            if (option := getattr(socket, name, None)) is not None:
                with contextlib.suppress(OSError):
                    same.setsockopt(socket.IPPROTO_TCP, option, value)
