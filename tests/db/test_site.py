"""The system user that runs the embedded server for root."""

import os
import subprocess
from collections.abc import Callable, Iterator
from uuid import uuid4

import pytest

from flowfabric.db.site import EmbeddedError, system_account

from .holders import fork, fork_is_intended

PROCESSES = 8


@pytest.fixture
def user() -> Iterator[str]:
    """The name of a system user that does not exist; it is removed afterwards."""
    name = f"fftest{uuid4().hex[:8]}"
    yield name
    subprocess.run(["userdel", name], capture_output=True, check=False)


@fork_is_intended
def test_processes_that_start_at_the_same_time_create_the_system_user_once(user: str) -> None:
    if os.geteuid() != 0:
        # Only root can create accounts.
        with pytest.raises(EmbeddedError, match=f"the system user {user} could not be created"):
            system_account(user)
        return

    def find(read: Callable[[], str], report: Callable[[object], None]) -> None:
        report("ready")
        read()
        report(system_account(user).uid)

    running = [fork(find) for _ in range(PROCESSES)]
    try:
        assert [process.report() for process in running] == ["ready"] * PROCESSES
        for process in running:
            process.order("find")
        found = [process.report() for process in running]
    finally:
        for process in running:
            process.kill()
    uid = subprocess.run(["id", "-u", user], capture_output=True, text=True, check=True).stdout
    assert found == [int(uid)] * PROCESSES
