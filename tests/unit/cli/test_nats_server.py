"""The NATS server of a system on one machine: what a killed one leaves does not mislead the next."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys

import pytest

from headrace.cli import nats_server
from headrace.cli.errors import CommandError
from headrace.cli.nats_server import NatsServer
from headrace.cli.supervisor import Supervisor


def test_port_files_of_killed_servers_are_removed(tmp_path):
    """A pid comes again: the file of a dead server under it would name the wrong port."""
    stale = tmp_path / "nats-server_4711.ports"
    stale.write_text('{"nats": ["nats://127.0.0.1:1"]}')
    server = NatsServer(tmp_path, tmp_path / "nats.log")
    assert not stale.exists() and server.config.exists()
    stale.write_text("{}")
    server.forget()
    assert not list(tmp_path.glob("*.ports"))


SMALL_DISK = """
mount -t tmpfs -o size=64k tmpfs "$1" || exit 77
head -c 56k /dev/zero > "$1/full"
exec "$2" -m headrace.cli up --engine sim --port 0 --state-dir "$1/state"
"""


def test_a_disk_too_full_for_the_port_of_the_server_is_named(tmp_path):
    """A disk of its own, in a namespace of its own: where a user may make those."""
    argv = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", SMALL_DISK, "sh", str(tmp_path), sys.executable]
    if shutil.which("unshare") is None:
        pytest.skip("no unshare here")
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60)
    if "unshare: " in done.stderr or done.returncode == 77:
        pytest.skip(f"no disk of its own: {done.stderr.strip()}")
    state = tmp_path / "state"
    assert done.returncode == 1
    said = rf"NATS did not start within 10 s: {state}/nats-server_\d+\.ports can't be written \(No space left on device; "
    assert re.search(said, done.stderr), done.stderr
    assert done.stderr.endswith(" bytes are free there); make room, or use --state-dir\n")


async def test_why_nats_does_not_start_is_said_in_its_own_words(tmp_path, monkeypatch):
    monkeypatch.setattr(nats_server, "START_TIMEOUT", 1.0)
    server = NatsServer(tmp_path, tmp_path / "nats.log")
    server.config.write_text("listen: nowhere:at:all\n")
    keeper = Supervisor(lambda death: False)
    await keeper.start(server.child)
    with pytest.raises(CommandError, match=r"within 1 s: the end of \S+nats.log:\n.*nowhere:at:all"):
        await server.ready()
    await keeper.stop([server.child], 5.0)
