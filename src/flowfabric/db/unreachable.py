"""The error messages of a failed connection: which server, the reason, and what to do."""

import os
import re
import socket
import ssl
from urllib.parse import parse_qs, unquote, unquote_plus, urlsplit

import asyncpg

from flowfabric.db.address import database_of, server_of, user_of
from flowfabric.db.faults import StoreFault, fault_of

CORRECT = "correct the database URL (FF_DATABASE_URL)"
_REJECTED_SETTING = ("08P01", "22023", "42501", "42704", "55P02")
"""SQLSTATEs with which a server or a pooler rejects a session setting."""
_TLS_MODES = ("require", "verify-ca", "verify-full")


class Unreachable(StoreFault):
    """No connection to the server; the message names the server and the database, the reason, and what to do."""

    @property
    def is_temporary(self) -> bool:
        """Whether a later attempt may succeed without any change."""
        return self.kind in ("transport", "timeout", "busy_loading")


def unreachable(error: BaseException, url: str, *, seconds: float) -> Unreachable | None:
    """The fault of a failed connection attempt, or None if the error is not the driver's."""
    fault = fault_of(error)
    if fault is None:
        return None
    return Unreachable(*_explain(error, fault, url, seconds))


def _explain(error: BaseException, fault: StoreFault, url: str, seconds: float) -> tuple[str, str]:
    server, database = server_of(url), database_of(url)
    where = f"{server} (database {database})"
    reason = _without_password(str(fault), url)
    match error:
        case asyncpg.ClientConfigurationError():
            return "protocol", f"the database URL cannot be used: {reason}; {CORRECT}"
        case asyncpg.ConnectionDoesNotExistError() | ConnectionResetError() | BrokenPipeError():
            return fault.kind, _closed_during_login(where)
        case asyncpg.PostgresError():
            return _explain_answer(error, fault, url)
        case ssl.SSLError():
            return (
                "protocol",
                f"no TLS session with {where}: {reason}; check sslmode and sslrootcert in the database URL",
            )
        case TimeoutError():
            return "timeout", (
                f"no answer from {where} within {seconds:g} s; check the host and the port in the database URL"
                " (FF_DATABASE_URL), and firewalls on the way"
            )
        case socket.gaierror():
            return "transport", f"the host of {where} is unknown: {error.strerror}; {CORRECT}"
        case PermissionError():
            return "protocol", f"this user may not connect to {where}: {reason}; {CORRECT}"
        case FileNotFoundError() if "sslrootcert" in url or "sslcert" in url or "sslkey" in url:
            return "protocol", f"no TLS session with {where}: a file named in the database URL is missing; {CORRECT}"
        case ConnectionError() if "rejected SSL" in str(error):
            if _requires_tls(url):
                return (
                    "protocol",
                    f"{where} does not support TLS, which sslmode in the database URL requires; {CORRECT}",
                )
            return "protocol", f"what answers at {server} is not Postgres; {CORRECT}"
        case ConnectionError() if "connection_lost" in str(error):
            return fault.kind, _closed_during_login(where)
        case ConnectionRefusedError() | FileNotFoundError():
            reason = "connection refused"
        case OSError() if "Connect call failed" in str(error):
            reason = "connection refused"
    return fault.kind, f"no server answers at {where}: {reason}; start the server, or {CORRECT}"


def _requires_tls(url: str) -> bool:
    given = parse_qs(urlsplit(url).query).get("sslmode", [os.environ.get("PGSSLMODE", "")])
    return given[-1] in _TLS_MODES


def _closed_during_login(where: str) -> str:
    return f"{where} closed the connection during the login; read the log of the server, or {CORRECT}"


def _explain_answer(error: asyncpg.PostgresError, fault: StoreFault, url: str) -> tuple[str, str]:
    server, database = server_of(url), database_of(url)
    reason = _without_password(str(error.args[0]) if error.args else type(error).__name__, url)
    match error:
        case asyncpg.InvalidAuthorizationSpecificationError():
            return "auth", (
                f"{server} refuses user {user_of(url)} for database {database}: {reason};"
                " correct the user or the password in the database URL (FF_DATABASE_URL)"
            )
        case asyncpg.InvalidCatalogNameError():
            return "protocol", f"there is no database {database} at {server}: create it, or {CORRECT}"
        case asyncpg.CannotConnectNowError():
            return fault.kind, f"{server} does not accept connections yet: {reason}; try again later"
        case asyncpg.TooManyConnectionsError():
            return fault.kind, (
                f"{server} has no connection left: {reason}; raise max_connections there, or lower"
                " FF_DATABASE_POOL_SIZE of the processes"
            )
        case _ if error.sqlstate in _REJECTED_SETTING:
            return "protocol", (
                f"{server} rejects a session setting that every process sends: {reason};"
                " configure the pooler to accept it, see docs/pgbouncer.md"
            )
        case _:
            return fault.kind, f"{server} (database {database}) refuses the connection: {reason} ({error.sqlstate})"


def _without_password(text: str, url: str) -> str:
    """The text of the driver or the server, which may quote the URL, with the passwords of the URL masked."""
    parts = urlsplit(url)
    options = [part.partition("=") for part in parts.query.split("&")]
    given = [value for name, _, value in options if "password" in unquote(name).lower()]
    secrets = {form for each in (parts.password or "", *given) for form in (each, unquote(each), unquote_plus(each))}
    # The longest first: one may be a part of another. One pass, so that a mask is not masked again.
    pattern = "|".join(re.escape(each) for each in sorted(secrets - {""}, key=len, reverse=True))
    return re.sub(pattern, "***", text) if pattern else text
