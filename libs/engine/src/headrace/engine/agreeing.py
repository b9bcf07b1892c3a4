"""A random V4.1 checkpoint whose draft often agrees with its target: real arithmetic in which drafts are accepted and rejected.

With weights drawn independently a draft is right once in a vocabulary. Here every layer's output is scaled down, so that the
next token hangs mostly on the newest one, and the Markov head is given just that table: head.weight n(x), where n is the final
norm of an embedding. What else the draft computes is scaled down too; it stays random and decides, with the target's layers,
how often the two differ.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from .config import parse_config
from .make_checkpoint import PRESETS, config_json, random_values, save_checkpoint, small_tokenizer_json

TAMED = ("attn.wo_b.weight", "w2.weight", "engram.wkv.weight")  # what a layer adds to the residual streams


def agreeing_checkpoint(out: str | Path, seed: int = 0, strength: float = 0.05, preset: str = "w16-draft", **text: Any) -> Path:
    """Write one and return its directory; a preset without a draft gets three stages. `strength` scales what layers add: 0
    would make draft and target equal, and about 1 makes them strangers. `text`: more text_config keys over the preset's."""
    keys = with_draft(PRESETS[preset]) | text
    keys = keys | {"dspark_markov_rank": keys["hidden_size"]}
    tokenizer = json.dumps(small_tokenizer_json(), ensure_ascii=False, indent=1)
    data = config_json(keys, Tokenizer.from_str(tokenizer))
    config = parse_config(data)
    values = dict(random_values(config, seed))
    for name, value in values.items():
        if name.endswith(TAMED):
            values[name] = strength * value
    last = f"mtp.{config.num_nextn_predict_layers - 1}."
    values[last + "norm.weight"] = strength * values["norm.weight"]
    embedded = values["embed.weight"]
    normed = embedded * torch.rsqrt(embedded.square().mean(-1, keepdim=True)) * values["norm.weight"]
    values[last + "markov_head.embed.weight"] = normed
    values[last + "markov_head.head.weight"] = values["head.weight"]
    return save_checkpoint(values.items(), data, tokenizer, out)


def with_draft(text: dict[str, Any]) -> dict[str, Any]:
    """text_config keys with those of a draft, where there are none: three stages that tap the last three layers."""
    if text.get("num_nextn_predict_layers"):
        return text
    layers = text["num_hidden_layers"]
    return text | {
        "compress_ratios": [*text["compress_ratios"], 0, 0, 0], "num_nextn_predict_layers": 3, "dspark_block_size": 5,
        "dspark_noise_token_id": 259, "dspark_target_layer_ids": [layers - 3, layers - 2, layers - 1],
        "dspark_n_routed_experts": max(4, text["n_routed_experts"] // 3), "dspark_num_experts_per_tok": 2,
    }  # fmt: skip
