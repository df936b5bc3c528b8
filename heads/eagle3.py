"""EAGLE-3 draft head, classic and 3.1 (Li et al. 2025, section 3; ALGORITHMS 9).

Slot t is the pair (g_t, x_{t+1}): the fused taps of position t and the token the target emitted from there. It predicts x_{t+2}; its
position id is t. At unroll step i the slot's token is x_{t+1+i}, its state the head's own output of step i-1, its position t+i.

Shapes: B sequences, T real slots, N query slots, S unroll steps, A taps, H hidden width, V_d draft vocabulary.
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


class Eagle3Config(HeadConfig):
    """What a recipe says of an EAGLE-3 head; everything left out is taken from the target."""

    kind: Literal["eagle3"] = "eagle3"
    """The head's kind in heads/registry.py."""
    variant: Literal["3.1", "classic"] = "3.1"
    """3.1: each tap is normed before fusion, and the normed output is what recurs. classic: neither."""
    layers: int = 1
    """Decoder layers of the head."""
    taps: tuple[int, ...] | None = None
    """Which residual streams are read (after that many decoder layers); None: 2, L//2, L-3."""
    draft_vocab_size: int | Literal["full"] = 32000
    """Target tokens the head can say, the most frequent in the corpus; full: all of them."""
    ffn: int | None = None
    """Width of the MLP; None: the target's."""
    init: Literal["aligned", "paper"] = "aligned"
    """aligned: the untrained head reads like the target's last layers (see Eagle3Head.initialise). paper: normal(0, 0.02) throughout."""
    train_lm_head: bool = True
    """False freezes the LM head at its initial value."""


class Eagle3Architecture(Config):
    """A head's shape in full; written beside its weights, and enough to build it again."""

    kind: Literal["eagle3"] = "eagle3"
    hidden_size: int
    ffn: int
    n_q: int
    n_kv: int
    head_dim: int
    layers: int
    taps: tuple[int, ...]
    tap_convention: Literal["residual stream after k decoder layers"] = "residual stream after k decoder layers"
    vocab_size: int
    draft_vocab_size: int
    rms_eps: float
    rope: dict[str, Any]
    max_positions: int
    fc_norm: bool
    """RMSNorm on each tap before fusion (3.1)."""
    norm_output: bool
    """The normed output recurs (3.1), not the raw one."""
    norm_before_residual: bool = False
    """The residual starts from the normed state instead of the raw one."""

    @classmethod
    def resolve(cls, config: Eagle3Config, target: FrozenTarget, draft_vocab_size: int) -> Eagle3Architecture:
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
            taps=target.taps,
            vocab_size=target.vocab_size,
            draft_vocab_size=draft_vocab_size,
            rms_eps=float(getattr(source, "rms_norm_eps", 1e-6)),
            rope=target.rope,
            max_positions=target.max_length,
            fc_norm=config.variant == "3.1",
            norm_output=config.variant == "3.1",
        )


