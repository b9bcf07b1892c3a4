"""Packed token shards: rows of one length that hold several documents each.

A data folder holds `index.json` and files `c<context>-<part>.npz` with, per row of `context` tokens:
  ids        uint16   token ids; padding is 2
  weights    uint8    how much the prediction of this token counts, in 1/100
  documents  uint8    number of the document within its row, from 0; padding has one of its own
Documents begin at even positions, as ratio-2 layers want it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

ALIGN = 2
PAD = 2
OPEN_ROWS = 32  # rows that wait for a document that fits
MOST_DOCUMENTS = 250  # in a row


class Packer:
    """Fills rows of some lengths; a document goes to the shortest length that holds it, best fit among open rows."""

    def __init__(self, contexts: Iterable[int]) -> None:
        self.contexts = sorted(contexts)
        self.open: dict[int, list[list[tuple[np.ndarray, np.ndarray]]]] = {c: [] for c in self.contexts}
        self.done: dict[int, list[list[tuple[np.ndarray, np.ndarray]]]] = {c: [] for c in self.contexts}
        self.refused = 0

    def add(self, ids: Iterable[int], weights: Iterable[float]) -> bool:
        """Whether the document was taken; one that is longer than every context is not."""
        document = (np.asarray(ids, np.uint16), np.round(np.asarray(weights, np.float32) * 100).astype(np.uint8))
        context = next((c for c in self.contexts if c >= len(document[0])), None)
        if context is None:
            self.refused += 1
            return False
        rows = self.open[context]
        fitting = [r for r in rows if _length(r) + len(document[0]) <= context and len(r) < MOST_DOCUMENTS]
        if fitting:
            max(fitting, key=_length).append(document)
        else:
            if len(rows) >= OPEN_ROWS:
                fullest = max(range(len(rows)), key=lambda r: _length(rows[r]))
                self.done[context].append(rows.pop(fullest))
            rows.append([document])
        return True

    def arrays(self) -> dict[int, dict[str, np.ndarray]]:
        """Everything packed so far, by context."""
        result = {}
        for context in self.contexts:
            rows = self.done[context] + self.open[context]
            if rows:
                result[context] = _rows(rows, context)
        return result


def _length(row: list[tuple[np.ndarray, np.ndarray]]) -> int:
    """Where the next document would begin."""
    return sum(len(ids) + len(ids) % ALIGN for ids, _ in row)


def _rows(rows: list[list[tuple[np.ndarray, np.ndarray]]], context: int) -> dict[str, np.ndarray]:
    ids = np.full((len(rows), context), PAD, np.uint16)
    weights, documents = np.zeros((len(rows), context), np.uint8), np.zeros((len(rows), context), np.uint8)
    for r, row in enumerate(rows):
        at = 0
        for number, (tokens, weight) in enumerate(row):
            ids[r, at : at + len(tokens)], weights[r, at : at + len(tokens)] = tokens, weight
            documents[r, at:] = number
            at += len(tokens) + len(tokens) % ALIGN
        end = at - len(row[-1][0]) % ALIGN
        documents[r, end:] = len(row)
    return {"ids": ids, "weights": weights, "documents": documents}


def write_part(folder: Path, part: int, arrays: dict[int, dict[str, np.ndarray]]) -> None:
    """One part's files, whole or not at all."""
    for context, values in arrays.items():
        path = folder / f"c{context}-{part:04}.npz"
        with open(path.with_suffix(".tmp"), "wb") as file:
            np.savez(file, **values)
        path.with_suffix(".tmp").rename(path)


@dataclass(slots=True)
class Batch:
    """ids int64 [B, T], weights fp32 [B, T], documents int64 [B, T] as numpy arrays."""

    ids: np.ndarray
    weights: np.ndarray
    documents: np.ndarray


class Shards:
    """A data folder in memory. Batch `n` is the same for everyone who asks with the same seed and size."""

    def __init__(self, folder: Path, tokens: int, seed: int) -> None:
        """tokens: of one batch, padding included."""
        index = folder / "index.json"
        if not index.exists():
            raise FileNotFoundError(f"{index} is missing; `python -m models.training pack` writes it")
        self.index = json.loads(index.read_text())
        self.seed, self.rows, self.batch_rows = seed, {}, {}
        for context in self.index["contexts"]:
            files = sorted(folder.glob(f"c{context}-*.npz"))
            if files:
                parts = [np.load(file) for file in files]
                self.rows[context] = {name: np.concatenate([p[name] for p in parts]) for name in parts[0].files}
                self.batch_rows[context] = max(1, tokens // context)
        self._epoch: tuple[int, list[tuple[int, np.ndarray]]] | None = None
        self.per_epoch = sum(max(1, len(r["ids"]) // self.batch_rows[c]) for c, r in self.rows.items())

    def batch(self, number: int) -> Batch:
        """Batch `number`; epochs are shuffled anew."""
        epoch, place = divmod(number, self.per_epoch)
        if self._epoch is None or self._epoch[0] != epoch:
            self._epoch = (epoch, self._order(epoch))
        context, rows = self._epoch[1][place]
        values = self.rows[context]
        return Batch(
            values["ids"][rows].astype(np.int64),
            values["weights"][rows].astype(np.float32) / 100,
            values["documents"][rows].astype(np.int64),
        )

    def _order(self, epoch: int) -> list[tuple[int, np.ndarray]]:
        draw = np.random.default_rng([self.seed, epoch])
        batches = []
        for context, values in self.rows.items():
            size, order = self.batch_rows[context], draw.permutation(len(values["ids"]))
            for start in range(0, max(1, len(order) // size) * size, size):
                batches.append((context, np.resize(order[start : start + size], size)))
        return [batches[i] for i in draw.permutation(len(batches))]
