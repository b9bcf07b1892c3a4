"""Logs: what happens to the work that writes them."""

from __future__ import annotations

import json
import subprocess
import sys

PROGRAM = """
import logging, structlog
from headrace.bus import log
log.configure("info", "json")
for number in range(1000):
    structlog.get_logger("test").warning("line", number=number)
    logging.getLogger("aiohttp").error("line %d", number)
print("went on")
"""


def test_a_full_disk_costs_lines_and_not_the_work_that_wrote_them():
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, stderr=full, timeout=30)
    assert done.returncode == 0 and done.stdout == b"went on\n"


def test_every_line_is_written_at_once_where_there_is_room():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=30)
    assert done.returncode == 0 and done.stderr.count("\n") == 2000 and '"number": 999' in done.stderr


GARBAGE = """
import asyncio, sys
from aiohttp import web
from headrace.bus import log
log.configure("info", "json")

async def main():
    runner = web.AppRunner(web.Application())
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    for data in (b"GET / HTTP/9.9\\r\\n\\r\\n", b"POST / HTTP/1.1\\r\\nContent-Length: abc\\r\\n\\r\\n"):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(data)
        print((await reader.readline()).decode().strip())
        writer.close()
    await runner.cleanup()

asyncio.run(main())
"""


def test_what_is_no_http_costs_one_line_and_no_traceback():
    done = subprocess.run([sys.executable, "-c", GARBAGE], capture_output=True, text=True, timeout=30)
    assert done.returncode == 0 and done.stdout.splitlines() == ["HTTP/1.0 400 Bad Request"] * 2, done
    lines = [json.loads(line) for line in done.stderr.splitlines()]
    assert len(lines) == 2 and all(line["level"] == "warning" and "exception" not in line for line in lines), lines
    assert "Invalid HTTP version" in lines[0]["event"] and "Content-Length" in lines[1]["event"]
