"""What `headrace doctor` says of kernels; the other checks are seen at a running system (tests/system/test_cli_system.py)."""

import os
import subprocess

import pytest

from headrace.cli import doctor
from headrace.cli.state import Running, StateDir

torch = pytest.importorskip("torch")


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_without_a_gpu_kernels_are_not_a_problem():
    found = doctor.kernels()
    assert found.level == "ok" and "no CUDA device" in found.text


def test_a_kernel_that_fails_is_named():
    rows = [
        {"op": "mhc", "case": "a", "first_seconds": 2.0, "second_seconds": 0.001},
        {"op": "topk", "case": "b", "error": "CompilationError: no such dtype"},
    ]
    found = doctor.warmed({"cache": "/tmp/c", "kernels": rows})
    assert found.level == "problem" and "1 of 2 fail; the first: topk: CompilationError" in found.text and found.way_out
    found = doctor.warmed({"cache": "/tmp/c", "kernels": rows[:1]})
    assert found.level == "ok" and "1 warmed in 2.0 s, the slowest warm call 1.0 ms; cache /tmp/c" in found.text


def test_a_warm_up_without_end_is_given_up(monkeypatch):
    def late(command, **options):
        raise subprocess.TimeoutExpired(command, options["timeout"])

    monkeypatch.setattr(subprocess, "run", late)
    found = doctor.kernels()
    assert found.level == "note" and "run it again" in found.way_out


def test_a_system_is_asked_for_the_services_that_it_has():
    """`up --both` has no prefill worker, and a checkpoint that sees has a vision worker."""
    assert doctor.roles_of(["nats", "gateway", "decode-1", "decode-2", "kvstore"]) == ["decode", "gateway", "kvstore"]
    assert "vision" in doctor.roles_of(["vision-1", "prefill-1"])


def test_the_port_of_the_system_that_runs_here_is_its_own(tmp_path, monkeypatch):
    where = StateDir(tmp_path)
    monkeypatch.setattr(doctor, "is_free", lambda port: False)
    assert doctor.api_port(where).level == "note"
    where.acquire()
    running = Running(os.getpid(), "http://127.0.0.1:8000", "nats://127.0.0.1:4222", "headrace", "secret", "m", "sim")
    where.write(running)
    assert (doctor.api_port(where).level, doctor.api_port(where).text) == ("ok", "the running system's own")
    running.url = "http://[::1]:9000"
    where.write(running)
    assert doctor.api_port(where).level == "note", "somebody else has 8000"
    where.release()


async def test_a_system_that_is_starting_is_no_problem(tmp_path):
    where = StateDir(tmp_path)
    where.acquire()
    (found,) = await doctor.running_system(StateDir(tmp_path))
    assert found.level == "note" and "still starting" in found.text
    where.release()
    (found,) = await doctor.running_system(StateDir(tmp_path))
    assert "none is recorded" in found.text


@pytest.mark.parametrize(("runs", "level"), [(1.9, "ok"), (2.1, "note")])
def test_more_work_than_cores_is_noted(monkeypatch, runs, level):
    monkeypatch.setattr(os, "getloadavg", lambda: (runs, 0.0, 9.0))
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    assert doctor.load().level == level and f"{runs}" in doctor.load().text and "2 cores" in doctor.load().text
