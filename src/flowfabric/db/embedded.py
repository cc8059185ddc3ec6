"""The embedded Postgres: a private server from the binaries of a wheel, shared by the processes of a machine."""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import logging
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from flowfabric.db.filelock import Busy, locked, try_lock, unlock
from flowfabric.db.site import EmbeddedError, Site, cluster_folder, prepare

__all__ = ["DATABASE", "Embedded", "EmbeddedError"]

logger = logging.getLogger(__name__)

DATABASE = "flowfabric"

_SUPERUSER = "postgres"
_TIMEOUT_S = 300
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
class _Postmaster:
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


class Embedded:
    """A reference to the embedded server of a home: the server runs while any process holds one."""

    def __init__(self, site: Site, postmaster: _Postmaster, holder: _Holder) -> None:
        self._site = site
        self._postmaster = postmaster
        self._holder: _Holder | None = holder
        self._owner = os.getpid()
        atexit.register(self._release_at_exit)

    @classmethod
    def start(cls, home: Path, *, version: int = 18) -> Embedded:
        """Start the server of this home, or join the running one; create the cluster if it is missing.

        Safe to call from several processes and threads at once. Blocks: call it off the event loop.
        """
        site = prepare(home, version=version)
        with _locked(site):
            _living_holders(site)
            _check_version(site)
            holder = _Holder.take(site)
            try:
                if not site.data.exists():
                    _initialise(site)
                postmaster = _wait_until_ready(site) or _launch(site)
                while not _ensure_database(site, postmaster):
                    postmaster = _wait_until_ready(site) or _launch(site)
            except BaseException:
                holder.drop()
                raise
        return cls(site, postmaster, holder)

    @staticmethod
    def data_of(home: Path, *, version: int = 18) -> Path:
        """The data folder of a home, whether it exists or not; creates nothing."""
        return cluster_folder(home) / f"postgres-{version}"

    @property
    def url(self) -> str:
        """The postgresql:// address of the database `flowfabric` on this server."""
        return self._postmaster.url

    @property
    def pid(self) -> int:
        """The process id of the server."""
        return self._postmaster.pid

    @property
    def data(self) -> Path:
        """The data folder of the server."""
        return self._site.data

    def revive(self) -> bool:
        """Start the server again if it has died; return whether the server process has changed.

        Safe to call from several processes and threads at once: one of them starts it. Blocks: call it off the event
        loop.
        """
        site, known = self._site, self._postmaster
        current = _read_pid_file(site)
        if (
            current is not None
            and _is_server_of(site, current)
            and (current.pid, current.url) == (known.pid, known.url)
        ):
            return False
        if not site.data.exists():
            # The data was deleted while the server ran: a new server would be empty.
            return False
        with _locked(site):
            if self._holder is None or os.getpid() != self._owner:
                return False
            found = _wait_until_ready(site)
            if found is None:
                found = _launch(site)
                logger.warning(
                    "the embedded Postgres on %s died (process %d) and was started again (process %d)",
                    site.data,
                    known.pid,
                    found.pid,
                )
            self._postmaster = found
        return True

    def release(self, *, discard: bool = False) -> None:
        """Release this reference; the last holder stops the server and, with `discard`, deletes the cluster.

        Idempotent; does nothing in a forked child.
        """
        holder, self._holder = self._holder, None
        if holder is None or os.getpid() != self._owner:
            return
        atexit.unregister(self._release_at_exit)
        if not self._site.folder.exists():
            holder.drop()
            return
        with _locked(self._site):
            holder.drop()
            if _living_holders(self._site):
                return
            _stop(self._site)
            if discard:
                _discard(self._site)

    def _release_at_exit(self) -> None:
        with contextlib.suppress(EmbeddedError, OSError):
            self.release()


