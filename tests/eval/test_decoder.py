"""The decoding loop: greedy identity, stops, accounting, KV commit, the head's incremental state, and the law at temperature 1."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence

import pytest
import torch

import eval.decoder
from eval.acceptance import Draws, RandomDraws
from eval.decoder import Generation, decode
from eval.drafters.base import Drafter, Proposal
from eval.drafters.eagle3 import Eagle3Drafter
from eval.drafters.simple import NoneDrafter, ScriptedDrafter
from heads.cache import TargetCache
from heads.errors import UserError
from heads.sampling import Sampling, probabilities
from heads.target import FrozenTarget, TargetOutput
from heads.vocab import DraftVocab
from tests.tiny import tiny_head, tiny_target

VOCAB = 300
GREEDY = Sampling()
NO_STOP: frozenset[int] = frozenset()


@functools.cache
def family_target(family: str) -> FrozenTarget:
    more = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]} if family == "gemma3" else {}
    return tiny_target(family, layers=3, vocab=VOCAB, scale=2.0, **more)


def prompts(count: int, longest: int = 40, vocab: int = VOCAB, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, longest + 1, (count,), generator=generator).tolist()
    return [torch.randint(0, vocab, (n,), generator=generator).tolist() for n in lengths]


def run(
    target: FrozenTarget, prompt: Sequence[int], drafter: Drafter, *, K: int = 3, new: int = 12, stop: frozenset[int] = NO_STOP
) -> Generation:
    return decode(target, prompt, drafter, draft_length=K, max_new_tokens=new, stop_ids=stop)


def library(target: FrozenTarget, prompt: Sequence[int], new: int, stop: Sequence[int] = ()) -> list[int]:
    """The model's own greedy output."""
    ids = torch.tensor([list(prompt)])
    eos = list(stop) or None
    target.model.generation_config.eos_token_id = None
    target.model.generation_config.bos_token_id = None
    out = target.model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=new, eos_token_id=eos, pad_token_id=0
    )
    return out[0, len(prompt) :].tolist()


def assert_accounts(result: Generation, K: int) -> None:
    assert 1 + sum(c.emitted for c in result.cycles) == len(result.tokens)
    for cycle in result.cycles:
        assert 0 <= cycle.accepted <= cycle.proposed <= K
        assert 1 <= cycle.emitted <= cycle.accepted + 1
        assert cycle.limit is None or cycle.proposed <= cycle.limit < K


def changed(token: int) -> int:
    return (token + 1) % VOCAB


def sometimes_changed(token: int) -> int:
    return changed(token) if token % 3 == 0 else token


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3"])
def test_greedy_output_is_the_models_own(family: str) -> None:
    target = family_target(family)
    half = DraftVocab(torch.arange(0, VOCAB, 2), VOCAB)
    heads: list[Drafter] = [
        Eagle3Drafter(tiny_head(target, seed=1), target, GREEDY, False),
        Eagle3Drafter(tiny_head(target, vocab=half, variant="classic", init="paper", seed=2), target, GREEDY, False),
    ]
    new = 8
    accepted = {"oracle": 0, "adversary": 0, "mixed": 0}
    mixed = set()
    for number, prompt in enumerate(prompts(36)):
        expected = library(target, prompt, new)
        scripted = {
            "oracle": ScriptedDrafter("oracle", expected),
            "adversary": ScriptedDrafter("adversary", expected, changed),
            "mixed": ScriptedDrafter("mixed", expected, sometimes_changed),
        }
        drafters: list[Drafter] = [NoneDrafter(), *heads, *scripted.values()]
        for drafter in drafters:
            result = run(target, prompt, drafter, new=new)
            assert result.tokens == expected, f"prompt {number}, {drafter.name}"
            assert result.finish == "length" and result.tokens
            assert_accounts(result, 3)
            if drafter.name in accepted:
                accepted[drafter.name] += sum(c.accepted for c in result.cycles)
            if drafter.name == "mixed":
                mixed |= {c.accepted for c in result.cycles if c.proposed == 3}
    # The drafters are what their names say, or the comparison proved little.
    assert accepted["adversary"] == 0 < accepted["mixed"] < accepted["oracle"]
    assert mixed >= {0, 1, 3}


