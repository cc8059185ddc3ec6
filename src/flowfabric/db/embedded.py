"""The embedded Postgres: a private server from the binaries of a wheel, shared by the processes of a machine."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

from flowfabric.db.cluster import (
    TIMEOUT_S,
    Postmaster,
    check_version,
    delete_cluster,
    ensure_database,
    initialise,
    is_server_of,
    launch,
    read_pid_file,
    stop,
    wait_until_ready,
)
from flowfabric.db.filelock import Busy, locked, try_lock, unlock
from flowfabric.db.site import EmbeddedError, Site, cluster_folder, prepare

__all__ = ["Embedded", "EmbeddedError"]

logger = logging.getLogger(__name__)


class Embedded:
    """A reference to the embedded server of a home: the server runs while any process holds one."""

    def __init__(self, site: Site, postmaster: Postmaster, holder: _Holder) -> None:
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
            check_version(site)
            holder = _Holder.take(site)
            try:
                if not site.data.exists():
                    initialise(site)
                postmaster = wait_until_ready(site) or launch(site)
                while not ensure_database(site, postmaster):
                    postmaster = wait_until_ready(site) or launch(site)
            except BaseException:
                holder.drop()
                raise
        return cls(site, postmaster, holder)

    @staticmethod
    def data_of(home: Path, *, version: int = 18) -> Path:
        """The data folder of a home, whether it exists or not; create nothing."""
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
        current = read_pid_file(site)
        if current is not None and is_server_of(site, current) and (current.pid, current.url) == (known.pid, known.url):
            return False
        if not site.data.exists():
            # The data was deleted while the server ran: a new server would be empty.
            return False
        with _locked(site):
            if self._holder is None or os.getpid() != self._owner:
                return False
            found = wait_until_ready(site)
            if found is None:
                found = launch(site)
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
            stop(self._site)
            if discard:
                delete_cluster(self._site)

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
        with locked(site.lock, seconds=TIMEOUT_S, make_folder=site.make_folder):
            yield
    except Busy as busy:
        raise EmbeddedError(
            f"{busy}, to start or stop the server of {site.data}; end that process and try again"
        ) from busy
