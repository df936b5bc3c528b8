"""What draft heads are built from: RMSNorm, rotary embedding, attention with step caches, gated MLP.

Shapes: B sequences, T tokens (slots), N query slots, H hidden width, n_q / n_kv query / key-value heads, d head size, E input width.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding


class RMSNorm(nn.Module):
    """x / rms(x) * weight, computed in float32."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x.float(), self.weight.shape, self.weight.float(), self.eps).to(x.dtype)


class Rotary(nn.Module):
    """The target's rotary embedding in the half-split form, scaling included (linear, dynamic, yarn, longrope, llama3)."""

    def __init__(self, rope: dict[str, Any], head_dim: int, max_positions: int) -> None:
        super().__init__()
        # The library owns the scaling rules; the config only carries the numbers they read.
        config = LlamaConfig(
            head_dim=head_dim,
            hidden_size=head_dim,
            num_attention_heads=1,
            max_position_embeddings=max_positions,
            rope_parameters=dict(rope),
        )
        self.rotary = LlamaRotaryEmbedding(config)

    def forward(self, x: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        """Rotate x [B, n, T, d] to its positions [B, T] int64."""
        cos, sin = self.rotary(x, position)
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
        first, second = x.chunk(2, dim=-1)
        return x * cos + torch.cat((-second, first), dim=-1) * sin


@dataclass
class KeysValues:
    """Keys and values [B, n_kv, T, d] of one layer; keys are rotated to their positions."""

    keys: torch.Tensor
    values: torch.Tensor


@dataclass
class StepCache:
    """What one layer's attention sees while training-time test unrolls (ALGORITHMS 9.3).

    ``real`` holds step 0: one key per slot of the row, causal for every query. ``own`` holds one entry per later step, [B, n_kv, N, d]:
    the query slot sees its own and no other's.
    """

    real: KeysValues
    own: list[KeysValues] = field(default_factory=list)


class Attention(nn.Module):
    """Grouped-query attention of input width E; no biases (the portable profile of public heads has none)."""

    def __init__(self, inputs: int, hidden: int, n_q: int, n_kv: int, head_dim: int) -> None:
        super().__init__()
        self.n_q, self.n_kv, self.head_dim = n_q, n_kv, head_dim
        self.q_proj = nn.Linear(inputs, n_q * head_dim, bias=False)
        self.k_proj = nn.Linear(inputs, n_kv * head_dim, bias=False)
        self.v_proj = nn.Linear(inputs, n_kv * head_dim, bias=False)
        self.o_proj = nn.Linear(n_q * head_dim, hidden, bias=False)

    def _split(self, x: torch.Tensor, heads: int) -> torch.Tensor:
        return x.view(*x.shape[:2], heads, self.head_dim).transpose(1, 2)

    def keys_values(self, x: torch.Tensor, position: torch.Tensor, rotary: Rotary) -> KeysValues:
        """x [B, T, E], position [B, T] -> keys and values [B, n_kv, T, d]."""
        return KeysValues(rotary(self._split(self.k_proj(x), self.n_kv), position), self._split(self.v_proj(x), self.n_kv))

    def forward(self, x: torch.Tensor, position: torch.Tensor, rotary: Rotary, cache: StepCache, visible: torch.Tensor) -> torch.Tensor:
        """Attend from N query slots to the row's real slots and to each slot's own steps: one softmax over both.

        Args:
            x: [B, N, E] inputs of the query slots.
            position: [B, N].
            cache: real keys [B, n_kv, T, d] and own steps.
            visible: [B, N, T] bool, which real slots each query sees.

        Returns:
            [B, N, H].
        """
        batch, slots, _ = x.shape
        groups = self.n_q // self.n_kv
        query = rotary(self._split(self.q_proj(x), self.n_q), position) * self.head_dim**-0.5
        query = query.reshape(batch, self.n_kv, groups, slots, self.head_dim)
        real = cache.real
        # Masked scores are -inf, not multiplied by 0: a masked key must have weight exactly 0 beside any other score.
        scores = (query.flatten(2, 3) @ real.keys.transpose(2, 3)).view(batch, self.n_kv, groups, slots, -1).float()
        scores = scores.masked_fill(~visible[:, None, None], float("-inf"))
        own = [(query * step.keys.unsqueeze(2)).sum(-1, keepdim=True).float() for step in cache.own]
        weights = torch.softmax(torch.cat([scores, *own], dim=-1), dim=-1).to(x.dtype)
        length = real.keys.shape[2]
        mixed = (weights[..., :length].flatten(2, 3) @ real.values).view(batch, self.n_kv, groups, slots, self.head_dim)
        for index, step in enumerate(cache.own):
            mixed = mixed + weights[..., length + index, None] * step.values.unsqueeze(2)
        return self.o_proj(mixed.flatten(1, 2).transpose(1, 2).reshape(batch, slots, self.n_q * self.head_dim))


class GatedMLP(nn.Module):
    """SwiGLU: H -> ffn -> H."""

    def __init__(self, hidden: int, ffn: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, ffn, bias=False)
        self.up_proj = nn.Linear(hidden, ffn, bias=False)
        self.down_proj = nn.Linear(ffn, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
