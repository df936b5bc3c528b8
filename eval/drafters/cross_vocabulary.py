"""A draft model with another tokenizer than the target's: SLEM, SLRS-1 and TLI (Timor et al. 2025, "Accelerating LLM inference with
lossless speculative decoding algorithms for heterogeneous vocabularies"; ALGORITHMS 6).

    method  proposes                                                                        acceptance of a position
    slem    the draft's text, tokenised by the target; candidates are deterministic          sum_t p(t) psi(t)
    slrs    the first target token of one draft token's text, drawn from its law psi         sum_t min(p(t), psi(t))
    tli     tokens that both vocabularies have, drawn from the draft's law on those (psi)    sum_t min(p(t), psi(t))

The draft model reads the target's text without its special tokens: its prompt is the target's prompt decoded with those stripped, not the
messages in the draft model's own chat template. What it reads decides how much is accepted, never what is emitted.

Shapes: B sequences, V_T target vocabulary, V_D draft vocabulary (rows of each model's LM head).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Literal

import torch
from transformers import PreTrainedTokenizerFast

from eval.acceptance import Draws, RandomDraws
from eval.drafters.base import Committed, Drafter
from eval.drafters.seam import Crossing, DraftText, Vocabulary, continuation, first_tokens, same_tokens
from eval.tree import DraftTree
from heads.cache import TargetCache, causal, visible_slots
from heads.errors import UserError
from heads.sampling import Sampling, probabilities
from heads.target import FrozenTarget

Method = Literal["slem", "slrs", "tli"]

CALIBRATION_POSITIONS = 16
"""auto: last positions of the first prompt on which the methods are compared."""
CALIBRATION_DRAFT = 4
"""auto: draft tokens after each of them for SLEM, whose target token may need several."""
CALIBRATION_DRAWS = 2
"""auto: how often these are drawn where drafts are drawn."""


@dataclass(frozen=True)
class Choice:
    """The method in use, and why."""

    method: Method
    reason: str
    """One sentence for the report."""
    estimates: dict[Method, float] = field(default_factory=dict)
    """auto: estimated acceptance of a position with each method; 0 for one that the vocabularies rule out."""


@dataclass
class _Row:
    tokens: list[int]
    """All committed target tokens."""
    text: DraftText


class CrossVocabularyDrafter(Drafter):
    """Drafts with a model of another vocabulary, which keeps its own KV cache."""

    name = "cross"

    def __init__(
        self,
        model: FrozenTarget,
        tokenizer: PreTrainedTokenizerFast,
        target: FrozenTarget,
        target_tokenizer: PreTrainedTokenizerFast,
        sampling: Sampling,
        *,
        method: Literal["auto", "slem", "slrs", "tli"] = "auto",
        sample_proposals: bool,
        stop_ids: frozenset[int],
    ) -> None:
        """
        Args:
            model: the draft model, read with ``tokenizer``.
            sampling: the target's; drafts are drawn at the same one.
            method: auto compares the three on the first prompt (``calibrate``) and keeps the best.
            sample_proposals: draw drafts from psi (slrs and tli then go by rule 2.2) instead of taking the most likely (2.1, 2.3).
            stop_ids: the target's; the draft model's end-of-text tokens become the end-of-turn one of these.

        Raises:
            UserError: a tokenizer of an unknown make, or vocabularies that rule the method out.
        """
        super().__init__()
        self.model, self.target, self.sampling = model, target, sampling
        self.sample_proposals = sample_proposals and not sampling.greedy
        self._stop_ids = stop_ids
        self._theirs = Vocabulary(target_tokenizer, target.vocab_size, "the target")
        self._own = Vocabulary(tokenizer, model.vocab_size, "the draft model")
        self._end = self._target_end(target_tokenizer.eos_token_id)
        self._ends = self._draft_ends(tokenizer.eos_token_id)
        same, first = same_tokens(self._own, self._theirs), first_tokens(self._own, self._theirs)
        self.shared = int((same >= 0).sum())
        """|I|: draft tokens that the target has too, special ones not counted."""
        self._possible: dict[Method, bool] = {"slem": True, "slrs": bool((first >= 0).any()), "tli": self.shared > 0}
        speaks = torch.tensor([i in self._ends or bool(piece) for i, piece in enumerate(self._own.pieces[: model.vocab_size])])
        if self._end is not None:
            for image in (same, first):
                image[list(self._ends)] = self._end
        self._speaks = speaks.to(model.device)
        self._crossings: dict[Method, Crossing] = {
            "slrs": Crossing(first.to(model.device), target.vocab_size),
            "tli": Crossing(same.to(model.device), target.vocab_size),
        }
        self.choice: Choice | None = None
        """None until ``auto`` has seen a prompt."""
        if method != "auto":
            self._check_possible(method)
            self.choice = Choice(method, f"{method} was asked for")
        self._rows: list[_Row] = []
        self._reader = Reader(model, 0, self.forwarding)

    def _target_end(self, eos: int | None) -> int | None:
        """The target's end-of-turn token."""
        if eos is not None and (not self._stop_ids or eos in self._stop_ids):
            return eos
        return min(self._stop_ids, default=None)

    def _draft_ends(self, eos: int | None) -> frozenset[int]:
        """What the draft model ends a text with."""
        configured = self.model.model.generation_config.eos_token_id
        ids = {eos} | set(configured if isinstance(configured, list) else [configured])
        return frozenset(i for i in ids if i is not None and i in self._own.special and i < self.model.vocab_size)

    def _check_possible(self, method: Method) -> None:
        if not self._possible[method]:
            shares = {
                "tli": f"shares no token with the target's ({self.model.vocab_size:,} against {self.target.vocab_size:,})",
                "slrs": "has no token that begins with one of the target's",
            }
            raise UserError(f"the draft model's vocabulary {shares[method]}, so drafter.method={method} cannot draft; use slem or auto")

    # --- the drafter's interface ---

    def start(self, prompts: Sequence[Sequence[int]]) -> None:
        if self.choice is None:
            self.choice = self.calibrate(prompts[0])
        self._rows = [_Row(list(p), self._draft_text(p)) for p in prompts]
        self._reader = Reader(self.model, len(prompts), self.forwarding)
        self._fresh = True

    def select(self, rows: Sequence[int]) -> None:
        self._rows = [self._rows[r] for r in rows]
        self._reader.select(rows)

    def observe(self, committed: Committed) -> None:
        assert self.choice is not None
        for row, new in zip(self._rows, committed.tokens, strict=True):
            grown = new[-1:] if self._fresh else new  # the first observation repeats the prompt
            row.tokens += grown
            if self.choice.method == "tli":
                for token in grown:
                    self._extend(row.text, token)
            else:
                row.text.append(b"".join(self._theirs.pieces[t] for t in grown))
        self._fresh = False

    @torch.no_grad()
    def propose(self, counts: Sequence[int], draws: Sequence[Draws]) -> list[DraftTree]:
        assert self.choice is not None
        if self.choice.method == "slem":
            drafted = self._draft(self._reader, [row.text for row in self._rows], counts, draws)
            candidates = [self._candidates(row.tokens, row.text, d) for row, d in zip(self._rows, drafted, strict=True)]
            return [DraftTree.chain(c[:count]) for c, count in zip(candidates, counts, strict=True)]
        return self._chains(self._crossings[self.choice.method], counts, draws)

    # --- drafting ---

    def _draft_text(self, prompt: Sequence[int]) -> DraftText:
        return DraftText(self._own, self._theirs.text(prompt))

    def _extend(self, text: DraftText, token: int) -> None:
        """A target token behind a text: as the same token of the draft vocabulary, or tokenised with the text before it."""
        piece = self._theirs.pieces[token]
        text.append(piece, self._own.by_bytes.get(piece, -1))

    def _readable(self, context: Sequence[int]) -> bool:
        """Whether the draft model can go on behind a context; one that outgrew it drafts nothing any more."""
        return 0 < len(context) <= self.model.max_length

    def _chains(self, crossing: Crossing, counts: Sequence[int], draws: Sequence[Draws]) -> list[DraftTree]:
        """SLRS-1 and TLI. Each context is a function of the target tokens proposed before it, so psi there is well defined."""
        texts = [row.text.fork() for row in self._rows]
        tokens: list[list[int]] = [[] for _ in counts]
        drawn_from: list[list[torch.Tensor]] = [[] for _ in counts]
        going = [count > 0 for count in counts]
        while True:
            # Behind an incomplete character that the draft model cannot read it has nothing to say.
            contexts = [t.context if g and not t.rest else [] for g, t in zip(going, texts, strict=True)]
            going = [self._readable(c) for c in contexts]
            if not any(going):
                break
            psi = crossing.law(self._reader.read([c if g else None for g, c in zip(going, contexts, strict=True)]), self.sampling).cpu()
            for b in (b for b, goes in enumerate(going) if goes):
                token = draws[b].pick(psi[b]) if self.sample_proposals else int(psi[b].argmax())
                tokens[b].append(token)
                drawn_from[b].append(psi[b])
                going[b] = len(tokens[b]) < counts[b] and token != self._end and token not in self._stop_ids
                if going[b]:
                    self._extend(texts[b], token)
        return [DraftTree.chain(t, q if self.sample_proposals else None) for t, q in zip(tokens, drawn_from, strict=True)]

    def _draft(self, reader: Reader, texts: Sequence[DraftText], counts: Sequence[int], draws: Sequence[Draws]) -> list[list[int]]:
        """SLEM: up to ``counts`` draft tokens behind each text."""
        drafted: list[list[int]] = [[] for _ in counts]
        contexts = [text.context for text in texts]
        going = [count > 0 for count in counts]
        while True:
            going = [g and self._readable(c) for g, c in zip(going, contexts, strict=True)]
            if not any(going):
                return drafted
            logits = reader.read([c if g else None for g, c in zip(going, contexts, strict=True)])
            q = probabilities(logits.masked_fill(~self._speaks, float("-inf")), self.sampling).cpu()
            for b in (b for b, goes in enumerate(going) if goes):
                token = draws[b].pick(q[b]) if self.sample_proposals else int(q[b].argmax())
                drafted[b].append(token)
                contexts[b] = [*contexts[b], token]
                going[b] = len(drafted[b]) < counts[b] and token not in self._ends

    def _candidates(self, tokens: Sequence[int], text: DraftText, drafted: Sequence[int]) -> list[int]:
        """SLEM: draft tokens behind a text as target tokens that continue the committed ones. None where they do not fit.

        The last candidate may be a piece of a longer token that a longer draft would have shown; it is proposed all the same.
        """
        new = b"".join(self._own.pieces[d] for d in drafted)
        if not new.startswith(text.rest):
            return []
        candidates, whole = continuation(self._theirs, tokens, new[len(text.rest) :])
        ended = bool(drafted) and drafted[-1] in self._ends and self._end is not None
        return [*candidates, self._end] if ended and whole and self._end is not None else candidates

    # --- auto ---

    @torch.no_grad()
    def calibrate(self, prompt: Sequence[int]) -> Choice:
        """The method with the best estimated acceptance of a position (ALGORITHMS 6, table; 6.5).

        The target and the draft model read the prompt's last positions; the target's law there is compared with the law of each method's
        first candidate. For SLEM the candidate is drafted as in decoding (several draft tokens), and its p averaged. Costs one forward
        of the target over the prompt and at most CALIBRATION_POSITIONS * (CALIBRATION_DRAFT + 1) short ones of the draft model; ``start``
        does it while ``choice`` is None. Where time is measured set ``choice`` to its result before the first prompt.
        """
        estimates = self._estimate(prompt)
        share = self.shared / self.model.vocab_size
        # Equal estimates go by the rule of thumb of section 6.5.
        order: list[Method] = ["slem", "slrs", "tli"] if self.sampling.greedy else ["slrs", "slem", "tli"]
        if share > 0.5:
            order = ["tli", *order[:2]]
        order = [method for method in order if self._possible[method]]
        best = max(order, key=lambda method: estimates[method])
        listed = ", ".join(f"{method} {estimates[method]:.2f}" for method in sorted(estimates))
        reason = (
            f"{best} has the best estimated acceptance of a position at the end of the first prompt ({listed}; "
            f"the target has {share:.0%} of the draft vocabulary)"
        )
        return Choice(best, reason, estimates)

    def _estimate(self, prompt: Sequence[int]) -> dict[Method, float]:
        last = len(prompt) - 1
        # Where a special token follows, the template speaks and not the target.
        positions = [i for i in range(last) if self._theirs.pieces[prompt[i + 1]]] + [last]
        positions = positions[-CALIBRATION_POSITIONS:]
        hidden = self.target.forward(torch.tensor([list(prompt)], device=self.target.device), taps=False).hidden[0, positions]
        laws = probabilities(self.target.logits(hidden), self.sampling).cpu()
        tries = CALIBRATION_DRAWS if self.sample_proposals else 1
        reader, draws = Reader(self.model, tries, self.forwarding), RandomDraws(0)
        sums: dict[Method, float] = {"slem": 0.0, "slrs": 0.0, "tli": 0.0}
        for i, p in zip(positions, laws, strict=True):
            text = self._draft_text(prompt[: i + 1])
            if not self._readable(text.context):
                continue
            if not text.rest:
                logits = reader.read([text.context] * tries)[0]
                for method, crossing in self._crossings.items():
                    if self._possible[method]:
                        psi = crossing.law(logits, self.sampling).cpu()
                        sums[method] += float(torch.minimum(p, psi).sum() if self.sample_proposals else p[psi.argmax()])
            for drafted in self._draft(reader, [text] * tries, [CALIBRATION_DRAFT] * tries, [draws] * tries):
                first = self._candidates(prompt[: i + 1], text, drafted)[:1]
                sums["slem"] += float(p[first].sum()) / tries
        return {method: total / len(positions) for method, total in sums.items()}


