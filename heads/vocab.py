"""DraftVocab: which target tokens a draft head can say (ALGORITHMS 9.4).

``d2t`` holds offsets, ``target_id = draft_id + d2t[draft_id]``; ``t2d`` is a boolean over the target's vocabulary. Draft ids are the
chosen target ids in ascending order, so ``nonzero(t2d) == arange(V_d) + d2t``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from heads.errors import UserError


@dataclass(frozen=True)
class DraftVocab:
    """The map between draft ids [0, V_d) and target ids [0, V)."""

    target_ids: torch.Tensor
    """[V_d] int64, ascending: the target id of each draft id."""
    vocab_size: int
    """V."""

    def __post_init__(self) -> None:
        ids = self.target_ids
        if ids.ndim != 1 or ids.numel() == 0 or ids.dtype != torch.int64:
            raise UserError(f"a draft vocabulary is a non-empty list of whole numbers, got {ids.dtype} of shape {tuple(ids.shape)}")
        if bool((ids[1:] <= ids[:-1]).any()) or int(ids[0]) < 0 or int(ids[-1]) >= self.vocab_size:
            raise UserError(
                f"a draft vocabulary lists distinct target ids below {self.vocab_size} in ascending order; "
                f"these run from {int(ids[0])} to {int(ids[-1])} or are out of order"
            )

    @classmethod
    def full(cls, vocab_size: int) -> DraftVocab:
        """Every target token: V_d = V, the map is the identity."""
        return cls(torch.arange(vocab_size), vocab_size)

    @classmethod
    def from_counts(cls, counts: torch.Tensor, size: int, always: Iterable[int] = ()) -> DraftVocab:
        """The ``size`` most frequent tokens, ``always`` included, filled up with the lowest unused ids.

        Low ids of a BPE vocabulary are its frequent merges; without them a vocabulary made from a small corpus covers new text badly.

        Args:
            counts: [V] int64, how often the target wrote each token.
            size: V_d.
            always: ids that must be in, however rare: end of turn and the other specials that answers hold.
        """
        vocab_size = counts.numel()
        if size >= vocab_size:
            return cls.full(vocab_size)
        forced = sorted({i for i in always if 0 <= i < vocab_size})
        if len(forced) > size:
            raise UserError(
                f"a draft vocabulary of {size} tokens cannot hold the {len(forced)} that must be in it; raise head.draft_vocab_size"
            )
        rank = counts.clone().to(torch.int64)
        rank[forced] = torch.iinfo(torch.int64).max
        # A stable descending sort keeps equal counts (zeros above all) in ascending order of id: the filling-up with low ids.
        chosen = torch.sort(rank, descending=True, stable=True).indices[:size]
        return cls(chosen.sort().values, vocab_size)

    @property
    def size(self) -> int:
        """V_d."""
        return self.target_ids.numel()

    @property
    def is_full(self) -> bool:
        return self.size == self.vocab_size

    @property
    def d2t(self) -> torch.Tensor:
        """[V_d] int64 offsets."""
        return self.target_ids - torch.arange(self.size)

    @property
    def t2d(self) -> torch.Tensor:
        """[V] bool."""
        member = torch.zeros(self.vocab_size, dtype=torch.bool)
        member[self.target_ids] = True
        return member

    @property
    def fingerprint(self) -> str:
        """A hash that binds a head to its map."""
        digest = hashlib.sha256(self.target_ids.numpy().tobytes())
        digest.update(str(self.vocab_size).encode())
        return digest.hexdigest()[:16]

    def coverage(self, counts: torch.Tensor) -> float:
        """Share of the counted tokens ([V]) that the head can say; acceptance is bounded by it."""
        total = int(counts.sum())
        return float(counts[self.target_ids].sum()) / total if total else 0.0
