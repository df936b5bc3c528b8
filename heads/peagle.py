"""P-EAGLE draft head: all K drafts from one forward (ALGORITHMS 10).

A slot is (anchor a, depth j). Depth 0 is an EAGLE-3 slot: the fused taps of position a and the token x_{a+1}. Depth j >= 1 stands for
tokens not known yet: a learned mask vector in place of the taps, a learned mask embedding in place of the token, at position a + j.
Slot (a, j) predicts x_{a+2+j}.

Shapes: B sequences, T real slots, M slots in all, K depths, A taps, H hidden width, V_d draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import nn

from heads.cache import LineCache, causal, visible_slots
from heads.config import Config, HeadConfig
from heads.eagle3 import Eagle3Architecture, Eagle3Config, Eagle3Head
from heads.layers import KeysValues, StepCache
from heads.target import FrozenTarget
from heads.vocab import DraftVocab


class PEagleConfig(HeadConfig):
    """What a recipe says of a P-EAGLE head; everything left out is taken from the target."""

    kind: Literal["peagle"] = "peagle"
    """The head's kind in heads/registry.py."""
    layers: int = Field(default=4, ge=1)
    """Decoder layers of the head."""
    depths: int = Field(default=8, ge=1, le=32)
    """K: tokens drafted at once, at most; train with more than you will use."""
    taps: tuple[int, ...] | None = None
    """Which residual streams are read (after that many decoder layers); None: 2, L//2, L-3."""
    draft_vocab_size: int | Literal["full"] = 32000
    """Target tokens the head can say, the most frequent in the corpus; full: all of them."""
    ffn: int | None = None
    """Width of the MLP; None: the target's."""
    train_embedding: bool = False
    """False: only the mask token's embedding is trained, so that the head loads where the target's table is used. True: a whole table."""
    train_lm_head: bool = True
    """False freezes the LM head at its initial value."""

    def input_block(self) -> Eagle3Config:
        """The EAGLE-3 head that it is made of."""
        return Eagle3Config(
            layers=self.layers,
            taps=self.taps,
            draft_vocab_size=self.draft_vocab_size,
            ffn=self.ffn,
            train_lm_head=self.train_lm_head,
        )


class PEagleArchitecture(Config):
    """A head's shape in full; written beside its weights, and enough to build it again."""

    kind: Literal["peagle"] = "peagle"
    base: Eagle3Architecture
    depths: int
    train_embedding: bool

    @property
    def hidden_size(self) -> int:
        return self.base.hidden_size

    @property
    def vocab_size(self) -> int:
        return self.base.vocab_size

    @property
    def taps(self) -> tuple[int, ...]:
        return self.base.taps

    @classmethod
    def resolve(cls, config: PEagleConfig, target: FrozenTarget, draft_vocab_size: int) -> PEagleArchitecture:
        base = Eagle3Architecture.resolve(config.input_block(), target, draft_vocab_size)
        return cls(base=base, depths=config.depths, train_embedding=config.train_embedding)