def test_oracle_accepts_all_and_none_accepts_nothing() -> None:
    target = family_target("llama")
    for K in (1, 3, 5):
        for prompt in prompts(3, seed=5):
            new = 1 + 3 * (K + 1)
            expected = run(target, prompt, NoneDrafter(), K=K, new=new)
            assert [(c.proposed, c.accepted, c.emitted) for c in expected.cycles] == [(0, 0, 1)] * (new - 1)
            oracle = run(target, prompt, ScriptedDrafter("oracle", expected.tokens), K=K, new=new)
            assert oracle.tokens == expected.tokens
            assert [(c.proposed, c.accepted, c.emitted, c.limit) for c in oracle.cycles] == [(K, K, K + 1, None)] * 3


@pytest.mark.parametrize("new", [1, 2, 3, 4, 5, 6, 7, 11])
def test_max_new_tokens_is_met_exactly(new: int) -> None:
    target = family_target("llama")
    prompt = prompts(1, seed=6)[0]
    expected = run(target, prompt, NoneDrafter(), new=16).tokens
    head = Eagle3Drafter(tiny_head(target), target, GREEDY, False)
    for drafter in (ScriptedDrafter("oracle", expected), ScriptedDrafter("adversary", expected, changed), NoneDrafter(), head):
        result = run(target, prompt, drafter, new=new)
        assert result.tokens == expected[:new] and result.finish == "length"
        assert_accounts(result, 3)
    oracle = run(target, prompt, ScriptedDrafter("oracle", expected), new=new).cycles
    left = new - 1
    for cycle in oracle:
        assert cycle.limit == (left - 1 if left - 1 < 3 else None) and cycle.proposed == min(3, left - 1)
        left -= cycle.emitted
    assert left == 0


def test_the_targets_context_is_the_last_limit() -> None:
    target = tiny_target(layers=2, vocab=VOCAB, max_position_embeddings=20)
    prompt = prompts(1, vocab=VOCAB, seed=7)[0]
    prompt = (prompt * 20)[:16]
    result = run(target, prompt, NoneDrafter(), new=50)
    assert len(result.tokens) == 4 and result.finish == "length"
    with pytest.raises(UserError, match="a prompt of 20 tokens fills the target's context of 20"):
        run(target, prompt + prompt[:4], NoneDrafter())


def distinct_run(target: FrozenTarget, length: int) -> tuple[list[int], list[int]]:
    """A prompt whose greedy output begins with this many different tokens."""
    for prompt in prompts(60, seed=8):
        tokens = run(target, prompt, NoneDrafter(), new=length).tokens
        if len(set(tokens)) == length:
            return prompt, tokens
    raise AssertionError("no prompt gives an output without repetition; the tiny target is too dull for this test")


def test_a_stop_inside_an_accepted_draft_ends_the_output_there() -> None:
    target = family_target("qwen3")
    prompt, tokens = distinct_run(target, 10)
    for at in range(10):
        stop = frozenset({tokens[at]})
        plain = run(target, prompt, NoneDrafter(), new=10, stop=stop)
        fast = run(target, prompt, ScriptedDrafter("oracle", tokens), K=4, new=10, stop=stop)
        assert fast.tokens == plain.tokens == tokens[: at + 1] == library(target, prompt, 10, list(stop))
        assert fast.finish == plain.finish == "stop"
        assert_accounts(fast, 4)
        if at == 0:
            assert not fast.cycles
        else:
            # Prefill gives token 0; full cycles give five each; the stop cuts what the rule had taken.
            assert len(fast.cycles) == (at - 1) // 5 + 1
            assert fast.cycles[-1].emitted == (at - 1) % 5 + 1
            assert fast.cycles[-1].accepted == fast.cycles[-1].proposed


