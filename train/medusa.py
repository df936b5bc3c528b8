"""The objectives of Medusa-1 and Medusa-2 (Cai et al. 2024, sections 2.2 and 2.3; ALGORITHMS 7.2)."""

from __future__ import annotations

import math
from typing import Any

import torch

from data.packing import Batch
from heads.adapter import TargetAdapter
from heads.target import FrozenTarget, TargetOutput
from train.losses import DraftLayer, LossConfig, distillation_loss
from train.objective_config import ObjectiveConfig
from train.objectives import Moment, Objective, Pairs
from train.pairs import Unroll

DIVERGENCE = LossConfig(loss="lk", lk_eta=0.0)
"""KL(p || q): the LK loss whose share of cross-entropy never falls."""


class MedusaObjective(Objective):
    """Medusa-1: every head on its own, from the last hidden state."""

    features = "hidden"

    @property
    def depths(self) -> int:
        return int(self.head.arch.heads)

    @property
    def same_layer(self) -> bool:  # type: ignore[override]
        return bool(self.head.arch.share_lm_head)

    def outputs(self, plan: Unroll, batch: Batch, features: TargetOutput, embedding: torch.Tensor, moment: Moment) -> torch.Tensor:
        line = torch.arange(len(batch.ids), device=batch.ids.device).unsqueeze(1)
        read = features.hidden[line, plan.slots].to(next(self.head.blocks.parameters()).dtype)
        # Each head runs only where it has a label.
        parts = [block(read[valid]) for block, valid in zip(self.head.blocks, plan.valid, strict=True)]
        return torch.cat(parts)

    def layer(self, depth: int, lm_head: torch.Tensor, softcap: float | None) -> DraftLayer:
        return DraftLayer(self.head.output_weight(depth, lm_head), softcap)


class JointObjective(MedusaObjective):
    """Medusa-2 by self-distillation: Medusa-1 up to a step; from there on the adapter is trained too.

    Then the heads read the adapted target, and the loss gains KL(p_original || p_adapted) where the target wrote. All labels are the
    original target's: the adapter switched off. lambda_0 acts where it is felt, on the heads' gradient as it enters the target; AdamW does
    not see by what factor a loss is scaled, so the heads learn the same with or without it.
    """

    def __init__(self, head: Any, config: ObjectiveConfig, target: FrozenTarget, adapter: TargetAdapter) -> None:
        super().__init__(head, config)
        self.adapter: TargetAdapter = adapter
        self._target = target

    def first_joint_step(self, steps: int) -> int:
        return round(self.config.joint.start * steps)

    def heads_weight(self, moment: Moment) -> float:
        """lambda_0 at an update."""
        joint, first = self.config.joint, self.first_joint_step(moment.steps)
        done = (moment.step - first + 1) / max(1, moment.steps - first)
        return joint.heads_weight * (math.sin(0.5 * math.pi * done) if joint.ramp else 1.0)

    def _joint(self, moment: Moment) -> bool:
        # A measurement (evaluation mode) is handed the states it is about.
        return self.training and moment.step >= self.first_joint_step(moment.steps)

    def read(self, batch: Batch, features: TargetOutput, moment: Moment) -> TargetOutput:
        if not self._joint(moment):
            return features
        with self.adapter.on():
            return self._target.trace(batch.ids, batch.position)

    def outputs(self, plan: Unroll, batch: Batch, features: TargetOutput, embedding: torch.Tensor, moment: Moment) -> torch.Tensor:
        if self._joint(moment):
            fixed = features.hidden.detach()
            features = TargetOutput(fixed + self.heads_weight(moment) * (features.hidden - fixed), None)
        return super().outputs(plan, batch, features, embedding, moment)

    def extra(self, outputs: torch.Tensor, read: TargetOutput, pairs: Pairs) -> torch.Tensor:
        if not self._joint(pairs.moment):
            # Zero; but DDP wants every parameter in every backward pass.
            return sum((value.sum() for value in self.adapter.parameters()), outputs.new_zeros(())) * 0
        first = int(pairs.plan.valid[0].sum())  # the pairs of depth 0 come first
        here = pairs.index[:first]
        states = read.hidden.flatten(0, 1)[pairs.positions][here]
        layer = DraftLayer(pairs.labels.lm_head, pairs.labels.softcap)
        return distillation_loss(states, layer, pairs.labels, here, pairs.weight[:first], DIVERGENCE, pairs.statistics)[0]
