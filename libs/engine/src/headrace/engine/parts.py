"""Long measurements in parts: independent pieces of work that several processes do, and a journal that remembers them.

Knows processes and files. Does not know what a part measures: a worker is a callable that is made once in each process and
gives a JSON value for a part.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

WorkerMaker = Callable[[str], Callable[["Part"], Any]]


class Part(NamedTuple):
    """The numbers first .. first + count - 1 (seeds, prompts) of `of`, in the measurement `kind`."""

    kind: str
    of: str
    first: int
    count: int

    @property
    def numbers(self) -> range:
        return range(self.first, self.first + self.count)


def cut(kind: str, of: str, total: int, size: int) -> list[Part]:
    """The numbers below `total` in parts of at most `size`."""
    return [Part(kind, of, first, min(size, total - first)) for first in range(0, total, size)]


def digest_of(package: Path, *more: str) -> str:
    """Of a package's Python files and what else decides what its parts give."""
    digest = hashlib.sha256("\n".join(more).encode())
    for path in sorted(package.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


class Journal:
    """Lines {"digest", "part", "value"} of a file, or of none. Only those of this digest count: others are of other code."""

    def __init__(self, path: Path | None, digest: str) -> None:
        self.path, self.digest = path, digest

    def read(self) -> dict[Part, Any]:
        """What is done. The last line may be cut off, where its writer was stopped."""
        out: dict[Part, Any] = {}
        text = self.path.read_text() if self.path is not None and self.path.exists() else ""
        for line in text.splitlines(keepends=True):
            if not line.endswith("\n"):
                break
            entry = json.loads(line)
            if entry["digest"] == self.digest:
                out[Part(*entry["part"])] = entry["value"]
        if self.path is not None and text and not text.endswith("\n"):
            self.path.write_text(text[: text.rfind("\n") + 1])
        return out

    def write(self, part: Part, value: Any) -> None:
        if self.path is not None:
            with self.path.open("a") as file:
                file.write(json.dumps({"digest": self.digest, "part": part, "value": value}) + "\n")


def work(todo: Sequence[Part], make: WorkerMaker, argument: str, workers: int, journal: Journal) -> dict[Part, Any]:
    """Every part's value. `make(argument)` is called in each of `workers` processes; with one, in this one."""
    known = journal.read()
    done = {part: known[part] for part in todo if part in known}
    rest = [part for part in todo if part not in known]

    def keep(part: Part, value: Any) -> None:
        done[part] = value
        journal.write(part, value)
        if sys.stderr.isatty():
            print(f"\r{len(done)} of {len(todo)} parts", end="", file=sys.stderr, flush=True)

    if workers == 1 or not rest:
        worker = make(argument) if rest else None
        for part in rest:
            keep(part, worker(part))
        return done
    with ProcessPoolExecutor(min(workers, len(rest)), get_context("spawn"), _begin, (make, argument)) as pool:
        try:
            futures = {pool.submit(_do, part): part for part in rest}
            for future in as_completed(futures):
                keep(futures[future], future.result())
        except BaseException:  # what has begun is waited for, the rest is not
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return done


_worker: Callable[[Part], Any] | None = None  # of this process


def _begin(make: WorkerMaker, argument: str) -> None:
    global _worker
    _worker = make(argument)


def _do(part: Part) -> Any:
    return _worker(part)
