"""The system user that runs the embedded server for root."""

import os
import subprocess
import sys
from collections.abc import Iterator
from uuid import uuid4

import pytest

from flowfabric.db.site import EmbeddedError, system_account

FIND = """
import sys
from flowfabric.db.site import system_account
print("ready", flush=True)
sys.stdin.readline()
print(system_account(sys.argv[1]).uid)
"""


@pytest.fixture
def user() -> Iterator[str]:
    """The name of a system user that does not exist; it is removed afterwards."""
    name = f"fftest{uuid4().hex[:8]}"
    yield name
    subprocess.run(["userdel", name], capture_output=True, check=False)


def found_at_once(user: str, processes: int = 8, **environment: str) -> list[str]:
    """What processes that ask for the account at the same time are told."""
    running = [
        subprocess.Popen(
            [sys.executable, "-c", FIND, user],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **environment},
        )
        for _ in range(processes)
    ]
    for process in running:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in running:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    return [process.communicate(timeout=60)[0].strip() for process in running]


def test_processes_that_start_at_once_create_the_system_user_once(user: str) -> None:
    if os.geteuid() != 0:
        # Only root creates accounts: anybody else is told who could not be created.
        with pytest.raises(EmbeddedError, match=f"the system user {user} could not be created"):
            system_account(user)
        return
    found = found_at_once(user)
    uid = subprocess.run(["id", "-u", user], capture_output=True, text=True, check=True).stdout.strip()
    assert found == [uid] * 8
