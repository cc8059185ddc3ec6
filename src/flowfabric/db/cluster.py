"""The data and the server process of an embedded cluster: create, start, stop and delete."""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from flowfabric.db.site import EmbeddedError, Site

DATABASE = "flowfabric"

_SUPERUSER = "postgres"
TIMEOUT_S = 300
_ORPHAN_TIMEOUT_S = 20
_LOG_BYTES = 16 * 1024 * 1024
# macOS limits the path of a socket to 103 bytes, Linux to 107.
_SOCKET_PATH_BYTES = 103

_SETTINGS = {
    "fsync": "on",
    "synchronous_commit": "on",
    "shared_buffers": "512MB",
    "max_wal_size": "4GB",
    "checkpoint_timeout": "15min",
    "max_connections": "200",
    "jit": "off",
    "autovacuum_naptime": "10s",
    "log_min_messages": "warning",
    "timezone": "UTC",
    "unix_socket_permissions": "0700",
}


@dataclass(frozen=True, kw_only=True)
class Postmaster:
    """A server as its pid file describes it."""

    pid: int
    host: str
    port: int
    ready: bool

    @property
    def url(self) -> str:
        """The address of the database on this server."""
        if self.host.startswith("/"):
            return f"postgresql://{_SUPERUSER}@/{DATABASE}?host={quote(self.host, safe='/')}&port={self.port}"
        return f"postgresql://{_SUPERUSER}@{self.host}:{self.port}/{DATABASE}"


def check_version(site: Site) -> None:
    """Raise if the folder holds data of another version of Postgres."""
    if not site.data.exists():
        others = sorted(path.name for path in site.folder.glob("postgres-[0-9][0-9]") if path.is_dir())
        if others:
            raise EmbeddedError(
                f"{site.folder} holds {', '.join(others)} but Postgres {site.version} was requested;"
                " install the flowfabric release that created it, or copy its data to another FF_HOME with pg_dump"
            )
        return
    marker = site.data / "PG_VERSION"
    if not marker.exists():
        raise EmbeddedError(
            f"{site.data} is not a Postgres data folder, it has no PG_VERSION: move it away,"
            " or set FF_HOME to another folder"
        )
    found = marker.read_text().strip()
    if found != str(site.version):
        raise EmbeddedError(
            f"{site.data} holds data of Postgres {found}, not of Postgres {site.version}: set FF_HOME to another folder"
        )


def initialise(site: Site) -> None:
    """Create the cluster under a temporary name, so that the data folder is either complete or absent."""
    fresh = site.data.with_suffix(".new")
    shutil.rmtree(fresh, ignore_errors=True)
    settings = dict(_SETTINGS)
    if sys.platform != "win32":
        # The port only names the socket. It differs per cluster, because a server whose data was deleted removes its
        # socket when it notices, and that must not be the socket of its successor.
        settings["port"] = str(20_000 + secrets.randbelow(40_000))
    host = "trust" if sys.platform == "win32" else "reject"
    options = ["--username", _SUPERUSER, "--no-locale", "--encoding", "UTF8", "--data-checksums", "--no-instructions"]
    options += ["--auth-local", "trust", "--auth-host", host, "--pgdata", str(fresh)]
    for name, value in settings.items():
        options += ["--set", f"{name}={value}"]
    code, output = site.run("initdb", *options)
    if code:
        shutil.rmtree(fresh, ignore_errors=True)
        raise EmbeddedError(f"the embedded Postgres could not be created in {site.folder}: {output}")
    fresh.rename(site.data)


def wait_until_ready(site: Site) -> Postmaster | None:
    """Wait for the server of this site to accept connections; None if it does not run. Stop it if it is unreachable."""
    deadline = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline:
        postmaster = read_pid_file(site)
        if postmaster is not None and postmaster.ready and _is_reachable(postmaster):
            return postmaster
        if not _is_running(site):
            return None
        if postmaster is not None and postmaster.ready:
            stop(site)
        time.sleep(0.02)
    raise EmbeddedError(
        f"the embedded Postgres on {site.data} is not ready after {TIMEOUT_S} s: {_log_tail(site)}; see {site.log}"
    )


def read_pid_file(site: Site) -> Postmaster | None:
    """The server that the pid file names, whether or not it runs."""
    try:
        pid, _, _, port, folder, host, _, status, *_ = (
            *map(str.strip, (site.data / "postmaster.pid").read_text().splitlines()),
            *[""] * 8,
        )
    except FileNotFoundError:
        return None
    if not pid.lstrip("-").isdecimal():
        return None
    return Postmaster(pid=abs(int(pid)), host=folder or host, port=int(port or 0), ready=status == "ready")


def _is_running(site: Site) -> bool:
    """Whether the process named by the pid file is a server on this data folder."""
    postmaster = read_pid_file(site)
    return postmaster is not None and is_server_of(site, postmaster)


def is_server_of(site: Site, postmaster: Postmaster) -> bool:
    """Whether this process is a server on this data folder.

    Pids are reused after a restart of the machine or the container, so the command line is compared.
    """
    if sys.platform == "win32":
        return _is_reachable(postmaster)
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            return os.fsencode(site.data) in Path(f"/proc/{postmaster.pid}/cmdline").read_bytes().split(b"\0")
        return False
    listing = subprocess.run(["ps", "-ww", "-o", "args=", "-p", str(postmaster.pid)], capture_output=True, check=False)
    return os.fsencode(site.data) in listing.stdout


