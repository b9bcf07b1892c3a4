"""safetensors checkpoints: one file or shards with an index, memory-mapped; what a checkpoint's digest covers.

Knows the container (header, offsets, index) and nothing of models. A tensor is a view of the file until somebody
computes with it. Every defect is a CheckpointError that names the file or tensor.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E8M0": torch.float8_e8m0fnu,
}  # fmt: skip
WHOLE_SHARD = 64 << 20  # bytes up to which a shard's content is part of the digest entirely
SAMPLES, SAMPLE = 64, 4096  # otherwise this many evenly spaced pieces of this many bytes


class CheckpointError(ValueError):
    """The checkpoint is damaged or is not what its config says; the message names what."""


@dataclass(frozen=True, slots=True)
class Entry:
    """Where a tensor lies."""

    file: Path
    dtype: str  # safetensors name
    shape: tuple[int, ...]
    begin: int  # bytes from the start of the file
    nbytes: int


class Checkpoint:
    """A directory with safetensors files. `entries`: every tensor's name (an optional `model.` prefix removed) ->
    Entry."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if not self.path.is_dir():
            raise CheckpointError(
                f"{self.path} is not a directory; a checkpoint is a directory with config.json and {INDEX}"
            )
        self.entries: dict[str, Entry] = {}
        self.headers: dict[Path, bytes] = {}
        self._maps: dict[Path, np.ndarray] = {}
        index = self._index()
        for file in sorted(set(index.values())) if index else [SINGLE]:
            self._read_shard(self.path / file, index)
        missing = index.keys() - {name for name in index if _plain(name) in self.entries}
        if missing:
            name = min(missing)
            raise CheckpointError(f"{INDEX} places {name} in {index[name]}, which does not hold it{_more(missing)}")

    def tensor(self, name: str) -> torch.Tensor:
        """The whole tensor as a view of the mapped file (private: writing to it does not reach the file)."""
        entry = self.entries[name]
        raw = torch.from_numpy(self._map(entry.file)[entry.begin : entry.begin + entry.nbytes])
        dtype = DTYPES[entry.dtype]
        if raw.data_ptr() % dtype.itemsize:
            raw = raw.clone()
        return raw.view(dtype).view(entry.shape)

    def bytes_of(self, name: str) -> np.ndarray:
        """The tensor's bytes as uint8 [shape[0], bytes per row], mapped: only rows that are indexed are ever read."""
        entry = self.entries[name]
        return self._map(entry.file)[entry.begin : entry.begin + entry.nbytes].reshape(entry.shape[0], -1)

    def check(
        self, expected: Mapping[str, tuple[Collection[str], tuple[int, ...]]], ignored: Callable[[str], bool]
    ) -> list[str]:
        """`expected`: name -> (accepted dtypes, shape). CheckpointError names the first that is missing, mis-shaped or
        wrongly typed. Returns the names, sorted, that are neither expected nor `ignored`."""
        for name, (dtypes, shape) in expected.items():
            entry = self.entries.get(name)
            if entry is None:
                missing = sum(other not in self.entries for other in expected)
                raise CheckpointError(
                    f"{self.path}: {name} {list(shape)} is missing ({missing} of {len(expected)} tensors are)"
                )
            if entry.shape != shape:
                raise CheckpointError(
                    f"{self.path}: {name} has shape {list(entry.shape)}; config.json says {list(shape)}"
                )
            if entry.dtype not in dtypes:
                raise CheckpointError(f"{self.path}: {name} is {entry.dtype}; expected {' or '.join(dtypes)}")
        return sorted(name for name in self.entries if name not in expected and not ignored(name))

    def digest(self) -> str:
        """Identity of config, tokenizer, index, every shard's header and size, and the shards' content: all of it up
        to 64 MiB a shard, 64 evenly spaced pieces of 4 KiB beyond."""
        digest = hashlib.blake2b(digest_size=16)
        for name in ("config.json", "tokenizer.json", INDEX):
            file = self.path / name
            content = file.read_bytes() if file.exists() else b""
            digest.update(f"{name}:{len(content)}:".encode() + content)
        for file in sorted(self.headers):
            mapped = self._map(file)
            digest.update(f"{file.name}:{mapped.size}:".encode() + self.headers[file])
            if mapped.size <= WHOLE_SHARD:
                digest.update(mapped)
            else:
                for i in range(SAMPLES):
                    start = (mapped.size - SAMPLE) * i // (SAMPLES - 1)
                    digest.update(mapped[start : start + SAMPLE])
        return digest.hexdigest()

    # -------------------------------------------------------------- files

    def _index(self) -> dict[str, str]:
        file = self.path / INDEX
        if not file.exists():
            if not (self.path / SINGLE).exists():
                raise CheckpointError(f"{self.path} has neither {INDEX} nor {SINGLE}")
            return {}
        try:
            index = json.loads(file.read_text())["weight_map"]
            assert all(isinstance(v, str) and Path(v).name == v for v in index.values())
        except (ValueError, KeyError, TypeError, AttributeError, AssertionError) as error:
            raise CheckpointError(
                f"{file} is not a safetensors index with a weight_map of file names ({_what(error)})"
            ) from None
        return index

    def _read_shard(self, file: Path, index: dict[str, str]) -> None:
        if not file.exists():
            raise CheckpointError(f"{file} is named in {INDEX} but does not exist; copy the whole checkpoint")
        size = file.stat().st_size
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if size < 8 or length > size - 8:
                raise CheckpointError(f"{file} is truncated: {size} bytes, but its header alone says {length}")
            header = stream.read(length)
        try:
            tensors = json.loads(header)
            tensors.pop("__metadata__", None)
            described = {
                name: (t["dtype"], tuple(map(int, t["shape"])), int(t["data_offsets"][0]), int(t["data_offsets"][1]))
                for name, t in tensors.items()
            }
        except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
            raise CheckpointError(
                f"{file} has a header that is not a safetensors one ({_what(error)}); copy the file again"
            ) from None
        self.headers[file] = header
        for name, (dtype, shape, begin, end) in described.items():
            self._add(name, dtype, shape, begin, end, file, 8 + length, size)
            if index and index.get(name) != file.name:
                raise CheckpointError(f"{file.name} holds {name}, but {INDEX} places it in {index.get(name)}")

    def _add(
        self, name: str, dtype: str, shape: tuple[int, ...], begin: int, end: int, file: Path, data: int, size: int
    ) -> None:
        if dtype not in DTYPES:
            raise CheckpointError(f"{name} in {file.name} has dtype {dtype}; known are {', '.join(DTYPES)}")
        nbytes = math.prod(shape) * DTYPES[dtype].itemsize
        if end - begin != nbytes or begin < 0:
            raise CheckpointError(
                f"{name} in {file.name}: {dtype} {list(shape)} needs {nbytes} bytes, the header gives {end - begin}"
            )
        if data + end > size:
            raise CheckpointError(f"{file} is truncated: {name} ends at byte {data + end}, the file has {size}")
        if _plain(name) in self.entries:
            raise CheckpointError(f"{name} is in {self.entries[_plain(name)].file.name} and in {file.name}")
        self.entries[_plain(name)] = Entry(file, dtype, shape, data + begin, nbytes)

    def _map(self, file: Path) -> np.ndarray:
        if file not in self._maps:
            self._maps[file] = np.memmap(file, np.uint8, mode="c")
        return self._maps[file]


def _plain(name: str) -> str:
    return name.removeprefix("model.")


def _what(error: Exception) -> str:
    """What is wrong, without the damaged bytes, which UnicodeDecodeError and KeyError carry whole."""
    match error:
        case UnicodeDecodeError():
            return f"byte {error.start} is not UTF-8"
        case json.JSONDecodeError():
            return f"not JSON from character {error.pos} on"
        case _:
            return f"JSON of another shape: {type(error).__name__}"


def _more(names: object) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""
