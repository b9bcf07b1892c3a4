"""Engram: hashed n-gram memory added to the residual streams before some layers.

Knows: the compressed token ids, the hash of the last n ids of a row, the table rows they name, and the gated update.
The tables are far larger than the rest of a model, so they stay in the checkpoint's memory map and only the named
rows are read.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import tokenizers
import torch
from tokenizers import Regex, Tokenizer, normalizers
from torch import nn

from .config import ModelConfig
from .layers import Linear, inverse_rms

DEAD = -1  # compressed id of a token that cannot be part of an n-gram (image tokens)

RowReader = Callable[[np.ndarray], torch.Tensor]  # table row numbers int64 [N] -> fp32 [N, engram_head_dim]


# ------------------------------------------------------------------ compressed ids


def compressed_ids(tokenizer: Tokenizer) -> np.ndarray:
    """Token id -> compressed id, int64 [len(tokenizer)]: tokens equal after normalisation share an id, in first-seen
    order."""
    space = "\ue000"
    normalizer = normalizers.Sequence(
        [
            normalizers.NFKC(),
            normalizers.NFD(),
            normalizers.StripAccents(),
            normalizers.Lowercase(),
            normalizers.Replace(Regex(r"[ \t\r\n]+"), " "),
            normalizers.Replace(Regex(r"^ $"), space),
            normalizers.Strip(),
            normalizers.Replace(space, " "),
        ]
    )
    size = tokenizer.get_vocab_size(with_added_tokens=True)
    texts = tokenizer.decode_batch([[token] for token in range(size)], skip_special_tokens=False)
    seen: dict[str, int] = {}
    ids = np.empty(size, np.int64)
    for token, text in enumerate(texts):
        key = tokenizer.id_to_token(token) if "\ufffd" in text else normalizer.normalize_str(text) or text
        ids[token] = seen.setdefault(key, len(seen))
    return ids


def cached_compressed_ids(tokenizer_file: Path) -> np.ndarray:
    """`compressed_ids` of a tokenizer.json, kept in the user's cache directory: 129,280 tokens take seconds."""
    content = tokenizer_file.read_bytes()
    digest = hashlib.blake2b(content + tokenizers.__version__.encode(), digest_size=16).hexdigest()
    directory = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "headrace"
    file, partial = directory / f"engram-{digest}.npy", directory / f".engram-{digest}.{os.getpid()}.npy"
    with contextlib.suppress(OSError, ValueError, EOFError):  # not there yet, or damaged
        return np.load(file)
    ids = compressed_ids(Tokenizer.from_buffer(content))
    with contextlib.suppress(OSError):  # a cache that cannot be written is only slower
        if directory.is_absolute():
            directory.mkdir(parents=True, exist_ok=True)
            np.save(partial, ids)
            partial.replace(file)
    return ids


# ------------------------------------------------------------------ hashing


