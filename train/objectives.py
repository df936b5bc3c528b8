"""Head + batch -> loss and per-depth metrics: training-time test for EAGLE-3 (ALGORITHMS 9.3, 9.5).

Shapes: B rows, T tokens, S unroll steps, N unrolled slots a row (padded), H hidden width, A taps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from pydantic import Field
from torch import nn

from data.packing import Batch, Normaliser, anchors
from heads.config import Config
from heads.eagle3 import Eagle3Head
from heads.target import FrozenTarget, TargetOutput
from train.losses import Labels, LabelStatistics, OovPolicy, PairMetrics, soft_cross_entropy


class ObjectiveConfig(Config):
    """What is minimised."""

    depths: int = Field(default=7, ge=1, le=32)
    """S: unroll steps of training-time test; steps beyond it are extrapolation when decoding."""
    depth_decay: float = Field(default=0.8, gt=0.0, le=1.0)
    """Weight of step i is depth_decay ** i."""
    loss_norm: Literal["sample_valid", "global_valid", "all_positions"] = "sample_valid"
    """sample_valid: mean over each document's slots, then over documents. global_valid: one divisor, the update's.
    all_positions: the update's row slots, masked or not (the paper)."""
    oov_policy: OovPolicy = "weight"
    """weight: every slot by the target's mass inside the draft vocabulary. drop: slots whose target argmax is outside (the paper)."""
    chunk: int = Field(default=256, ge=1)
    """Label positions whose logits are alive at a time."""


@dataclass(frozen=True)
class Unroll:
    """The index bookkeeping of training-time test for one batch."""

    slots: torch.Tensor
    """[B, N] int64: unrolled slots; a row with fewer repeats slot 0 without weight."""
    valid: torch.Tensor
    """[S, B, N] bool: step i of the slot has a label: every token it reads or predicts was written by the target in one turn."""
    label: torch.Tensor
    """[S, B, N] int64: position t+1+i in the row."""
    sample: torch.Tensor
    """[B, N] int64: the slot's document."""


def plan_unroll(batch: Batch, depths: int) -> Unroll:
    """Choose the anchors of a batch and where their steps have labels."""
    is_anchor = anchors(batch.mask, batch.document)
    rows, length = is_anchor.shape
    count = max(1, int(is_anchor.sum(1).max()))
    # Anchors first, in order; a stable sort keeps it.
    slots = torch.sort(is_anchor.int(), dim=1, descending=True, stable=True).indices[:, :count]
    line = torch.arange(rows, device=slots.device).unsqueeze(1)
    alive = is_anchor[line, slots]
    valid = [alive]
    for step in range(1, depths):
        there = slots + step
        # Running AND: a step beyond the end of the turn would put the slot where decoding never is.
        alive = alive & (there < length) & is_anchor[line, there.clamp_max(length - 1)]
        valid.append(alive)
    steps = torch.arange(depths, device=slots.device).view(-1, 1, 1)
    label = (slots + 1 + steps).clamp_max(length - 1)
    return Unroll(slots, torch.stack(valid), label, batch.document[line, slots])


def visible_slots(batch: Batch) -> torch.Tensor:
    """[B, T, T] bool: slot q sees slot k: k <= q in the same document. A slot is complete only if its token lies in the document too."""
    length = batch.ids.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool, device=batch.ids.device).tril()
    return causal & (batch.document.unsqueeze(2) == batch.document.unsqueeze(1))


def shifted_tokens(ids: torch.Tensor, depths: int) -> torch.Tensor:
    """[S, B, T] int64: step i at slot t holds x_{t+1+i}; past the end, the last token (never with weight)."""
    length = ids.shape[1]
    at = torch.arange(length, device=ids.device) + 1
    return torch.stack([ids[:, (at + step).clamp_max(length - 1)] for step in range(depths)])


def pair_weights(plan: Unroll, config: ObjectiveConfig, total: Normaliser) -> torch.Tensor:
    """[S, B, N] float32: what each pair's loss is multiplied with, so that the sum over an update is its loss."""
    weight = plan.valid.float()
    steps = torch.arange(len(weight), device=weight.device).view(-1, 1, 1)
    decay = config.depth_decay**steps
    if config.loss_norm == "all_positions":
        return weight * decay / total.slots
    if config.loss_norm == "global_valid":
        return weight * decay / max(total.anchors, 1)
    samples = int(plan.sample.max()) + 1
    counts = torch.zeros(len(weight), samples, device=weight.device)
    counts.scatter_add_(1, plan.sample.flatten().expand(len(weight), -1), weight.flatten(1))
    own = counts.gather(1, plan.sample.flatten().expand(len(weight), -1)).view_as(weight)
    return weight / own.clamp_min(1) * decay / total.documents


