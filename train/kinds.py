"""The objective of each kind of head: EAGLE-3, EAGLE-1 and HASS, Medusa, P-EAGLE (ALGORITHMS 7.2, 8.2, 8.4, 9.3, 10.2).

Shapes: B rows, T tokens, S depths, N chosen slots a row (padded), M pairs that carry loss, H hidden width.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F

from data.packing import Batch
from heads.adapter import TargetAdapter
from heads.target import FrozenTarget, TargetOutput
from train.losses import DraftLayer, Emphasis
from train.medusa import JointObjective, MedusaObjective
from train.objective_config import ObjectiveConfig
from train.objectives import Moment, Objective, Pairs
from train.pairs import Unroll, plan_unroll, shifted_tokens, visible_slots

EAGLE3_DEPTHS = 7


class TrainingTimeTest(Objective):
    """EAGLE-3: teacher-forced steps through which the gradient flows."""

    @property
    def depths(self) -> int:
        return self.config.depths or EAGLE3_DEPTHS

    def outputs(self, plan: Unroll, batch: Batch, features: TargetOutput, embedding: torch.Tensor, moment: Moment) -> torch.Tensor:
        assert features.taps is not None
        dtype = self.head.fc.weight.dtype
        tokens = F.embedding(shifted_tokens(batch.ids, self.depths), embedding).to(dtype)
        found = self.head.unroll(features.taps.to(dtype), tokens, batch.position, visible_slots(batch), plan.slots)
        return found.flatten(0, 2)[plan.valid.flatten()]

    def layer(self, depth: int, lm_head: torch.Tensor, softcap: float | None) -> DraftLayer:
        return DraftLayer(self.head.lm_head.weight)


class EagleObjective(Objective):
    """EAGLE-1: the next feature by regression, its token by cross-entropy through the target's LM head. With more than one pass, HASS.

    HASS gives pass j the draft's own features of the last j - 1 positions. Here the unroll of EAGLE-3 does so exactly as decoding will,
    with the gradient cut between passes.
    """

    features = "hidden"

    def __init__(self, head: Any, config: ObjectiveConfig) -> None:
        super().__init__(head, config)
        terms = config.eagle
        self.distillation_weight = terms.cross_entropy
        self.emphasis = Emphasis(terms.top, terms.top_weight / terms.cross_entropy) if terms.top_weight and terms.cross_entropy else None

    @property
    def depths(self) -> int:
        return self.config.eagle.align_passes

    def outputs(self, plan: Unroll, batch: Batch, features: TargetOutput, embedding: torch.Tensor, moment: Moment) -> torch.Tensor:
        dtype = next(self.head.parameters()).dtype
        tokens = F.embedding(shifted_tokens(batch.ids, self.depths), embedding).to(dtype)
        read = features.hidden.to(dtype)
        if self.training and self.config.eagle.noise:
            read = read + noise(batch, read.shape[-1], self.config.eagle.noise, moment).to(read)
        found = self.head.unroll(read, tokens, batch.position, visible_slots(batch), plan.slots, detach=True)
        return found.flatten(0, 2)[plan.valid.flatten()]

    def layer(self, depth: int, lm_head: torch.Tensor, softcap: float | None) -> DraftLayer:
        return DraftLayer(lm_head, softcap)

    def extra(self, outputs: torch.Tensor, read: TargetOutput, pairs: Pairs) -> torch.Tensor | None:
        distance = F.smooth_l1_loss(outputs.float(), pairs.labels.hidden[pairs.index].float(), reduction="none").mean(-1)
        return self.config.eagle.regression * (distance * pairs.weight).sum()


def noise(batch: Batch, width: int, half: float, moment: Moment) -> torch.Tensor:
    """[B, T, width] uniform in +-half * 512 / length of the document; a function of update and row, not of the batch around the row."""
    drawn = torch.stack([torch.rand(batch.ids.shape[1], width, generator=moment.generator(row)) for row in batch.rows])
    document = batch.document.cpu()
    length = torch.bincount(document.flatten())[document]
    return (2 * drawn - 1) * (half * 512 / length).unsqueeze(-1)


class PEagleObjective(Objective):
    """P-EAGLE: all depths of a slot in one forward, deeper ones at fewer and fewer anchors."""

    @property
    def depths(self) -> int:
        return int(self.head.arch.depths)

    def plan(self, batch: Batch, moment: Moment) -> Unroll:
        plan = plan_unroll(batch, self.depths)
        return replace(plan, valid=plan.valid & kept_groups(plan, batch, self.config, moment)) if self.training else plan

    def outputs(self, plan: Unroll, batch: Batch, features: TargetOutput, embedding: torch.Tensor, moment: Moment) -> torch.Tensor:
        assert features.taps is not None
        device, length = batch.ids.device, batch.ids.shape[1]
        dtype = self.head.mask_embedding.dtype
        # Depth-0 slots exist at every position, as context; deeper ones only where they carry loss. Rows with fewer are filled up.
        deep = plan.valid[1:].permute(1, 2, 0)
        most = int(deep.flatten(1).sum(1).max()) if self.depths > 1 else 0
        real = torch.arange(length, device=device).expand(len(batch.ids), -1)
        anchor, depth, alive = real, torch.zeros_like(real), torch.ones_like(real, dtype=torch.bool)
        if most:
            chosen = torch.sort(deep.flatten(1).int(), dim=1, descending=True, stable=True).indices[:, :most]
            line = torch.arange(len(real), device=device).unsqueeze(1)
            anchor = torch.cat((real, plan.slots[line, chosen // (self.depths - 1)]), dim=1)
            depth = torch.cat((depth, 1 + chosen % (self.depths - 1)), dim=1)
            alive = torch.cat((alive, deep.flatten(1)[line, chosen]), dim=1)
        tokens = self.head.embed(shifted_tokens(batch.ids, 1)[0], embedding)
        visible = group_visibility(batch.document, anchor, depth, alive)
        output = self.head.parallel(features.taps.to(dtype), tokens, batch.position, anchor, depth, visible)
        where = torch.zeros(len(real), length, self.depths, dtype=torch.int64, device=device)
        row = torch.arange(len(real), device=device).unsqueeze(1).expand_as(anchor)
        number = torch.arange(anchor.shape[1], device=device).expand_as(anchor)
        where[row[alive], anchor[alive], depth[alive]] = number[alive]
        steps, rows, columns = plan.valid.nonzero(as_tuple=True)
        return output[rows, where[rows, plan.slots[rows, columns], steps]]

    def layer(self, depth: int, lm_head: torch.Tensor, softcap: float | None) -> DraftLayer:
        return DraftLayer(self.head.base.lm_head.weight)


def kept_groups(plan: Unroll, batch: Batch, config: ObjectiveConfig, moment: Moment) -> torch.Tensor:
    """Conditional drop-token sampling, [S, B, N] bool: depth j keeps a share max(r^j, r_min) of a row's anchors, chosen among those whose
    depth j - 1 was kept: each anchor's depths are a nested prefix."""
    kept = torch.zeros(plan.valid.shape, dtype=torch.bool)
    for b, row in enumerate(batch.rows):
        # One rank an anchor and a threshold that only falls: nested by construction, and exact in number.
        count = int(plan.valid[0, b].sum())
        rank = torch.randperm(count, generator=moment.generator(row))
        for depth in range(len(kept)):
            share = max(config.peagle.keep**depth, config.peagle.keep_least) if depth else 1.0
            kept[depth, b, :count] = rank < max(1, round(share * count))
    return kept.to(plan.valid.device)


