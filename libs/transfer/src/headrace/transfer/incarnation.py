"""One life of one process, and the proof that it is over.

An incarnation is named `<instance>~<nonce>~<random>`. Where there is a shm directory the process holds an exclusive flock
on `<incarnation>.lock` in it for as long as it lives; the kernel drops that lock when the last thread is gone, so a lock
that we can take means that nothing of that process can write any more. A stopped process keeps its lock: it is not dead.

`nonce` names the directory itself (a random file in it), so that two processes know whether they look at the same one: a
missing lock file proves death only in the directory where the incarnation was made.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import time
from pathlib import Path

from headrace.transfer.errors import ShmUnavailable

SEPARATOR = "~"
NO_NONCE = "-"  # an incarnation without shared memory


def host_nonce(shm_dir: str | os.PathLike) -> str:
    """The directory's nonce; made on first use (atomically: two processes agree). ShmUnavailable says why it can't be."""
    path = Path(shm_dir)
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not (nonce := read_nonce(path)):
            draft = path / f".nonce-{secrets.token_hex(8)}"
            draft.write_text(secrets.token_hex(8))
            with contextlib.suppress(FileExistsError):
                os.link(draft, path / "nonce")  # unlike rename, link never replaces another's
            draft.unlink()
            nonce = read_nonce(path)
    except OSError as error:
        raise ShmUnavailable(
            f"can't use {path} for shared memory: {error.strerror or error}. Name a writable tmpfs directory with --shm-dir, "
            "or do without with --transports tcp"
        ) from error
    return nonce


def read_nonce(shm_dir: str | os.PathLike) -> str:
    """The directory's nonce, or "" when it has none or we can't see it."""
    try:
        return (Path(shm_dir) / "nonce").read_text().strip()
    except OSError:
        return ""


class Incarnation:
    """This process's name and, with a directory, its lock."""

    def __init__(self, instance: str, shm_dir: str | os.PathLike | None) -> None:
        if not instance or SEPARATOR in instance or "/" in instance:
            raise ValueError(f"an instance name is not empty and has no '{SEPARATOR}' or '/'; got {instance!r}")
        self.shm_dir = None if shm_dir is None else Path(shm_dir)
        self.nonce = NO_NONCE if self.shm_dir is None else host_nonce(self.shm_dir)
        self.name = SEPARATOR.join((instance, self.nonce, secrets.token_hex(8)))
        self._fd = -1 if self.shm_dir is None else self._lock()

    def release(self) -> None:
        """The process writes no more: drop the lock and its file."""
        if self._fd >= 0:
            _lock_path(self.shm_dir, self.name).unlink(missing_ok=True)
            os.close(self._fd)
            self._fd = -1

    def _lock(self) -> int:
        # Locked before it has its name: nobody ever sees an unlocked file of a living process.
        draft = self.shm_dir / f"{self.name}.draft"
        fd = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        fcntl.flock(fd, fcntl.LOCK_EX)
        os.write(fd, f"{os.getpid()}\n".encode())
        os.rename(draft, _lock_path(self.shm_dir, self.name))
        return fd


def is_dead(incarnation: str, shm_dir: str | os.PathLike) -> bool:
    """True only with proof: the incarnation was made in this very directory and its lock is free or its file is gone.
    False means alive, stopped, or not to be judged from here."""
    nonce = nonce_of(incarnation)
    if nonce == NO_NONCE or nonce != read_nonce(shm_dir):
        return False
    try:
        fd = os.open(_lock_path(shm_dir, incarnation), os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)  # shared: two who ask at once don't mislead each other
    except BlockingIOError:
        return False
    finally:
        os.close(fd)
    return True


class Watch:
    """Asks about one incarnation of this directory again and again: its lock file stays open, so asking is one system call."""

    def __init__(self, incarnation: str, shm_dir: str | os.PathLike) -> None:
        self._fd = -1
        with contextlib.suppress(FileNotFoundError):
            self._fd = os.open(_lock_path(shm_dir, incarnation), os.O_RDONLY | os.O_CLOEXEC)

    def is_dead(self) -> bool:
        """The lock is free (also when its file is unlinked by now), or there was none."""
        if self._fd >= 0:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(self._fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
                self.close()
        return self._fd < 0

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def nonce_of(incarnation: str) -> str:
    """The directory nonce inside an incarnation's name. ValueError for anything that is no such name."""
    parts = incarnation.split(SEPARATOR)
    if len(parts) != 3:
        raise ValueError(f"not an incarnation (instance{SEPARATOR}nonce{SEPARATOR}random): {incarnation!r}")
    return parts[1]


def sweep(shm_dir: str | os.PathLike) -> list[str]:
    """Remove what dead incarnations left behind (segments, then the lock). Returns their names."""
    path, swept = Path(shm_dir), []
    for lock in path.glob("*.lock"):
        name = lock.name.removesuffix(".lock")
        if SEPARATOR in name and is_dead(name, path):
            for segment in path.glob(f"{name}.*"):
                if segment != lock:
                    segment.unlink(missing_ok=True)
            lock.unlink(missing_ok=True)
            swept.append(name)
    for draft in (*path.glob("*.draft"), *path.glob(".nonce-*")):
        with contextlib.suppress(FileNotFoundError):
            if time.time() - draft.stat().st_mtime > 60:  # a process died between creating and naming it
                draft.unlink()
    return swept


def _lock_path(shm_dir: str | os.PathLike, incarnation: str) -> Path:
    return Path(shm_dir) / f"{incarnation}.lock"
