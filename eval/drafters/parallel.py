"""Drafting with heads that give all depths at once, Medusa and P-EAGLE: chain, static tree, dynamic tree (ALGORITHMS 7.3, 10.3).

The depths are independent given the context, so a node's confidence is the product of its depths' marginals.

Shapes: B sequences, K depths, V_d draft vocabulary, R ranks, H hidden width.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import torch

from eval.acceptance import Draws
from eval.drafters.base import Committed, Drafter, keep_rows, merge
from eval.drafters.recurrent import DEFAULT_ACCURACIES
from eval.drafters.shape import ShapeConfig
from eval.tree import DraftTree, parents_of, static_tree, tree_of_marginals
from heads.cache import LineCache
from heads.medusa import MedusaHead
from heads.peagle import PEagleHead
from heads.sampling import Sampling, probabilities
from heads.target import FrozenTarget
from heads.vocab import DraftVocab


class MarginalDrafter(Drafter):
    """What the two share: from marginals to trees."""

    def __init__(
        self,
        name: str,
        vocab: DraftVocab,
        target: FrozenTarget,
        sampling: Sampling | None,
        sample_proposals: bool,
        shape: ShapeConfig | None,
        accuracies: Sequence[Sequence[float]] | None,
    ) -> None:
        super().__init__()
        self.name, self.target = name, target
        self.sampling = sampling or Sampling()
        self.shape = shape or ShapeConfig()
        self.sample_proposals = sample_proposals and not self.sampling.greedy and self.shape.kind == "chain"
        self._accuracies = accuracies or DEFAULT_ACCURACIES
        self._vocab = vocab
        self._target_ids = vocab.target_ids.to(target.device)

    @abstractmethod
    def marginals(self, depth: int) -> torch.Tensor:
        """Draft logits [B, depth, V_d] after each sequence's pending token."""

    @torch.no_grad()
    def propose(self, counts: Sequence[int], draws: Sequence[Draws]) -> list[DraftTree]:
        depth = max(counts)
        if depth < 1:
            return [DraftTree() for _ in counts]
        logits = self.marginals(depth)
        if self.shape.kind == "chain":
            trees = self._chains(logits, draws)
        elif self.shape.kind == "dynamic":
            log_q, choice = torch.log_softmax(logits.float(), -1).topk(min(self.shape.beam, logits.shape[-1]))
            log_q, ids = log_q.cpu(), self._target_ids[choice].cpu()
            trees = [tree_of_marginals(log_q[b], ids[b], self.shape.nodes) for b in range(len(logits))]
        else:
            trees = self._static(logits)
        return [tree.cut(count) for tree, count in zip(trees, counts, strict=True)]

    def _chains(self, logits: torch.Tensor, draws: Sequence[Draws]) -> list[DraftTree]:
        if not self.sample_proposals:
            return [DraftTree.chain(tokens) for tokens in self._target_ids[logits.argmax(-1)].tolist()]
        q = probabilities(logits, self.sampling)
        full = q.new_zeros(*q.shape[:-1], self._vocab.vocab_size)
        full[..., self._target_ids] = q
        full = full.cpu()
        return [DraftTree.chain([d.pick(row) for row in rows], list(rows)) for d, rows in zip(draws, full, strict=True)]

    def _static(self, logits: torch.Tensor) -> list[DraftTree]:
        paths = static_tree(self._accuracies[: logits.shape[1]], self.shape.nodes + 1, min(self.shape.beam, logits.shape[-1]))
        parents = parents_of(paths)
        most = max(path[-1] for path in paths) + 1
        ranked = self._target_ids[logits.topk(most).indices].tolist()
        return [DraftTree(tuple(ranks[len(path) - 1][path[-1]] for path in paths), parents) for ranks in ranked]


class MedusaDrafter(MarginalDrafter):
    """Medusa: the heads read the last hidden state that verification left behind; there is no draft pass."""

    def __init__(
        self,
        head: MedusaHead,
        target: FrozenTarget,
        sampling: Sampling | None = None,
        *,
        sample_proposals: bool = False,
        shape: ShapeConfig | None = None,
        accuracies: Sequence[Sequence[float]] | None = None,
    ) -> None:
        super().__init__("medusa", head.vocab, target, sampling, sample_proposals, shape, accuracies)
        self.head = head
        self.start([])

    def start(self, prompts: Sequence[Sequence[int]]) -> None:
        self._last = torch.empty(0)

    def select(self, rows: Sequence[int]) -> None:
        self._last = self._last[torch.tensor(list(rows), dtype=torch.int64, device=self._last.device)]

    def observe(self, committed: Committed) -> None:
        last = torch.tensor([len(t) - 1 for t in committed.tokens], device=committed.hidden.device)
        self._last = committed.hidden[torch.arange(len(last), device=last.device), last]

    def marginals(self, depth: int) -> torch.Tensor:
        with self.forwarding():
            return self.head.draft(self._last, depth, self.target.lm_head)


class PEagleDrafter(MarginalDrafter):
    """P-EAGLE: one forward over the newly verified slots and K - 1 mask slots."""

    needs_taps = True

    def __init__(
        self,
        head: PEagleHead,
        target: FrozenTarget,
        sampling: Sampling | None = None,
        *,
        sample_proposals: bool = False,
        shape: ShapeConfig | None = None,
        accuracies: Sequence[Sequence[float]] | None = None,
    ) -> None:
        super().__init__("peagle", head.vocab, target, sampling, sample_proposals, shape, accuracies)
        self.head = head
        self.start([])

    def start(self, prompts: Sequence[Sequence[int]]) -> None:
        self._cache = LineCache()
        self._waiting: list[Committed] = []

    def select(self, rows: Sequence[int]) -> None:
        self._cache.select(rows)
        self._waiting = keep_rows(self._waiting, rows)

    def observe(self, committed: Committed) -> None:
        self._waiting.append(committed)

    def marginals(self, depth: int) -> torch.Tensor:
        taps, followers = merge(self._waiting, "taps")
        self._waiting = []
        counts = [len(f) for f in followers]
        ids = torch.tensor([f + [0] * (taps.shape[1] - len(f)) for f in followers], device=taps.device)
        with self.forwarding():
            logits = self.head.draft(taps, self.head.embed(ids, self.target.embedding), counts, depth, self._cache)
        self._cache.commit([range(n) for n in counts])
        return logits
