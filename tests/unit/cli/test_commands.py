"""Words on the command line: what is found, what is suggested, what is refused and how."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import pty
import socket
import subprocess
import sys
import threading
from dataclasses import asdict, replace

import msgspec
import pytest

from headrace.cli import doctor, ports, state
from headrace.cli.console import Console
from headrace.cli.errors import CommandError
from headrace.cli.main import COMMANDS, GROUPS, main
from headrace.cli.nats_server import NatsServer
from headrace.cli.passthrough import BENCHES
from headrace.cli.shared_memory import folder_of
from headrace.cli.state import Running, StateDir
from headrace.cli.supervisor import Supervisor

RUNNING = Running(os.getpid(), "http://127.0.0.1:8000", "nats://127.0.0.1:4222", "headrace", "secret", "/model", "sim")


def test_help_names_every_command(capsys):
    assert main(["--help"]) == 0
    page = capsys.readouterr().out
    assert sorted(name for names in GROUPS.values() for name in names) == sorted(COMMANDS)
    assert all(f"  {name} " in page for name in COMMANDS)


@pytest.mark.parametrize("name", [name for name, (module, _) in COMMANDS.items() if module not in ("passthrough", "testing")])
def test_every_command_has_a_help_page_and_it_ends_with_0(name, capsys):
    with pytest.raises(SystemExit) as ended:
        main([name, "--help"])
    assert ended.value.code == 0
    assert f"usage: headrace {name}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("typed", "meant"), [("demos", "demo"), ("uo", "up"), ("docter", "doctor"), ("make_checkpoint", "make-checkpoint")]
)
def test_unknown_command_suggests_the_nearest(typed, meant, capsys):
    assert main([typed]) == 2
    assert f"did you mean `headrace {meant}`?" in capsys.readouterr().err


def test_unknown_command_far_from_all_points_to_help(capsys):
    assert main(["xyzzy"]) == 2
    assert "`headrace --help` lists what there is" in capsys.readouterr().err


def test_bench_without_a_room_lists_the_rooms(capsys):
    assert main(["bench"]) == 1
    assert "gateway, engine, recipe, kernels, transfer" in capsys.readouterr().err


def test_what_cannot_be_measured_is_named_in_a_sentence_of_its_own(capsys):
    assert main(["bench", "nope"]) == 1
    assert "headrace bench: 'nope' cannot be measured. Choose one of: gateway, " in capsys.readouterr().err


def test_bench_help_says_what_each_measures(capsys):
    assert main(["bench", "--help"]) == 0
    page = capsys.readouterr().out
    assert all(f"\n  {name} " in page for name in BENCHES)


def test_clients_say_how_to_start_a_system(tmp_path, capsys):
    assert main(["chat", "hello", "--state-dir", str(tmp_path)]) == 1
    assert f"no running system is recorded in {tmp_path}; start one with `headrace up`" in capsys.readouterr().err


def test_chat_without_a_message_on_a_terminal_gives_an_example(monkeypatch, capsys):
    ours, theirs = pty.openpty()
    with open(theirs) as terminal, open(ours):
        monkeypatch.setattr(sys, "stdin", terminal)
        assert main(["chat"]) == 1
    assert 'For example: headrace chat "Why is the sky blue?"' in capsys.readouterr().err


def test_help_page_comes_without_loading_the_bus():
    code = "import sys; from headrace.cli.main import main; main(['--help']); sys.exit('headrace.bus' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL, timeout=30).returncode == 0


# ---------------------------------------------------------------- ports


def test_holder_of_a_port_is_named():
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        port = server.getsockname()[1]
        assert not ports.is_free(port)
        assert ports.holder(port).startswith(f"pid {os.getpid()} (")
    assert ports.is_free(port)
    assert ports.holder(port) == ""


# ---------------------------------------------------------------- state directory


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1"])
def test_ports_are_looked_for_at_the_host_that_is_meant(host):
    try:
        ports.check_host(host)
    except CommandError:
        pytest.skip(f"no {host} here")
    port = ports.free_port(host)
    assert ports.is_free(port, host)
    with socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET):
        assert not ports.is_free(port, host)


def test_state_is_readable_by_its_user_only_and_forgotten_at_the_end(tmp_path):
    directory = StateDir(tmp_path / "state")
    directory.acquire()
    directory.write(RUNNING)
    assert StateDir(tmp_path / "state").read() == RUNNING
    secret = tmp_path / "state" / "nats.url"
    assert secret.read_text() == "nats://headrace:secret@127.0.0.1:4222\n"
    assert secret.stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "state" / "running.json").stat().st_mode & 0o777 == 0o600
    directory.release()
    assert directory.read() is None
    assert not secret.exists()


def test_second_system_in_one_state_directory_is_refused_by_name(tmp_path):
    first = StateDir(tmp_path)
    first.acquire()
    first.write(RUNNING)
    with pytest.raises(CommandError, match=rf"already runs .*pid {os.getpid()}, http://127.0.0.1:8000.*--state-dir"):
        StateDir(tmp_path).acquire()
    first.release()
    second = StateDir(tmp_path)
    second.acquire()
    second.release()


def test_a_system_that_is_still_starting_is_waited_for(tmp_path, capsys):
    where = StateDir(tmp_path)
    assert not where.starting() and not StateDir(tmp_path / "none").starting()
    where.acquire()
    assert StateDir(tmp_path).starting()
    with pytest.raises(CommandError, match="is still starting; try again"):
        state.running_or_fail(StateDir(tmp_path))
    with pytest.raises(CommandError, match="is still starting; try again"):
        state.running_soon(StateDir(tmp_path), Console(), 0.3)
    assert f"the system in {tmp_path} is still starting; waiting for it" in capsys.readouterr().err
    late = threading.Timer(0.5, where.write, [RUNNING])
    late.start()
    assert state.running_soon(StateDir(tmp_path), Console(), 30.0) == RUNNING
    assert not where.starting()
    late.join()
    where.release()
    where.acquire()
    ends = threading.Timer(0.5, where.release)
    ends.start()
    with pytest.raises(CommandError, match="no running system is recorded"):
        state.running_soon(StateDir(tmp_path), Console(), 30.0)
    ends.join()


def test_a_look_at_the_lock_is_no_second_system(tmp_path):
    where = StateDir(tmp_path)
    where.acquire()
    where.release()
    look = (tmp_path / "lock").open()
    fcntl.flock(look, fcntl.LOCK_SH)
    threading.Timer(0.05, look.close).start()
    where.acquire()
    where.release()


def test_a_refused_second_system_leaves_the_memory_of_the_first_alone(tmp_path, capsys):
    first = StateDir(tmp_path)
    first.acquire()
    memory = folder_of(first.path)
    memory.mkdir()
    try:
        assert main(["up", "--engine", "sim", "--port", "0", "--state-dir", str(tmp_path)]) == 1
        assert "already runs" in capsys.readouterr().err
        assert memory.is_dir()
    finally:
        memory.rmdir()
        first.release()


def test_what_cannot_be_shown_does_not_end_the_work(monkeypatch):
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stderr", full)
        Console().alert("a process died")
        with contextlib.suppress(OSError):
            full.close()


WHOLE = json.dumps(asdict(RUNNING))
DAMAGED = {
    "empty": b"",
    "cut": b"{",
    "null": b"null",
    "list": b"[]",
    "object": b"{}",
    "text": b'""',
    "number": b"123",
    "pid only": b'{"pid": 1}',
    "wrong type": WHOLE.replace('"http://127.0.0.1:8000"', "5").encode(),
    "wrong type inside": WHOLE.replace('"processes": {}', '"processes": {"nats": "x"}').encode(),
    "deep": b"[" * 100_000,
    "deep inside": WHOLE.replace("{", '{"more": ' + "[" * 100_000, 1).encode(),
    "not UTF-8": WHOLE.replace("sim", "\xff").encode("latin-1"),
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_a_damaged_record_of_a_running_system_is_named(tmp_path, damage, capsys):
    directory = StateDir(tmp_path)
    directory.acquire()
    directory.write(RUNNING)
    record = tmp_path / "running.json"
    assert msgspec.json.decode(WHOLE, type=Running) == RUNNING
    record.write_bytes(DAMAGED[damage])
    said = f"a system runs from {tmp_path}, but its record {record} can't be read ("
    way_out = "stop that system with Ctrl-C in its terminal and start it again"
    for command in (["chat", "hello"], ["trace", "x"], ["up", "--engine", "sim"]):
        assert main([*command, "--state-dir", str(tmp_path)]) == 1
        error = capsys.readouterr().err
        assert f": {said}" in error and error.endswith(f"); {way_out}\n") and error.count("\n") == 1
    assert doctor.api_port(StateDir(tmp_path)).check == "port 8000"
    (finding,) = asyncio.run(doctor.running_system(StateDir(tmp_path)))
    assert finding.level == "problem" and finding.text.startswith(said) and finding.way_out == way_out
    directory.release()
    assert not record.exists() and StateDir(tmp_path).read() is None


def test_a_damaged_record_of_a_system_that_is_gone_counts_as_none(tmp_path):
    (tmp_path / "running.json").write_text("null")
    assert StateDir(tmp_path).read() is None and not StateDir(tmp_path).starting()
    directory = StateDir(tmp_path)
    directory.acquire()
    assert StateDir(tmp_path).starting()
    directory.release()


LEFT = """
import os, signal, sys
from headrace.cli.state import Running, StateDir
where = StateDir(sys.argv[1])
where.acquire()
where.write(Running(int(sys.argv[2]), "http://x", "nats://x", "u", "p", "m", "sim"))
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_record_of_a_killed_system_counts_as_none_even_if_another_process_has_its_pid(tmp_path):
    subprocess.run([sys.executable, "-c", LEFT, str(tmp_path), str(os.getpid())], check=False)
    assert (tmp_path / "running.json").exists()
    assert StateDir(tmp_path).read() is None and not StateDir(tmp_path).starting()


