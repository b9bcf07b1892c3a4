"""A run's folder: weights and optimiser state that survive a stop, and a log of what happened.

  config.json, tokenizer.json   what is trained
  <stage>.pt                    newest state of each stage: weights, optimiser, step, seconds, random state
  log.jsonl                     one JSON object for each report
  earlier.json                  of a run that began from a checkpoint: what its card said about stages and data
Knows files; does not know losses.
"""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from headrace.engine.config import parse_config
from headrace.engine.models.v41.config import ModelConfig
from headrace.engine.models.v41.engram import compressed_ids
from headrace.engine.models.v41.training import TrainingModel, initialize

from .configs import root_config

STAGES = ("pretrain", "anneal", "draft")
EARLIER = "earlier.json"


def dense_config(config: ModelConfig) -> ModelConfig:
    """The same model when every visible entry is selected."""
    return dataclasses.replace(config, index_topk=1 << 20, candidate_topk_blocks=1 << 20)


class Run:
    """One model on its way through the stages."""

    def __init__(self, folder: Path) -> None:
        if not (folder / "config.json").exists():
            raise FileNotFoundError(f"{folder} is no run; start one with `train --config NAME --tokenizer FILE`")
        self.folder = folder
        self.root: dict[str, Any] = json.loads((folder / "config.json").read_text())
        self.config: ModelConfig = parse_config(self.root)
        self.tokenizer = folder / "tokenizer.json"

    @classmethod
    def create(cls, folder: Path, config: str, tokenizer: Path) -> Run:
        """A run that exists already must be of the same model."""
        text = tokenizer.read_text("utf-8")
        root = root_config(config, Tokenizer.from_str(text))
        folder.mkdir(parents=True, exist_ok=True)
        if (folder / "config.json").exists():
            if json.loads((folder / "config.json").read_text()) != root:
                raise ValueError(f"{folder} trains another model than {config!r} with {tokenizer}; give another folder")
        else:
            (folder / "tokenizer.json").write_text(text, "utf-8")
            (folder / "config.json").write_text(json.dumps(root, indent=1))
        return cls(folder)

    def model(self, seed: int = 0, config: ModelConfig | None = None, **options: Any) -> TrainingModel:
        """A model with initial weights."""
        compressed = compressed_ids(Tokenizer.from_file(str(self.tokenizer)))
        model = TrainingModel(config or self.config, compressed, **options)
        initialize(model, seed)
        return model

    def state(self, stage: str, device: str | torch.device = "cpu") -> dict[str, Any] | None:
        """The newest state of a stage, if there is one."""
        path = self.folder / f"{stage}.pt"
        return torch.load(path, map_location=device, weights_only=True) if path.exists() else None

    def newest(self, before: str | None = None) -> tuple[str, dict[str, Any]] | None:
        """The state of the latest stage that was begun (before the named one)."""
        stages = STAGES if before is None else STAGES[: STAGES.index(before)]
        for stage in reversed(stages):
            if (state := self.state(stage)) is not None:
                return stage, state
        return None

    def save(self, stage: str, state: dict[str, Any]) -> None:
        """Whole or not at all, whatever happens meanwhile."""
        partial = self.folder / f"{stage}.pt.tmp"
        torch.save(state, partial)
        os.replace(partial, self.folder / f"{stage}.pt")

    def log(self, **values: Any) -> None:
        """Append one line; tensors become numbers."""
        line = {k: round(float(v), 5) if isinstance(v, (torch.Tensor, float)) else v for k, v in values.items()}
        with open(self.folder / "log.jsonl", "a") as file:
            file.write(json.dumps(line) + "\n")

    def earlier(self) -> dict[str, Any]:
        """rows: of the card's table, shares: percent of tokens by kind; both empty when the run began from nothing."""
        path = self.folder / EARLIER
        return json.loads(path.read_text()) if path.exists() else {"rows": [], "shares": {}}

    def history(self) -> list[dict[str, Any]]:
        """Every line of the log."""
        path = self.folder / "log.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
