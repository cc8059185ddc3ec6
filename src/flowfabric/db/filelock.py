"""File locks between processes: the kernel drops the lock of a process that dies."""

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

if sys.platform == "win32":
    import msvcrt
else:
    import fcntl

_POLL_S = 0.02


def try_lock(descriptor: int) -> bool:
    """Lock an open file without waiting; return whether the lock was free."""
    try:
        if sys.platform == "win32":
            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
        else:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def unlock(descriptor: int) -> None:
    """Unlock an open file; closing it is not enough, since a forked child may have inherited the descriptor."""
    if sys.platform == "win32":
        msvcrt.locking(descriptor, msvcrt.LK_UNLCK, 1)
    else:
        fcntl.flock(descriptor, fcntl.LOCK_UN)


class Busy(Exception):
    """Another process has held the lock of a file for too long."""


@contextlib.contextmanager
def locked(path: Path, *, seconds: float, make_folder: Callable[[], None]) -> Iterator[None]:
    """Hold the lock of a file, creating it and its folder if they are missing; raise Busy if it stays locked."""
    deadline = time.monotonic() + seconds
    while True:
        make_folder()
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        while not try_lock(descriptor):
            if time.monotonic() > deadline:
                os.close(descriptor)
                raise Busy(f"another process has held the lock of {path} for {seconds:g} s")
            time.sleep(_POLL_S)
        # The file may have been deleted with its folder while this process waited for it.
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(descriptor), path.stat()):
                break
        os.close(descriptor)
    try:
        yield
    finally:
        unlock(descriptor)
        os.close(descriptor)