class NgramHash:
    """Row of every (layer, n, head) table bucket for the n-gram that ends at a token."""

    def __init__(self, config: ModelConfig, compressed: np.ndarray) -> None:
        size = int(compressed.max()) + 1
        if size != config.engram_compressed_vocab_size:
            raise ValueError(
                f"the tokenizer has {size} compressed ids but engram_compressed_vocab_size is "
                f"{config.engram_compressed_vocab_size}: this tokenizer does not belong to this checkpoint"
            )
        # A tokenizer may have fewer ids than the embedding; the others are part of no n-gram.
        self.compressed = np.pad(compressed, (0, max(0, config.vocab_size - len(compressed))), constant_values=DEAD)
        self.pad = int(compressed[config.engram_pad_token_id])
        self.size = config.engram_max_ngram_size
        self.primes, self.offsets, self.multipliers = {}, {}, {}
        bound = max(1, (2**63 - 1) // size // 2)
        tables = bucket_sizes(config)
        for layer, rows in zip(config.engram_layer_ids, config.engram_num_embeddings, strict=True):
            primes = np.array(tables[layer], np.int64)
            if primes.sum() > rows:
                raise ValueError(
                    f"layers.{layer}.engram hashes into {primes.sum()} rows but engram_num_embeddings says {rows}"
                )
            self.primes[layer] = primes.reshape(self.size - 1, config.engram_n_heads)
            self.offsets[layer] = np.concatenate([[0], primes.cumsum()[:-1]]).reshape(self.primes[layer].shape)
            draw = np.random.default_rng(10007 * layer).integers(0, bound, size=self.size, dtype=np.int64)
            self.multipliers[layer] = draw * 2 + 1

    def contexts(self, segments: Sequence[tuple[Sequence[int], Sequence[int]]]) -> np.ndarray:
        """[(previous ids, row ids)] -> compressed ids of each row and the rows before it, [T, n], newest first.

        From the first token that is missing (sequence start) or dead, all older ones are padding.
        """
        reach = self.size - 1
        flat, ends = [], []
        for previous, ids in segments:
            history = previous[-reach:]
            if len(history) < reach:
                flat += [DEAD] * (reach - len(history))
            flat += history
            flat += ids
            ends += range(len(flat) - len(ids), len(flat))
        flat_ids = np.array(flat, np.int64)
        codes = np.where(flat_ids >= 0, self.compressed[np.maximum(flat_ids, 0)], DEAD)
        grams = codes[np.array(ends, np.int64)[:, None] - np.arange(self.size)]
        dead = np.logical_or.accumulate(grams == DEAD, axis=1)
        return np.where(dead, self.pad, grams)

    def rows(self, layer: int, contexts: np.ndarray) -> np.ndarray:
        """[T, n] -> table rows [T, (n - 1) * heads]: 2-gram heads first, then 3-grams, ..."""
        products = contexts * self.multipliers[layer]
        rolling = np.bitwise_xor.accumulate(products, axis=1)[:, 1:, None]
        return (rolling % self.primes[layer] + self.offsets[layer]).reshape(contexts.shape[0], -1)


def bucket_sizes(config: ModelConfig) -> dict[int, list[int]]:
    """Primes per layer: for each layer, each n, each head the next prime from engram_vocab_size not used anywhere
    before."""
    used: set[int] = set()
    sizes: dict[int, list[int]] = {}
    for layer in config.engram_layer_ids:
        sizes[layer] = []
        for _ in range(config.engram_max_ngram_size - 1):
            prime = config.engram_vocab_size - 1
            for _ in range(config.engram_n_heads):
                prime = _next_prime(prime + 1, used)
                used.add(prime)
                sizes[layer].append(prime)
    return sizes


def _next_prime(start: int, used: set[int]) -> int:
    candidate = max(start, 2)
    while candidate in used or any(candidate % divisor == 0 for divisor in range(2, math.isqrt(candidate) + 1)):
        candidate += 1
    return candidate


# ------------------------------------------------------------------ module


class Engram(nn.Module):
    """X_i += sigmoid(signed sqrt of <X_i, key_i>) * value, with key and value from the hashed rows."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.layer, self.hc, self.d, self.eps = layer, config.hc_mult, config.hidden_size, config.rms_norm_eps
        hashes = (config.engram_max_ngram_size - 1) * config.engram_n_heads
        self.wkv = Linear(hashes * config.engram_head_dim, (self.hc + 1) * self.d)
        self.q_weight = nn.Parameter(torch.ones(self.hc, self.d))
        self.k_weight = nn.Parameter(torch.ones(self.hc, self.d))
        self.read_rows: RowReader | None = None  # set by the loader; the table is not a parameter

    def forward(self, streams: torch.Tensor, table_rows: np.ndarray, image: torch.Tensor | None = None) -> torch.Tensor:
        """streams [T, hc, d], table rows [T', hashes] of the first T' <= T rows (the others are padding) -> [T, hc,
        d]."""
        rows = streams.shape[0]
        memory = self.read_rows(table_rows.reshape(-1)).view(table_rows.shape[0], -1)
        if memory.shape[0] < rows:
            memory = torch.nn.functional.pad(memory, (0, 0, 0, rows - memory.shape[0]))
        return self.update(streams, memory.to(streams.dtype), image)

    def update(self, streams: torch.Tensor, memory: torch.Tensor, image: torch.Tensor | None = None) -> torch.Tensor:
        """memory [T, hashes * head_dim]: the rows' embeddings."""
        projected = self.wkv(memory).float()
        key, value = projected[:, : self.hc * self.d].view(-1, self.hc, self.d), projected[:, self.hc * self.d :]
        x = streams.float()
        dot = (x * (self.q_weight.float() * self.k_weight.float()) * key).sum(-1, keepdim=True)
        dot = dot * inverse_rms(x, self.eps) * inverse_rms(key, self.eps) * self.d**-0.5
        gate = torch.sigmoid(torch.copysign(dot.abs().clamp_min(1e-6).sqrt(), dot))  # [T, hc, 1]
        if image is not None:
            gate = gate.masked_fill(image[:, None, None], 0.0)
        return (x + gate * value.unsqueeze(1)).to(streams.dtype)