class Reader:
    """The draft model with what it has read of each of B sequences."""

    def __init__(self, model: FrozenTarget, batch: int, forwarding: Callable[[], AbstractContextManager[None]]) -> None:
        """forwarding: opened around every forward (Drafter.forwarding)."""
        self._model, self._forwarding = model, forwarding
        self._cache = TargetCache()
        self._held: list[list[int]] = [[] for _ in range(batch)]

    def select(self, rows: Sequence[int]) -> None:
        """Keep these sequences, in this order."""
        self._held = [self._held[r] for r in rows]
        self._cache.select(rows)

    def read(self, contexts: Sequence[Sequence[int] | None]) -> torch.Tensor:
        """Logits [B, V_D] after each context; those of a sequence without one mean nothing.

        What the cache holds is kept as far as it agrees with the context (ALGORITHMS 6.4); only the rest is fed.
        """
        model, cache, device = self._model, self._cache, self._model.device
        kept = [len(h) if c is None else min(_agreeing(h, c), len(c) - 1) for h, c in zip(self._held, contexts, strict=True)]
        if cache.lengths:
            cache.keep(kept)
        new = [[0] if c is None else list(c[n:]) for c, n in zip(contexts, kept, strict=True)]
        width = max(map(len, new))
        ids = torch.tensor([[min(t, model.vocab_size - 1) for t in n] + [0] * (width - len(n)) for n in new], device=device)
        lengths = torch.tensor(kept, device=device)
        # Padding, and a sequence that is not asked for, may lie behind the end of the draft model's context.
        position = (lengths.unsqueeze(1) + torch.arange(width, device=device)).clamp_max(model.max_length - 1)
        visible = None
        if not cache.lines.even or min(map(len, new)) < width:
            visible = visible_slots(lengths, causal(len(new), width, device), max(kept) + width)
        with self._forwarding():
            output = model.forward(ids, cache=cache, position=position, visible=visible, taps=False)
            last = torch.tensor([len(n) - 1 for n in new], device=device)
            logits = model.logits(output.hidden[torch.arange(len(new), device=device), last])
        cache.commit([[] if c is None else range(len(n)) for c, n in zip(contexts, new, strict=True)])
        self._held = [h if c is None else list(c) for h, c in zip(self._held, contexts, strict=True)]
        return logits


def _agreeing(held: Sequence[int], wanted: Sequence[int]) -> int:
    """Length of the longest common prefix, by bisection (slices compare fast)."""
    low, high = 0, min(len(held), len(wanted))
    while low < high:
        middle = (low + high + 1) // 2
        if held[low:middle] == wanted[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
