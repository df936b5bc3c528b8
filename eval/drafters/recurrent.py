"""Drafting with heads that feed on themselves, EAGLE-1/2 and EAGLE-3: chain, static tree, dynamic tree (ALGORITHMS 3.4, 8.3, 9.7).

The head is extended by the slots that the target has verified, and keeps their keys and values; those of draft slots are dropped after
each proposal.

Shapes: B sequences, W nodes run at once, V_d draft vocabulary, H hidden width.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from eval.acceptance import Draws
from eval.drafters.base import Committed, Drafter, keep_rows, merge
from eval.drafters.shape import ShapeConfig
from eval.tree import DraftTree, Ranks, best_first, parents_of, static_tree
from heads.cache import LineCache, causal, visible_slots
from heads.recurrent import RecurrentHead
from heads.sampling import Sampling, probabilities
from heads.target import FrozenTarget

MISSING = -1
DEFAULT_ACCURACIES = [[0.6 * 0.35**rank * 0.93**depth for rank in range(10)] for depth in range(16)]
"""Of a head that brings no measured ones: about what EAGLE heads reach, falling with rank and depth."""


class RecurrentDrafter(Drafter):
    """Drafts with a head that predicts one token at a time from its own last output."""

    def __init__(
        self,
        name: str,
        head: RecurrentHead,
        target: FrozenTarget,
        sampling: Sampling | None = None,
        *,
        features: str = "taps",
        sample_proposals: bool = False,
        shape: ShapeConfig | None = None,
        accuracies: Sequence[Sequence[float]] | None = None,
    ) -> None:
        """
        Args:
            features: what complete slots feed on: taps (EAGLE-3) or hidden (EAGLE-1).
            sample_proposals: draw drafts from the head at the target's sampling (rules 2.2, 2.5) instead of its most likely tokens
                (2.1, 2.3, 2.4). Chains and static trees only: a dynamic tree's candidates are chosen, never drawn.
            accuracies: [depths][ranks], for static trees.
        """
        super().__init__()
        self.name, self.head, self.target = name, head, target
        self.needs_taps = features == "taps"
        self.sampling = sampling or Sampling()
        self.shape = shape or ShapeConfig()
        self.sample_proposals = sample_proposals and not self.sampling.greedy and self.shape.kind != "dynamic"
        self._accuracies = accuracies or DEFAULT_ACCURACIES
        self._dtype = next(head.parameters()).dtype
        self._target_ids = head.vocab.target_ids.to(target.device)
        self.start([])

    def start(self, prompts: Sequence[Sequence[int]]) -> None:
        self._cache = LineCache()
        self._waiting: list[Committed] = []

    def select(self, rows: Sequence[int]) -> None:
        self._cache.select(rows)
        self._waiting = keep_rows(self._waiting, rows)

    def observe(self, committed: Committed) -> None:
        self._waiting.append(committed)

    @torch.no_grad()
    def propose(self, counts: Sequence[int], draws: Sequence[Draws]) -> list[DraftTree]:
        depth = max(counts)
        if depth < 1:
            return [DraftTree() for _ in counts]
        logits, state = self._extend()
        if self.shape.kind == "dynamic":
            trees = self._dynamic(logits, state, depth)
        elif self.shape.kind == "static":
            trees = self._static(logits, state, depth, draws)
        else:
            trees = self._chain(logits, state, depth, draws)
        self._cache.drop()
        return [tree.cut(count) for tree, count in zip(trees, counts, strict=True)]

    def _extend(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Feed the verified slots. Returns logits [B, V_d] and state [B, H] of each sequence's last one."""
        device = self.target.device
        features, followers = merge(self._waiting, "taps" if self.needs_taps else "hidden")
        self._waiting = []
        width = features.shape[1]
        new = [len(f) for f in followers]
        lengths = torch.tensor(self._cache.lengths or [0] * len(new), device=device)
        ids = torch.tensor([f + [0] * (width - len(f)) for f in followers], device=device)
        position = lengths.unsqueeze(1) + torch.arange(width, device=device)
        visible = visible_slots(lengths, causal(len(new), width, device), self._cache.used + width)
        with self.forwarding():
            output, state = self.head.extend(features.to(self._dtype), None, self._embed(ids), position, self._cache, visible)
            line, last = torch.arange(len(new), device=device), torch.tensor(new, device=device) - 1
            logits = self.head.draft_logits(output[line, last], self.target)
        self._cache.commit([range(n) for n in new])
        return logits, state[line, last]

    def _embed(self, ids: torch.Tensor) -> torch.Tensor:
        return self.target.embed(ids).to(self._dtype)

    def _step(self, state: torch.Tensor, tokens: torch.Tensor, own: torch.Tensor, depth: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Run draft nodes of one depth (1 = the first drafted token).

        Args:
            state: [B, W, H] of their parents.
            tokens: [B, W] target ids.
            own: [B, W, M] bool, which draft slots each sees, its own (among the last W) included.

        Returns:
            logits [B, W, V_d], state [B, W, H].
        """
        lengths = torch.tensor(self._cache.lengths, device=tokens.device)
        position = (lengths - 1 + depth).unsqueeze(1).expand(-1, tokens.shape[1])
        visible = visible_slots(lengths, own, self._cache.used + tokens.shape[1])
        with self.forwarding():
            output, state = self.head.extend(None, state, self._embed(tokens), position, self._cache, visible)
            return self.head.draft_logits(output, self.target), state

    def _chain(self, logits: torch.Tensor, state: torch.Tensor, depth: int, draws: Sequence[Draws]) -> list[DraftTree]:
        tokens: list[list[int]] = []
        drawn_from: list[list[torch.Tensor]] = []
        state = state.unsqueeze(1)
        for step in range(1, depth + 1):
            if self.sample_proposals:
                q = self._over_target(probabilities(logits, self.sampling))
                drawn_from.append(list(q))
                tokens.append([d.pick(row) for d, row in zip(draws, q, strict=True)])
            else:
                tokens.append(self._target_ids[logits.argmax(-1)].tolist())
            if step < depth:
                ids = torch.tensor(tokens[-1], device=state.device).unsqueeze(1)
                own = torch.ones(len(ids), 1, step, dtype=torch.bool, device=state.device)
                logits, state = self._step(state, ids, own, step)
                logits = logits[:, 0]
        chains = zip(*tokens, strict=True)
        if not self.sample_proposals:
            return [DraftTree.chain(chain) for chain in chains]
        return [DraftTree.chain(chain, q) for chain, q in zip(chains, zip(*drawn_from, strict=True), strict=True)]

    def _over_target(self, q: torch.Tensor) -> torch.Tensor:
        """Draft probabilities [..., V_d] as probabilities over the target's vocabulary [..., V], on the CPU."""
        full = q.new_zeros(*q.shape[:-1], self.head.vocab.vocab_size)
        full[..., self._target_ids] = q
        return full.cpu()

    def _dynamic(self, logits: torch.Tensor, state: torch.Tensor, depth: int) -> list[DraftTree]:
        batch, beam = logits.shape[0], min(self.shape.beam, logits.shape[-1])
        device = logits.device
        line = torch.arange(batch, device=device).unsqueeze(1)
        score, choice = torch.log_softmax(logits.float(), -1).topk(beam)
        tokens = self._target_ids[choice]
        all_tokens, all_scores = [tokens], [score]
        all_parents = [torch.zeros_like(tokens)]
        number = torch.arange(1, beam + 1, device=device).expand(batch, -1)  # node numbers of the beam
        parent_state = state.unsqueeze(1).expand(-1, beam, -1)
        own = torch.eye(beam, dtype=torch.bool, device=device).expand(batch, -1, -1)
        made = beam
        for level in range(1, depth):
            logits, states = self._step(parent_state, tokens, own, level)
            child_score, choice = torch.log_softmax(logits.float(), -1).topk(beam)
            child_score = (child_score + score.unsqueeze(2)).flatten(1)
            child_tokens = self._target_ids[choice].flatten(1)
            all_tokens.append(child_tokens)
            all_scores.append(child_score)
            all_parents.append(number.repeat_interleave(beam, dim=1))
            # Stable, so that ties go to the smaller number.
            chosen = child_score.sort(dim=1, descending=True, stable=True).indices[:, :beam]
            number, score, tokens = made + 1 + chosen, child_score[line, chosen], child_tokens[line, chosen]
            made += beam * beam
            parent = chosen // beam
            parent_state = states[line, parent]
            seen = own[line, parent]
            own = torch.cat((seen, torch.eye(beam, dtype=torch.bool, device=device).expand(batch, -1, -1)), dim=2)
        columns = [torch.cat(c, dim=1).tolist() for c in (all_tokens, all_parents, all_scores)]
        return [best_first(t, p, s, self.shape.nodes) for t, p, s in zip(*columns, strict=True)]

    def _static(self, logits: torch.Tensor, state: torch.Tensor, depth: int, draws: Sequence[Draws]) -> list[DraftTree]:
        """One tree of rank paths for all; children drawn without replacement where proposals are sampled."""
        paths = static_tree(self._accuracies[:depth], self.shape.nodes + 1, min(self.shape.beam, logits.shape[-1]))
        parents = parents_of(paths)
        batch = len(logits)
        tokens: list[list[int]] = [[] for _ in range(batch)]
        q: list[dict[int, torch.Tensor]] = [{} for _ in range(batch)]
        level_logits, level_state = logits.unsqueeze(1), state.unsqueeze(1)
        level_own = torch.zeros(batch, 1, 0, dtype=torch.bool, device=logits.device)
        run = [0]  # node numbers that level_logits belong to
        for level in range(1, depth + 1):
            nodes = [n for n, path in enumerate(paths, start=1) if len(path) == level]
            if not nodes:
                break
            self._fill(level_logits, run, nodes, parents, paths, tokens, q, draws)
            inner = [n for n in nodes if n in parents]
            if not inner:
                break
            above = torch.tensor([run.index(parents[n - 1]) for n in inner], device=logits.device)
            ids = torch.tensor([[max(row[n - 1], 0) for n in inner] for row in tokens], device=logits.device)
            eye = torch.eye(len(inner), dtype=torch.bool, device=logits.device).expand(batch, -1, -1)
            level_own = torch.cat((level_own[:, above], eye), dim=2)
            level_logits, level_state = self._step(level_state[:, above], ids, level_own, level)
            run = inner
        return [_without_missing(t, parents, d if self.sample_proposals else None) for t, d in zip(tokens, q, strict=True)]

    def _fill(
        self,
        logits: torch.Tensor,
        run: list[int],
        nodes: list[int],
        parents: Sequence[int],
        paths: Sequence[Ranks],
        tokens: list[list[int]],
        q: list[dict[int, torch.Tensor]],
        draws: Sequence[Draws],
    ) -> None:
        """Choose the tokens of one level's nodes from the logits [B, W, V_d] of their parents ``run``; MISSING where a truncated
        distribution has fewer tokens than the node's rank, and below such a node."""
        if not self.sample_proposals:
            most = max(paths[n - 1][-1] for n in nodes) + 1
            ranked = self._target_ids[logits.topk(most).indices].tolist()
            for b, row in enumerate(tokens):
                row += [ranked[b][run.index(parents[n - 1])][paths[n - 1][-1]] for n in nodes]
            return
        over = self._over_target(probabilities(logits, self.sampling))
        for b, row in enumerate(tokens):
            left: dict[int, torch.Tensor] = {}
            for n in nodes:
                parent = parents[n - 1]
                if parent and row[parent - 1] == MISSING:
                    row.append(MISSING)
                    continue
                if parent not in left:
                    q[b][parent] = over[b, run.index(parent)]
                    left[parent] = q[b][parent].clone()
                token = draws[b].pick(left[parent]) if float(left[parent].sum()) > 0 else MISSING
                if token != MISSING:
                    left[parent][token] = 0
                row.append(token)


def _without_missing(tokens: Sequence[int], parents: Sequence[int], q: dict[int, torch.Tensor] | None) -> DraftTree:
    number, kept = {0: 0}, []
    for node, token in enumerate(tokens, start=1):
        if token != MISSING:
            number[node] = len(number)
            kept.append(node)
    drawn_from = None if q is None else {number[n]: d for n, d in q.items()}
    return DraftTree(tuple(tokens[n - 1] for n in kept), tuple(number[parents[n - 1]] for n in kept), drawn_from)
