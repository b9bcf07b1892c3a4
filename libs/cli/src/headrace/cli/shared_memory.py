"""The folder for the shared memory of one system, and what is left of those whose processes were all killed.

Knows that every process locks a file in the folder for as long as it lives (`up` its own, `owner.lock`; workers one each, see
`headrace.transfer.incarnation`). A folder is a dead system's when `up` had locked its file and no lock in it is held: the
kernel lets go of a lock only when its process is gone, and a stopped process keeps it. Without `owner.lock` nothing is proven,
and the folder stays. Does not know what the processes keep there.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/dev/shm")
PREFIX = "headrace-"
OWNER = "owner.lock"


def folder_of(state: Path) -> Path:
    """The folder of the system that runs from this state directory."""
    return ROOT / f"{PREFIX}{hashlib.blake2b(str(state).encode(), digest_size=6).hexdigest()}"


class Claim:
    """An empty folder that this process owns. What was there before is removed. OSError: it can't be made."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        with _alone(folder.parent):
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(mode=0o700)
            self._fd = os.open(folder / OWNER, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._fd, fcntl.LOCK_EX)

    def release(self) -> None:
        """Remove the folder with all that is in it."""
        shutil.rmtree(self.folder, ignore_errors=True)
        os.close(self._fd)


def clear_dead(root: Path = ROOT) -> list[tuple[Path, int]]:
    """Remove the folders of dead systems of this user; returns each with the bytes that it held."""
    cleared = []
    with contextlib.suppress(OSError), _alone(root):
        for folder in sorted(root.glob(f"{PREFIX}*")):
            if _is_dead(folder):
                held = sum(path.stat().st_size for path in folder.iterdir())
                shutil.rmtree(folder, ignore_errors=True)
                cleared.append((folder, held))
    return cleared


def _is_dead(folder: Path) -> bool:
    if folder.stat().st_uid != os.getuid() or not (folder / OWNER).is_file():
        return False
    return not any(_is_held(lock) for lock in folder.glob("*.lock"))


def _is_held(lock: Path) -> bool:
    """Also when it can't be asked: only what is proven free is free."""
    try:
        fd = os.open(lock, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return True
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(fd)
    return False


@contextlib.contextmanager
def _alone(root: Path) -> Iterator[None]:
    """Nobody else makes or clears folders meanwhile: the lock is on `root` itself, so that it leaves no file."""
    fd = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)
