"""TCP ports of this machine: which are free, and who holds one that is not."""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path

LISTEN = "0A"  # state column of /proc/net/tcp


def is_free(port: int, host: str = "127.0.0.1") -> bool:
    """Whether a server could listen there now."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
        return True


def free_port(host: str = "127.0.0.1") -> int:
    """A port that nobody listens on now. Another process may take it first: use port 0 where a server can tell its own."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return probe.getsockname()[1]


def holder(port: int) -> str:
    """Who listens on `port`, e.g. 'pid 4711 (python3 -m http.server)'; '' when /proc does not tell (another user's process)."""
    inodes = _listening_inodes(port)
    if not inodes:
        return ""
    for process in Path("/proc").iterdir():
        if process.name.isdigit() and any(_link(fd) in inodes for fd in _open_files(process)):
            with contextlib.suppress(OSError):  # ended meanwhile
                command = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
                return f"pid {process.name} ({command[:100]})"
    return ""


def _open_files(process: Path) -> list[Path]:
    try:
        return list((process / "fd").iterdir())
    except OSError:  # ended meanwhile, or not ours to look into
        return []


def _link(fd: Path) -> str:
    try:
        return os.readlink(fd)
    except OSError:  # closed meanwhile
        return ""


def _listening_inodes(port: int) -> set[str]:
    """`socket:[inode]` of every listener on `port`, as it appears under /proc/PID/fd."""
    inodes = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            lines = Path(table).read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            columns = line.split()
            if columns[3] == LISTEN and int(columns[1].rsplit(":", 1)[1], 16) == port:
                inodes.add(f"socket:[{columns[9]}]")
    return inodes
