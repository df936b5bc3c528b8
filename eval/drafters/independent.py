"""A smaller model of the same vocabulary as drafter: two-model speculative sampling (Leviathan et al. 2023; ALGORITHMS 4).

Shapes: B sequences, V_c the vocabulary both models share (ids below the smaller embedding table).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from eval.acceptance import Draws
from eval.drafters.base import Committed, Drafter
from eval.tree import DraftTree
from heads.cache import TargetCache, causal, visible_slots
from heads.errors import UserError
from heads.sampling import Sampling, probabilities
from heads.target import FrozenTarget

Schedule = Literal["constant", "additive", "confidence"]


@dataclass
class _Sequence:
    tokens: list[int]
    """All committed tokens."""
    length: float = 5.0
    """additive: draft length of the next cycle."""
    proposed: int = 0


class IndependentDrafter(Drafter):
    """Drafts token by token with a model of its own, which keeps its own KV cache."""

    def __init__(
        self,
        model: FrozenTarget,
        target: FrozenTarget,
        sampling: Sampling | None = None,
        *,
        sample_proposals: bool = False,
        schedule: Schedule = "constant",
        threshold: float = 0.4,
        name: str = "independent",
    ) -> None:
        """
        Args:
            model: the draft model; ids mean the same as the target's (check_vocabularies).
            sample_proposals: draw drafts at the target's sampling (rule 2.2) instead of taking the argmax (2.1, 2.3).
            schedule: constant: as many drafts as may be. additive: starts at 5, 2 more after a cycle that was accepted whole, 1 less
                otherwise. confidence: stops after a draft of probability below ``threshold``.
        """
        super().__init__()
        self.name, self.model, self.target = name, model, target
        self.sampling = sampling or Sampling()
        self.sample_proposals = sample_proposals and not self.sampling.greedy
        self._schedule, self._threshold = schedule, threshold
        self._shared = min(model.vocab_size, target.vocab_size)
        self._rows: list[_Sequence] = []

    def start(self, prompts: Sequence[Sequence[int]]) -> None:
        self._cache = TargetCache()
        self._rows = [_Sequence(list(p)) for p in prompts]
        self._fresh = True

    def select(self, rows: Sequence[int]) -> None:
        self._cache.select(rows)
        self._rows = [self._rows[r] for r in rows]

    def observe(self, committed: Committed) -> None:
        kept = []
        for row, new in zip(self._rows, committed.tokens, strict=True):
            if self._fresh:
                row.tokens.append(new[-1])
                continue
            accepted = len(new) - 1
            row.tokens += new
            if row.proposed:
                row.length = max(1.0, row.length + (2 if accepted == row.proposed else -1))
            # What was fed for accepted drafts stands; the last draft was never fed.
            kept.append(range(min(accepted, self._cache.lines.extra)))
        if not self._fresh and self._cache.lengths:
            self._cache.commit(kept)
        self._fresh = False

    @torch.no_grad()
    def propose(self, counts: Sequence[int], draws: Sequence[Draws]) -> list[DraftTree]:
        counts = [self._count(row, count) for row, count in zip(self._rows, counts, strict=True)]
        tokens: list[list[int]] = [[] for _ in counts]
        drawn_from: list[list[torch.Tensor]] = [[] for _ in counts]
        going = [count > 0 for count in counts]
        if any(going):
            logits = self._feed([row.tokens for row in self._rows])
        while any(going):
            picked = self._choose(logits, draws, tokens, drawn_from, going)
            going = [
                g and len(t) < count and not (self._schedule == "confidence" and sure < self._threshold)
                for g, t, count, sure in zip(going, tokens, counts, picked, strict=True)
            ]
            if any(going):
                logits = self._step([t[-1] if t else 0 for t in tokens])
        for row, drafted in zip(self._rows, tokens, strict=True):
            row.proposed = len(drafted)
        return [DraftTree.chain(t, q if self.sample_proposals else None) for t, q in zip(tokens, drawn_from, strict=True)]

    def _count(self, row: _Sequence, count: int) -> int:
        room = self.model.max_length - len(row.tokens)
        wanted = int(row.length) if self._schedule == "additive" else count
        return max(0, min(count, wanted, room))

    def _choose(
        self,
        logits: torch.Tensor,
        draws: Sequence[Draws],
        tokens: list[list[int]],
        drawn_from: list[list[torch.Tensor]],
        going: list[bool],
    ) -> list[float]:
        """Add one draft to each sequence that goes on; returns how sure the model was of it. logits [B, V_c]."""
        sure = [1.0] * len(going)
        if not self.sample_proposals:
            best = logits.argmax(-1)
            if self._schedule == "confidence":
                sure = torch.softmax(logits.float(), -1).gather(1, best.unsqueeze(1)).squeeze(1).tolist()
            for row, token, goes in zip(tokens, best.tolist(), going, strict=True):
                row += [token] if goes else []
            return sure
        q = probabilities(logits, self.sampling).cpu()
        full = torch.nn.functional.pad(q, (0, self.target.vocab_size - q.shape[-1]))
        for b, goes in enumerate(going):
            if goes:
                tokens[b].append(draws[b].pick(full[b]))
                drawn_from[b].append(full[b])
                sure[b] = float(full[b, tokens[b][-1]])
        return sure

    def _feed(self, sequences: Sequence[Sequence[int]]) -> torch.Tensor:
        """Read what each sequence's cache lacks; logits [B, V_c] after its last token."""
        held = self._cache.lengths or [0] * len(sequences)
        # A sequence that has outgrown the draft model's context is fed one token and asked for nothing.
        new = [list(s[n:]) if len(s) <= self.model.max_length else [s[-1]] for s, n in zip(sequences, held, strict=True)]
        width = max(map(len, new))
        device = self.model.device
        ids = torch.tensor([[min(t, self.model.vocab_size - 1) for t in n] + [0] * (width - len(n)) for n in new], device=device)
        lengths = torch.tensor(held, device=device)
        position = lengths.unsqueeze(1) + torch.arange(width, device=device)
        visible = None
        if not self._cache.lines.even or min(map(len, new)) < width:
            visible = visible_slots(lengths, causal(len(new), width, device), max(held) + width)
        with self.forwarding():
            output = self.model.forward(ids, cache=self._cache, position=position, visible=visible, taps=False)
            last = torch.tensor([len(n) - 1 for n in new], device=device)
            logits = self.model.logits(output.hidden[torch.arange(len(new), device=device), last])
        overgrown = [len(s) > self.model.max_length for s in sequences]
        self._cache.commit([[] if over else range(len(n)) for n, over in zip(new, overgrown, strict=True)])
        return logits[:, : self._shared]

    def _step(self, tokens: Sequence[int]) -> torch.Tensor:
        """Read one draft a sequence, without keeping it for good; logits [B, V_c]."""
        device, cache = self.model.device, self._cache
        ids = torch.tensor(tokens, device=device).unsqueeze(1)
        lengths = torch.tensor(cache.lengths, device=device)
        position = (lengths + cache.lines.extra).unsqueeze(1)
        visible = None
        if not cache.lines.even:
            own = torch.ones(len(tokens), 1, cache.lines.extra + 1, dtype=torch.bool, device=device)
            visible = visible_slots(lengths, own, cache.used + 1)
        with self.forwarding():
            output = self.model.forward(ids, cache=cache, position=position, visible=visible, taps=False)
            return self.model.logits(output.hidden[:, -1])[:, : self._shared]


def check_vocabularies(target: dict[str, int], draft: dict[str, int], name: str) -> None:
    """Raises UserError unless the two tokenizers (token -> id) are the same."""
    if target != draft:
        shared = sum(target.get(token) == index for token, index in draft.items())
        raise UserError(
            f"the draft model {name} has another vocabulary than the target ({len(draft):,} tokens against {len(target):,}, "
            f"{shared:,} with the same id); give it as evaluate.drafter.kind=cross instead of independent"
        )
