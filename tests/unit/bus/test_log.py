"""Logs: what happens to the work that writes them."""

from __future__ import annotations

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
