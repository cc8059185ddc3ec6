"""The embedded Postgres: a private server on the binaries of a wheel, shared by the processes of one machine."""

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
from flowfabric.db.site import EmbeddedError, Site, place_of, prepare

__all__ = ["DATABASE", "Embedded", "EmbeddedError"]

logger = logging.getLogger(__name__)

DATABASE = "flowfabric"

_SUPERUSER = "postgres"
_PATIENCE_S = 300
_ORPHANS_S = 20
_LOG_BYTES = 16 * 1024 * 1024
# macOS allows 103 bytes for the path of a socket, Linux 107.
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
    """A hold on the embedded server of a home: it runs as long as any process holds it."""

    def __init__(self, site: Site, postmaster: _Postmaster, hold: _Hold) -> None:
        self._site = site
        self._postmaster = postmaster
        self._hold: _Hold | None = hold
        self._owner = os.getpid()
        atexit.register(self._release_at_exit)

    @classmethod
    def start(cls, home: Path, *, version: int = 18) -> Embedded:
        """Hold the server of this home, starting it or creating it when it is not there.

        Safe from several processes and threads at once; blocks, so call it off the event loop.
        """
        site = prepare(home, version=version)
        with _locked(site):
            _prune(site)
            _check_version(site)
            hold = _Hold.take(site)
            try:
                if not site.data.exists():
                    _initialise(site)
                postmaster = _running(site) or _launch(site)
                while not _has_database(site, postmaster):
                    postmaster = _running(site) or _launch(site)
            except BaseException:
                hold.drop()
                raise
        return cls(site, postmaster, hold)

    @staticmethod
    def data_of(home: Path, *, version: int = 18) -> Path:
        """Where the data of a home is or would be; nothing is made."""
        return place_of(home) / f"postgres-{version}"

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
        """Start the server again if it has died; answers whether it is another one than this hold knew.

        Safe from several processes and threads at once: one of them starts it. Blocks, so call it off the event loop.
        """
        site, known = self._site, self._postmaster
        named = _named(site)
        if named is not None and _serves(site, named) and (named.pid, named.url) == (known.pid, known.url):
            return False
        if not site.data.exists():
            # Deleted under its holders: a new server would be an empty one.
            return False
        with _locked(site):
            if self._hold is None or os.getpid() != self._owner:
                return False
            found = _running(site)
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
        """Return up this hold; the last holder stops the server and, with `discard`, deletes the cluster.

        Idempotent, and without effect in a forked child.
        """
        hold, self._hold = self._hold, None
        if hold is None or os.getpid() != self._owner:
            return
        atexit.unregister(self._release_at_exit)
        if not self._site.place.exists():
            hold.drop()
            return
        with _locked(self._site):
            hold.drop()
            if _prune(self._site):
                return
            _stop(self._site)
            if discard:
                _discard(self._site)

    def _release_at_exit(self) -> None:
        with contextlib.suppress(EmbeddedError, OSError):
            self.release()


