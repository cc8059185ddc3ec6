"""One session with Postgres: what it asks of the server, and how long it may stay silent."""

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
"""How much longer than the server's own limit the client waits before it takes the connection for dead."""
KEEPALIVE_IDLE_SECONDS = 5
KEEPALIVE_INTERVAL_SECONDS = 2
KEEPALIVE_COUNT = 3
UNACKNOWLEDGED_MS = 10_000
"""How long sent data may stay unacknowledged before the kernel ends the connection."""
MOST_PREPARED = 500
"""More prepared statements than the package has."""

_TCP_OPTIONS = {
    # Its name on Linux, and on macOS.
    "TCP_KEEPIDLE": KEEPALIVE_IDLE_SECONDS,
    "TCP_KEEPALIVE": KEEPALIVE_IDLE_SECONDS,
    "TCP_KEEPINTVL": KEEPALIVE_INTERVAL_SECONDS,
    "TCP_KEEPCNT": KEEPALIVE_COUNT,
    "TCP_USER_TIMEOUT": UNACKNOWLEDGED_MS,
}

_SESSION = {
    "application_name": "flowfabric",
    # A row held for longer than this is given up and the transaction is run again.
    "lock_timeout": "2s",
    # The statements are nested loops over indexes, whatever the tables hold: a plan made while a table was empty lives
    # on when it is full, and must not be one that reads it whole.
    "enable_seqscan": "off",
    "enable_bitmapscan": "off",
    "enable_hashjoin": "off",
    "enable_mergejoin": "off",
    "plan_cache_mode": "force_generic_plan",
    "jit": "off",
    # A client that vanishes without a word is noticed, and its locks are released.
    "tcp_keepalives_idle": str(KEEPALIVE_IDLE_SECONDS),
    "tcp_keepalives_interval": str(KEEPALIVE_INTERVAL_SECONDS),
    "tcp_keepalives_count": str(KEEPALIVE_COUNT),
    "tcp_user_timeout": str(UNACKNOWLEDGED_MS),
}

_NOT_COMPARED = frozenset(name for name in _SESSION if name.startswith("tcp_")) | {"application_name"}
# set_config answers the value in the form that current_setting has it.
_IGNORED = """
select name from (select name, value, current_setting(name) as had
                    from unnest($1::text[], $2::text[]) as asked(name, value) offset 0) s
 where had <> set_config(name, value, true)
 order by name
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """How long a session may take before it is given up."""

    statement_ms: int = 6_000
    """The longest a statement may run; the server ends it then. 0 is no limit, as in Postgres."""
    idle_in_transaction_ms: int = 5_000
    """The longest a transaction may wait for its next statement; the server ends the session then."""

    @property
    def answer_seconds(self) -> float | None:
        """The longest the client waits for an answer."""
        return self.statement_ms / 1000 + ANSWER_SECONDS if self.statement_ms else None

    @property
    def silent_ms(self) -> int | None:
        """How long a session may wait for its client in the middle of a statement: longer than any statement runs."""
        return None if self.answer_seconds is None else round(self.answer_seconds * 1000)


NO_LIMITS = Limits(statement_ms=0, idle_in_transaction_ms=0)
"""For a session whose statements may take as long as they need: migrations."""


def session_settings(schema: str, limits: Limits | None = None) -> dict[str, str]:
    """What every session of ours asks of the server."""
    limits = limits or Limits()
    return {
        **_SESSION,
        "search_path": schema,
        "statement_timeout": str(limits.statement_ms),
        "idle_in_transaction_session_timeout": str(limits.idle_in_transaction_ms),
    }


async def connect(url: str, *, schema: str, limits: Limits | None = None, **settings: str) -> Any:
    """A connection with the session settings of the pool; every call on it is given up after the limit.

    Where none is made, the fault says which server it is about, why, and what to do.
    """
    limits = limits or Limits()
    try:
        return await asyncpg.connect(
            url,
            server_settings={**session_settings(schema, limits), **settings},
            timeout=CONNECT_SECONDS,
            command_timeout=limits.answer_seconds,
            # Every statement of ours is prepared once a connection, however long it is and however long that lives.
            statement_cache_size=MOST_PREPARED,
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
    """Close a connection, or drop it when that takes longer."""
    with contextlib.suppress(Exception):
        # The driver's own limit may leave out its wait for a statement that was cancelled before.
        async with asyncio.timeout(seconds):
            await connection.close()


async def ignored_settings(connection: Any, schema: str, limits: Limits) -> tuple[str, ...]:
    """The session settings that were asked for and are not in effect: something in between drops them."""
    # Those of TCP have no effect on a Unix socket, and concern the connection of a pooler where there is one.
    asked = {name: value for name, value in session_settings(schema, limits).items() if name not in _NOT_COMPARED}
    rows = await connection.fetch(_IGNORED, list(asked), list(asked.values()))
    return tuple(row["name"] for row in rows)


class _Connection(asyncpg.Connection):
    """A connection whose socket notices by itself that the server is gone."""

    __slots__ = ()

    def __init__(self, protocol: Any, transport: asyncio.Transport, *rest: Any) -> None:
        super().__init__(protocol, transport, *rest)
        _keep_alive(transport.get_extra_info("socket"))


def _keep_alive(given: socket.socket) -> None:
    """Have the kernel probe an idle connection, and end one whose data is not acknowledged."""
    if given.family == getattr(socket, "AF_UNIX", None):
        return
    # A copy of the descriptor: event loops give out sockets whose options cannot all be set.
    with socket.fromfd(given.fileno(), given.family, given.type) as same:
        same.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _TCP_OPTIONS.items():
            if (option := getattr(socket, name, None)) is not None:
                with contextlib.suppress(OSError):
                    same.setsockopt(socket.IPPROTO_TCP, option, value)
