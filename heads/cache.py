"""The target's KV cache: write speculatively, keep the accepted rows.

The plan of the house puts this beside the decoder (eval/cache.py). It lies here because regeneration (data/) decodes with
the same cache, and data/ may not import from eval/.

Shapes: keys and values of one layer [B, n_kv, T, d].
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicLayer

GROWTH = 256  # tokens; a buffer grows by at least this much, so that decoding copies it rarely


class BufferedLayer(DynamicLayer):
    """One layer's keys and values in a buffer that is larger than what it holds.

    Unlike the library's dynamic layer it does not copy the whole cache for every token, and unlike its sliding-window layer it
    forgets nothing, so that rejected tokens can be cropped away at any length. (The window of a sliding layer is kept by the mask.)
    """

    def __init__(self) -> None:
        super().__init__()
        self._buffers: tuple[torch.Tensor, torch.Tensor] | None = None

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        start = self.get_seq_length()
        end = start + key_states.shape[2]
        if self._buffers is None or end > self._buffers[0].shape[2]:
            self._grow(key_states, value_states, start, end)
        assert self._buffers is not None
        for buffer, new in zip(self._buffers, (key_states, value_states), strict=True):
            buffer[:, :, start:end] = new
        return self._show(end)

    def _grow(self, key_states: torch.Tensor, value_states: torch.Tensor, held: int, needed: int) -> None:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        capacity = needed + max(GROWTH, needed // 4)
        grown = []
        for old, new in ((self.keys, key_states), (self.values, value_states)):
            buffer = new.new_zeros(*new.shape[:2], capacity, new.shape[3])
            if held and old is not None:
                buffer[:, :, :held] = old
            grown.append(buffer)
        self._buffers = (grown[0], grown[1])

    def _show(self, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        assert self._buffers is not None
        keys, values = self._buffers[0][:, :, :length], self._buffers[1][:, :, :length]
        self.keys, self.values = keys, values
        return keys, values

    def crop(self, tokens_to_remove: int) -> None:
        assert tokens_to_remove <= 0, "the number of tokens to remove is given as a negative number"
        if self._buffers is not None:
            self._show(self.get_seq_length() + tokens_to_remove)

    def select(self, rows: torch.Tensor) -> None:
        """Keep these rows of the batch, in this order. rows: [B'] int64."""
        if self._buffers is not None:
            length = self.get_seq_length()
            self._buffers = (self._buffers[0][rows], self._buffers[1][rows])
            self._show(length)

    def reset(self) -> None:
        self._buffers = None
        super().reset()


class TargetCache(Cache):
    """Keys and values of every decoder layer of the target, for B sequences of equal (padded) length."""

    def __init__(self) -> None:
        super().__init__(layer_class_to_replicate=BufferedLayer)

    @property
    def _buffered(self) -> list[BufferedLayer]:
        return [layer for layer in self.layers if isinstance(layer, BufferedLayer)]

    @property
    def length(self) -> int:
        """Tokens held."""
        return int(self.get_seq_length())

    def keep(self, length: int) -> None:
        """Forget everything after the first ``length`` tokens."""
        surplus = self.length - length
        assert surplus >= 0, f"the cache holds {self.length} tokens and cannot keep {length}"
        for layer in self._buffered:
            layer.crop(-surplus)

    def select(self, rows: torch.Tensor) -> None:
        """Keep these rows of the batch, in this order. rows: [B'] int64."""
        for layer in self._buffered:
            layer.select(rows)