class TrainingTimeTest(nn.Module):
    """Wraps a head so that one forward is loss and metrics: what accelerate and DDP need to see."""

    def __init__(self, head: Eagle3Head, config: ObjectiveConfig) -> None:
        super().__init__()
        self.head = head
        self.config = config

    def forward(
        self,
        batch: Batch,
        features: TargetOutput,
        embedding: torch.Tensor,
        lm_head: torch.Tensor,
        softcap: float | None,
        total: Normaliser,
        statistics: LabelStatistics | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Loss (a share of the update's) and depth sums [S, 6]: valid, agree, alpha, joint prefix correct, loss, mass."""
        plan = plan_unroll(batch, self.config.depths)
        tokens = nn.functional.embedding(shifted_tokens(batch.ids, self.config.depths), embedding)
        assert features.taps is not None
        parameter = self.head.fc.weight
        taps, tokens = features.taps.to(parameter.dtype), tokens.to(parameter.dtype)
        outputs = self.head.unroll(taps, tokens, batch.position, visible_slots(batch), plan.slots)
        length = batch.ids.shape[1]
        line = torch.arange(len(batch.ids), device=batch.ids.device).view(1, -1, 1)
        used = plan.valid.flatten()
        # Label positions that any pair needs, densely numbered: nothing is computed for prompts and padding.
        positions, index = torch.unique((line * length + plan.label).flatten()[used], return_inverse=True)
        hidden = features.hidden.flatten(0, 1)[positions]
        labels = Labels(hidden, lm_head, self.head.vocab.target_ids.to(hidden.device), softcap)
        weight = pair_weights(plan, self.config, total).flatten()[used]
        if statistics is not None:
            statistics = LabelStatistics(statistics.log_mass.flatten()[positions], statistics.best.flatten()[positions])
        loss, metrics = soft_cross_entropy(
            outputs.flatten(0, 2)[used],
            self.head.lm_head.weight,
            labels,
            index,
            weight,
            self.config.oov_policy,
            self.config.chunk,
            statistics,
        )
        return loss, depth_sums(plan, metrics)


def depth_sums(plan: Unroll, metrics: PairMetrics) -> torch.Tensor:
    """[S, 6] sums over valid slots: count, agree, alpha, joint prefix correct, loss, mass."""
    used = plan.valid.flatten()

    def spread(values: torch.Tensor) -> torch.Tensor:
        full = torch.zeros(len(used), device=used.device)
        full[used] = values
        return full.view(len(plan.valid), -1)

    agree = spread(metrics.agree)
    joint = agree.cumprod(dim=0)  # invalid steps are 0 and come last, so they end a prefix as they should
    columns = [
        plan.valid.flatten(1).float(),
        agree,
        spread(metrics.alpha),
        joint,
        spread(metrics.loss),
        spread(metrics.mass),
    ]
    return torch.stack([c.sum(1) for c in columns], dim=1)


def depth_metrics(sums: torch.Tensor) -> dict[str, float]:
    """Flat metrics from depth sums [S, 6] (ALGORITHMS 9.5); tau_sim uses joint prefix correctness, not a product of marginals."""
    values: dict[str, float] = {}
    tau = 1.0
    for depth, (count, agree, alpha, joint, loss, mass) in enumerate(sums.double().tolist()):
        if count == 0:
            continue
        values |= {
            f"agree/{depth}": agree / count,
            f"alpha/{depth}": alpha / count,
            f"loss/{depth}": loss / count,
        }
        if depth == 0:
            values["target_mass_in_vocab"] = mass / count
        tau += joint / count
    values["tau_sim"] = tau
    return values


def run_target(target: FrozenTarget, batch: Batch) -> TargetOutput:
    """Taps and last hidden states of a packed batch; the positions tell documents apart."""
    return target.forward(batch.ids, position=batch.position)
