"""Medusa draft heads (Cai et al. 2024, section 3; ALGORITHMS 7).

Head k (1-based) reads the target's last hidden state f_t and predicts x_{t+1+k}; the target's LM head itself predicts x_{t+1}.

Shapes: H hidden width, K heads, V target vocabulary.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import nn

from heads.adapter import AdapterConfig
from heads.config import Config, HeadConfig
from heads.target import FrozenTarget
from heads.vocab import DraftVocab


class MedusaConfig(HeadConfig):
    """What a recipe says of Medusa heads."""

    kind: Literal["medusa"] = "medusa"
    """The head's kind in heads/registry.py."""
    heads: int = Field(default=4, ge=1, le=16)
    """How many tokens are predicted beyond the LM head's own."""
    blocks: int = Field(default=1, ge=1, le=8)
    """Residual blocks of a head."""
    share_lm_head: bool = True
    """True: every head uses the target's frozen LM head, and only blocks are trained. False: each has a trained copy (H x V more)."""
    adapter: AdapterConfig | None = None
    """Medusa-2: train a low-rank adapter on the target together with the heads (objective.joint). What is decoded then is the adapted
    target, NOT the original one; the report says how far it is from it."""


class MedusaArchitecture(Config):
    """The heads' shape in full; written beside their weights, and enough to build them again."""

    kind: Literal["medusa"] = "medusa"
    hidden_size: int
    heads: int
    blocks: int
    share_lm_head: bool
    vocab_size: int
    softcap: float | None = None

    @property
    def taps(self) -> None:
        """It reads the last hidden state only."""
        return None

    @classmethod
    def resolve(cls, config: MedusaConfig, target: FrozenTarget) -> MedusaArchitecture:
        return cls(
            hidden_size=target.hidden_size,
            heads=config.heads,
            blocks=config.blocks,
            share_lm_head=config.share_lm_head,
            vocab_size=target.vocab_size,
            softcap=target.softcap,
        )


class ResidualBlock(nn.Module):
    """u = f + SiLU(W f + b); the identity where W and b are 0."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + F.silu(self.linear(x))


class MedusaHead(nn.Module):
    """All K heads."""

    def __init__(self, arch: MedusaArchitecture) -> None:
        super().__init__()
        self.arch = arch
        self.vocab = DraftVocab.full(arch.vocab_size)
        width = arch.hidden_size
        self.blocks = nn.ModuleList(nn.Sequential(*(ResidualBlock(width) for _ in range(arch.blocks))) for _ in range(arch.heads))
        own = 0 if arch.share_lm_head else arch.heads
        self.lm_heads = nn.ModuleList(nn.Linear(width, arch.vocab_size, bias=False) for _ in range(own))

    @torch.no_grad()
    def initialise(self, target: FrozenTarget, config: MedusaConfig, generator: torch.Generator | None = None) -> None:
        """Weights and biases 0: every block is the identity, and every head starts as the target's LM head."""
        for module in self.blocks.modules():
            if isinstance(module, nn.Linear):
                module.weight.zero_()
                module.bias.zero_()
        for lm_head in self.lm_heads:
            lm_head.weight.copy_(target.lm_head.float())  # type: ignore[operator]

    def outputs(self, hidden: torch.Tensor, heads: int | None = None) -> torch.Tensor:
        """hidden [..., H] -> [K, ..., H], what each head's LM head reads."""
        return torch.stack([block(hidden) for block in self.blocks[: heads or self.arch.heads]])

    def output_weight(self, head: int, target_lm_head: torch.Tensor) -> torch.Tensor:
        """[V, H] LM head of head ``head`` (0-based)."""
        own: Any = self.lm_heads[head] if len(self.lm_heads) else None
        return target_lm_head if own is None else own.weight

    def draft(self, hidden: torch.Tensor, depth: int, target_lm_head: torch.Tensor) -> torch.Tensor:
        """Logits [B, depth, V] of the tokens after the pending one, from the last verified position's hidden state [B, H]."""
        assert depth <= self.arch.heads
        dtype = next(self.blocks.parameters()).dtype
        outputs = self.outputs(hidden.to(dtype), depth)
        logits = [F.linear(o, self.output_weight(k, target_lm_head).to(dtype)) for k, o in enumerate(outputs)]
        stacked = torch.stack(logits, dim=1)
        return stacked if self.arch.softcap is None else torch.tanh(stacked / self.arch.softcap) * self.arch.softcap