def group_visibility(document: torch.Tensor, anchor: torch.Tensor, depth: torch.Tensor, alive: torch.Tensor) -> torch.Tensor:
    """[B, M, M] bool, query sees key: depth-0 keys of its document up to its anchor, and its own group's up to its depth (10.2).

    Args:
        document: [B, T].
        anchor, depth: [B, M].
        alive: [B, M] bool; a slot that only fills up is nobody's key but its own.
    """
    q_anchor, k_anchor = anchor.unsqueeze(2), anchor.unsqueeze(1)
    q_depth, k_depth = depth.unsqueeze(2), depth.unsqueeze(1)
    of = document.gather(1, anchor)
    same = of.unsqueeze(2) == of.unsqueeze(1)
    seen = same & (((k_depth == 0) & (k_anchor <= q_anchor)) | ((k_anchor == q_anchor) & (k_depth <= q_depth)))
    return (seen & alive.unsqueeze(1)) | torch.eye(anchor.shape[1], dtype=torch.bool, device=anchor.device)


OBJECTIVES: dict[str, type[Objective]] = {
    "eagle": EagleObjective,
    "eagle3": TrainingTimeTest,
    "medusa": MedusaObjective,
    "peagle": PEagleObjective,
}


def make_objective(head: Any, config: ObjectiveConfig, target: FrozenTarget, adapter: TargetAdapter | None = None) -> Objective:
    """The objective of a head's kind; with an adapter on the target, Medusa-2's."""
    if adapter is not None:
        return JointObjective(head, config, target, adapter)
    return OBJECTIVES[head.arch.kind](head, config)
