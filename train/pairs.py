"""Pairs (depth i, slot t): which there are, what they weigh, and what is counted of them (ALGORITHMS 9.3, 9.5, 11.4).

From a slot whose next token is known, depth i predicts x_{t+2+i}; that is compared with what the target says at position t+1+i.

Shapes: B rows, T tokens, S depths, N chosen slots a row (padded), M pairs that carry loss.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from data.packing import Batch, Normaliser, anchors
from train.losses import PairMetrics
from train.objective_config import ObjectiveConfig


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
    decay = config.depth_decay**steps if config.depth_weights == "decay" else torch.ones_like(steps)
    if config.loss_norm == "all_positions":
        return weight * decay / total.slots
    if config.loss_norm == "global_valid":
        return weight * decay / max(total.anchors, 1)
    samples = int(plan.sample.max()) + 1
    counts = torch.zeros(len(weight), samples, device=weight.device)
    counts.scatter_add_(1, plan.sample.flatten().expand(len(weight), -1), weight.flatten(1))
    if config.depth_weights == "dpace":
        counts = counts[:1].expand_as(counts)  # its weights fall with depth by themselves: one divisor, the number of groups
    own = counts.gather(1, plan.sample.flatten().expand(len(weight), -1)).view_as(weight)
    return weight / own.clamp_min(1) * decay / total.documents


def by_depth(plan: Unroll, values: torch.Tensor) -> torch.Tensor:
    """Values [M] of the valid pairs as [S, B*N], 0 elsewhere."""
    used = plan.valid.flatten()
    full = torch.zeros(len(used), device=used.device)
    full[used] = values
    return full.view(len(plan.valid), -1)


def dpace_weights(ce: torch.Tensor, valid: torch.Tensor, beta: float) -> torch.Tensor:
    """D-PACE (ALGORITHMS 11.4): w_j = sum_{m >= j} prod_{i <= m} c_i, c_i = (1 - beta) exp(-CE_i) + beta.

    Args:
        ce: [S, G] cross-entropies of G groups.
        valid: [S, G] bool; a group's valid depths come first.

    Returns:
        [S, G], 0 where not valid.
    """
    confidence = ((1 - beta) * torch.exp(-ce) + beta) * valid
    reached = confidence.cumprod(dim=0)
    return reached.flip(0).cumsum(0).flip(0)


def depth_sums(plan: Unroll, metrics: PairMetrics) -> torch.Tensor:
    """[S, 6] sums over valid slots: count, agree, alpha, joint prefix correct, loss, mass."""

    def spread(values: torch.Tensor) -> torch.Tensor:
        return by_depth(plan, values)

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