class _Holder:
    """A file that its holder keeps locked: the kernel releases the lock of a killed process."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self._path = path
        self._descriptor = descriptor

    @classmethod
    def take(cls, site: Site) -> _Holder:
        """Register this process as a holder of the site."""
        site.holders.mkdir(mode=0o700, exist_ok=True)
        path = site.holders / f"{os.getpid()}-{secrets.token_hex(4)}"
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try_lock(descriptor)
        return cls(path, descriptor)

    def drop(self) -> None:
        """Unregister the holder."""
        unlock(self._descriptor)
        os.close(self._descriptor)
        self._path.unlink(missing_ok=True)


def _living_holders(site: Site) -> list[int]:
    """Return the pids of the living holders of this site; delete the files of dead ones."""
    living = []
    for path in sorted(site.holders.glob("*")):
        descriptor = os.open(path, os.O_RDWR)
        dead = try_lock(descriptor)
        if dead:
            unlock(descriptor)
        else:
            living.append(int(path.name.partition("-")[0]))
        os.close(descriptor)
        if dead:
            path.unlink(missing_ok=True)
    return living


@contextlib.contextmanager
def _locked(site: Site) -> Iterator[None]:
    """Hold the lock under which processes start and stop the server of this site."""
    try:
        with locked(site.lock, seconds=_TIMEOUT_S, make_folder=site.make_folder):
            yield
    except Busy as busy:
        raise EmbeddedError(
            f"{busy}, to start or stop the server of {site.data}; end that process and try again"
        ) from busy


def _check_version(site: Site) -> None:
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


def _initialise(site: Site) -> None:
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


def _wait_until_ready(site: Site) -> _Postmaster | None:
    """Wait for the server of this site to accept connections; None if it does not run. Stop it if it is unreachable."""
    deadline = time.monotonic() + _TIMEOUT_S
    while time.monotonic() < deadline:
        postmaster = _read_pid_file(site)
        if postmaster is not None and postmaster.ready and _is_reachable(postmaster):
            return postmaster
        if not _is_running(site):
            return None
        if postmaster is not None and postmaster.ready:
            _stop(site)
        time.sleep(0.02)
    raise EmbeddedError(
        f"the embedded Postgres on {site.data} is not ready after {_TIMEOUT_S} s: {_log_tail(site)}; see {site.log}"
    )


def _read_pid_file(site: Site) -> _Postmaster | None:
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
    return _Postmaster(pid=abs(int(pid)), host=folder or host, port=int(port or 0), ready=status == "ready")


def _is_running(site: Site) -> bool:
    """Whether the process named by the pid file is a server on this data folder."""
    postmaster = _read_pid_file(site)
    return postmaster is not None and _is_server_of(site, postmaster)


def _is_server_of(site: Site, postmaster: _Postmaster) -> bool:
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


def _is_reachable(postmaster: _Postmaster) -> bool:
    try:
        if sys.platform == "win32" or not postmaster.host.startswith("/"):
            socket.create_connection((postmaster.host, postmaster.port), timeout=5).close()
        else:
            with socket.socket(socket.AF_UNIX) as connection:
                connection.connect(f"{postmaster.host}/.s.PGSQL.{postmaster.port}")
    except OSError:
        return False
    return True


def _launch(site: Site) -> _Postmaster:
    """Start the server and wait until it accepts connections."""
    if site.log.exists() and site.log.stat().st_size > _LOG_BYTES:
        site.log.replace(site.log.with_suffix(".log.old"))
    deadline = time.monotonic() + _ORPHAN_TIMEOUT_S
    while True:
        code, output = _start(site)
        postmaster = _wait_until_ready(site) if code == 0 else None
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
    arguments = ("-w", "-t", str(_TIMEOUT_S), "-D", str(site.data), "-l", str(site.log), "-o", options)
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


def _ensure_database(site: Site, postmaster: _Postmaster) -> bool:
    """Create the database if it is missing; return False if the server died meanwhile."""
    statement = (
        f"select 'create database {DATABASE}'"
        f" where not exists (select from pg_database where datname = '{DATABASE}') \\gexec\n"
    )
    address = ("-h", postmaster.host, "-p", str(postmaster.port), "-U", _SUPERUSER, "-d", "postgres")
    deadline = time.monotonic() + _TIMEOUT_S
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


def _stop(site: Site) -> None:
    """Stop the server of this site and wait until its process has ended."""
    postmaster = _read_pid_file(site)
    if postmaster is None or not _is_server_of(site, postmaster):
        return
    deadline = time.monotonic() + _TIMEOUT_S
    code, output = site.run("pg_ctl", "stop", "-m", "fast", "-w", "-t", str(_TIMEOUT_S), "-D", str(site.data))
    # pg_ctl waits until the pid file is gone, but the process exits shortly after that.
    while not _has_ended(site, postmaster):
        if (code and _is_running(site)) or time.monotonic() > deadline:
            raise EmbeddedError(
                f"the embedded Postgres on {site.data}, process {postmaster.pid}, did not stop: {output};"
                f" see {site.log}"
            )
        time.sleep(0.01)


def _has_ended(site: Site, postmaster: _Postmaster) -> bool:
    """Whether the server process has exited; a process that is exiting has no command line any more."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            return Path(f"/proc/{postmaster.pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
        return True
    return not _is_server_of(site, postmaster)


def _discard(site: Site) -> None:
    """Delete everything this module created in the folder, and the folder itself if it is under the system folder."""
    for folder in (site.data, site.holders):
        shutil.rmtree(folder)
    for path in (site.log, site.log.with_suffix(".log.old"), site.lock):
        path.unlink(missing_ok=True)
    if (folder := _socket_folder(site)) != site.folder:
        shutil.rmtree(folder)
    if site.account is not None:
        shutil.rmtree(site.folder)
