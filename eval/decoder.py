"""The loop: prefill, then draft, verify, accept, commit until a stop (ALGORITHMS 1.2), for one sequence or a batch, chains or trees.

State of a sequence of n committed tokens at the start of a cycle: the KV cache holds x_0..x_{n-2}; x_{n-1} is committed and pending.

Shapes: B live sequences, N tree nodes (padded to the largest tree), V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from eval.acceptance import Draws, RandomDraws, Verdict, accept_compared, accept_sampled, accept_typical
from eval.drafters.base import Committed, Drafter
from eval.records import Cycle, Finish
from eval.stopping import StopRule
from eval.tree import DraftTree
from heads.cache import TargetCache, causal, visible_slots
from heads.errors import UserError
from heads.sampling import Sampling, penalise, probabilities
from heads.target import FrozenTarget, TargetOutput

PREFILL, BONUS, CORRECTION = 0, -1, -2


@dataclass(frozen=True)
class DecodeSettings:
    """What decoding is asked to do."""

    draft_length: int
    """K: deepest draft of a cycle."""
    max_new_tokens: int
    """At least 1; the prefill token counts."""
    stop: StopRule = StopRule()  # noqa: RUF009
    sampling: Sampling = Sampling()  # noqa: RUF009
    typical: bool = False
    """Accept by rule 2.6, which does not keep the target's law."""


@dataclass
class Generation:
    """What decoding one prompt gave."""

    tokens: list[int] = field(default_factory=list)
    """Output ids, the end-of-turn token included."""
    origins: list[int] = field(default_factory=list)
    """Where each token came from: k > 0, accepted at depth k; or PREFILL, BONUS, CORRECTION."""
    cycles: list[Cycle] = field(default_factory=list)
    finish: Finish = "length"
    seconds: float = 0.0
    """Wall seconds until its last token, prefill included."""
    cpu_seconds: float = 0.0
    first_token_seconds: float = 0.0

    @property
    def draft_seconds(self) -> float:
        return sum(c.draft_seconds for c in self.cycles)

    @property
    def verify_seconds(self) -> float:
        return sum(c.verify_seconds for c in self.cycles)


Listener = Callable[[int, list[int], list[int]], None]
"""Called with (number of the prompt, new tokens, their origins) whenever a sequence has grown."""


def decode(
    target: FrozenTarget,
    prompts: Sequence[Sequence[int]],
    drafter: Drafter,
    settings: DecodeSettings,
    draws: Sequence[Draws] | None = None,
    listener: Listener | None = None,
) -> list[Generation]:
    """Decode speculatively. Greedy output equals the target's own; sampled output has the target's law, for every drafter and batch.

    Args:
        draws: one a prompt.

    Raises:
        UserError: a prompt is empty or leaves no room in the target's context, or the drafter cannot serve these settings.
    """
    for prompt in prompts:
        if not 0 < len(prompt) < target.max_length:
            raise UserError(f"a prompt of {len(prompt)} tokens fills the target's context of {target.max_length}; shorten it")
    loop = _Loop(target, prompts, drafter, settings, draws or [RandomDraws(seed) for seed in range(len(prompts))], listener)
    with torch.no_grad():
        loop.prefill()
        while loop.live:
            loop.cycle()
    return loop.results


