"""What training minimises: next-token loss, the draft's distillation, its confidence; and the router's balance.

Draft losses follow DSpark as DeepSpec publishes it: the draft is pulled to the target's distribution, and its confidence to the
probability that speculative sampling accepts, sum of min(p, q).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional as F

from headrace.engine.models.v41.draft import Drafts
from headrace.engine.models.v41.training import TrainingModel

PLACE_DECAY = 0.85  # a later place of a block counts less: it is reached less often


def token_loss(
    logits: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, documents: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weighted mean cross-entropy of the next token within its document, in nats: (loss, loss on targets alone).

    logits [B, T, V], ids [B, T], weights [B, T] of each token's prediction."""
    counted = torch.where(documents[:, 1:] == documents[:, :-1], weights[:, 1:], 0.0)
    losses = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), reduction="none").view(counted.shape)
    target = (counted > 0.5).float()
    alone = (losses.detach() * target).sum() / target.sum().clamp_min(1)
    return (losses * counted).sum() / counted.sum().clamp_min(1), alone


@torch.no_grad()
def loads(router: dict[int, tuple[torch.Tensor, torch.Tensor]]) -> dict[int, torch.Tensor]:
    """Layer -> how many rows chose each expert, from (scores, chosen)."""
    return {
        layer: scores.new_zeros(scores.shape[1], dtype=torch.float32).scatter_add_(
            0, chosen.flatten(), scores.new_ones(chosen.numel(), dtype=torch.float32)
        )
        for layer, (scores, chosen) in router.items()
    }


@torch.no_grad()
def balance(model: TrainingModel, loads: dict[int, torch.Tensor], rate: float) -> torch.Tensor:
    """Move gate biases towards equal load, as V3 and V4 do without a loss. Returns the largest load over the mean."""
    worst = []
    for layer, load in loads.items():
        load = load / load.mean()
        gate = model.layers[layer].ffn.gate
        gate.bias.add_(torch.sign(1 - load), alpha=rate)
        gate.bias_vl.copy_(gate.bias)
        worst.append(load.max())
    return torch.stack(worst).max()


# ------------------------------------------------------------------ draft


@dataclass(slots=True)
class DraftLoss:
    """total is minimised; the others are for the log. accepted: expected drafts accepted of a block, by sampling."""

    total: torch.Tensor
    distance: torch.Tensor
    confidence: torch.Tensor
    accepted: torch.Tensor


def draw_anchors(
    weights: torch.Tensor, documents: torch.Tensor, block: int, count: int, generator: torch.Generator
) -> torch.Tensor:
    """Positions [B, A] to draft from, mostly where the answer is said; anchor + block stays in the row."""
    here = weights[:, 1 : weights.shape[1] - block] + 1e-4
    here = torch.where(documents[:, 1 : documents.shape[1] - block] == documents[:, :-1][:, : here.shape[1]], here, 1e-6)
    return torch.multinomial(here.cpu(), count, replacement=here.shape[1] < count, generator=generator).to(weights.device)


def draft_loss(drafts: Drafts, target: torch.Tensor, anchors: torch.Tensor, documents: torch.Tensor) -> DraftLoss:
    """target [B, T, V]: the frozen model's logits on the same ids. Places behind the end of a document do not count."""
    block = drafts.tokens.shape[1]
    places = anchors.unsqueeze(2) + torch.arange(block, device=anchors.device)  # the row that predicts each draft
    rows = places.flatten(1)
    wanted = target.gather(1, rows.unsqueeze(2).expand(-1, -1, target.shape[-1])).view(-1, block, target.shape[-1])
    p, q = torch.softmax(wanted.float(), -1), torch.log_softmax(drafts.logits, -1)
    same = documents.gather(1, rows + 1).view(places.shape) == documents.gather(1, anchors).unsqueeze(2)
    counted = same.flatten(0, 1).float() * PLACE_DECAY ** torch.arange(block, device=anchors.device)
    total = counted.sum().clamp_min(1)
    cross = -(p * q).sum(-1)
    accept = torch.minimum(p, q.exp()).sum(-1)  # [R, block], 1 - total variation
    confidence = F.binary_cross_entropy_with_logits(drafts.confidence_logits, accept.detach(), reduction="none")
    mean = lambda x: (x * counted).sum() / total  # noqa: E731
    distance, sure = mean(0.5 * cross + (1 - accept)), mean(confidence)
    reached = (accept.detach() * same.flatten(0, 1)).cumprod(1).sum(1)
    whole = same.flatten(0, 1).all(1).float()
    return DraftLoss(distance + sure, distance.detach(), sure.detach(), (reached * whole).sum() / whole.sum().clamp_min(1))