class Checked:
    """Passes everything on to another drafter; before each proposal calls check(committed ids)."""

    needs_taps = True

    def __init__(self, inner: Drafter, prompt: Sequence[int], check: Callable[[list[int], TargetOutput], None]) -> None:
        self.name, self.inner, self.check = f"checked {inner.name}", inner, check
        self.committed, self.prompt = list(prompt), list(prompt)
        self.seen: list[TargetOutput] = []

    def start(self) -> None:
        self.inner.start()
        self.committed, self.seen = self.prompt[:1], []

    def observe(self, output: TargetOutput, tokens: Sequence[int]) -> None:
        self.committed += tokens
        self.seen.append(output)
        whole = TargetOutput(torch.cat([o.hidden for o in self.seen], 1), torch.cat([o.taps for o in self.seen if o.taps is not None], 1))
        self.check(self.committed, whole)
        self.inner.observe(output, tokens)

    def propose(self, count: int, draws: Draws) -> Proposal:
        return self.inner.propose(count, draws)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3", "gemma2", "mistral"])
def test_after_each_cycle_the_cache_is_that_of_the_committed_tokens(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target = family_target(family)
    caches: list[TargetCache] = []

    class Kept(TargetCache):
        def __init__(self) -> None:
            super().__init__()
            caches.append(self)

    monkeypatch.setattr(eval.decoder, "TargetCache", Kept)
    checks = 0

    def check(committed: list[int], observed: TargetOutput) -> None:
        nonlocal checks
        cache, held = caches[-1], len(committed) - 1
        assert cache.length == held == observed.hidden.shape[1]
        scratch = target.forward(torch.tensor([committed]))
        assert scratch.taps is not None and observed.taps is not None
        assert torch.allclose(observed.hidden, scratch.hidden[:, :held], atol=1e-4)
        assert torch.allclose(observed.taps, scratch.taps[:, :held], atol=1e-4)
        again = target.forward(torch.tensor([committed[-1:]]), cache=cache, taps=False)
        assert torch.allclose(target.logits(again.hidden[0, -1]), target.logits(scratch.hidden[0, -1]), atol=1e-4)
        cache.keep(held)
        checks += 1

    rejected = 0
    for prompt in prompts(4, seed=9):
        monkeypatch.setattr(eval.decoder, "TargetCache", TargetCache)
        plain = run(target, prompt, NoneDrafter(), new=16).tokens
        monkeypatch.setattr(eval.decoder, "TargetCache", Kept)
        drafter = Checked(ScriptedDrafter("mixed", plain, sometimes_changed), prompt, check)
        result = run(target, prompt, drafter, new=16)
        assert result.tokens == plain
        rejected += sum(c.accepted < c.proposed for c in result.cycles)
    assert checks > 16 and rejected > 4


@pytest.mark.parametrize("settings", [{}, {"variant": "classic"}, {"layers": 2}], ids=["3.1", "classic", "two layers"])
def test_the_heads_state_is_that_of_the_committed_prefix(settings: dict[str, object]) -> None:
    """What a drafter proposes after many cycles equals what a fresh one proposes that is fed the whole prefix at once."""
    target = tiny_target(layers=3, vocab=12)
    head = tiny_head(target, vocab=DraftVocab(torch.arange(1, 11), 12), **settings)
    sampling = Sampling(1.5)
    compared = accepted = rejected = 0

    class Compared(Checked):
        def propose(self, count: int, draws: Draws) -> Proposal:
            nonlocal compared
            seed = len(self.committed)
            got = self.inner.propose(count, RandomDraws(seed))
            if count:
                fresh = Eagle3Drafter(head, target, sampling, True)
                fresh.observe(target.forward(torch.tensor([self.committed[:-1]])), self.committed[1:])
                expected = fresh.propose(count, RandomDraws(seed))
                assert got.q is not None and expected.q is not None
                assert got.q.shape == (count, 12) and not got.q[:, [0, 11]].any()
                assert torch.allclose(got.q, expected.q, atol=1e-5)
                assert got.tokens == expected.tokens
                compared += 1
            return got

    for number, prompt in enumerate(prompts(6, longest=9, vocab=12, seed=10)):
        drafter = Compared(Eagle3Drafter(head, target, sampling, True), prompt, lambda committed, output: None)
        result = decode(
            target, prompt, drafter, draft_length=3, max_new_tokens=20, stop_ids=NO_STOP, sampling=sampling, draws=RandomDraws(number)
        )  # fmt: skip
        accepted += sum(c.accepted for c in result.cycles)
        rejected += sum(c.accepted < c.proposed for c in result.cycles)
    assert compared > 30 and accepted > 5 and rejected > 5


def test_a_drafter_serves_one_sequence_after_another() -> None:
    target = family_target("llama")
    used, (first, second) = Eagle3Drafter(tiny_head(target), target, GREEDY, False), prompts(2, seed=11)
    seen: list[tuple[int, ...]] = []
    for drafter in (used, Eagle3Drafter(used.head, target, GREEDY, False)):
        inner = drafter.propose
        proposals: list[tuple[int, ...]] = []

        def recorded(
            count: int, draws: Draws, inner: Callable[[int, Draws], Proposal] = inner, into: list[tuple[int, ...]] = proposals
        ) -> Proposal:
            into.append((proposal := inner(count, draws)).tokens)
            return proposal

        drafter.propose = recorded  # type: ignore[method-assign]
        if drafter is used:
            run(target, first, drafter)
            proposals.clear()
        run(target, second, drafter)
        seen.append(tuple(token for tokens in proposals for token in tokens))
    assert seen[0] == seen[1] and seen[0]


# --- the law at temperature 1 ---

SMALL, LENGTH = 8, 3


@functools.cache
def small_target() -> FrozenTarget:
    return tiny_target(layers=1, vocab=SMALL, hidden=16, scale=2.0, seed=3)


PROMPT = [3, 1, 4, 1, 5]


def exact_law(sampling: Sampling) -> torch.Tensor:
    """[V, V, V]: the law of the first three tokens, by enumeration with the target alone."""
    target = small_target()
    law = torch.ones(1)
    prefixes = torch.tensor([PROMPT])
    for _ in range(LENGTH):
        p = probabilities(target.logits(target.forward(prefixes, taps=False).hidden[:, -1]), sampling)
        law = (law.reshape(-1, 1) * p).reshape(-1)
        prefixes = torch.cat([prefixes.repeat_interleave(SMALL, 0), torch.arange(SMALL).repeat(len(prefixes)).unsqueeze(1)], 1)
    return law.double().reshape(SMALL, SMALL, SMALL)


class EnoughError(Exception):
    """Ends a decode from within: the first cycle is all the counts need."""


class FirstCycle(Checked):
    """Passes on to another drafter until the first cycle is committed."""

    def propose(self, count: int, draws: Draws) -> Proposal:
        if len(self.seen) > 1:
            raise EnoughError
        proposal = super().propose(count, draws)
        assert len(proposal.tokens) == 2
        return proposal


def counts(decodes: int, sampling: Sampling, sample_proposals: bool) -> tuple[torch.Tensor, float]:
    """Counts [V, V, V] of the first three tokens over seeded decodes, and the share of drafts accepted.

    One cycle is decoded; where it emitted one token only, the third is drawn from the exact law of the target after the two.
    """
    target, law = small_target(), exact_law(sampling)
    inner = Eagle3Drafter(tiny_head(target, init="paper", seed=4), target, sampling, sample_proposals)
    drafter = FirstCycle(inner, PROMPT, lambda committed, output: None)
    table = torch.zeros(SMALL, SMALL, SMALL, dtype=torch.float64)
    accepted = 0
    for seed in range(decodes):
        draws = RandomDraws(seed)
        with pytest.raises(EnoughError):
            decode(target, PROMPT, drafter, draft_length=2, max_new_tokens=9, stop_ids=NO_STOP, sampling=sampling, draws=draws)
        tokens = drafter.committed[len(PROMPT) :]
        accepted += len(tokens) - 2
        if len(tokens) == 2:
            tokens.append(draws.pick(law[tokens[0], tokens[1]]))
        table[tuple(tokens[:LENGTH])] += 1
    return table, accepted / (2 * decodes)


def chi_square_p(observed: torch.Tensor, law: torch.Tensor) -> float:
    """P-value of counts under a law (Wilson-Hilferty); cells that expect fewer than 5 are pooled. A count where the law has 0 gives 0."""
    observed, law = observed.flatten(), law.flatten()
    if float(observed[law == 0].sum()) > 0:
        return 0.0
    expected = law * observed.sum()
    rare = expected < 5
    pooled = [observed[~rare]], [expected[~rare]]
    if float(expected[rare].sum()) > 0:
        pooled[0].append(observed[rare].sum().reshape(1))
        pooled[1].append(expected[rare].sum().reshape(1))
    o, e = torch.cat(pooled[0]), torch.cat(pooled[1])
    freedom = len(o) - 1
    assert freedom >= 5
    statistic = float(((o - e) ** 2 / e.clamp_min(1e-9)).sum())
    variance = 2 / (9 * freedom)
    z = ((statistic / freedom) ** (1 / 3) - (1 - variance)) / math.sqrt(variance)
    return 0.5 * math.erfc(z / math.sqrt(2))


@pytest.mark.parametrize(
    ("sampling", "sample_proposals"),
    [(Sampling(1.0), True), (Sampling(1.0), False)],
    ids=["sampled", "delta"],
)
def test_sampled_output_has_the_law_of_the_target(sampling: Sampling, sample_proposals: bool) -> None:
    observed, rate = counts(3000, sampling, sample_proposals)
    law = exact_law(sampling)
    assert 0.02 < rate < 0.9  # both branches of the rule are walked, and the head is bad
    for table, expected in ((observed, law), (observed.sum(-1), law.sum(-1)), (observed.sum((0, 1)), law.sum((0, 1)))):
        assert chi_square_p(table, expected) > 1e-4


@pytest.mark.parametrize("sample_proposals", [True, False], ids=["sampled", "delta"])
def test_the_chi_square_sees_a_wrong_rule(sample_proposals: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def always_sampled(p: torch.Tensor, q: torch.Tensor, drafts: Sequence[int], draws: Draws) -> tuple[int, int]:
        return len(drafts), draws.pick(p[len(drafts)])

    def always_delta(p: torch.Tensor, drafts: Sequence[int], draws: Draws) -> tuple[int, int]:
        return len(drafts), draws.pick(p[len(drafts)])

    monkeypatch.setattr(eval.decoder, "accept_sampled", always_sampled)
    # Without drafts (prefill) the honest rule and this one are the same.
    monkeypatch.setattr(eval.decoder, "accept_delta", always_delta)
    observed, rate = counts(400, Sampling(1.0), sample_proposals)
    assert rate == 1
    assert chi_square_p(observed, exact_law(Sampling(1.0))) < 1e-6


def test_the_chi_square_itself() -> None:
    """Near the true quantiles: P(chi2_9 > 16.919) = 0.05, P(chi2_9 > 27.877) = 0.001."""
    law = torch.full((10,), 0.1, dtype=torch.float64)
    for statistic, p in ((16.919, 0.05), (27.877, 0.001)):
        shift = math.sqrt(statistic * 100 / 2)
        table = torch.full((10,), 100.0, dtype=torch.float64)
        table[0] += shift
        table[1] -= shift
        assert chi_square_p(table, law) == pytest.approx(p, rel=0.1)
