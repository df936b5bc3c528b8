"""EAGLE-3 chain drafting (ALGORITHMS 9.7): extend by the verified slots, then K-1 recurrent steps."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from eval.acceptance import Draws
from eval.drafters.base import Proposal
from heads.eagle3 import Eagle3Head
from heads.layers import KeysValues
from heads.sampling import Sampling, probabilities
from heads.target import FrozenTarget, TargetOutput


class Eagle3Drafter:
    """Drafts with a trained head. Keys and values made from true taps are kept; those of draft slots are dropped after each cycle."""

    name = "eagle3"
    needs_taps = True

    def __init__(self, head: Eagle3Head, target: FrozenTarget, sampling: Sampling, sample_proposals: bool) -> None:
        """sample_proposals: draw drafts from the head at the target's sampling (rule 2.2) instead of taking its argmax (2.1, 2.3)."""
        self.head, self.target, self.sampling = head, target, sampling
        self.sample_proposals = sample_proposals and not sampling.greedy
        self.start()

    def start(self) -> None:
        self._caches: list[KeysValues] = []
        self._slots = 0
        self._waiting: list[tuple[torch.Tensor, list[int]]] = []

    def observe(self, output: TargetOutput, tokens: Sequence[int]) -> None:
        assert output.taps is not None and output.taps.shape[1] == len(tokens)
        self._waiting.append((output.taps, list(tokens)))

    @torch.no_grad()
    def propose(self, count: int, draws: Draws) -> Proposal:
        if count < 1:
            return Proposal(())
        weight = self.head.fc.weight
        taps = torch.cat([taps for taps, _ in self._waiting], dim=1).to(weight.dtype)
        followers = [token for _, tokens in self._waiting for token in tokens]
        self._waiting = []
        position = torch.arange(self._slots, self._slots + len(followers), device=weight.device).unsqueeze(0)
        logits, state, self._caches = self.head.extend(taps, None, self._embed(followers), position, self._caches)
        self._slots += len(followers)
        logits, state, caches = logits[:, -1], state[:, -1:], self._caches
        tokens: list[int] = []
        proposed_from: list[torch.Tensor] = []
        for step in range(count):
            token, q = self._choose(logits[0], draws)
            tokens.append(token)
            proposed_from += [] if q is None else [q]
            if step + 1 < count:
                position = torch.tensor([[self._slots + step]], device=weight.device)
                logits, state, caches = self.head.extend(None, state, self._embed([token]), position, caches)
                logits = logits[:, -1]
        return Proposal(tuple(tokens), torch.stack(proposed_from) if proposed_from else None)

    def _embed(self, tokens: Sequence[int]) -> torch.Tensor:
        ids = torch.tensor([list(tokens)], device=self.target.device)
        return self.target.embed(ids).to(self.head.fc.weight.dtype)

    def _choose(self, logits: torch.Tensor, draws: Draws) -> tuple[int, torch.Tensor | None]:
        """A token in target ids, and the q over the target's vocabulary it was drawn from (None: argmax)."""
        if not self.sample_proposals:
            return int(self.head.target_ids(logits.argmax(-1))), None
        q = probabilities(logits, self.sampling)
        full = q.new_zeros(self.head.arch.vocab_size)
        full[self.head.vocab.target_ids.to(q.device)] = q
        return draws.pick(full), full
