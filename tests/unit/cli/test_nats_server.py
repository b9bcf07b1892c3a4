"""The NATS server of a system on one machine: what a killed one leaves does not mislead the next."""

from __future__ import annotations

from headrace.cli.nats_server import NatsServer


def test_port_files_of_killed_servers_are_removed(tmp_path):
    """A pid comes again: the file of a dead server under it would name the wrong port."""
    stale = tmp_path / "nats-server_4711.ports"
    stale.write_text('{"nats": ["nats://127.0.0.1:1"]}')
    server = NatsServer(tmp_path, tmp_path / "nats.log")
    assert not stale.exists() and server.config.exists()
    stale.write_text("{}")
    server.forget()
    assert not list(tmp_path.glob("*.ports"))