class PEagleHead(nn.Module):
    """An EAGLE-3 head of several layers, and what stands for the unknown."""

    def __init__(self, arch: PEagleArchitecture, vocab: DraftVocab) -> None:
        super().__init__()
        self.arch = arch
        self.base = Eagle3Head(arch.base, vocab)
        width = arch.base.hidden_size
        self.mask_hidden = nn.Parameter(torch.zeros(len(arch.base.taps) * width))
        self.mask_embedding = nn.Parameter(torch.zeros(width))
        self.table = nn.Parameter(torch.zeros(arch.base.vocab_size, width)) if arch.train_embedding else None

    @property
    def vocab(self) -> DraftVocab:
        return self.base.vocab

    @torch.no_grad()
    def initialise(self, target: FrozenTarget, config: PEagleConfig, generator: torch.Generator | None = None) -> None:
        """The EAGLE-3 head's values; mask vector normal(0, 1), mask embedding the mean row of the target's table."""
        self.base.initialise(target, config.input_block(), generator)
        self.mask_hidden.copy_(torch.randn(self.mask_hidden.shape, generator=generator))
        self.mask_embedding.copy_(target.embedding.float().mean(0))
        if self.table is not None:
            self.table.copy_(target.embedding.float())

    def embed(self, ids: torch.Tensor, target_embedding: torch.Tensor) -> torch.Tensor:
        """Token ids -> [..., H], by the head's own table where it has one."""
        table = target_embedding if self.table is None else self.table
        return F.embedding(ids, table).to(self.mask_embedding.dtype)

    def run(
        self,
        value: torch.Tensor,
        token: torch.Tensor,
        position: torch.Tensor,
        visible: torch.Tensor,
        cache: LineCache | None = None,
    ) -> torch.Tensor:
        """Slots through all layers.

        Args:
            value: [B, M, H] fused taps or fused mask vector.
            token: [B, M, H].
            position: [B, M].
            visible: [B, M, M], or [B, M, columns] where a cache is extended.

        Returns:
            [B, M, H] normed outputs.
        """
        base = self.base
        for index, layer in enumerate(base.layers):
            inputs, residual = layer.inputs(token, value)  # type: ignore[operator]
            seen: KeysValues = layer.attention.keys_values(inputs, position, base.rotary)  # type: ignore[union-attr,operator]
            if cache is not None:
                seen = KeysValues(*cache.layer(index).write(seen.keys, seen.values))
            attended = layer.attention(inputs, position, base.rotary, StepCache(seen), visible)  # type: ignore[operator]
            value = layer.finish(residual, attended)  # type: ignore[operator]
        if cache is not None:
            cache.advance(token.shape[1])
        return base.norm(value)

    def parallel(
        self,
        taps: torch.Tensor,
        tokens: torch.Tensor,
        position: torch.Tensor,
        anchor: torch.Tensor,
        depth: torch.Tensor,
        visible: torch.Tensor,
    ) -> torch.Tensor:
        """The training forward: any set of slots (a, j).

        Args:
            taps: [B, T, A*H].
            tokens: [B, T, H] embedded; slot t holds E(x_{t+1}).
            position: [B, T] of the depth-0 slots.
            anchor, depth: [B, M] int64.
            visible: [B, M, M] bool.

        Returns:
            [B, M, H] normed outputs.
        """
        line = torch.arange(len(anchor), device=anchor.device).unsqueeze(1)
        unknown = (depth > 0).unsqueeze(-1)
        value = torch.where(unknown, self.base.fuse(self.mask_hidden), self.base.fuse(taps)[line, anchor])
        token = torch.where(unknown, self.mask_embedding, tokens[line, anchor])
        return self.run(value, token, position[line, anchor] + depth, visible)

    def draft(self, taps: torch.Tensor, tokens: torch.Tensor, counts: Sequence[int], depth: int, cache: LineCache) -> torch.Tensor:
        """The incremental forward: newly verified slots and the mask slots behind the last of them, in one call.

        Args:
            taps: [B, n, A*H]; sequence b has counts[b] new slots, padding follows.
            tokens: [B, n, H] embedded.
            depth: K.
            cache: extended and not committed; the caller keeps the first counts[b] of each line.

        Returns:
            Draft logits [B, K, V_d].
        """
        assert depth <= self.arch.depths
        batch, width = taps.shape[:2]
        device, masks = taps.device, depth - 1
        new = torch.tensor(list(counts), device=device)
        lengths = torch.tensor(cache.lengths or [0] * batch, device=device)
        dtype: Any = self.mask_embedding.dtype
        unknown = self.base.fuse(self.mask_hidden).expand(batch, masks, -1)
        value = torch.cat((self.base.fuse(taps.to(dtype)), unknown), dim=1)
        token = torch.cat((tokens.to(dtype), self.mask_embedding.expand(batch, masks, -1)), dim=1)
        steps = torch.arange(masks, device=device)
        real = lengths.unsqueeze(1) + torch.arange(width, device=device)
        position = torch.cat((real, (lengths + new).unsqueeze(1) + steps), dim=1)
        own = causal(batch, width + masks, device).clone()
        own[:, width:, :width] = (torch.arange(width, device=device) < new.unsqueeze(1)).unsqueeze(1)
        output = self.run(value, token, position, visible_slots(lengths, own, cache.used + width + masks), cache)
        at = torch.cat(((new - 1).unsqueeze(1), (width + steps).expand(batch, -1)), dim=1)
        return self.base.logits(output[torch.arange(batch, device=device).unsqueeze(1), at])
