"""What one decode step launches, counted: kernels by name, and operations of the framework that are launches of their own.

    TRITON_INTERPRET=1 python -m headrace.engine.models.v41.gpu.launches [--layers 8] [--batch 64] [--context 4096]

In a captured pass every launch costs one to three microseconds whatever it does. Nothing is computed: kernels are left out and
memory is zeros, so counts need no GPU and take seconds. Widths are the smallest that the kernels allow: counts do not depend on
them. Logits, sampling and what the host copies are not among these.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from headrace.kernels._triton import INTERPRETED

from .bench import SMALL, Steps, build, configure

# Operations that launch nothing: views, and memory that is not written.
QUIET = {
    "alias", "as_strided", "detach", "empty", "empty_like", "empty_strided", "expand", "new_empty", "permute", "select",
    "slice", "split", "split_with_sizes", "squeeze", "t", "transpose", "unbind", "unsqueeze", "view", "_unsafe_view",
    "_reshape_alias",
}  # fmt: skip


class _Operations(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), options: Any = None) -> Any:
        name = function.__name__.split(".")[0]
        if name not in QUIET:
            self.counts[name] += 1
        return function(*args, **(options or {}))


@contextlib.contextmanager
def _without_kernels(counts: Counter[str]) -> Iterator[None]:
    """Launches are counted instead; what they would write is zeros."""
    from triton.runtime.interpreter import InterpretedFunction

    empty, like = torch.empty, torch.empty_like
    with (
        mock.patch.object(InterpretedFunction, "run", lambda kernel, *_, **__: counts.update([kernel.fn.__name__])),
        mock.patch.object(torch, "empty", lambda *shape, **options: empty(*shape, **options).zero_()),
        mock.patch.object(torch, "empty_like", lambda *values, **options: like(*values, **options).zero_()),
    ):
        yield


def count(layers: int = 8, batch: int = 64, context: int = 4096) -> dict[str, dict[str, int]]:
    """{"kernels": {name: launches}, "operations": {name: launches}} of one step on one stream."""
    if not INTERPRETED:
        raise RuntimeError("launches are counted in Triton's interpreter: set TRITON_INTERPRET=1 before the start")
    with torch.no_grad(), _without_kernels(Counter()):
        model = build(configure(SMALL, layers, 8), torch.device("cpu"))
        Steps(model, batch, context).issue()
    (graph,) = model.captured.values()
    kernels: Counter[str] = Counter()
    with torch.no_grad(), _without_kernels(kernels), _Operations() as operations:
        graph.replay()
    operations.counts.pop("zero_", None)  # of `_without_kernels`
    return {"kernels": dict(kernels.most_common()), "operations": dict(operations.counts.most_common())}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="headrace.engine.models.v41.gpu.launches",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--context", type=int, default=4096)
    options = parser.parse_args(arguments)
    if not INTERPRETED:
        parser.error("set TRITON_INTERPRET=1")
    found = count(options.layers, options.batch, options.context)
    print(json.dumps({"sums": {name: sum(of.values()) for name, of in found.items()}} | found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