def test_of_the_processes_of_a_record_those_count_that_run_under_its_system():
    """A signal to the pid of a dead one may reach anybody."""
    with subprocess.Popen(["sleep", "60"]) as child, subprocess.Popen(["true"]) as zombie:
        os.waitid(os.P_PID, zombie.pid, os.WEXITED | os.WNOWAIT)
        pids = {"child": child.pid, "zombie": zombie.pid, "stranger": os.getppid(), "gone": 2**22 + 1}
        assert replace(RUNNING, processes=pids).alive() == {"child": child.pid}
        child.kill()


def test_a_record_is_written_whole_or_not_at_all(tmp_path):
    directory = StateDir(tmp_path)
    directory.acquire()
    directory.write(RUNNING)
    for full in ("running.tmp", "nats.tmp"):
        (tmp_path / full).symlink_to("/dev/full")
        with pytest.raises(OSError, match="No space left"):
            directory.write(replace(RUNNING, url="http://other", nats_password="other"))
        assert not list(tmp_path.glob("*.tmp"))
        assert directory.read() == RUNNING
        assert (tmp_path / "nats.url").read_text() == "nats://headrace:secret@127.0.0.1:4222\n"
    directory.release()


def test_unwritable_state_directory_is_one_sentence(tmp_path):
    blocker = tmp_path / "file"
    blocker.write_text("")
    with pytest.raises(CommandError, match="cannot write to the state directory .*; mend that, or use --state-dir"):
        StateDir(blocker / "state").acquire()


