"""TCP ports of this machine: which are free, and who holds one that is not."""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path

from headrace.cli.errors import CommandError

LISTEN = "0A"  # state column of /proc/net/tcp


def check_host(host: str) -> None:
    """Raise CommandError unless a server could listen at this address, or at every address of this name."""
    try:
        for family, address in _addresses(host):
            _bind(family, address, 0).close()
    except OSError as error:
        raise CommandError(
            f"--host {host!r} is no address to listen on ({error.strerror or error}); give one of this machine: 127.0.0.1 or "
            "::1 for this machine only, 0.0.0.0 or :: for all of its addresses"
        ) from None


def is_free(port: int, host: str = "127.0.0.1") -> bool:
    """Whether a server could listen there now."""
    try:
        for family, address in _addresses(host):
            _bind(family, address, port).close()
    except OSError:
        return False
    return True


def free_port(host: str = "127.0.0.1") -> int:
    """A port that nobody listens on now. Another process may take it first: use port 0 where a server can tell its own."""
    with _bind(*_addresses(host)[0], 0) as probe:
        return probe.getsockname()[1]


def _addresses(host: str) -> list[tuple[socket.AddressFamily, str]]:
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    return list(dict.fromkeys((family, address[0]) for family, _, _, _, address in found))


def _bind(family: socket.AddressFamily, address: str, port: int) -> socket.socket:
    probe = socket.socket(family)
    try:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:  # as a server does it: `::` leaves 0.0.0.0 to others
            probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        probe.bind((address, port))
    except BaseException:
        probe.close()
        raise
    return probe


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
