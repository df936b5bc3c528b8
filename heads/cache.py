"""Keys and values of B sequences of unequal length, for the target and for draft heads: write speculatively, keep the accepted rows.

Every sequence starts at column 0 of its own line, so nothing is padded on the left: a line holds ``lengths[b]`` kept slots, then ``extra``
slots that were written and not committed yet (drafts), then rubbish. What a query may see is said by a mask (``visible_slots``).

The plan of the house puts this beside the decoder (eval/cache.py). It lies here because regeneration (data/) decodes with the same cache,
and data/ may not import from eval/.

Shapes: B sequences, N new slots, M own slots (written, not committed), T columns in all, n_kv key-value heads, d head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from transformers.cache_utils import Cache, DynamicLayer

GROWTH = 256  # slots; a buffer grows by at least this much, so that decoding copies it rarely


def visible_slots(lengths: torch.Tensor, own: torch.Tensor, total: int) -> torch.Tensor:
    """Which columns each new slot sees: all kept ones, and of the own ones those that ``own`` says.

    Args:
        lengths: [B] int64, kept slots.
        own: [B, N, M] bool; column lengths[b] + j is seen by query i iff own[b, i, j].
        total: T.

    Returns:
        [B, N, T] bool.
    """
    relative = torch.arange(total, device=own.device) - lengths.unsqueeze(1)
    inside = (relative >= 0) & (relative < own.shape[2])
    index = relative.clamp(0, own.shape[2] - 1).unsqueeze(1).expand(-1, own.shape[1], -1)
    return (relative < 0).unsqueeze(1) | (inside.unsqueeze(1) & own.gather(2, index))


def causal(batch: int, count: int, device: torch.device, before: int = 0) -> torch.Tensor:
    """[B, count, before + count] bool: every own slot sees the ``before`` ones and those up to itself."""
    return torch.ones(count, before + count, dtype=torch.bool, device=device).tril(before).expand(batch, -1, -1)


class Lines:
    """How much each sequence's line holds; shared by all layers of a cache."""

    def __init__(self) -> None:
        self.lengths: list[int] = []
        self.extra = 0

    @property
    def used(self) -> int:
        """Columns in use: the longest line with its uncommitted slots."""
        return max(self.lengths, default=0) + self.extra

    @property
    def even(self) -> bool:
        return len(self.lengths) < 2 or min(self.lengths) == max(self.lengths)


