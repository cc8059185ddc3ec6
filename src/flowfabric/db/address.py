"""The address of a Postgres server, as settings name it."""

import re
from urllib.parse import parse_qs, urlsplit

_HOST_AND_PORT = re.compile(r"(?:\[[^\[\]]*\]|[^:\[\]]*)(?::(?P<port>.*))?")


def check_url(url: str) -> str:
    """Give back an address that can be asked for, or raise ValueError; the text holds nothing of the address."""
    if not url.startswith(("postgresql://", "postgres://")):
        raise ValueError("must begin with postgresql://")
    try:
        parts = urlsplit(url)
        ports = parse_qs(parts.query).get("port", [])
    except ValueError:
        raise ValueError("cannot be read: write special characters of a password as %XX") from None
    for host in parts.netloc.rpartition("@")[2].split(","):
        found = _HOST_AND_PORT.fullmatch(host)
        if found is None:
            raise ValueError("names no host: write postgresql://user:password@host:port/database")
        ports.append(found["port"])
    for port in ports:
        if port and not all(each.isdecimal() and 1 <= int(each) <= 65535 for each in port.split(",")):
            raise ValueError("names no port from 1 to 65535; write special characters of a password as %XX")
    return url