class Eagle3Layer(nn.Module):
    """One decoder layer. The first reads token and state side by side (2H), later ones the layer below (H)."""

    def __init__(self, arch: Eagle3Architecture, first: bool) -> None:
        super().__init__()
        width, eps = arch.hidden_size, arch.rms_eps
        self.norm_before_residual = arch.norm_before_residual and first
        self.token_norm = RMSNorm(width, eps) if first else None
        self.state_norm = RMSNorm(width, eps)
        self.attention = Attention(2 * width if first else width, width, arch.n_q, arch.n_kv, arch.head_dim)
        self.mlp_norm = RMSNorm(width, eps)
        self.mlp = GatedMLP(width, arch.ffn)

    def inputs(self, token: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention input [B, T, 2H or H] and residual [B, T, H]."""
        normed = self.state_norm(state)
        residual = normed if self.norm_before_residual else state
        return (normed if self.token_norm is None else torch.cat((self.token_norm(token), normed), dim=-1)), residual

    def finish(self, residual: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        residual = residual + attended
        return residual + self.mlp(self.mlp_norm(residual))


class Eagle3Head(RecurrentHead):
    """The trained part. The target's embedding is not in here: callers pass embedded tokens."""

    d2t: torch.Tensor
    t2d: torch.Tensor

    def __init__(self, arch: Eagle3Architecture, vocab: DraftVocab) -> None:
        super().__init__()
        assert arch.draft_vocab_size == vocab.size and arch.vocab_size == vocab.vocab_size
        self.arch = arch
        self.vocab = vocab
        width = arch.hidden_size
        self.fc_norms = nn.ModuleList(RMSNorm(width, arch.rms_eps) for _ in arch.taps) if arch.fc_norm else None
        self.fc = nn.Linear(len(arch.taps) * width, width, bias=False)
        self.layers = nn.ModuleList(Eagle3Layer(arch, first=index == 0) for index in range(arch.layers))
        self.norm = RMSNorm(width, arch.rms_eps)
        self.lm_head = nn.Linear(width, arch.draft_vocab_size, bias=False)
        self.rotary = Rotary(arch.rope, arch.head_dim, arch.max_positions)
        self.register_buffer("d2t", vocab.d2t)
        self.register_buffer("t2d", vocab.t2d)

    @torch.no_grad()
    def initialise(self, target: FrozenTarget, config: Eagle3Config, generator: torch.Generator | None = None) -> None:
        """Set initial values. Matrices are normal(0, 0.02), norms ones (ALGORITHMS 9.2); ``aligned`` then changes four things:

        * LM head and output norm are the target's, the norm scaled by 0.3: random outputs through the full gain are confident nonsense
          (21 nats a token, against ln V_d = 9 for knowing nothing), and the first hundred updates only unlearn it;
        * fusion passes the highest tap through, with a little of everything: it lives in the space that the LM head reads;
        * attention and MLP start at a tenth, so that this is what comes out.

        Measured on the bundled target, 36 updates of one row, mean of the last 8, soft cross-entropy at step 0: LM head and norm of the
        target alone 6.33, norm scaled 5.42, all of it 4.81.
        """
        for module in self.modules():
            if isinstance(module, nn.Linear):
                module.weight.copy_(torch.randn(module.weight.shape, generator=generator) * 0.02)
            elif isinstance(module, RMSNorm):
                module.weight.fill_(1.0)
        if config.init == "aligned":
            width = self.arch.hidden_size
            self.lm_head.weight.copy_(target.lm_head[self.vocab.target_ids.to(target.device)].float())
            self.norm.weight.copy_(target.final_norm_weight() * 0.3)
            self.fc.weight.mul_(0.2)
            self.fc.weight[:, -width:] += torch.eye(width)
            for layer in self.layers:
                layer.attention.o_proj.weight.mul_(0.1)  # type: ignore[union-attr,operator]
                layer.mlp.down_proj.weight.mul_(0.1)  # type: ignore[union-attr,operator]
        self.lm_head.weight.requires_grad_(config.train_lm_head)

    def fuse(self, taps: torch.Tensor) -> torch.Tensor:
        """taps [B, T, A*H] -> g [B, T, H]."""
        if self.fc_norms is not None:
            parts = taps.split(self.arch.hidden_size, dim=-1)
            taps = torch.cat([norm(part) for norm, part in zip(self.fc_norms, parts, strict=True)], dim=-1)
        return self.fc(taps)

    def logits(self, output: torch.Tensor) -> torch.Tensor:
        """Draft logits [..., V_d] from normed outputs [..., H]."""
        return self.lm_head(output)

    def target_ids(self, draft_ids: torch.Tensor) -> torch.Tensor:
        """Draft ids to target ids."""
        return draft_ids + self.d2t[draft_ids]

    def finished(self, value: torch.Tensor) -> torch.Tensor:
        return self.norm(value)

    @property
    def recurs_finished(self) -> bool:
        return self.arch.norm_output

    def draft_logits(self, output: torch.Tensor, target: FrozenTarget) -> torch.Tensor:
        return self.logits(output)

    def output_weight(self, target_lm_head: torch.Tensor) -> torch.Tensor:
        return self.lm_head.weight
