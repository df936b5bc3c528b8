"""Documents -> packed rows, in an order that is a function of seed and step alone (ALGORITHMS 12.3).

Rows are packed once and never change: an epoch only shuffles them. So a step's batch does not depend on how many processes share it or
on where a run was interrupted, and features captured for a row may be kept.

Shapes: B rows, T tokens a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from pydantic import Field

from data.corpus import Document
from heads.config import Config
from heads.errors import UserError


class PackingConfig(Config):
    """How documents are laid into rows."""

    max_length: int = Field(default=2048, ge=16)
    """Tokens of a row; longer documents are cut (and counted)."""
    pack: bool = True
    """Several documents a row, each attending to itself only. False: one document a row, right-padded."""


@dataclass(frozen=True)
class Batch:
    """Rows as tensors, all [B, T]."""

    ids: torch.Tensor
    """int64; 0 on padding."""
    mask: torch.Tensor
    """bool: the target wrote this token."""
    document: torch.Tensor
    """int64: which document of the batch, counted through all rows; padding has one of its own a row, never a masked one."""
    position: torch.Tensor
    """int64: restarts at 0 with each document (and with the padding)."""
    rows: tuple[int, ...]
    """Numbers of the rows in the packed set."""

    def to(self, device: torch.device) -> Batch:
        return Batch(self.ids.to(device), self.mask.to(device), self.document.to(device), self.position.to(device), self.rows)


def anchors(mask: torch.Tensor, document: torch.Tensor) -> torch.Tensor:
    """M of ALGORITHMS 9.3, [B, T] bool: slot t is an anchor where x_{t+1} and x_{t+2} were both written by the target, in t's document."""
    valid = torch.zeros_like(mask)
    same = (document[:, :-2] == document[:, 1:-1]) & (document[:, :-2] == document[:, 2:])
    valid[:, :-2] = mask[:, 1:-1] & mask[:, 2:] & same
    return valid


@dataclass(frozen=True)
class Normaliser:
    """Totals of a whole update, over all processes and accumulation steps."""

    documents: int
    """Documents that carry loss."""
    slots: int
    """Row slots, masked or not."""
    anchors: int
    """Slots that carry loss at step 0."""


class PackedRows:
    """A corpus laid into rows."""

    def __init__(self, documents: Sequence[Document], config: PackingConfig) -> None:
        """Raises UserError where no document carries loss."""
        self.length = config.max_length
        self.cut = sum(len(d.ids) > config.max_length for d in documents)
        self.documents = [d for d in documents if _anchor_count(d.mask[: config.max_length])]
        self._anchors = [_anchor_count(d.mask[: config.max_length]) for d in self.documents]
        self.without_loss = len(documents) - len(self.documents)
        if not self.documents:
            raise UserError(
                "no document of the corpus has two answer tokens in a row within packing.max_length, so there is nothing to train on; "
                "raise packing.max_length or prepare a corpus with answers"
            )
        sizes = [min(len(d.ids), self.length) for d in self.documents]
        self.rows = _first_fit_decreasing(sizes, self.length) if config.pack else [[i] for i in range(len(sizes))]

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def fill(self) -> float:
        """Share of the row slots that hold a token."""
        used = sum(min(len(d.ids), self.length) for d in self.documents)
        return used / (len(self.rows) * self.length)

    def totals(self, rows: Sequence[int]) -> Normaliser:
        """The divisors of an update made of these rows, known to every process without asking the others."""
        inside = [i for r in rows for i in self.rows[r]]
        return Normaliser(len(inside), len(rows) * self.length, sum(self._anchors[i] for i in inside))

    def batch(self, rows: Sequence[int]) -> Batch:
        """Rows as tensors. A batch of unpacked rows is only as wide as its longest."""
        width = max(sum(min(len(self.documents[i].ids), self.length) for i in self.rows[r]) for r in rows)
        shape = (len(rows), width)
        ids, mask = np.zeros(shape, np.int64), np.zeros(shape, bool)
        document, position = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        number = 0
        for line, row in enumerate(rows):
            start = 0
            for index in self.rows[row]:
                source = self.documents[index]
                size = min(len(source.ids), self.length)
                span = slice(start, start + size)
                ids[line, span], mask[line, span] = source.ids[:size], source.mask[:size] == 1
                document[line, span], position[line, span] = number, np.arange(size)
                number += 1
                start += size
            document[line, start:], position[line, start:] = number, np.arange(width - start)
            number += 1
        tensors = [torch.from_numpy(a) for a in (ids, mask, document, position)]
        return Batch(tensors[0], tensors[1], tensors[2], tensors[3], tuple(rows))


def _anchor_count(mask: np.ndarray) -> int:
    """How many slots of a document carry loss: ``anchors`` for a single document."""
    return int((mask[1:-1] & mask[2:]).sum()) if len(mask) > 2 else 0


def _first_fit_decreasing(sizes: Sequence[int], capacity: int) -> list[list[int]]:
    """Longest first, each into the fullest row that still has room: within a few percent of the fewest rows possible."""
    rows: list[list[int]] = []
    by_room: dict[int, list[int]] = {}
    for index in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        size = sizes[index]
        room = next((r for r in sorted(by_room) if r >= size and by_room[r]), None)
        if room is None:
            rows.append([index])
            number, left = len(rows) - 1, capacity - size
        else:
            number, left = by_room[room].pop(), room - size
            rows[number].append(index)
        by_room.setdefault(left, []).append(number)
    return rows


class RowOrder:
    """The endless sequence of row numbers: every epoch a new shuffle of all rows, from (seed, epoch) alone."""

    def __init__(self, rows: int, seed: int) -> None:
        self.rows, self.seed = rows, seed
        self._epoch: tuple[int, np.ndarray] | None = None

    def _permutation(self, epoch: int) -> np.ndarray:
        if self._epoch is None or self._epoch[0] != epoch:
            self._epoch = (epoch, np.random.default_rng((self.seed, epoch)).permutation(self.rows))
        return self._epoch[1]

    def update(self, step: int, size: int) -> list[int]:
        """Row numbers of update ``step`` (0-based) with ``size`` rows."""
        return [int(self._permutation(i // self.rows)[i % self.rows]) for i in range(step * size, (step + 1) * size)]