class LineBuffer:
    """One layer's keys and values, [B, n_kv, capacity, d] each."""

    def __init__(self, lines: Lines) -> None:
        self.lines = lines
        self.tensors: tuple[torch.Tensor, torch.Tensor] | None = None

    def write(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Put new slots [B, n_kv, N, d] behind each line; returns all columns in use, [B, n_kv, T, d]. The lines are not advanced."""
        lines, count = self.lines, keys.shape[2]
        if not lines.lengths:
            lines.lengths = [0] * keys.shape[0]
        end = lines.used + count
        if self.tensors is None or end > self.tensors[0].shape[2]:
            self._grow(keys, values, end)
        assert self.tensors is not None
        if lines.even:
            for buffer, new in zip(self.tensors, (keys, values), strict=True):
                buffer[:, :, end - count : end] = new
        else:
            at = torch.tensor(lines.lengths, device=keys.device).unsqueeze(1) + lines.extra + torch.arange(count, device=keys.device)
            line = torch.arange(keys.shape[0], device=keys.device).unsqueeze(1)
            for buffer, new in zip(self.tensors, (keys, values), strict=True):
                buffer[line, :, at] = new.transpose(1, 2)
        return self.tensors[0][:, :, :end], self.tensors[1][:, :, :end]

    def _grow(self, keys: torch.Tensor, values: torch.Tensor, needed: int) -> None:
        capacity = needed + max(GROWTH, needed // 4)
        grown = []
        for index, new in enumerate((keys, values)):
            buffer = new.new_zeros(*new.shape[:2], capacity, new.shape[3])
            if self.tensors is not None:
                old = self.tensors[index]
                buffer[:, :, : old.shape[2]] = old
            grown.append(buffer)
        self.tensors = (grown[0], grown[1])

    def move(self, source: torch.Tensor, line: torch.Tensor, to: torch.Tensor) -> None:
        """Copy columns source -> to of the given lines, all [n] int64. Sources are read before anything is written."""
        assert self.tensors is not None
        for buffer in self.tensors:
            buffer[line, :, to] = buffer[line, :, source]

    def adopt(self, lines: list[int], other: LineBuffer, source: list[int]) -> None:
        """Overwrite lines with lines of another buffer."""
        assert other.tensors is not None
        width = other.lines.used
        if self.tensors is None or width > self.tensors[0].shape[2]:
            assert self.tensors is not None
            self._grow(self.tensors[0], self.tensors[1], width)
        for mine, theirs in zip(self.tensors, other.tensors, strict=True):
            mine[lines, :, :width] = theirs[source, :, :width]

    def append(self, other: LineBuffer, source: list[int]) -> None:
        """Add lines of another buffer."""
        assert other.tensors is not None
        if self.tensors is None:
            self.tensors = (other.tensors[0][source], other.tensors[1][source])
            return
        joined = []
        for mine, theirs in zip(self.tensors, other.tensors, strict=True):
            capacity = max(mine.shape[2], theirs.shape[2])
            wide = [F.pad(t, (0, 0, 0, capacity - t.shape[2])) for t in (mine, theirs[source])]
            joined.append(torch.cat(wide))
        self.tensors = (joined[0], joined[1])

    def select(self, rows: torch.Tensor) -> None:
        if self.tensors is not None:
            self.tensors = (self.tensors[0][rows], self.tensors[1][rows])


class LineCache:
    """The buffers of all layers and the one account of what they hold. A model writes N slots in every layer, then ``advance(N)``."""

    def __init__(self) -> None:
        self.lines = Lines()
        self.buffers: list[LineBuffer] = []

    def layer(self, index: int) -> LineBuffer:
        """The buffer of a layer, made when first asked for."""
        while len(self.buffers) <= index:
            self.buffers.append(LineBuffer(self.lines))
        return self.buffers[index]

    @property
    def lengths(self) -> list[int]:
        """Kept slots of each line."""
        return self.lines.lengths

    @property
    def used(self) -> int:
        """Columns in use."""
        return self.lines.used

    def advance(self, count: int) -> None:
        """Account for ``count`` slots that every layer has written behind each line."""
        self.lines.extra += count

    def commit(self, paths: Sequence[Sequence[int]]) -> None:
        """Of the uncommitted slots keep these, in this order, and forget the rest.

        Args:
            paths: one a line; strictly ascending indices into its uncommitted slots.
        """
        lines = self.lines
        assert len(paths) == len(lines.lengths) and all(not p or p[-1] < lines.extra for p in paths)
        moves = [(b, lines.lengths[b] + s, lines.lengths[b] + i) for b, path in enumerate(paths) for i, s in enumerate(path) if s != i]
        if moves:
            device = self.buffers[0].tensors[0].device if self.buffers and self.buffers[0].tensors else None
            line, source, to = (torch.tensor(column, device=device) for column in zip(*moves, strict=True))
            for buffer in self.buffers:
                buffer.move(source, line, to)
        lines.lengths = [length + len(path) for length, path in zip(lines.lengths, paths, strict=True)]
        lines.extra = 0

    def drop(self) -> None:
        """Forget the uncommitted slots."""
        self.lines.extra = 0

    def keep(self, lengths: Sequence[int]) -> None:
        """Forget everything after the first ``lengths[b]`` slots of each line."""
        held = [length + self.lines.extra for length in self.lines.lengths]
        assert len(lengths) == len(held) and all(0 <= n <= h for n, h in zip(lengths, held)), f"{held} slots held, {list(lengths)} to keep"
        self.lines.lengths, self.lines.extra = list(lengths), 0

    def adopt(self, lines: Sequence[int], other: LineCache, source: Sequence[int]) -> None:
        """Overwrite ``lines`` with the committed lines ``source`` of another cache."""
        assert self.lines.extra == other.lines.extra == 0
        for mine, theirs in zip(self.buffers, other.buffers, strict=True):
            mine.adopt(list(lines), theirs, list(source))
        for line, index in zip(lines, source, strict=True):
            self.lines.lengths[line] = other.lengths[index]

    def append(self, other: LineCache, source: Sequence[int]) -> None:
        """Add the committed lines ``source`` of another cache."""
        assert self.lines.extra == other.lines.extra == 0
        for index, theirs in enumerate(other.buffers):
            self.layer(index).append(theirs, list(source))
        self.lines.lengths = [*self.lines.lengths, *(other.lengths[i] for i in source)]

    def select(self, rows: Sequence[int]) -> None:
        """Keep these sequences, in this order."""
        self.lines.lengths = [self.lines.lengths[r] for r in rows] if self.lines.lengths else []
        for buffer in self.buffers:
            if buffer.tensors is not None:
                buffer.select(torch.tensor(list(rows), dtype=torch.int64, device=buffer.tensors[0].device))


class _LibraryLayer(DynamicLayer):
    """What the library's attention layers see of a LineBuffer.

    Unlike the library's dynamic layer it does not copy the whole cache for every token, and unlike its sliding-window layer it
    forgets nothing, so that rejected tokens can be dropped at any length. (The window of a sliding layer is kept by the mask.)
    """

    def __init__(self, buffer: LineBuffer) -> None:
        super().__init__()
        self._buffer = buffer

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        return self._buffer.write(key_states, value_states)

    def get_seq_length(self) -> int:
        return self._buffer.lines.used


class TargetCache(LineCache):
    """The target's keys and values; ``library`` is the face that its layers write through."""

    def __init__(self) -> None:
        super().__init__()
        self.library = _LibraryCache(self)


class _LibraryCache(Cache):
    def __init__(self, cache: LineCache) -> None:
        super().__init__(layer_class_to_replicate=lambda: _LibraryLayer(cache.layer(len(self.layers))))  # type: ignore[arg-type]
        self._lines = cache.lines

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._lines.used
