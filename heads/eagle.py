"""EAGLE-1 draft head, which serves EAGLE-2 too (Li et al. 2024a, section 4; Li et al. 2024b; ALGORITHMS 8).

Slot t is (f_t, x_{t+1}), f the target's last hidden state after the final norm. It predicts f_{t+1}, which the target's own LM head turns
into the distribution of x_{t+2}; the predicted feature recurs.

Shapes: H hidden width, V target vocabulary.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import nn

from heads.config import Config, HeadConfig
from heads.layers import Attention, GatedMLP, RMSNorm, Rotary
from heads.recurrent import RecurrentHead
from heads.target import FrozenTarget
from heads.vocab import DraftVocab


class EagleConfig(HeadConfig):
    """What a recipe says of an EAGLE-1 head; everything left out is taken from the target."""

    kind: Literal["eagle"] = "eagle"
    """The head's kind in heads/registry.py."""
    layers: int = 1
    """Decoder layers of the head."""
    ffn: int | None = None
    """Width of the MLP; None: the target's."""


class EagleArchitecture(Config):
    """A head's shape in full; written beside its weights, and enough to build it again."""

    kind: Literal["eagle"] = "eagle"
    hidden_size: int
    ffn: int
    n_q: int
    n_kv: int
    head_dim: int
    layers: int
    vocab_size: int
    rms_eps: float
    rope: dict[str, Any]
    max_positions: int
    softcap: float | None = None
    """The target's soft cap on logits."""

    @property
    def taps(self) -> None:
        """It reads the last hidden state only."""
        return None

    @classmethod
    def resolve(cls, config: EagleConfig, target: FrozenTarget) -> EagleArchitecture:
        """Fill what the recipe leaves out from the target."""
        source = target.config
        n_q = int(source.num_attention_heads)
        return cls(
            hidden_size=target.hidden_size,
            ffn=config.ffn or int(source.intermediate_size),
            n_q=n_q,
            n_kv=int(getattr(source, "num_key_value_heads", None) or n_q),
            head_dim=int(getattr(source, "head_dim", None) or target.hidden_size // n_q),
            layers=config.layers,
            vocab_size=target.vocab_size,
            rms_eps=float(getattr(source, "rms_norm_eps", 1e-6)),
            rope=target.rope,
            max_positions=target.max_length,
            softcap=target.softcap,
        )


class EagleLayer(nn.Module):
    """One decoder layer. The first fuses token and feature and has no norm before its attention; later ones are standard."""

    def __init__(self, arch: EagleArchitecture, first: bool) -> None:
        super().__init__()
        width = arch.hidden_size
        self.fc = nn.Linear(2 * width, width) if first else None
        self.input_norm = None if first else RMSNorm(width, arch.rms_eps)
        self.attention = Attention(width, width, arch.n_q, arch.n_kv, arch.head_dim)
        self.mlp_norm = RMSNorm(width, arch.rms_eps)
        self.mlp = GatedMLP(width, arch.ffn)

    def inputs(self, token: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention input and residual, [B, T, H] each."""
        value = state if self.fc is None else self.fc(torch.cat((token, state), dim=-1))
        return (value if self.input_norm is None else self.input_norm(value)), value

    def finish(self, residual: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        residual = residual + attended
        return residual + self.mlp(self.mlp_norm(residual))


class EagleHead(RecurrentHead):
    """The trained part: fusion and decoder layer. Embedding and LM head are the target's."""

    def __init__(self, arch: EagleArchitecture) -> None:
        super().__init__()
        self.arch = arch
        self.vocab = DraftVocab.full(arch.vocab_size)
        self.layers = nn.ModuleList(EagleLayer(arch, first=index == 0) for index in range(arch.layers))
        self.rotary = Rotary(arch.rope, arch.head_dim, arch.max_positions)

    @torch.no_grad()
    def initialise(self, target: FrozenTarget, config: EagleConfig, generator: torch.Generator | None = None) -> None:
        """Matrices normal(0, 0.02), norms ones, biases 0. The fusion passes the feature through and the layer starts at a tenth, so that an
        untrained head repeats the last feature: the LM head reads something it knows, and loss starts near the target's own entropy."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                module.weight.copy_(torch.randn(module.weight.shape, generator=generator) * 0.02)
                if module.bias is not None:
                    module.bias.zero_()
            elif isinstance(module, RMSNorm):
                module.weight.fill_(1.0)
        first: Any = self.layers[0]
        first.fc.weight[:, self.arch.hidden_size :] += torch.eye(self.arch.hidden_size)
        for layer in self.layers:
            layer.attention.o_proj.weight.mul_(0.1)  # type: ignore[union-attr,operator]
            layer.mlp.down_proj.weight.mul_(0.1)  # type: ignore[union-attr,operator]

    def fuse(self, features: torch.Tensor) -> torch.Tensor:
        return features

    def finished(self, value: torch.Tensor) -> torch.Tensor:
        return value

    @property
    def recurs_finished(self) -> bool:
        return True

    def draft_logits(self, output: torch.Tensor, target: FrozenTarget) -> torch.Tensor:
        return target.logits(output.to(target.dtype))

    def output_weight(self, target_lm_head: torch.Tensor) -> torch.Tensor:
        return target_lm_head
