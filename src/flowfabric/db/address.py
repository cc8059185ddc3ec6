"""The parts of a database URL, and a check that it can be used."""

import getpass
import os
import re
from urllib.parse import parse_qs, unquote, urlsplit

_HOST_AND_PORT = re.compile(r"(?:\[[^\[\]]*\]|[^:\[\]]*)(?::(?P<port>.*))?")


def check_url(url: str) -> str:
    """Return a usable URL unchanged, else raise ValueError; the message shows no part of the URL."""
    if not url.startswith(("postgresql://", "postgres://")):
        raise ValueError("must begin with postgresql://, as in postgresql://user:password@host:5432/database")
    try:
        parts = urlsplit(url)
        ports = parse_qs(parts.query).get("port", [])
    except ValueError:
        raise ValueError(
            "is not a URL: write special characters of the user and the password as %XX, for example @ as %40"
        ) from None
    if parts.netloc.count("@") > 1:
        raise ValueError("has more than one @ before the host: write an @ of the user or the password as %40")
    if "@" in parts.path:
        raise ValueError("has an @ after the host: write special characters of the password as %XX, / as %2F, @ as %40")
    for host in parts.netloc.rpartition("@")[2].split(","):
        found = _HOST_AND_PORT.fullmatch(host)
        if found is None:
            raise ValueError("has an invalid host: write postgresql://user:password@host:5432/database")
        ports.append(found["port"])
    for port in ports:
        if port and not all(each.isdecimal() and 1 <= int(each) <= 65535 for each in port.split(",")):
            raise ValueError(
                "has an invalid port: use 1 to 65535, and write special characters of the password as %XX, : as %3A"
            )
    return url


def server_of(url: str) -> str:
    """The host and port of a URL without user and password: `db.internal:5432`, or the folder of a socket."""
    parts = urlsplit(url)
    options = parse_qs(parts.query)
    port = _option(options, "port", "PGPORT") or "5432"
    hosts = parts.netloc.rpartition("@")[2] or _option(options, "host", "PGHOST") or "the local socket"
    return ",".join(_with_port(unquote(host), port) for host in hosts.split(","))


def database_of(url: str) -> str:
    """The name of the database of a URL."""
    parts = urlsplit(url)
    named = unquote(parts.path.removeprefix("/")) or _option(parse_qs(parts.query), "dbname", "PGDATABASE")
    return named or user_of(url)


def user_of(url: str) -> str:
    """The name of the user of a URL."""
    parts = urlsplit(url)
    return unquote(parts.username or "") or _option(parse_qs(parts.query), "user", "PGUSER") or getpass.getuser()


def _option(options: dict[str, list[str]], name: str, variable: str) -> str:
    return options.get(name, [""])[0] or os.environ.get(variable, "")


def _with_port(host: str, port: str) -> str:
    found = _HOST_AND_PORT.fullmatch(host)
    return host if found is None or found["port"] or not host else f"{host}:{port}"
