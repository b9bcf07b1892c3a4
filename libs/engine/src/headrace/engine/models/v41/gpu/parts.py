"""Where the device time of a captured pass goes: by the function that launched it, and by kernel.

By function: events are captured around every call that a pass makes, so their times are those of a replay. What a function
calls does not count for itself; what is between the calls (torch operations, gaps, and the events themselves, about a
microsecond each) is the rest. Knows names of functions; does not know shapes.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import torch

from . import model as passes
from . import weights
from .model import V41Gpu

# Functions that `model` calls -> the component that they are.
PARTS = {
    "sparse_attention": "attention", "kv_store": "cache writes", "index_scores": "index scores", "block_max": "top-k",
    "topk": "top-k", "rope_fp4": "FP4 rounding", "mhc_pass": "mHC", "mhc_coefficients": "mHC", "engram_gate": "Engram",
    "route": "routing", "plan_choices": "routing", "permute": "routing", "combine": "routing", "swiglu": "SwiGLU",
    "rmsnorm": "norms", "rope": "RoPE", "rope_tables": "RoPE", "embedding": "embedding",
}  # fmt: skip


def _product(*_: Any, **options: Any) -> str:
    return "experts" if options.get("group_of_row") is not None else "linears"


class Marks:
    """Begin and end of every call, in order."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.calls: list[tuple[str, Any, Any]] = []

    def around(self, part: str | Callable[..., str], function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            begin = self._mark()
            out = function(*args, **options)
            self.calls.append((part if isinstance(part, str) else part(*args, **options), begin, self._mark()))
            return out

        return call

    def _mark(self) -> Any:
        if self.device.type != "cuda":
            return time.perf_counter()
        if not torch.cuda.is_current_stream_capturing():
            return None
        event = torch.cuda.Event(enable_timing=True, external=True)
        event.record()
        return event

    def milliseconds(self) -> dict[str, float]:
        out: dict[str, float] = defaultdict(float)
        for part, begin, end in self.calls:
            if begin is not None:
                out[part] += begin.elapsed_time(end) if self.device.type == "cuda" else (end - begin) * 1e3
        return out


@contextlib.contextmanager
def _marked(marks: Marks) -> Iterator[None]:
    places = [(passes, name, part) for name, part in PARTS.items()]
    places += [(passes, "gemm_upcast", _product), (weights, "gemm_upcast", _product)]
    kept = [getattr(module, name) for module, name, _ in places]
    for (module, name, part), function in zip(places, kept, strict=True):
        setattr(module, name, marks.around(part, function))
    try:
        yield
    finally:
        for (module, name, _), function in zip(places, kept, strict=True):
            setattr(module, name, function)


def by_part(model: V41Gpu, step: Callable[[], Any], times: int) -> dict[str, float]:
    """Milliseconds of each component in a replay of the pass that `step` runs (logits not included), all on one stream; the
    number of calls."""
    marks, device, overlap = Marks(model.device), model.device, model.overlap
    model.captured.clear()
    model.overlap = False  # of calls that run beside each other, times are not a sum
    with _marked(marks):
        if device.type == "cuda":
            step()
        graph = None if not model.captured else list(model.captured.values())[-1]
        runs, wholes = [], []
        for _ in range(times):
            if graph is None:
                marks.calls.clear()
            start = time.perf_counter()
            whole = (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) if graph else None
            if whole:
                whole[0].record()
                graph.replay()
                whole[1].record()
                torch.cuda.synchronize(device)
                wholes.append(whole[0].elapsed_time(whole[1]))
            else:
                step()
                wholes.append((time.perf_counter() - start) * 1e3)
            runs.append(marks.milliseconds())
    model.overlap = overlap
    out = {part: statistics.median(run[part] for run in runs) for part in runs[0]}
    out = dict(sorted(out.items(), key=lambda item: -item[1]))
    rest = statistics.median(whole - sum(run.values()) for run, whole in zip(runs, wholes, strict=True))  # medians don't add up
    calls = sum(begin is not None for _, begin, _ in marks.calls)  # of the capture, not of what warmed it up
    return out | {"rest": rest, "whole": statistics.median(wholes), "calls": float(calls)}


def by_kernel(device: torch.device, replay: Callable[[], Any], times: int = 3, most: int = 25) -> dict[str, float]:
    """Milliseconds a replay of the kernels that take longest, by name, and the sum of all; nothing without a device."""
    if device.type != "cuda":
        return {}
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        for _ in range(times):
            replay()
        torch.cuda.synchronize(device)
    total: dict[str, float] = defaultdict(float)
    for event in profiled.events():
        if str(event.device_type).endswith("CUDA"):
            total[event.name[:60]] += event.self_device_time_total / 1e3 / times
    ranked = sorted(total.items(), key=lambda item: -item[1])
    return dict(ranked[:most]) | {"sum": sum(total.values())}
