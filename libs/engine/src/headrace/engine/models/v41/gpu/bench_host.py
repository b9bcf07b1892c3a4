"""What the host does for one decode step, alone: the forward pass of V4.1 on a GPU without what runs on the device.

    python -m headrace.engine.models.v41.gpu.bench_host [--batch 64,128,256] [--context 4096,32768,131072] [--json]

Everything of `V41Gpu.forward` runs, from segments to the inputs of a captured pass and the choice of rows behind it; the pass
itself gives zeros. Sequences move on by a token a step and get their tables as the scheduler gives them: a new list each time,
with another block every 128 tokens. A model of the smallest dimensions does: nothing here depends on widths, but for Engram's
memory. Reported per batch and context, in microseconds of a step: the median and the slowest tenth by the clock, and processor
time of all threads, which other work on the machine changes least; and processor time of a step that was prepared, before its
tokens are known (`prepare_us`, which an engine hides behind the step before) and behind that (`behind_us`). `--device cuda`
counts staging in pinned memory and starting copies; the default, a CPU, counts plain copies in their place.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import numpy as np
import torch

from ....batch import Segment
from ....cache import KVPool
from .bench import SMALL, Rows, arguments_for, build, configure, device_of, forget, numbers, wait
from .model import V41Gpu


class Decoding:
    """`batch` sequences of `context` tokens, one row a step."""

    def __init__(self, model: V41Gpu, batch: int, context: int) -> None:
        self.model, self.position = model, context - 1
        self.draw = np.random.default_rng(0)
        self.kv, self.states = KVPool(model.spec, 1, device=str(model.device)), model.new_states(batch)
        self.free = iter(self.draw.permutation(batch * (context // model.spec.block_tokens + 64)).tolist())
        self.tables: list[list[int]] = [[] for _ in range(batch)]
        # As among real sequences, blocks do not fill up all in the same step.
        self.ahead = self.draw.integers(0, model.spec.block_tokens, batch).tolist()
        for phase in range(len(self.states.next)):
            self.states.first[phase], self.states.next[phase] = [0] * batch, [self.position + ahead for ahead in self.ahead]

    def segments(self) -> list[Segment]:
        """The next step."""
        ids, out = self.draw.integers(3, self.model.vocab_size, (len(self.tables), 4)).tolist(), []
        for slot, (table, ahead) in enumerate(zip(self.tables, self.ahead, strict=True)):
            start = self.position + ahead
            while len(table) * self.model.spec.block_tokens <= start:
                table.append(next(self.free))
            out.append(Segment(slot, start, ids[slot][3:], ids[slot][:3], list(table), outputs=[start]))
        self.position += 1
        return out

    def seconds(self, prepared: bool = False) -> tuple[float, float, float]:
        """Of the host, for one step: by the clock and of processors behind what is prepared, and of processors for that."""
        segments, began = self.segments(), time.process_time()
        if prepared:
            self.model.prepare(segments, self.kv, self.states)
        cpu, start = time.process_time(), time.perf_counter()
        self.model.forward(segments, self.kv, self.states)
        spent = time.perf_counter() - start, time.process_time() - cpu, cpu - began
        wait(self.model.device)
        return spent


def without_device(model: V41Gpu) -> V41Gpu:
    """Passes, drafts and logits are zeros."""

    def zeros(*shape: int, dtype: torch.dtype = model.dtype) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=model.device)

    def drafted(values: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        rows = values.shape[1] * model.draft_block
        return *(zeros(rows, model.hidden_size) for _ in range(2)), zeros(rows, model.vocab_size, dtype=torch.float32)

    model.run = lambda inputs, *_: zeros(inputs.rows.padded, model.hidden_size)
    model.logits = lambda hidden: zeros(len(hidden), model.vocab_size, dtype=torch.float32)
    model._draft_pass = drafted
    return model


def measure(model: V41Gpu, batch: int, context: int, times: int) -> dict[str, Any]:
    decoding = Decoding(model, batch, context)
    runs = []
    for prepared in (False, True):
        spans = np.array([decoding.seconds(prepared) for _ in range(times + 3)]) * 1e6
        runs.append(spans[3:].T)
    (clock, cpu, _), (_, behind, prepare) = runs
    return {
        "host_us": float(np.median(clock)), "slow_us": float(np.quantile(clock, 0.9)), "cpu_us": float(np.median(cpu)),
        "prepare_us": float(np.median(prepare)), "behind_us": float(np.median(behind)),
    }  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    parser = arguments_for("headrace.engine.models.v41.gpu.bench_host", __doc__)
    parser.add_argument("--batch", type=numbers, default=[64, 128, 256], help="sequences (default: 64,128,256)")
    parser.add_argument("--context", type=numbers, default=[4096, 32768, 131072], help="tokens of each (default: 4k,32k,128k)")
    parser.set_defaults(device="cpu", times=100)
    options = parser.parse_args(arguments)
    device, rows = device_of(parser, options), Rows(options.json, options.budget)
    model = without_device(build(configure(SMALL, options.layers, min(options.experts, 8)), device, not options.eager))
    rows.say({"device": str(device), "torch": torch.__version__, "threads": torch.get_num_threads()})
    for context in options.context:
        for batch in options.batch:
            rows.add({"batch": batch, "context": context}, lambda b=batch, c=context: measure(model, b, c, options.times))
            forget(model)
    return int(rows.failed > 0)


if __name__ == "__main__":
    sys.exit(main())
