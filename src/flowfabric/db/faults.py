"""Faults of the store: how an error of the driver or of Postgres is reported to callers."""

from typing import Final

import asyncpg

VALUE_ERRORS: Final = ("22", "23", "54")
"""SQLSTATE classes caused by the values of one statement: data, constraints and program limits."""
TEMPORARY: Final = ("53", "55", "57", "58")
"""SQLSTATE classes of a server that cannot work at the moment: resources, state, operator, system."""

_STORE_FAILURES = frozenset({"transport", "auth", "timeout", "busy_loading"})
_READ_ONLY = "25006"
_COMPLETION_UNKNOWN = "40003"

RETRYABLE: Final = (
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
    # The server ended the session while it was idle, and the driver finds it in an unexpected state.
    asyncpg.InternalClientError,
    # Includes our own timeouts, a reset connection and TLS errors.
    OSError,
)
_DETAILED = (asyncpg.PostgresError, asyncpg.InterfaceError)
"""Errors whose message may contain the values of a row after its first line."""


class StoreFault(Exception):
    """A failed call to Postgres.

    `kind` is one of the engine's transport kinds, or `contention`. `outcome_unknown` means that the statement or the
    commit was sent but not answered: it may have taken effect. `is_canceled` means that Postgres canceled the
    statement, mostly because it took longer than the statement timeout.
    """

    def __init__(self, kind: str, message: str, *, outcome_unknown: bool = False, is_canceled: bool = False) -> None:
        super().__init__(message)
        self.kind = kind
        self.outcome_unknown = outcome_unknown
        self.is_canceled = is_canceled

    @property
    def is_store_failure(self) -> bool:
        """Whether the store itself failed, so that trying the items of a batch one by one would not help.

        Any other answer may be that to one item: a trigger of the user may raise whatever it likes.
        """
        return self.kind in _STORE_FAILURES

    def copy(self) -> "StoreFault":
        """The same fault for another caller: each raised exception collects its own traceback."""
        return StoreFault(self.kind, str(self), outcome_unknown=self.outcome_unknown, is_canceled=self.is_canceled)


def fault_of(error: BaseException) -> StoreFault | None:
    """The fault that describes a driver's error, or None if the error is not the driver's."""
    if isinstance(error, StoreFault):
        return error
    kind = _kind_of(error)
    if kind is None:
        return None
    text = _text(error) or ("no answer in time" if kind == "timeout" else type(error).__name__)
    if kind in ("other", "protocol"):
        text = f"{type(error).__name__}: {text}"
    # A session that the server ends may have committed already, while it waited for a standby.
    is_unknown = not is_answered(error) or getattr(error, "sqlstate", None) == _COMPLETION_UNKNOWN
    is_canceled = isinstance(error, asyncpg.QueryCanceledError)
    return StoreFault(kind, text, outcome_unknown=is_unknown, is_canceled=is_canceled)


def is_answered(error: BaseException | None) -> bool:
    """Whether the server answered the call completely, so that the session can be used again."""
    if isinstance(error, asyncpg.DataError):
        # The driver raises it too, before it sends anything.
        return True
    if getattr(error, "severity_en", None) in ("FATAL", "PANIC"):
        # The server has ended the session.
        return False
    return error is None or (isinstance(error, Exception) and not isinstance(error, _LOST))


def without_values(error: BaseException) -> BaseException | None:
    """The error as a cause to show, or None if its message may contain the values of a row."""
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
        case _ if isinstance(error, RETRYABLE):
            return "contention"
        case _ if isinstance(error, _LOST) or sqlstate == _COMPLETION_UNKNOWN:
            return "transport"
        case _ if sqlstate[:2] in TEMPORARY or sqlstate == _READ_ONLY:
            return "busy_loading"
        case _ if sqlstate[:2] in VALUE_ERRORS:
            return "other"
        case _:
            return "protocol"


def _text(error: BaseException) -> str:
    """The message of a driver's error without values: they may be tokens, secrets or payloads."""
    if isinstance(error, asyncpg.DataError):
        # Even its first line contains the value.
        return f"a value is refused ({error.sqlstate})"
    return str(error.args[0]) if isinstance(error, _DETAILED) and error.args else str(error)
