"""The training loop of all three stages.

pretrain  everything, dense attention to all compressed entries, steady rate
anneal    the mix of conversations; the indexer learns (KL to dense attention), then selections are real; weights are rounded
          as they will be stored; the rate decays
draft     DSpark stages on the frozen target: its distribution, and the confidence that a draft is accepted

Progress through the schedule is the share of --minutes (or of --steps) that is used up, so a run ends with its rate decayed
however fast the machine is. State is written every --save-seconds and at the end; the same command goes on from there.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from headrace.engine.models.v41.training import TrainingModel, indexer_loss

from . import losses
from .optimizer import Optimizer, schedule
from .probe import KINDS, Probe, line
from .rounding import Rounded
from .runs import STAGES, Run, dense_config
from .shards import Shards


@dataclass(frozen=True, slots=True)
class Stage:
    """What a stage does when. Shares are of its schedule."""

    warmup: float
    decay: float
    rate: float  # times --rate
    dense: float = 0.0  # until then attention sees every entry
    index: bool = False  # train the indexer
    rounded: bool = False  # weights as they will be stored


PLAN = {
    "pretrain": Stage(warmup=0.02, decay=0.1, rate=1.0, dense=1.0),
    "anneal": Stage(warmup=0.02, decay=0.7, rate=0.7, dense=0.4, index=True, rounded=True),
    "draft": Stage(warmup=0.05, decay=0.6, rate=0.7),
}
BALANCE_RATE = 1e-3
LOOK_SECONDS = 10.0  # --growing: how often new parts are looked for
ANCHORS = 64  # draft blocks a row


class Trainer:
    """One stage of one run, on one device."""

    def __init__(self, run: Run, stage: str, shards: Shards, options: argparse.Namespace) -> None:
        self.run, self.stage, self.plan, self.shards, self.options = run, stage, PLAN[stage], shards, options
        self.device = torch.device(options.device)
        dtype = torch.bfloat16 if options.bf16 else torch.float32
        self.model = run.model(options.seed, dtype=dtype, recompute=options.recompute).to(self.device)
        self.draft = stage == "draft"
        if self.draft and not run.config.num_nextn_predict_layers:
            raise ValueError("this model has no draft (num_nextn_predict_layers 0)")
        for name, parameter in self.model.named_parameters():
            parameter.requires_grad_(parameter.requires_grad and name.startswith("mtp.") == self.draft)
        self.optimizer = Optimizer(self.model.named_parameters())
        self.target = Rounded(self.model, r"^(?!mtp\.)")  # a draft learns from what will be served
        self.rounded = Rounded(self.model, r"^mtp\.") if self.draft else self.target
        self.step, self.seconds, self.tokens = 0, 0.0, 0
        self._restore()
        self.batches = Ahead(self._batch)
        if options.compile:
            compile_parts(self.model, self.device)

    # -------------------------------------------------------------- state

    def _restore(self) -> None:
        state = self.run.state(self.stage)
        if state is not None and "carried" in state:  # weights without an optimiser: the stage is over
            raise ValueError(f"stage {self.stage} of {self.run.folder} came without its optimiser; go on with the next stage")
        if state is not None:
            self.model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"], self.device)
            self.step, self.seconds, self.tokens = state["step"], state["seconds"], state["tokens"]
            return
        earlier = self.run.newest(before=self.stage)
        if earlier is not None:
            self.model.load_state_dict(earlier[1]["model"])
        elif self.draft:
            raise ValueError(f"{self.run.folder} has no trained target yet; run the pretrain and anneal stages first")

    def save(self) -> None:
        """Everything that going on exactly needs."""
        state = {
            "model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "step": self.step,
            "seconds": self.seconds, "tokens": self.tokens,
        }  # fmt: skip
        self.run.save(self.stage, state)

    # -------------------------------------------------------------- loop

    @property
    def progress(self) -> float:
        """0..1 of this stage."""
        if self.options.steps:
            return min(1.0, self.step / self.options.steps)
        return min(1.0, self.seconds / (60 * self.options.minutes))

    def work(self) -> None:
        """Train until the stage or this process's time is over."""
        stop = _Stop()
        begun, saved, reported, probed, looked = *[time.monotonic()] * 2, 0.0, *[time.monotonic()] * 2
        probe = Probe.begin(self.run.tokenizer, KINDS, self.options.probe_count) if self.options.probe_seconds else None
        self.reported = (self.tokens, begun)
        limit = 60 * self.options.limit_minutes if self.options.limit_minutes else float("inf")
        while self.progress < 1.0 and not stop.asked and time.monotonic() - begun < limit:
            start = time.monotonic()
            values = self.one_step()
            self.seconds += time.monotonic() - start
            now = time.monotonic()
            if now - reported > self.options.report_seconds or self.progress >= 1.0:
                self._report(values)
                reported = now
            if now - saved > self.options.save_seconds:
                self.save()
                saved = now
            if probe and now - probed > self.options.probe_seconds:
                probe = self._probe(probe)
                probed = time.monotonic()
            if self.options.growing and now - looked > LOOK_SECONDS:
                self.shards, looked = self.shards.grown(), now
        self.save()
        if probe:
            self._probe(probe)

    def _probe(self, probe: Probe) -> Probe | None:
        """Say what held-out answers are right already, as the model is served and, before selections are real, as it trains.
        Returns the probe for the next time, None when it failed."""
        configs = {"selected": self.run.config}
        if self.progress < self.plan.dense:
            configs["dense"] = dense_config(self.run.config)
        try:
            with self.rounded(self.plan.rounded):
                found = {name: probe(self.model, config, self.device) for name, config in configs.items()}
        except Exception as error:  # whatever it is, hours of training must not end for a look at them
            print(f"probe failed, no more of them: {type(error).__name__}: {error}", flush=True)
            return None
        for name, shares in found.items():
            print(line(f"{self.progress:.0%}, {name}", shares), flush=True)
            with open(self.run.folder / "probe.jsonl", "a") as file:
                values = {"stage": self.stage, "step": self.step, "attention": name, **shares}
                file.write(json.dumps(values) + "\n")
        return probe

    def one_step(self) -> dict[str, torch.Tensor]:
        """Gradients of one batch, in pieces that fit, and one move of the optimiser."""
        pieces, tokens = self.batches(self.step)
        self.configure()
        loads: dict[int, torch.Tensor] = {}
        with self.target(self.draft), self.rounded(self.plan.rounded or (self.draft and self.progress > 0.5)):
            for piece in pieces:
                there = [None if part is None else part.to(self.device, non_blocking=True) for part in piece]
                total, values, chosen = self.losses(*there)
                (total / len(pieces)).backward()
                loads = {layer: loads.get(layer, 0) + load for layer, load in chosen.items()}
        if loads:  # behind the last piece, so that all of a batch see the same router
            values["imbalance"] = losses.balance(self.model, loads, BALANCE_RATE)
        values["norm"] = self.optimizer.clip(1.0)
        values["rate"] = (
            self.options.rate * self.plan.rate * schedule(self.progress, warmup=self.plan.warmup, decay=self.plan.decay)
        )
        self.optimizer.step(values["rate"])
        self.step += 1
        self.tokens += tokens
        return values

    def _batch(self, number: int) -> tuple[list[tuple[torch.Tensor | None, ...]], int]:
        """Pieces (ids, weights, documents, images, anchors) of a batch on the host, and how many of its tokens count."""
        batch = self.shards.batch(number)
        values = [torch.from_numpy(x) for x in (batch.ids, batch.weights, batch.documents)]
        rows = max(1, self.options.micro_tokens // batch.ids.shape[1]) if self.options.micro_tokens else len(batch.ids)
        draw, pieces = torch.Generator().manual_seed((self.options.seed << 32) + number), []
        for at in range(0, len(batch.ids), rows):
            ids, weights, documents = (x[at : at + rows] for x in values)
            block = self.run.config.dspark_block_size
            anchors = losses.draw_anchors(weights, documents, block, ANCHORS, draw) if self.draft else None
            piece = (ids, weights, documents, self._images(batch.images[at : at + rows]), anchors)
            if self.device.type == "cuda":  # so that copying waits for nothing
                piece = tuple(None if part is None else part.pin_memory() for part in piece)
            pieces.append(piece)
        return pieces, int((batch.weights > 0).sum())

    def configure(self) -> None:
        """Dense or selected attention, as progress has it."""
        self.model.config = dense_config(self.run.config) if self.progress < self.plan.dense else self.run.config

    def _images(self, rows: list[np.ndarray]) -> torch.Tensor | None:
        """The pictures of some rows in order, none is possible; None when the model does not see."""
        if self.run.config.vision is None:
            return None
        pictures = [pixels for pixels in rows if len(pixels)] or [np.zeros((0, 0, 0, 3), np.uint8)]
        return torch.from_numpy(np.concatenate(pictures))

    def losses(
        self, ids: torch.Tensor, weights: torch.Tensor, documents: torch.Tensor, images: torch.Tensor | None,
        anchors: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor], dict[int, torch.Tensor]]:  # fmt: skip
        """What is minimised, what is reported, and how many rows chose each expert of a layer."""
        if self.draft:
            return *self._draft_losses(ids, documents, images, anchors), {}
        index = self.plan.index and self.step % self.options.index_every == 0
        extras = ("router", "index") if index else ("router",)
        out = self.model(ids, documents=documents, images=images, extras=extras)
        total, target = losses.token_loss(out.logits, ids, weights, documents)
        values = {"loss": total.detach(), "target_loss": target}
        if index:
            kl = indexer_loss(out, self.model.config)
            total, values["index_loss"] = total + kl, kl.detach()
        return total, values, losses.loads(out.router)

    def _draft_losses(
        self, ids: torch.Tensor, documents: torch.Tensor, images: torch.Tensor | None, anchors: torch.Tensor
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        with torch.no_grad():
            out = self.model(ids, documents=documents, images=images, extras=("taps",))
        drafts = self.model.draft(ids, out.taps, anchors, documents)
        loss = losses.draft_loss(drafts, out.logits, anchors, documents)
        return loss.total, {"loss": loss.distance, "confidence_loss": loss.confidence, "accepted": loss.accepted}

    def _report(self, values: dict) -> None:
        shown = ", ".join(f"{k} {float(v):.4g}" for k, v in values.items())  # waits for the device
        (tokens, seconds), self.reported = self.reported, (self.tokens, time.monotonic())
        speed = (self.tokens - tokens) / (self.reported[1] - seconds)
        memory = f", {torch.cuda.max_memory_allocated(self.device) / 2**30:.1f} GiB" if self.device.type == "cuda" else ""
        self.run.log(
            stage=self.stage, step=self.step, seconds=self.seconds, tokens=self.tokens, progress=self.progress, **values
        )
        print(f"{self.stage} {self.progress:6.1%} step {self.step} {shown}; {speed:,.0f} tokens a second{memory}", flush=True)


def compile_parts(model: TrainingModel, device: torch.device) -> None:
    """torch.compile for the model's parts. What cannot be compiled runs as it is, with a warning; the constant that the engine
    keeps behind `lru_cache` becomes a plain tensor, for a compiler would make it anew in every pass."""
    from headrace.engine.models.v41 import layers

    scales = layers._scale_of_mix(model.config.hc_mult, device)
    layers._scale_of_mix = lambda *_: scales
    torch._dynamo.config.recompile_limit = 64  # contexts, kinds of layers, with and without gradients
    torch._dynamo.config.suppress_errors = True
    model.parts.compile()


class Ahead:
    """A function of a number, computed on a thread of its own for the number that follows the one that was asked for."""

    def __init__(self, function: Callable[[int], Any]) -> None:
        self.function, self.pool, self.next = function, ThreadPoolExecutor(1), (-1, None)

    def __call__(self, number: int) -> Any:
        made = self.next[1].result() if self.next[0] == number else self.function(number)
        self.next = (number + 1, self.pool.submit(self.function, number + 1))
        return made


class _Stop:
    """The first SIGINT or SIGTERM ends the loop after its step, with state saved."""

    def __init__(self) -> None:
        self.asked = False
        for name in (signal.SIGINT, signal.SIGTERM):
            signal.signal(name, self._ask)

    def _ask(self, *_) -> None:
        self.asked = True


# ------------------------------------------------------------------ command


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, help="folder of the run")
    parser.add_argument("--stage", choices=STAGES, required=True)
    parser.add_argument("--data", type=Path, nargs="+", required=True, help="folders of packed shards")
    parser.add_argument("--config", help="a new run: which model (micro, nano, tiny)")
    parser.add_argument("--tokenizer", type=Path, help="a new run: its tokenizer.json")
    schedule_of = parser.add_mutually_exclusive_group(required=True)
    schedule_of.add_argument("--minutes", type=float, help="length of the stage, in minutes of training")
    schedule_of.add_argument("--steps", type=int, help="length of the stage, in steps")
    parser.add_argument("--limit-minutes", type=float, help="stop this process by then; the same command goes on")
    parser.add_argument("--tokens", type=int, default=65536, help="tokens of one step (default: 65536)")
    parser.add_argument("--micro-tokens", type=int, default=0, help="tokens of one forward pass (default: all of a step)")
    parser.add_argument("--rate", type=float, default=4e-3, help="peak learning rate (default: 4e-3)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, help="CPU threads")
    parser.add_argument("--bf16", action="store_true", help="activations in bfloat16 (weights stay fp32)")
    parser.add_argument("--recompute", action="store_true", help="keep fewer activations, compute them again")
    parser.add_argument("--compile", action="store_true", help="torch.compile of the model's parts")
    parser.add_argument("--index-every", type=int, default=1, help="train the indexer in every such step only (default: 1)")
    parser.add_argument("--save-seconds", type=float, default=60.0)
    parser.add_argument("--report-seconds", type=float, default=5.0)
    parser.add_argument("--growing", action="store_true", help="take in parts of --data that are packed meanwhile")
    parser.add_argument("--probe-seconds", type=float, default=0.0, help="how often to `probe`; at the end, too (0: never)")
    parser.add_argument("--probe-count", type=int, default=64, help="held-out samples of each kind (default: 64)")


def main(args: argparse.Namespace) -> None:
    """Train one stage: pretrain, anneal or draft. Stopped (Ctrl-C, --limit-minutes) and started again, it goes on exactly."""
    if args.threads:
        torch.set_num_threads(args.threads)
    torch.set_float32_matmul_precision("high")
    if args.config:
        if not args.tokenizer:
            raise ValueError("a new run needs --tokenizer FILE as well as --config")
        run = Run.create(args.run, args.config, args.tokenizer)
    else:
        run = Run(args.run)
    shards = Shards(args.data, args.tokens, args.seed)
    trainer = Trainer(run, args.stage, shards, args)
    shutil.copyfile(args.data[0] / "index.json", run.folder / f"data-{args.stage}.json")  # for the model card
    parameters = sum(p.numel() for p in trainer.model.parameters())
    print(
        f"{run.folder}: {parameters / 1e6:.2f} M parameters on {trainer.device}; stage {args.stage} at {trainer.progress:.0%}"
    )
    trainer.work()


__all__ = ["PLAN", "Stage", "Trainer", "TrainingModel", "main"]