def test_launcher_and_variable_choose_the_state_directory(monkeypatch, tmp_path):
    monkeypatch.setenv("HEADRACE_HOME", str(tmp_path))
    monkeypatch.delenv("HEADRACE_STATE_DIR", raising=False)
    assert state.default_path() == tmp_path / ".headrace"
    monkeypatch.setenv("HEADRACE_STATE_DIR", "/elsewhere")
    assert str(state.default_path()) == "/elsewhere"


def test_bus_is_the_named_one_else_that_of_the_system_here_else_that_of_the_environment(tmp_path, monkeypatch):
    directory = StateDir(tmp_path)
    monkeypatch.delenv("HEADRACE_NATS_URL", raising=False)
    with pytest.raises(CommandError, match="headrace up"):
        state.bus_settings(directory)
    monkeypatch.setenv("HEADRACE_NATS_URL", "nats://bus:4222")
    monkeypatch.setenv("HEADRACE_NATS_USER", "someone")
    found = state.bus_settings(directory)
    assert (found.nats_url, found.nats_user) == ("nats://bus:4222", "someone")
    directory.acquire()
    directory.write(RUNNING)
    assert state.bus_settings(directory) == RUNNING.bus_settings()
    assert state.bus_settings(directory, "nats://other:4222").nats_url == "nats://other:4222"
    directory.release()


# ---------------------------------------------------------------- NATS


async def test_nats_wants_its_password_and_keeps_its_port_over_a_restart(tmp_path):
    from headrace.bus import Bus, BusError, BusSettings

    keeper = Supervisor(lambda death: True)
    server = NatsServer(tmp_path, tmp_path / "nats.log")
    await keeper.start(server.child)
    try:
        await server.ready()
        assert server.settings.nats_url.startswith("nats://127.0.0.1:")
        assert server.config.stat().st_mode & 0o777 == 0o600
        with pytest.raises(BusError):
            await Bus.connect(BusSettings(server.url, "headrace", "wrong", nats_connect_seconds=2))
        bus = await Bus.connect(server.settings)
        back = asyncio.Event()
        bus.on_reconnect.append(back.set)
        server.child.process.kill()
        await asyncio.wait_for(back.wait(), 15)
        await bus.flush()
        await bus.close()
    finally:
        await keeper.stop([server.child], 5)
