"""Faults of the store: what a failed conversation with Postgres means for its caller."""

from typing import Final

import asyncpg

ABOUT_VALUES: Final = ("22", "23", "54")
"""SQLSTATE classes that judge the values of one statement: data, constraints and limits of the program."""
REFUSES_FOR_NOW: Final = ("53", "55", "57", "58")
"""SQLSTATE classes of a server that cannot do its work at the moment: resources, state, operator, system."""

_READ_ONLY = "25006"
_COMPLETION_UNKNOWN = "40003"

RUN_AGAIN: Final = (
    asyncpg.SerializationError,
    asyncpg.DeadlockDetectedError,
    asyncpg.LockNotAvailableError,
)
_LOST = (
    asyncpg.PostgresConnectionError,
    asyncpg.AdminShutdownError,
    asyncpg.CrashShutdownError,
    asyncpg.IdleInTransactionSessionTimeoutError,
    asyncpg.InterfaceError,
    # The session was ended while it was idle, and the driver finds it in a state it does not expect.
    asyncpg.InternalClientError,
    # Also a time limit of ours, a reset connection and TLS.
    OSError,
)
_DETAILED = (asyncpg.PostgresError, asyncpg.InterfaceError)
"""Errors whose text may go on after its first line, for example with the values of a row."""


class StoreFault(Exception):
    """A failed conversation with Postgres.

    `kind` is one of the engine's transport kinds, or `contention`. `outcome_unknown` says that the statement or the
    commit was sent and not answered: it may have been carried out.
    """

    def __init__(self, kind: str, message: str, *, outcome_unknown: bool = False) -> None:
        super().__init__(message)
        self.kind = kind
        self.outcome_unknown = outcome_unknown

    @property
    def is_store_failure(self) -> bool:
        """Whether the store itself failed: trying the items of a batch one by one would not help."""
        return self.kind not in ("contention", "other")

    def copy(self) -> "StoreFault":
        """The same fault for another caller: an exception keeps the traceback of whoever raises it."""
        return StoreFault(self.kind, str(self), outcome_unknown=self.outcome_unknown)


def fault_of(error: BaseException) -> StoreFault | None:
    """The fault a driver's error stands for, or None when the error is not the driver's."""
    if isinstance(error, StoreFault):
        return error
    kind = _kind_of(error)
    if kind is None:
        return None
    text = _text(error) or ("no answer in time" if kind == "timeout" else type(error).__name__)
    if kind in ("other", "protocol"):
        text = f"{type(error).__name__}: {text}"
    # A session that the server ends may have committed before, while it waited for a standby.
    is_unknown = not is_answered(error) or getattr(error, "sqlstate", None) == _COMPLETION_UNKNOWN
    return StoreFault(kind, text, outcome_unknown=is_unknown)


def is_answered(error: BaseException | None) -> bool:
    """Whether a conversation that ended so was answered whole, so that its session can be used again."""
    if isinstance(error, asyncpg.DataError):
        # Raised by the driver as well, before anything is sent.
        return True
    if getattr(error, "severity_en", None) in ("FATAL", "PANIC"):
        # The server has ended the session.
        return False
    return error is None or (isinstance(error, Exception) and not isinstance(error, _LOST))


def without_values(error: BaseException) -> BaseException | None:
    """The error as a cause to show, or None when its text may hold the values of a row."""
    return None if isinstance(error, _DETAILED) else error


def _kind_of(error: BaseException) -> str | None:
    if isinstance(error, TimeoutError):
        return "timeout"
    if isinstance(error, asyncpg.PostgresError):
        return _kind_of_answer(error, error.sqlstate or "")
    return "transport" if isinstance(error, _LOST) else None


def _kind_of_answer(error: asyncpg.PostgresError, sqlstate: str) -> str:
    match error:
        case asyncpg.InvalidAuthorizationSpecificationError():
            return "auth"
        case asyncpg.QueryCanceledError():
            return "timeout"
        case _ if isinstance(error, RUN_AGAIN):
            return "contention"
        case _ if isinstance(error, _LOST) or sqlstate == _COMPLETION_UNKNOWN:
            return "transport"
        case _ if sqlstate[:2] in REFUSES_FOR_NOW or sqlstate == _READ_ONLY:
            return "busy_loading"
        case _ if sqlstate[:2] in ABOUT_VALUES:
            return "other"
        case _:
            return "protocol"


def _text(error: BaseException) -> str:
    """What a driver's error says, without the values it is about: they may be tokens, secrets or payloads."""
    if isinstance(error, asyncpg.DataError):
        # Its first line names the value.
        return f"a value is refused ({error.sqlstate})"
    return str(error.args[0]) if isinstance(error, _DETAILED) and error.args else str(error)