class _Loop:
    """One call of ``decode``. Lists over live sequences are parallel to ``live``."""

    def __init__(
        self,
        target: FrozenTarget,
        prompts: Sequence[Sequence[int]],
        drafter: Drafter,
        settings: DecodeSettings,
        draws: Sequence[Draws],
        listener: Listener | None,
    ) -> None:
        self.target, self.drafter, self.settings, self.listener = target, drafter, settings, listener
        self.live = list(range(len(prompts)))
        self.prompts, self.draws = [list(p) for p in prompts], list(draws)
        self.limits = [min(settings.max_new_tokens, target.max_length - len(p)) for p in prompts]
        self.results = [Generation() for _ in prompts]
        self.cache = TargetCache()
        self.started, self.cpu = time.perf_counter(), time.process_time()

    def prefill(self) -> None:
        device, lengths = self.target.device, [len(p) for p in self.prompts]
        self.drafter.start(self.prompts)
        width = max(lengths)
        ids = torch.tensor([p + [0] * (width - len(p)) for p in self.prompts], device=device)
        position = visible = None
        if min(lengths) < width:
            position = torch.arange(width, device=device).expand(len(lengths), -1)
            visible = causal(len(lengths), width, device)
        output = self.target.forward(ids, cache=self.cache, position=position, visible=visible, taps=self.drafter.needs_taps)
        self.cache.commit([range(n) for n in lengths])
        last = torch.tensor(lengths, device=device) - 1
        logits = self.target.logits(output.hidden[torch.arange(len(lengths), device=device), last].unsqueeze(1))
        best = self._best(logits)
        tokens = [self._judge(b, DraftTree(), logits, best).extra for b in range(len(lengths))]
        for result in self.results:
            result.first_token_seconds = time.perf_counter() - self.started
        self.drafter.observe(Committed(output.hidden, output.taps, [[*p[1:], t] for p, t in zip(self.prompts, tokens, strict=True)]))
        self._grow([[t] for t in tokens], [[PREFILL] for _ in tokens])

    def cycle(self) -> None:
        began, forwards = time.perf_counter(), self.drafter.forward_seconds
        left = [self.limits[i] - len(self.results[i].tokens) for i in self.live]
        K = self.settings.draft_length
        trees = self.drafter.propose([min(K, n - 1) for n in left], [self.draws[i] for i in self.live])
        drafted = time.perf_counter()
        ids, position, visible = self._inputs(trees)
        ready = time.perf_counter()
        output = self.target.forward(ids, cache=self.cache, position=position, visible=visible, taps=self.drafter.needs_taps)
        logits = self.target.logits(output.hidden)
        best = self._best(logits)
        verified = time.perf_counter()
        verdicts = [self._judge(b, tree, logits, best) for b, tree in enumerate(trees)]
        new = [[*(t.tokens[n - 1] for n in v.path), v.extra] for t, v in zip(trees, verdicts, strict=True)]
        self.cache.commit([[0, *v.path] for v in verdicts])
        self.drafter.observe(self._committed(output, verdicts, new))
        before = [len(self.results[i].tokens) for i in self.live]
        live = list(self.live)
        self._grow(new, [[*range(1, len(v.path) + 1), CORRECTION if v.refused else BONUS] for v in verdicts])
        done = time.perf_counter()
        share = 1 / len(live)
        for b, i in enumerate(live):
            self.results[i].cycles.append(
                Cycle(
                    proposed=max(trees[b].depths),
                    accepted=len(verdicts[b].path),
                    emitted=len(self.results[i].tokens) - before[b],
                    limit=left[b] - 1 if left[b] - 1 < K else None,
                    nodes=trees[b].size - 1,
                    draft_seconds=(drafted - began) * share,
                    forward_seconds=(self.drafter.forward_seconds - forwards) * share,
                    verify_seconds=(verified - ready) * share,
                    commit_seconds=(done - verified + ready - drafted) * share,
                )
            )

    def _inputs(self, trees: Sequence[DraftTree]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """ids [B, N], positions [B, N], and what each node sees [B, N, columns] (None: the library's own causal rule is right)."""
        device, lengths = self.target.device, self.cache.lengths
        width = max(t.size for t in trees)
        pending = [self.results[i].tokens[-1] for i in self.live]
        padding = [width - t.size for t in trees]
        ids = torch.tensor([[first, *t.tokens, *[0] * pad] for first, t, pad in zip(pending, trees, padding, strict=True)], device=device)
        position = torch.tensor(
            [[n + d for d in (*t.depths, *[0] * pad)] for n, t, pad in zip(lengths, trees, padding, strict=True)], device=device
        )
        if width == 1 and self.cache.lines.even:
            return ids, position, None
        own = torch.eye(width, dtype=torch.bool).repeat(len(trees), 1, 1)  # padding sees itself, and nobody sees it
        for b, tree in enumerate(trees):
            own[b, : tree.size, : tree.size] = tree.ancestors
        return ids, position, visible_slots(torch.tensor(lengths, device=device), own.to(device), max(lengths) + width)

    def _best(self, logits: torch.Tensor) -> list[list[int]] | None:
        """[B][N] argmax of each node where that is all that greedy verification needs."""
        sampling = self.settings.sampling
        plain = sampling.greedy and sampling.repetition_penalty == 1.0 and not self.settings.typical
        return logits.argmax(-1).tolist() if plain else None

    def _judge(self, b: int, tree: DraftTree, logits: torch.Tensor, best: list[list[int]] | None) -> Verdict:
        """Apply the acceptance rule that fits how the candidates were proposed. logits [B, N, V]."""
        if best is not None:
            return accept_compared(tree, lambda node, path: best[b][node])
        number, sampling = self.live[b], self.settings.sampling
        context, draws = [*self.prompts[number], *self.results[number].tokens], self.draws[number]

        def law(node: int, path: Sequence[int]) -> torch.Tensor:
            # Lazily, at the visited nodes only, each with its own hypothetical prefix.
            return probabilities(penalise(logits[b, node], sampling, [*context, *path]), sampling).cpu()

        if self.settings.typical:
            return accept_typical(tree, law, draws)
        if tree.q is None or sampling.greedy:
            return accept_compared(tree, lambda node, path: draws.pick(law(node, path)))
        return accept_sampled(tree, law, draws)

    def _committed(self, output: TargetOutput, verdicts: Sequence[Verdict], new: list[list[int]]) -> Committed:
        most = max(len(v.path) for v in verdicts) + 1
        if all(v.path == tuple(range(1, len(v.path) + 1)) for v in verdicts):
            return Committed(output.hidden[:, :most], None if output.taps is None else output.taps[:, :most], new)
        index = torch.tensor([[0, *v.path, *[0] * (most - 1 - len(v.path))] for v in verdicts], device=self.target.device)
        line = torch.arange(len(verdicts), device=index.device).unsqueeze(1)
        return Committed(output.hidden[line, index], None if output.taps is None else output.taps[line, index], new)

    def _grow(self, new: Sequence[list[int]], origins: Sequence[list[int]]) -> None:
        """Append what each sequence may still emit; sequences that end leave the batch."""
        staying = []
        for b, i in enumerate(self.live):
            result = self.results[i]
            count, ended = self.settings.stop.emitted(result.tokens, new[b][: self.limits[i] - len(result.tokens)])
            result.tokens += new[b][:count]
            result.origins += origins[b][:count]
            if self.listener is not None:
                self.listener(i, new[b][:count], origins[b][:count])
            if ended or len(result.tokens) >= self.limits[i]:
                result.finish = "stop" if ended else "length"
                result.seconds, result.cpu_seconds = time.perf_counter() - self.started, time.process_time() - self.cpu
            else:
                staying.append(b)
        if len(staying) < len(self.live):
            self.live = [self.live[b] for b in staying]
            if staying:
                self.cache.select(staying)
                self.drafter.select(staying)
