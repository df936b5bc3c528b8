"""The decoding loop: greedy identity for every drafter, KV commit, stops, limits, accounting, batches."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence

import pytest
import torch

import eval.decoder
from eval.acceptance import Draws
from eval.decoder import BONUS, CORRECTION, PREFILL, DecodeSettings, Generation, decode
from eval.drafters.base import Drafter
from eval.drafters.build import DrafterConfig, build_drafter, head_drafter
from eval.drafters.shape import ShapeConfig
from eval.drafters.simple import NoneDrafter, ScriptedDrafter
from eval.stopping import StopRule
from eval.tree import DraftTree
from heads.cache import TargetCache, visible_slots
from heads.eagle import EagleConfig
from heads.eagle3 import Eagle3Config
from heads.errors import UserError
from heads.medusa import MedusaConfig
from heads.peagle import PEagleConfig
from heads.registry import new_head
from heads.sampling import Sampling
from heads.target import FrozenTarget
from heads.vocab import DraftVocab
from tests.tiny import Watched, heated, library_greedy, random_prompts, tiny_model, tiny_target

VOCAB = 64
GREEDY = Sampling()
FAMILIES = ["llama", "qwen3", "gemma3", "mistral"]
BATCHES = {"llama": (0, 1, 3, 28), "qwen3": (0, 5, 28), "gemma3": (0, 1, 6, 28), "mistral": (0, 2, 28)}  # bounds of batches of the prompts
NEW = 7
SHAPES = {
    "chain": ShapeConfig(),
    "dynamic": ShapeConfig(kind="dynamic", nodes=10, beam=3),
    "static": ShapeConfig(kind="static", nodes=10, beam=3),
}
HEADS = {
    "eagle": (EagleConfig(), DraftVocab.full(VOCAB)),
    "eagle3-classic": (Eagle3Config(variant="classic", init="paper"), DraftVocab(torch.arange(0, VOCAB, 2), VOCAB)),
    "eagle3-3.1": (Eagle3Config(), DraftVocab(torch.arange(1, 60), VOCAB)),
    "medusa": (MedusaConfig(heads=3), DraftVocab.full(VOCAB)),
    "peagle": (PEagleConfig(layers=2, depths=4), DraftVocab(torch.arange(0, VOCAB, 2), VOCAB)),
}


@functools.cache
def family_target(family: str) -> FrozenTarget:
    more = {"layer_types": ["sliding_attention", "full_attention"]} if family == "gemma3" else {}
    return tiny_target(family, (0, 1, 2), layers=2, vocab=VOCAB, scale=2.0, **more)


@functools.cache
def cousin(family: str, noise: float = 0.02) -> FrozenTarget:
    """The target with a little noise on its weights: a draft model that is right now and then."""
    more = {"layer_types": ["sliding_attention", "full_attention"]} if family == "gemma3" else {}
    model = tiny_model(family, layers=2, vocab=VOCAB, scale=2.0, **more)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(noise * torch.randn(parameter.shape, generator=generator))
    return FrozenTarget(model)


@functools.cache
def reference(family: str) -> tuple[list[list[int]], list[list[int]]]:
    """28 prompts of unequal length, some longer than the window, and the library's own greedy outputs of NEW tokens."""
    prompts = random_prompts(28, VOCAB)
    for prompt in prompts[::3]:
        prompt += prompt[: max(1, len(prompt) // 2)]  # something to look up
    return prompts, [library_greedy(family_target(family), p, NEW) for p in prompts]


def changed(token: int) -> int:
    return (token + 1) % VOCAB


def sometimes_changed(token: int) -> int:
    return changed(token) if token % 3 == 0 else token


class BushDrafter(ScriptedDrafter):
    """Trees that hold the target's own continuation among wrong siblings, at shifting places; every fourth level grows below a wrong one."""  # noqa: E501

    def propose(self, counts: Sequence[int], draws: Sequence[Draws]) -> list[DraftTree]:
        trees = []
        for chain in super().propose(counts, draws):
            tokens: list[int] = []
            parents: list[int] = []
            at = 0
            for token in chain.tokens:
                turn = token + len(tokens)
                siblings = [(token + 1) % VOCAB, (token + 9) % VOCAB]
                siblings.insert(turn % 3, token)
                first = len(tokens) + 1
                tokens += siblings
                parents += [at] * 3
                at = first + (turn + (turn % 4 == 0)) % 3
            trees.append(DraftTree(tuple(tokens), tuple(parents)))
        return trees


def make(name: str, family: str, expected: Sequence[Sequence[int]]) -> Drafter:
    """A drafter by its name in DRAFTERS."""
    target = family_target(family)
    kind, _, variant = name.partition(" ")
    if kind in HEADS:
        head = heated(new_head(*order(kind, target), seed=1), seed=3)
        return head_drafter(head, target, GREEDY, False, SHAPES[variant])
    if kind in ("none", "lookup"):
        config = DrafterConfig.model_validate({"kind": kind, "match": variant or "recent"})
        return build_drafter(config, target, GREEDY, sample_proposals=False, stop_ids=frozenset())
    if name == "independent first layer":
        config = DrafterConfig(kind="independent", first_layers=1)
        return build_drafter(config, target, GREEDY, sample_proposals=False, stop_ids=frozenset())
    if kind == "independent":
        model = target if variant == "same" else cousin(family)
        config = DrafterConfig(kind="independent", first_layers=1, schedule="constant" if variant == "same" else variant)
        return build_drafter(config, target, GREEDY, sample_proposals=False, stop_ids=frozenset(), model=model)
    change = {"oracle": lambda token: token, "adversary": changed, "mixed": sometimes_changed, "bush": lambda token: token}[kind]
    return (BushDrafter if kind == "bush" else ScriptedDrafter)(kind, expected, change)


def order(kind: str, target: FrozenTarget) -> tuple[object, FrozenTarget, DraftVocab]:
    config, vocab = HEADS[kind]
    return config, target, vocab


DRAFTERS = [
    "none", "oracle", "adversary", "mixed", "bush", "lookup recent", "lookup earliest",
    "independent constant", "independent additive", "independent confidence", "independent same", "independent first layer",
    *(f"{kind} {shape}" for kind in HEADS for shape in SHAPES),
]  # fmt: skip


def run(
    target: FrozenTarget, prompts: Sequence[Sequence[int]], drafter: Drafter, *, K: int = 3, new: int = 12, **settings: object
) -> list[Generation]:
    return decode(target, prompts, drafter, DecodeSettings(K, new, **settings))  # type: ignore[arg-type]


def assert_accounts(result: Generation, K: int) -> None:
    """What every generation's records must leave true."""
    assert 1 + sum(c.emitted for c in result.cycles) == len(result.tokens) == len(result.origins)
    origins = [PREFILL]
    for number, cycle in enumerate(result.cycles):
        assert 0 <= cycle.accepted <= cycle.proposed <= min(K, cycle.nodes)
        assert 1 <= cycle.emitted <= cycle.accepted + 1
        assert cycle.emitted == cycle.accepted + 1 or number == len(result.cycles) - 1
        assert cycle.limit is None or cycle.proposed <= cycle.limit < K
        assert 0 <= cycle.forward_seconds <= cycle.draft_seconds and cycle.verify_seconds > 0 and cycle.commit_seconds > 0
        last = result.origins[len(origins) + cycle.emitted - 1]
        if cycle.emitted == cycle.accepted + 1:
            assert last in (BONUS, CORRECTION) and (last == CORRECTION or cycle.accepted <= cycle.proposed)
            assert last == BONUS or cycle.proposed  # nothing was refused where nothing was proposed
            origins += [*range(1, cycle.accepted + 1), last]
        else:
            origins += range(1, cycle.emitted + 1)
    assert result.origins == origins
    assert 0 < result.first_token_seconds <= result.seconds and result.cpu_seconds > 0


@pytest.mark.parametrize("name", DRAFTERS)
def test_greedy_output_is_the_models_own(name: str) -> None:
    """112 prompts a drafter, four architectures, batches of 1, 2, 5 and 20 odd of unequal length."""
    accepted = rejected = 0
    for family in FAMILIES:
        prompts, expected = reference(family)
        for start, end in itertools.pairwise(BATCHES[family]):
            results = run(family_target(family), prompts[start:end], make(name, family, expected[start:end]), new=NEW)
            for i, result in enumerate(results, start=start):
                assert result.tokens == expected[i], f"{name}, {family}, prompt {i} of batch {start}:{end}"
                assert result.finish == "length"
                assert_accounts(result, 3)
                accepted += sum(c.accepted for c in result.cycles)
                rejected += sum(c.accepted < c.proposed for c in result.cycles)
                if name in ("oracle", "independent same"):
                    assert all(c.accepted == c.proposed for c in result.cycles)
                    assert [c.proposed for c in result.cycles] == [3, 1]
    # The drafters are what their names say, or the comparison proved little.
    assert (accepted > 0) == (name not in ("none", "adversary"))
    assert (rejected > 0) == (name not in ("none", "oracle", "independent same"))


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_greedy_output_with_a_repetition_penalty_is_the_models_own(family: str) -> None:
    """Each node is judged with its own hypothetical prefix."""
    target = family_target(family)
    prompts = random_prompts(6, VOCAB, longest=24, seed=2)
    expected = [library_greedy(target, p, 10, repetition_penalty=1.8) for p in prompts]
    assert expected != [library_greedy(target, p, 10) for p in prompts]
    accepted: dict[str, int] = {}
    for name in ("none", "oracle", "bush", "mixed", "independent constant", "eagle3-3.1 dynamic"):
        for start, end in ((0, 1), (1, 6)):
            drafter = make(name, family, expected[start:end])
            results = run(target, prompts[start:end], drafter, new=10, sampling=Sampling(repetition_penalty=1.8))
            assert [g.tokens for g in results] == expected[start:end], name
            accepted[name] = accepted.get(name, 0) + sum(c.accepted for g in results for c in g.cycles)
    assert min(accepted[name] for name in ("oracle", "bush", "mixed")) > 10


# --- KV commit ---


@pytest.mark.parametrize("name", ["mixed", "bush", "eagle3-3.1 dynamic"])
@pytest.mark.parametrize("family", [*FAMILIES, "gemma2"])
def test_after_each_cycle_the_cache_is_that_of_the_committed_tokens(family: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target = family_target(family)
    prompts = [*random_prompts(2, VOCAB, longest=30, seed=9), [3, 1, 4, 1, 5, 9, 2, 6] * 3]
    plain = [g.tokens for g in run(target, prompts, NoneDrafter(), new=14)]
    caches: list[TargetCache] = []

    class Kept(TargetCache):
        def __init__(self) -> None:
            super().__init__()
            caches.append(self)

    monkeypatch.setattr(eval.decoder, "TargetCache", Kept)
    checks = 0

    def check(drafter: Watched) -> None:
        nonlocal checks
        cache = caches[-1]
        assert cache.lengths == [len(c) - 1 for c in drafter.committed] and cache.lines.extra == 0
        rows = len(cache.lengths)
        pending = torch.tensor([c[-1:] for c in drafter.committed])
        lengths = torch.tensor(cache.lengths)
        visible = visible_slots(lengths, torch.ones(rows, 1, 1, dtype=torch.bool), max(cache.lengths) + 1)
        again = target.forward(pending, cache=cache, position=lengths.unsqueeze(1), visible=visible, taps=False)
        cache.drop()
        for b, committed in enumerate(drafter.committed):
            held = len(committed) - 1
            own = TargetCache()
            scratch = target.forward(torch.tensor([committed]), cache=own)
            assert scratch.taps is not None and len(own.buffers) == len(cache.buffers) == 2
            for mine, theirs in zip(cache.buffers, own.buffers, strict=True):
                assert mine.tensors is not None and theirs.tensors is not None
                for kept, expected in zip(mine.tensors, theirs.tensors, strict=True):
                    assert torch.allclose(kept[b, :, :held], expected[0, :, :held], atol=1e-4)
            assert drafter.hidden[b].shape[0] == drafter.taps[b].shape[0] == held
            assert torch.allclose(drafter.hidden[b], scratch.hidden[0, :held], atol=1e-4)
            assert torch.allclose(drafter.taps[b], scratch.taps[0, :held], atol=1e-4)
            assert torch.allclose(target.logits(again.hidden[b, 0]), target.logits(scratch.hidden[0, -1]), atol=1e-4)
            checks += 1

    accepted = rejected = moved = 0
    for start, end in ((2, 3), (0, 3)):
        drafter = Watched(make(name, family, plain[start:end]), check)
        results = run(target, prompts[start:end], drafter, new=14)
        assert [g.tokens for g in results] == plain[start:end]
        cycles = [c for g in results for c in g.cycles]
        accepted += sum(c.accepted for c in cycles)
        rejected += sum(c.accepted < c.proposed for c in cycles)
        moved += sum(c.nodes > c.proposed and c.accepted > 0 for c in cycles)
    assert checks > 12 and accepted > 0 and rejected > 2
    assert moved > 3 or name != "bush"  # rows were gathered, not only cut off


# --- stops and limits ---


def test_oracle_accepts_all_and_none_accepts_nothing() -> None:
    target = family_target("llama")
    prompts = random_prompts(3, VOCAB, seed=5)
    for K in (1, 3, 5):
        new = 1 + 3 * (K + 1)
        expected = run(target, prompts, NoneDrafter(), K=K, new=new)
        oracle = run(target, prompts, ScriptedDrafter("oracle", [g.tokens for g in expected]), K=K, new=new)
        for plain, fast in zip(expected, oracle, strict=True):
            assert [(c.proposed, c.accepted, c.emitted, c.nodes) for c in plain.cycles] == [(0, 0, 1, 0)] * (new - 1)
            assert plain.origins == [PREFILL, *[BONUS] * (new - 1)]
            assert fast.tokens == plain.tokens
            assert [(c.proposed, c.accepted, c.emitted, c.limit, c.nodes) for c in fast.cycles] == [(K, K, K + 1, None, K)] * 3
            assert fast.origins == [PREFILL, *[*range(1, K + 1), BONUS] * 3]


@pytest.mark.parametrize("new", [1, 2, 3, 4, 5, 6, 7, 11])
def test_max_new_tokens_is_met_exactly(new: int) -> None:
    target = family_target("llama")
    prompts = random_prompts(2, VOCAB, seed=6)
    expected = [g.tokens for g in run(target, prompts, NoneDrafter(), new=16)]
    for name in ("oracle", "adversary", "none", "bush", "eagle3-3.1 chain", "eagle3-3.1 dynamic", "medusa static", "independent constant"):
        for result, tokens in zip(run(target, prompts, make(name, "llama", expected), new=new), expected, strict=True):
            assert result.tokens == tokens[:new] and result.finish == "length"
            assert_accounts(result, 3)
    oracle = run(target, prompts[:1], ScriptedDrafter("oracle", expected[:1]), new=new)[0].cycles
    left = new - 1
    for cycle in oracle:
        assert cycle.limit == (left - 1 if left - 1 < 3 else None) and cycle.proposed == min(3, left - 1)
        left -= cycle.emitted
    assert left == 0


def test_the_targets_context_is_the_last_limit() -> None:
    target = tiny_target(layers=2, vocab=VOCAB, max_position_embeddings=20)
    prompts = [(random_prompts(1, VOCAB, seed=7)[0] * 20)[:n] for n in (16, 9, 19)]
    plain = run(target, prompts, NoneDrafter(), new=50)
    assert [(len(g.tokens), g.finish) for g in plain] == [(4, "length"), (11, "length"), (1, "length")]
    bush = BushDrafter("bush", [g.tokens for g in plain])
    assert [g.tokens for g in run(target, prompts, bush, K=8, new=50)] == [g.tokens for g in plain]
    for wrong in (prompts[2] + [1], []):
        with pytest.raises(UserError, match=f"a prompt of {len(wrong)} tokens fills the target's context of 20"):
            run(target, [prompts[0], wrong], NoneDrafter())


def distinct_run(target: FrozenTarget, length: int) -> tuple[list[int], list[int]]:
    """A prompt whose greedy output begins with this many different tokens."""
    prompts = random_prompts(80, VOCAB, seed=8)
    for prompt, result in zip(prompts, run(target, prompts, NoneDrafter(), new=length), strict=True):
        if len(set(result.tokens)) == length:
            return prompt, result.tokens
    raise AssertionError("no prompt gives an output without repetition; the tiny target is too dull for this test")


def test_a_stop_inside_an_accepted_draft_ends_the_output_there() -> None:
    target = family_target("qwen3")
    prompt, tokens = distinct_run(target, 10)
    for at in range(10):
        stop = StopRule(frozenset({tokens[at]}))
        (plain,) = run(target, [prompt], NoneDrafter(), new=10, stop=stop)
        (fast,) = run(target, [prompt], ScriptedDrafter("oracle", [tokens]), K=4, new=10, stop=stop)
        (bush,) = run(target, [prompt], BushDrafter("bush", [tokens]), K=4, new=10, stop=stop)
        assert fast.tokens == plain.tokens == bush.tokens == tokens[: at + 1] == library_greedy(target, prompt, 10, list(stop.ids))
        assert fast.finish == plain.finish == bush.finish == "stop"
        assert_accounts(fast, 4)
        assert_accounts(bush, 4)
        if at == 0:
            assert not fast.cycles
        else:
            # Prefill gives token 0; full cycles give five each; the stop cuts what the rule had taken.
            assert len(fast.cycles) == (at - 1) // 5 + 1
            assert fast.cycles[-1].emitted == (at - 1) % 5 + 1
            assert fast.cycles[-1].accepted == fast.cycles[-1].proposed


@pytest.mark.parametrize("name", ["mixed", "bush", "eagle3-3.1 static"])
def test_the_listener_hears_every_token_once_and_in_order(name: str) -> None:
    target = family_target("llama")
    prompts, expected = random_prompts(4, VOCAB, seed=4), []
    expected = [g.tokens for g in run(target, prompts, NoneDrafter(), new=13)]
    heard: dict[int, list[list[int]]] = {}
    origins: dict[int, list[int]] = {}

    def listen(number: int, tokens: list[int], where: list[int]) -> None:
        assert len(tokens) == len(where) > 0
        heard.setdefault(number, []).append(tokens)
        origins[number] = origins.get(number, []) + where

    stop = StopRule(frozenset({expected[1][6]}))  # sequences end at different times, and the batch shrinks
    results = decode(target, prompts, make(name, "llama", expected), DecodeSettings(3, 13, stop), listener=listen)
    assert len({len(g.tokens) for g in results}) > 1
    for number, result in enumerate(results):
        assert [t for tokens in heard[number] for t in tokens] == result.tokens
        assert origins[number] == result.origins
        assert [len(tokens) for tokens in heard[number]] == [1, *(c.emitted for c in result.cycles)]
        assert_accounts(result, 3)
