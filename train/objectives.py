"""Head + batch -> loss and per-depth metrics: what the objectives of all kinds of heads share (ALGORITHMS 9.5, 11.4).

Shapes: B rows, T tokens, S depths, N chosen slots a row (padded), M pairs that carry loss, H hidden width.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import nn

from data.packing import Batch, Normaliser
from heads.adapter import TargetAdapter
from heads.target import FrozenTarget, TargetOutput
from train.losses import DraftLayer, Emphasis, Labels, LabelStatistics, PairMetrics, distillation_loss
from train.objective_config import ObjectiveConfig
from train.pairs import Unroll, by_depth, depth_sums, dpace_weights, pair_weights, plan_unroll


@dataclass(frozen=True)
class Moment:
    """Which update this is: randomness in training is a function of it and of the row, so that resuming and splitting change nothing."""

    seed: int = 0
    step: int = 0
    """Updates before it."""
    steps: int = 1
    """Updates of the run."""

    def generator(self, row: int) -> torch.Generator:
        """The random source of a row, on the CPU."""
        return torch.Generator().manual_seed(int(np.random.SeedSequence((self.seed, self.step, row)).generate_state(1, np.uint64)[0] >> 1))


@dataclass(frozen=True)
class Pairs:
    """What the outputs of a batch are compared with."""

    plan: Unroll
    index: torch.Tensor
    """[M] int64: each pair's number among the label positions."""
    weight: torch.Tensor
    """[M] float32."""
    labels: Labels
    positions: torch.Tensor
    """[P] int64: where in the flattened batch the label positions are."""
    statistics: LabelStatistics | None
    moment: Moment


class Objective(nn.Module, ABC):
    """Wraps a head so that one forward is loss and metrics: what accelerate and DDP need to see.

    A kind of head brings its depths, how outputs come from a batch, and what turns them into draft logits.
    """

    features: Literal["taps", "hidden"] = "taps"
    """What the head reads of the target."""

    def __init__(self, head: Any, config: ObjectiveConfig) -> None:
        super().__init__()
        self.head = head
        self.config = config
        self.adapter: TargetAdapter | None = None
        """What is trained inside the target, where anything is."""

    @property
    @abstractmethod
    def depths(self) -> int:
        """S."""

    @abstractmethod
    def outputs(self, plan: Unroll, batch: Batch, features: TargetOutput, embedding: torch.Tensor, moment: Moment) -> torch.Tensor:
        """[M, H] the head's outputs for the plan's valid pairs, in their order."""

    @abstractmethod
    def layer(self, depth: int, lm_head: torch.Tensor, softcap: float | None) -> DraftLayer:
        """What turns outputs of a depth into logits; given the target's LM head and its soft cap."""

    same_layer = True
    """Whether ``layer`` is one for all depths."""
    distillation_weight = 1.0
    emphasis: Emphasis | None = None

    def first_joint_step(self, steps: int) -> int:
        """The update from which on the adapter is trained, of a run of so many."""
        return steps

    def plan(self, batch: Batch, moment: Moment) -> Unroll:
        """The pairs of a batch."""
        return plan_unroll(batch, self.depths)

    def read(self, batch: Batch, features: TargetOutput, moment: Moment) -> TargetOutput:
        """What of the target the head reads; labels are always the frozen target's."""
        return features

    def extra(self, outputs: torch.Tensor, read: TargetOutput, pairs: Pairs) -> torch.Tensor | None:
        """A further loss beside the distillation of ``outputs``."""
        return None

    def forward(
        self,
        batch: Batch,
        features: TargetOutput,
        embedding: torch.Tensor,
        lm_head: torch.Tensor,
        softcap: float | None,
        total: Normaliser,
        statistics: LabelStatistics | None = None,
        moment: Moment = Moment(),
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Loss (a share of the update's) and depth sums [S, 6]: valid, agree, alpha, joint prefix correct, loss, mass."""
        plan = self.plan(batch, moment)
        read = self.read(batch, features, moment)
        outputs = self.outputs(plan, batch, read, embedding, moment)
        index, labels, positions = label_positions(plan, batch, features, lm_head, self.head.vocab.target_ids, softcap)
        if statistics is not None:
            statistics = LabelStatistics(statistics.log_mass.flatten()[positions], statistics.best.flatten()[positions])
        weight = pair_weights(plan, self.config, total).flatten()[plan.valid.flatten()]
        pairs = Pairs(plan, index, weight, labels, positions, statistics, moment)
        if self.config.depth_weights == "dpace":
            with torch.no_grad():
                _, found = self._distil(pairs, outputs.detach(), weight)
            share = dpace_weights(by_depth(plan, found.loss), plan.valid.flatten(1), self.config.dpace_beta)
            pairs = replace(pairs, weight=weight * share[plan.valid.flatten(1)])
        loss, metrics = self._distil(pairs, outputs, pairs.weight * self.distillation_weight)
        further = self.extra(outputs, read, pairs)
        return (loss if further is None else loss + further), depth_sums(plan, metrics)

    def _distil(self, pairs: Pairs, outputs: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, PairMetrics]:
        """The distillation loss, depth by depth where the depths speak through layers of their own."""
        labels, index, statistics = pairs.labels, pairs.index, pairs.statistics
        lm_head, softcap = labels.lm_head, labels.softcap
        if self.same_layer:
            layer = self.layer(0, lm_head, softcap)
            return distillation_loss(outputs, layer, labels, index, weight, self.config, statistics, self.emphasis)
        ends = pairs.plan.valid.flatten(1).sum(1).cumsum(0).tolist()
        loss, parts = outputs.sum() * 0, []
        for depth, (low, high) in enumerate(zip([0, *ends[:-1]], ends, strict=True)):
            of = slice(low, high)
            layer = self.layer(depth, lm_head, softcap)
            one, metrics = distillation_loss(outputs[of], layer, labels, index[of], weight[of], self.config, statistics, self.emphasis)
            loss = loss + one
            parts.append(metrics)
        fields = ("loss", "agree", "alpha", "mass", "in_vocab")
        return loss, PairMetrics(*(torch.cat([getattr(m, name) for m in parts]) for name in fields))


def label_positions(
    plan: Unroll, batch: Batch, features: TargetOutput, lm_head: torch.Tensor, draft_ids: torch.Tensor, softcap: float | None
) -> tuple[torch.Tensor, Labels, torch.Tensor]:
    """The positions that any pair is compared with, densely numbered, so that nothing is computed for prompts and padding.

    Returns:
        index [M] into the labels, the labels of P positions, and those positions [P] in the flattened batch.
    """
    length = batch.ids.shape[1]
    line = torch.arange(len(batch.ids), device=batch.ids.device).view(1, -1, 1)
    positions, index = torch.unique((line * length + plan.label).flatten()[plan.valid.flatten()], return_inverse=True)
    # A label position is never the last of its row: the token it predicts lies in the row too.
    following = batch.ids.flatten()[(positions + 1).clamp_max(batch.ids.numel() - 1)]
    hidden = features.hidden.detach().flatten(0, 1)[positions]
    return index, Labels(hidden, lm_head, draft_ids.to(hidden.device), softcap, following), positions


def run_target(target: FrozenTarget, batch: Batch) -> TargetOutput:
    """Taps and last hidden states of a packed batch; the positions tell documents apart."""
    return target.forward(batch.ids, position=batch.position)
