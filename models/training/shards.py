"""Packed token shards: rows of one length that hold several documents each.

A data folder holds `index.json` and files `c<context>-<part>.npz` with, per row of `context` tokens:
  ids        uint16   token ids; padding is 2
  weights    uint8    how much the prediction of this token counts, in 1/100
  documents  uint8    number of the document within its row, from 0; padding has one of its own
and, for rows with pictures,
  pictures   uint8    PNG files one behind the other, in the order of rows and of image spans in them
  ends       int64    where each of them ends
  owners     int32    the row of each
Documents begin at even positions, as ratio-2 layers want it.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

ALIGN = 2
PAD = 2
OPEN_ROWS = 32  # rows that wait for a document that fits
MOST_DOCUMENTS = 250  # in a row


Document = tuple[np.ndarray, np.ndarray, list[bytes]]  # ids, weights in 1/100, pictures


class Packer:
    """Fills rows of some lengths; a document goes to the shortest length that holds it, best fit among open rows."""

    def __init__(self, contexts: Iterable[int]) -> None:
        self.contexts = sorted(contexts)
        self.open: dict[int, list[list[Document]]] = {c: [] for c in self.contexts}
        self.done: dict[int, list[list[Document]]] = {c: [] for c in self.contexts}
        self.refused = 0

    def add(self, ids: Iterable[int], weights: Iterable[float], pictures: Iterable[bytes] = ()) -> bool:
        """Whether the document was taken; one that is longer than every context is not."""
        hundredths = np.round(np.asarray(weights, np.float32) * 100).astype(np.uint8)
        document = (np.asarray(ids, np.uint16), hundredths, list(pictures))
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


def _length(row: list[Document]) -> int:
    """Where the next document would begin."""
    return sum(len(ids) + len(ids) % ALIGN for ids, _, _ in row)


def _rows(rows: list[list[Document]], context: int) -> dict[str, np.ndarray]:
    ids = np.full((len(rows), context), PAD, np.uint16)
    weights, documents = np.zeros((len(rows), context), np.uint8), np.zeros((len(rows), context), np.uint8)
    files: list[bytes] = []
    owners: list[int] = []
    for r, row in enumerate(rows):
        at = 0
        for number, (tokens, weight, pictures) in enumerate(row):
            ids[r, at : at + len(tokens)], weights[r, at : at + len(tokens)] = tokens, weight
            documents[r, at:] = number
            at += len(tokens) + len(tokens) % ALIGN
            files += pictures
            owners += [r] * len(pictures)
        end = at - len(row[-1][0]) % ALIGN
        documents[r, end:] = len(row)
    arrays = {"ids": ids, "weights": weights, "documents": documents}
    if files:
        arrays["pictures"] = np.frombuffer(b"".join(files), np.uint8)
        arrays["ends"], arrays["owners"] = np.cumsum([len(f) for f in files]), np.array(owners, np.int32)
    return arrays


def write_part(folder: Path, part: int, arrays: dict[int, dict[str, np.ndarray]]) -> None:
    """One part's files, whole or not at all."""
    for context, values in arrays.items():
        path = folder / f"c{context}-{part:04}.npz"
        with open(path.with_suffix(".tmp"), "wb") as file:
            np.savez(file, **values)
        path.with_suffix(".tmp").rename(path)


@dataclass(slots=True)
class Batch:
    """ids int64 [B, T], weights fp32 [B, T], documents int64 [B, T]; images uint8 [M, height, width, 3], if there are any."""

    ids: np.ndarray
    weights: np.ndarray
    documents: np.ndarray
    images: list[np.ndarray]  # of each row


class Shards:
    """Data folders in memory. Batch `n` is the same for everyone who asks with the same seed and size."""

    def __init__(self, folders: Path | Sequence[Path], tokens: int, seed: int) -> None:
        """tokens: of one batch, padding included. Rows of several folders are mixed as they are."""
        self.arguments = folders, tokens, seed
        folders = [folders] if isinstance(folders, Path) else list(folders)
        self.seed, self.rows, self.batch_rows = seed, {}, {}
        self.pictures: dict[int, dict[int, list[bytes]]] = {}  # context -> row -> files
        files: dict[int, list[Path]] = {}
        for folder in folders:
            index = folder / "index.json"
            if not index.exists():
                raise FileNotFoundError(f"{index} is missing; `python -m models.training pack` writes it")
            for context in json.loads(index.read_text())["contexts"]:
                files.setdefault(context, []).extend(sorted(folder.glob(f"c{context}-*.npz")))
        for context, found in sorted(files.items()):
            if found:
                parts = [dict(np.load(file)) for file in found]
                self.pictures[context] = pictures_of(parts)
                names = ("ids", "weights", "documents")
                self.rows[context] = {name: np.concatenate([p[name] for p in parts]) for name in names}
                self.batch_rows[context] = max(1, tokens // context)
        if not self.rows:
            raise FileNotFoundError(f"{folders[0]} has an index but no shards; run `python -m models.training pack` again")
        self.files = sum(map(len, files.values()))
        self._epoch: tuple[int, list[tuple[int, np.ndarray]]] | None = None
        self.per_epoch = sum(max(1, len(r["ids"]) // self.batch_rows[c]) for c, r in self.rows.items())

    def grown(self) -> Shards:
        """These shards, or a new object with all parts that are there by now if they are half as many again."""
        folders = [self.arguments[0]] if isinstance(self.arguments[0], Path) else self.arguments[0]
        there = sum(len(list(folder.glob("c*.npz"))) for folder in folders)
        return Shards(*self.arguments) if there >= 1.5 * self.files else self

    def batch(self, number: int) -> Batch:
        """Batch `number`; epochs are shuffled anew."""
        epoch, place = divmod(number, self.per_epoch)
        if self._epoch is None or self._epoch[0] != epoch:
            self._epoch = (epoch, self._order(epoch))
        context, rows = self._epoch[1][place]
        values, pictures = self.rows[context], self.pictures[context]
        return Batch(
            values["ids"][rows].astype(np.int64),
            values["weights"][rows].astype(np.float32) / 100,
            values["documents"][rows].astype(np.int64),
            [decoded(pictures.get(int(row), ())) for row in rows],
        )

    def _order(self, epoch: int) -> list[tuple[int, np.ndarray]]:
        draw = np.random.default_rng([self.seed, epoch])
        batches = []
        for context, values in self.rows.items():
            size, order = self.batch_rows[context], draw.permutation(len(values["ids"]))
            for start in range(0, max(1, len(order) // size) * size, size):
                batches.append((context, np.resize(order[start : start + size], size)))
        return [batches[i] for i in draw.permutation(len(batches))]


def pictures_of(parts: list[dict[str, np.ndarray]]) -> dict[int, list[bytes]]:
    """Row -> its PNG files, rows counted through all parts."""
    found: dict[int, list[bytes]] = {}
    first = 0
    for part in parts:
        begin = 0
        for end, owner in zip(part.get("ends", ()), part.get("owners", ()), strict=True):
            found.setdefault(first + int(owner), []).append(part["pictures"][begin:end].tobytes())
            begin = end
        first += len(part["ids"])
    return found


def decoded(files: Iterable[bytes]) -> np.ndarray:
    """uint8 [M, height, width, 3]."""
    from PIL import Image

    pixels = [np.asarray(Image.open(io.BytesIO(file)).convert("RGB")) for file in files]
    return np.stack(pixels) if pixels else np.zeros((0, 0, 0, 3), np.uint8)
