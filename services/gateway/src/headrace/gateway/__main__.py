"""`python -m headrace.gateway`: one gateway, or with --workers N a parent that keeps N of them on one port."""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import sys
import time

from headrace.bus import SettingsError, run_service

from .service import Gateway
from .settings import GatewaySettings

RESTART_SECONDS = 1.0


def main(argv: list[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    try:
        settings = GatewaySettings.load(argv, Gateway.role, Gateway.description)
    except SettingsError as error:
        print(f"headrace gateway: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    if settings.workers == 1:
        run_service(Gateway, argv)
    else:
        raise SystemExit(_parent(settings, argv))


def _parent(settings: GatewaySettings, argv: list[str]) -> int:
    """Start the workers, restart one that dies, hand signals on, wait for all. A socket that only binds holds the port."""
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        try:
            holder.bind((settings.host, settings.port))
        except OSError as error:
            where = f"{settings.host}:{settings.port}"
            print(f"headrace gateway: can't listen on {where} ({error.strerror}); choose another --port", file=sys.stderr)
            return 1
        port = holder.getsockname()[1]
        command = [sys.executable, "-m", "headrace.gateway", *argv, "--workers", "1", "--share-port", "--port", str(port)]
        children = [subprocess.Popen(command) for _ in range(settings.workers)]
        return _supervise(children, command)


def _supervise(children: list[subprocess.Popen], command: list[str]) -> int:
    stopping = False

    def hand_on(number: int, _: object) -> None:
        nonlocal stopping
        stopping = True
        for child in children:
            with contextlib.suppress(ProcessLookupError):
                child.send_signal(number)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, hand_on)
    started = time.monotonic()
    while any(child.poll() is None for child in children) or not stopping:
        time.sleep(0.1)
        for index, child in enumerate(children):
            if child.poll() is None or stopping:
                continue
            if time.monotonic() - started < 2 * RESTART_SECONDS:  # wrong settings or no NATS: the child has said it
                stopping = True
                hand_on(signal.SIGTERM, None)
                break
            print(f"headrace gateway: worker {child.pid} ended with {child.returncode}; starting another one", file=sys.stderr)
            time.sleep(RESTART_SECONDS)
            if not stopping:
                children[index] = subprocess.Popen(command)
    return max((abs(child.wait()) for child in children), default=0)


if __name__ == "__main__":
    main()