def _is_reachable(postmaster: Postmaster) -> bool:
    try:
        if sys.platform == "win32" or not postmaster.host.startswith("/"):
            socket.create_connection((postmaster.host, postmaster.port), timeout=5).close()
        else:
            with socket.socket(socket.AF_UNIX) as connection:
                connection.connect(f"{postmaster.host}/.s.PGSQL.{postmaster.port}")
    except OSError:
        return False
    return True


def launch(site: Site) -> Postmaster:
    """Start the server and wait until it accepts connections."""
    if site.log.exists() and site.log.stat().st_size > _LOG_BYTES:
        site.log.replace(site.log.with_suffix(".log.old"))
    deadline = time.monotonic() + _ORPHAN_TIMEOUT_S
    while True:
        code, output = _start(site)
        postmaster = wait_until_ready(site) if code == 0 else None
        if postmaster is not None:
            return postmaster
        reason = _log_tail(site) or output
        # The sessions of a killed server keep its shared memory until they notice that it is gone.
        if "shared memory block" not in reason or time.monotonic() > deadline:
            raise EmbeddedError(f"the embedded Postgres did not start on {site.data}: {reason}; see {site.log}")
        time.sleep(0.1)


def _start(site: Site) -> tuple[int, str]:
    folder = _socket_folder(site)
    # These files are stale, but Postgres would refuse to start if another process has the pid they name.
    for leftover in (site.data / "postmaster.pid", *folder.glob(".s.PGSQL.*")):
        leftover.unlink(missing_ok=True)
    if sys.platform == "win32":
        with socket.create_server(("127.0.0.1", 0)) as probe:
            options = f"-h 127.0.0.1 -p {probe.getsockname()[1]}"
    else:
        options = f"-h '' -k '{folder}'"
    arguments = ("-w", "-t", str(TIMEOUT_S), "-D", str(site.data), "-l", str(site.log), "-o", options)
    return site.run("pg_ctl", "start", *arguments)


def _log_tail(site: Site) -> str:
    if not site.log.exists():
        return ""
    with site.log.open("rb") as log:
        log.seek(max(0, site.log.stat().st_size - 4096))
        lines = log.read().decode(errors="replace").splitlines()
    return "; ".join(lines[-5:])


def _socket_folder(site: Site) -> Path:
    """The cluster folder, or a private folder in the temporary folder if its path does not suit a socket."""
    if sys.platform == "win32":
        return site.folder
    longest = len(os.fsencode(site.folder / ".s.PGSQL.65535"))
    if longest <= _SOCKET_PATH_BYTES and not set(str(site.folder)) & set("'\"\\,$`!\n"):
        return site.folder
    name = f"flowfabric-{os.geteuid()}-{hashlib.sha256(os.fsencode(site.data)).hexdigest()[:16]}"
    folder = Path(tempfile.gettempdir()) / name
    if len(os.fsencode(folder / ".s.PGSQL.65535")) > _SOCKET_PATH_BYTES:
        folder = Path("/tmp") / name
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    if found.st_uid != os.geteuid() or found.st_mode & 0o170077 != 0o040000:
        raise EmbeddedError(
            f"{folder} must be a folder that belongs to this user and has mode 700: remove it, it will be created again"
        )
    return folder


def ensure_database(site: Site, postmaster: Postmaster) -> bool:
    """Create the database if it is missing; return False if the server died meanwhile."""
    statement = (
        f"select 'create database {DATABASE}'"
        f" where not exists (select from pg_database where datname = '{DATABASE}') \\gexec\n"
    )
    address = ("-h", postmaster.host, "-p", str(postmaster.port), "-U", _SUPERUSER, "-d", "postgres")
    deadline = time.monotonic() + TIMEOUT_S
    while True:
        code, output = site.run("psql", "-X", "-q", "-w", "-v", "ON_ERROR_STOP=1", *address, stdin=statement)
        if code == 0:
            return True
        # psql exits with 2 if it cannot connect: a server in crash recovery refuses connections for a while.
        if code == 2 and not _is_running(site):
            return False
        if code != 2 or time.monotonic() > deadline:
            raise EmbeddedError(
                f"the database {DATABASE} could not be created on the embedded server of {site.data}: {output};"
                f" see {site.log}"
            )
        time.sleep(0.1)


def stop(site: Site) -> None:
    """Stop the server of this site and wait until its process has ended."""
    postmaster = read_pid_file(site)
    if postmaster is None or not is_server_of(site, postmaster):
        return
    deadline = time.monotonic() + TIMEOUT_S
    code, output = site.run("pg_ctl", "stop", "-m", "fast", "-w", "-t", str(TIMEOUT_S), "-D", str(site.data))
    # pg_ctl waits until the pid file is gone, but the process exits shortly after that.
    while not _has_ended(site, postmaster):
        if (code and _is_running(site)) or time.monotonic() > deadline:
            raise EmbeddedError(
                f"the embedded Postgres on {site.data}, process {postmaster.pid}, did not stop: {output};"
                f" see {site.log}"
            )
        time.sleep(0.01)


def _has_ended(site: Site, postmaster: Postmaster) -> bool:
    """Whether the server process has exited; a process that is exiting has no command line any more."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            return Path(f"/proc/{postmaster.pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
        return True
    return not is_server_of(site, postmaster)


def delete_cluster(site: Site) -> None:
    """Delete everything this module created in the folder, and the folder itself if it is under the system folder."""
    for folder in (site.data, site.holders):
        shutil.rmtree(folder)
    for path in (site.log, site.log.with_suffix(".log.old"), site.lock):
        path.unlink(missing_ok=True)
    if (folder := _socket_folder(site)) != site.folder:
        shutil.rmtree(folder)
    if site.account is not None:
        shutil.rmtree(site.folder)