class _Hold:
    """A file locked for as long as its holder lives: the kernel drops the lock of a killed process."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self._path = path
        self._descriptor = descriptor

    @classmethod
    def take(cls, site: Site) -> _Hold:
        """Become a holder of this site."""
        site.holders.mkdir(mode=0o700, exist_ok=True)
        path = site.holders / f"{os.getpid()}-{secrets.token_hex(4)}"
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try_lock(descriptor)
        return cls(path, descriptor)

    def drop(self) -> None:
        """Stop being a holder."""
        unlock(self._descriptor)
        os.close(self._descriptor)
        self._path.unlink(missing_ok=True)


def _prune(site: Site) -> list[int]:
    """The pids that hold this site, after removing those of dead holders."""
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
    """Be the only one, over all processes, that starts or stops this site."""
    try:
        with locked(site.lock, seconds=_PATIENCE_S, make_folder=site.make_place):
            yield
    except Busy as busy:
        raise EmbeddedError(
            f"{busy}: it has been starting or stopping the server of {site.data} all the time;"
            " end that process and try again"
        ) from busy


def _check_version(site: Site) -> None:
    """Refuse a place whose data was written by another Postgres."""
    if not site.data.exists():
        others = sorted(path.name for path in site.place.glob("postgres-[0-9][0-9]") if path.is_dir())
        if others:
            raise EmbeddedError(
                f"{site.place} holds {', '.join(others)} but Postgres {site.version} was asked for;"
                " install the flowfabric that made it, or copy its data with pg_dump to another FF_HOME"
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
    """Create the cluster under a temporary name, so that a data folder is either whole or absent."""
    fresh = site.data.with_suffix(".new")
    shutil.rmtree(fresh, ignore_errors=True)
    settings = dict(_SETTINGS)
    if sys.platform != "win32":
        # It names the socket only, and differs per cluster: a server whose data was deleted removes its socket
        # when it notices, which must not be the socket of its successor.
        settings["port"] = str(20_000 + secrets.randbelow(40_000))
    host = "trust" if sys.platform == "win32" else "reject"
    options = ["--username", _SUPERUSER, "--no-locale", "--encoding", "UTF8", "--data-checksums", "--no-instructions"]
    options += ["--auth-local", "trust", "--auth-host", host, "--pgdata", str(fresh)]
    for name, value in settings.items():
        options += ["--set", f"{name}={value}"]
    code, output = site.run("initdb", *options)
    if code:
        shutil.rmtree(fresh, ignore_errors=True)
        raise EmbeddedError(f"the embedded Postgres could not be created in {site.place}: {output}")
    fresh.rename(site.data)


def _running(site: Site) -> _Postmaster | None:
    """The server of this site once it accepts connections; one that is up but deaf is stopped."""
    deadline = time.monotonic() + _PATIENCE_S
    while time.monotonic() < deadline:
        postmaster = _named(site)
        if postmaster is not None and postmaster.ready and _reachable(postmaster):
            return postmaster
        if not _alive(site):
            return None
        if postmaster is not None and postmaster.ready:
            _stop(site)
        time.sleep(0.02)
    raise EmbeddedError(
        f"the embedded Postgres on {site.data} is not ready after {_PATIENCE_S} s: {_last_words(site)}; see {site.log}"
    )


def _named(site: Site) -> _Postmaster | None:
    """The server the pid file names, whether or not it is there."""
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


def _alive(site: Site) -> bool:
    """Whether the process the pid file names is a server on this data folder."""
    postmaster = _named(site)
    return postmaster is not None and _serves(site, postmaster)


def _serves(site: Site, postmaster: _Postmaster) -> bool:
    """Whether this process is a server on this data folder.

    A pid is used again after a restart of the machine or the container: only the command line tells.
    """
    if sys.platform == "win32":
        return _reachable(postmaster)
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            return os.fsencode(site.data) in Path(f"/proc/{postmaster.pid}/cmdline").read_bytes().split(b"\0")
        return False
    listing = subprocess.run(["ps", "-ww", "-o", "args=", "-p", str(postmaster.pid)], capture_output=True, check=False)
    return os.fsencode(site.data) in listing.stdout


def _reachable(postmaster: _Postmaster) -> bool:
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
    deadline = time.monotonic() + _ORPHANS_S
    while True:
        code, output = _start(site)
        postmaster = _running(site) if code == 0 else None
        if postmaster is not None:
            return postmaster
        reason = _last_words(site) or output
        # Sessions of a killed server hold its memory until they notice that it is gone.
        if "shared memory block" not in reason or time.monotonic() > deadline:
            raise EmbeddedError(f"the embedded Postgres did not start on {site.data}: {reason}; see {site.log}")
        time.sleep(0.1)


def _start(site: Site) -> tuple[int, str]:
    folder = _socket_folder(site)
    # Whoever these files name is dead or somebody else; Postgres would take a process with that pid for its twin.
    for leftover in (site.data / "postmaster.pid", *folder.glob(".s.PGSQL.*")):
        leftover.unlink(missing_ok=True)
    if sys.platform == "win32":
        with socket.create_server(("127.0.0.1", 0)) as probe:
            options = f"-h 127.0.0.1 -p {probe.getsockname()[1]}"
    else:
        options = f"-h '' -k '{folder}'"
    arguments = ("-w", "-t", str(_PATIENCE_S), "-D", str(site.data), "-l", str(site.log), "-o", options)
    return site.run("pg_ctl", "start", *arguments)


def _last_words(site: Site) -> str:
    if not site.log.exists():
        return ""
    with site.log.open("rb") as log:
        log.seek(max(0, site.log.stat().st_size - 4096))
        lines = log.read().decode(errors="replace").splitlines()
    return "; ".join(lines[-5:])


def _socket_folder(site: Site) -> Path:
    """The place itself, or a private folder under the temporary one when its path does not suit a socket."""
    if sys.platform == "win32":
        return site.place
    longest = len(os.fsencode(site.place / ".s.PGSQL.65535"))
    if longest <= _SOCKET_PATH_BYTES and not set(str(site.place)) & set("'\"\\,$`!\n"):
        return site.place
    name = f"flowfabric-{os.geteuid()}-{hashlib.sha256(os.fsencode(site.data)).hexdigest()[:16]}"
    folder = Path(tempfile.gettempdir()) / name
    if len(os.fsencode(folder / ".s.PGSQL.65535")) > _SOCKET_PATH_BYTES:
        folder = Path("/tmp") / name
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    if found.st_uid != os.geteuid() or found.st_mode & 0o170077 != 0o040000:
        raise EmbeddedError(
            f"{folder} must be a folder that belongs to this user and has mode 700: remove it, it is created again"
        )
    return folder


def _has_database(site: Site, postmaster: _Postmaster) -> bool:
    """Have the database on this server; False when the server died meanwhile."""
    statement = (
        f"select 'create database {DATABASE}'"
        f" where not exists (select from pg_database where datname = '{DATABASE}') \\gexec\n"
    )
    address = ("-h", postmaster.host, "-p", str(postmaster.port), "-U", _SUPERUSER, "-d", "postgres")
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        code, output = site.run("psql", "-X", "-q", "-w", "-v", "ON_ERROR_STOP=1", *address, stdin=statement)
        if code == 0:
            return True
        # 2 is a refused connection: a server that recovers from a crash refuses them for a while.
        if code == 2 and not _alive(site):
            return False
        if code != 2 or time.monotonic() > deadline:
            raise EmbeddedError(
                f"the database {DATABASE} could not be created on the embedded server of {site.data}: {output};"
                f" see {site.log}"
            )
        time.sleep(0.1)


def _stop(site: Site) -> None:
    """Stop the server of this site and wait until its process has ended."""
    postmaster = _named(site)
    if postmaster is None or not _serves(site, postmaster):
        return
    deadline = time.monotonic() + _PATIENCE_S
    code, output = site.run("pg_ctl", "stop", "-m", "fast", "-w", "-t", str(_PATIENCE_S), "-D", str(site.data))
    # pg_ctl waits for the pid file to go, which a server removes a moment before it ends.
    while not _has_ended(site, postmaster):
        if (code and _alive(site)) or time.monotonic() > deadline:
            raise EmbeddedError(
                f"the embedded Postgres on {site.data}, process {postmaster.pid}, did not stop: {output};"
                f" see {site.log}"
            )
        time.sleep(0.01)


def _has_ended(site: Site, postmaster: _Postmaster) -> bool:
    """Whether this server's process is gone; one whose memory the kernel takes back has no command line any more."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            return Path(f"/proc/{postmaster.pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
        return True
    return not _serves(site, postmaster)


def _discard(site: Site) -> None:
    """Delete what this module put into the place, and the place when it is its own."""
    for folder in (site.data, site.holders):
        shutil.rmtree(folder)
    for path in (site.log, site.log.with_suffix(".log.old"), site.lock):
        path.unlink(missing_ok=True)
    if (folder := _socket_folder(site)) != site.place:
        shutil.rmtree(folder)
    if site.account is not None:
        shutil.rmtree(site.place)
