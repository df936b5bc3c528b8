"""What of an objective a recipe can say."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from heads.config import Config
from train.losses import LossConfig


class EagleTerms(Config):
    """EAGLE-1 only (ALGORITHMS 8.2, 8.4)."""

    regression: float = Field(default=1.0, ge=0.0)
    """Weight of the smooth L1 distance between the predicted and the target's feature."""
    cross_entropy: float = Field(default=0.1, ge=0.0)
    """Weight of the distillation loss."""
    noise: float = Field(default=0.1, ge=0.0)
    """Half width of the uniform noise on the features that are read, for a document of 512 tokens; shorter ones get more."""
    align_passes: int = Field(default=1, ge=1, le=16)
    """1: EAGLE-1. More: HASS, each pass trained on the outputs of the one before it."""
    top: int = Field(default=10, ge=1)
    """Tokens of the emphasis term."""
    top_weight: float = Field(default=0.0, ge=0.0)
    """Weight of the extra cross-entropy on the target's `top` most likely tokens; HASS has 1."""


class DropTerms(Config):
    """P-EAGLE only: conditional drop-token sampling (ALGORITHMS 10.2)."""

    keep: float = Field(default=0.75, gt=0.0, le=1.0)
    """r: share of a depth's slots whose next depth is trained too."""
    keep_least: float = Field(default=0.1, ge=0.0, le=1.0)
    """Depth j keeps at least this share of all slots."""


class JointTerms(Config):
    """Medusa-2 only (ALGORITHMS 7.2): first the heads alone, then heads and head.adapter together."""

    start: float = Field(default=0.5, ge=0.0, lt=1.0)
    """Share of the steps before the adapter is trained too; 0 where the heads are trained already (head.init_from)."""
    learning_rate: float = Field(default=2.5e-4, gt=0.0, le=1.0)
    """Peak of the adapter's rate, with a warm-up and a cosine of its own; the paper has a quarter of the heads'."""
    heads_weight: float = Field(default=0.01, ge=0.0, le=1.0)
    """lambda_0: what of the heads' gradient reaches the target, beside the distance from what it was. The heads themselves always get all
    of theirs."""
    ramp: bool = True
    """Let heads_weight rise from 0 as a quarter sine."""


class ObjectiveConfig(LossConfig):
    """What is minimised."""

    depths: int | None = Field(default=None, ge=1, le=32)
    """eagle3: unroll steps of training-time test (7 where left out); steps beyond it are extrapolation when decoding. The other kinds have
    theirs from head.heads, head.depths or objective.eagle.align_passes."""
    depth_weights: Literal["decay", "dpace"] = "decay"
    """decay: depth i weighs depth_decay ** i. dpace: by how likely the drafts before and after it are to be accepted (D-PACE)."""
    depth_decay: float = Field(default=0.8, gt=0.0, le=1.0)
    """1: equal weights."""
    dpace_beta: float = Field(default=0.5, ge=0.0, le=1.0)
    """dpace: confidences c are lifted to (1 - beta) c + beta."""
    loss_norm: Literal["sample_valid", "global_valid", "all_positions"] = "sample_valid"
    """sample_valid: mean over each document's slots, then over documents. global_valid: one divisor, the update's.
    all_positions: the update's row slots, masked or not (the paper)."""
    eagle: EagleTerms = EagleTerms()
    joint: JointTerms = JointTerms()
    peagle: DropTerms = DropTerms()
