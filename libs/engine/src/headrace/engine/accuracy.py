"""What class `bounded` costs in accuracy, measured: `headrace bench engine --accuracy`.

`exact` computes every layer on every row. `bounded` runs decoder layers on a prompt's last rows and replays few rows at a hit;
both are approximations by design. Figures: the largest and the mean difference of a first token's log-probability, over
the reference's 64 most likely tokens, and the share of greedy tokens that changed, position by position.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from . import api
from .core import EngineCore
from .llm import Answer, collect
from .loader import load_model

TOP = 64  # tokens whose log-probabilities are compared


def measure(path: str | Path, prompts: int = 24, output: int = 16, seed: int = 0, batch_invariant: bool = True) -> dict:
    """{comparison: {"max_logprob_error", "mean_logprob_error", "changed_tokens"}} over random prompts of 130 to 900 tokens."""
    rng = np.random.default_rng(seed)
    exact = load_model(path, numerics="exact", batch_invariant=batch_invariant)
    bounded = load_model(path, numerics="bounded", batch_invariant=batch_invariant)
    sampling = api.SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True, logprobs=min(TOP, exact.vocab_size))
    todo = []
    for i in range(prompts):
        ids = rng.integers(3, exact.vocab_size, int(rng.integers(130, 900))).tolist()
        todo.append(api.EngineRequest(f"r{i}", ids, [], sampling))
    reference, cold = collect(_engine(exact), todo), collect(_engine(bounded), todo)
    out = {"bounded against exact": _compare(reference, cold)}
    for name, snapshot_bytes in (("hit with replay", 0), ("hit with snapshot", 1 << 30)):
        engine = _engine(bounded, snapshot_bytes=snapshot_bytes)
        collect(engine, todo)
        again = collect(engine, todo)
        assert all(answer.cached_tokens and answer.snapshot_hit == (snapshot_bytes > 0) for answer in again)
        out[f"bounded, {name} against cold"] = _compare(cold, again)
    return {"prompts": prompts, "output_tokens": output, "keep_rows": bounded.spec.keep_rows, **out}


def _engine(model, **config) -> EngineCore:
    return EngineCore(model, api.EngineConfig(num_blocks=512, **config))


def _compare(reference: Sequence[Answer], other: Sequence[Answer]) -> dict[str, float]:
    errors, changed, total = [], 0, 0
    for a, b in zip(reference, other, strict=True):
        want, got = (dict(answer.choices[0].logprobs[0][2]) for answer in (a, b))
        errors += [abs(value - got[token]) for token, value in want.items() if token in got]
        changed += sum(x != y for x, y in zip(a.choices[0].ids, b.choices[0].ids, strict=True))
        total += len(a.choices[0].ids)
    return {
        "max_logprob_error": float(np.max(errors)),
        "mean_logprob_error": float(np.mean(errors)),
        "changed_tokens": changed / total,
    }


def table(report: dict) -> str:
    lines = [f"{report['prompts']} prompts, {report['output_tokens']} greedy tokens each, keep_rows {report['keep_rows']}"]
    lines.append(f"{'':<42}{'max |dlogprob|':>15}{'mean':>10}{'changed tokens':>16}")
    for name, row in report.items():
        if isinstance(row, dict):
            errors = f"{row['max_logprob_error']:>15.2e}{row['mean_logprob_error']:>10.1e}"
            lines.append(f"{name:<42}{errors}{100 * row['changed_tokens']:>14.1f} %")
    return "\n".join(lines)
