"""Whole sampled outputs have the target's law with every drafter (chi-square); trees of branch 1 are chains; batches; bad input."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import pytest
import torch
from pydantic import ValidationError

import eval.acceptance
from eval.acceptance import RandomDraws
from eval.decoder import DecodeSettings, Generation, decode
from eval.drafters.base import Drafter
from eval.drafters.build import DrafterConfig, build_drafter, check_draft, first_layers, head_drafter
from eval.drafters.independent import IndependentDrafter, check_vocabularies
from eval.drafters.shape import ShapeConfig
from eval.drafters.simple import NoneDrafter
from eval.harness import EvaluateConfig
from eval.tree import DraftTree
from heads.eagle import EagleConfig
from heads.eagle3 import Eagle3Config
from heads.errors import UserError
from heads.medusa import MedusaConfig
from heads.peagle import PEagleConfig
from heads.registry import new_head
from heads.sampling import Sampling
from heads.target import FrozenTarget
from heads.vocab import DraftVocab
from tests.laws import chi_square, joint, laws
from tests.tiny import Watched, heated, random_prompts, tiny_model, tiny_target

VOCAB = 9
PROMPT = [3, 1, 4, 1, 5, 3, 1, 4]
GREEDY, WARM, CUT = Sampling(), Sampling(1.0), Sampling(0.8, top_p=0.85, top_k=6)
SHAPES = {
    "chain": ShapeConfig(),
    "dynamic": ShapeConfig(kind="dynamic", nodes=5, beam=2),
    "static": ShapeConfig(kind="static", nodes=5, beam=3),
}
PRUNED = DraftVocab(torch.tensor([0, 2, 3, 5, 8]), VOCAB)
HEADS = {
    "eagle": (EagleConfig(), DraftVocab.full(VOCAB)),
    "eagle3": (Eagle3Config(), PRUNED),
    "medusa": (MedusaConfig(heads=3), DraftVocab.full(VOCAB)),
    "peagle": (PEagleConfig(layers=1, depths=3), PRUNED),
}


@functools.cache
def target() -> FrozenTarget:
    return tiny_target("llama", (0, 1, 2), layers=2, vocab=VOCAB, scale=2.0)


@functools.cache
def stranger() -> FrozenTarget:
    """A draft model that has nothing to do with the target: q far from p."""
    return FrozenTarget(tiny_model("llama", layers=1, vocab=VOCAB, scale=3.0, seed=11))


def make(name: str, sampling: Sampling, sampled: bool) -> Drafter:
    kind, _, variant = name.partition(" ")
    if kind in HEADS:
        config, vocab = HEADS[kind]
        return head_drafter(heated(new_head(config, target(), vocab, seed=1), seed=3), target(), sampling, sampled, SHAPES[variant])
    if kind == "independent":
        fields = {"first_layers": 1} if variant == "first layer" else {"schedule": variant, "threshold": 0.3}
        config = DrafterConfig.model_validate({"kind": kind, **fields})
        model = None if variant == "first layer" else stranger()
        return build_drafter(config, target(), sampling, sample_proposals=sampled, stop_ids=frozenset(), model=model)
    config = DrafterConfig.model_validate({"kind": kind})
    return build_drafter(config, target(), sampling, sample_proposals=sampled, stop_ids=frozenset())


DRAFTERS = [
    "lookup", "independent constant", "independent additive", "independent confidence", "independent first layer",
    *(f"{kind} {shape}" for kind in HEADS for shape in SHAPES),
]  # fmt: skip


# --- the law of whole outputs ---


@functools.cache
def law(sampling: Sampling, prompt: tuple[int, ...] = tuple(PROMPT)) -> torch.Tensor:
    """[V, V, V] float64: probability of the first three tokens."""
    with torch.no_grad():
        return joint(laws(target(), prompt, sampling))


def run(prompts: Sequence[Sequence[int]], drafter: Drafter, seeds: Sequence[int], **settings: object) -> list[Generation]:
    return decode(target(), prompts, drafter, DecodeSettings(2, 4, **settings), [RandomDraws(s) for s in seeds])  # type: ignore[arg-type]


def counted(results: Sequence[Generation]) -> torch.Tensor:
    table = torch.zeros(VOCAB, VOCAB, VOCAB, dtype=torch.float64)
    for result in results:
        table[tuple(result.tokens[:3])] += 1
    return table


def least_p(observed: torch.Tensor, expected: torch.Tensor) -> float:
    """Of the joint law, the second and third tokens together, and the third alone: what drafts and corrections make."""
    views = ((), (0,), (0, 1))
    found = [chi_square(observed.sum(d) if d else observed, expected.sum(d) if d else expected) for d in views]
    enough = [p for p, freedom in found if freedom >= 3 or p == 0]  # few decodes leave some views too few cells
    assert enough
    return min(enough)


@pytest.mark.parametrize(("sampling", "sampled"), [(WARM, True), (WARM, False), (CUT, True)], ids=["sampled", "most likely", "top-p"])
@pytest.mark.parametrize("name", DRAFTERS)
def test_sampled_output_has_the_law_of_the_target(name: str, sampling: Sampling, sampled: bool) -> None:
    drafter = make(name, sampling, sampled)
    results = [g for first in range(0, 1500, 500) for g in run([PROMPT] * 500, drafter, range(first, first + 500), sampling=sampling)]
    cycles = [c for g in results for c in g.cycles]
    assert sum(c.accepted for c in cycles) > 0 and sum(c.accepted < c.proposed for c in cycles) > 0
    assert least_p(counted(results), law(sampling)) > 1e-4


@pytest.mark.parametrize("name", ["lookup", "independent constant", "eagle3 static", "medusa dynamic"])
def test_alone_and_in_threes_the_law_is_the_same(name: str) -> None:
    drafter = make(name, WARM, True)
    alone = [g for seed in range(250) for g in run([PROMPT], drafter, [seed], sampling=WARM)]
    assert least_p(counted(alone), law(WARM)) > 1e-4
    prompts = [PROMPT, [7], [2, 2, 8, 0, 6]]
    batches = [run(prompts, drafter, range(3 * i, 3 * i + 3), sampling=WARM) for i in range(200)]
    for prompt, results in zip(prompts, zip(*batches, strict=True), strict=True):
        assert least_p(counted(results), law(WARM, tuple(prompt))) > 1e-4


@pytest.mark.parametrize("name", ["independent constant", "eagle3 static"])
def test_the_chi_square_sees_a_rule_that_accepts_everything(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eval.acceptance.RandomDraws, "accept", lambda self, p, q: True)
    assert least_p(counted(run([PROMPT] * 500, make(name, WARM, True), range(500), sampling=WARM)), law(WARM)) < 1e-6


@pytest.mark.parametrize("sampling", [GREEDY, WARM], ids=["greedy", "sampled"])
def test_the_oracle_is_accepted_whole(sampling: Sampling) -> None:
    cycles = [c for g in run(random_prompts(20, VOCAB), make("oracle", sampling, True), range(20), sampling=sampling) for c in g.cycles]
    assert cycles and all(c.accepted == c.proposed == min(2, 2 if c.limit is None else c.limit) for c in cycles)


def test_typical_acceptance_is_not_lossless() -> None:
    drafter = make("medusa dynamic", WARM, False)
    results = run([PROMPT] * 1500, drafter, range(1500), sampling=WARM, typical=True)
    assert least_p(counted(results), law(WARM)) < 1e-6


# --- shapes ---


@pytest.mark.parametrize("shape", ["dynamic", "static"])
@pytest.mark.parametrize("kind", HEADS)
def test_a_tree_of_branch_one_is_the_chain(kind: str, shape: str) -> None:
    config, vocab = HEADS[kind]
    head = heated(new_head(config, target(), vocab, seed=1), seed=3)
    proposals, outputs = {}, {}
    prompts = random_prompts(3, VOCAB)
    for name, form in (("chain", ShapeConfig()), (shape, ShapeConfig(kind=shape, nodes=3, beam=1))):  # type: ignore[arg-type]
        watched = Watched(head_drafter(head, target(), GREEDY, False, form))
        outputs[name] = [g.tokens for g in decode(target(), prompts, watched, DecodeSettings(3, 12))]
        proposals[name] = [(tree.tokens, tree.parents) for trees in watched.proposals for tree in trees]
    assert outputs["chain"] == outputs[shape]
    assert proposals["chain"] == proposals[shape] and len(proposals["chain"]) > 5


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_a_sure_head_keeps_parents_with_their_children(kind: str) -> None:
    """The tie case of the dynamic tree: children of probability 1 score as high as their parents."""
    config, vocab = HEADS[kind]
    head = heated(new_head(config, target(), vocab, seed=1), seed=3)
    logits = head.draft_logits
    head.draft_logits = lambda output, of: logits(output, of) * 1e4
    prompts = random_prompts(4, VOCAB)
    plain = [g.tokens for g in decode(target(), prompts, NoneDrafter(), DecodeSettings(4, 12))]
    drafter = Watched(head_drafter(head, target(), GREEDY, False, ShapeConfig(kind="dynamic", nodes=6, beam=3)))
    assert [g.tokens for g in decode(target(), prompts, drafter, DecodeSettings(4, 12))] == plain
    seen = [tree for trees in drafter.proposals for tree in trees]
    assert seen and all(parent < node for tree in seen for node, parent in enumerate(tree.parents, start=1))
    # The sure path comes first of all, to its full depth.
    assert max(max(t.depths) for t in seen) == 4


@pytest.mark.parametrize("name", [f"{kind} {shape}" for kind in HEADS for shape in SHAPES])
def test_a_batch_drafts_what_its_sequences_draft_alone(name: str) -> None:
    prompts = random_prompts(3, VOCAB, seed=5)

    def first_proposal(group: list[list[int]]) -> list[DraftTree]:
        watched = Watched(make(name, GREEDY, False))
        decode(target(), group, watched, DecodeSettings(3, 5))
        return watched.proposals[0]

    for tree, prompt in zip(first_proposal(prompts), prompts, strict=True):
        alone = first_proposal([prompt])[0]
        assert (tree.tokens, tree.parents) == (alone.tokens, alone.parents)


# --- bad input ---


def test_drafts_beyond_what_a_head_was_trained_for() -> None:
    for kind, key in (("medusa", "head.heads"), ("peagle", "head.depths")):
        config, vocab = HEADS[kind]
        with pytest.raises(UserError, match=f"draft_length is 4.*trained for 3 tokens .{key}"):
            check_draft(ShapeConfig(), 4, target(), new_head(config, target(), vocab, seed=0))
        check_draft(ShapeConfig(), 3, target(), new_head(config, target(), vocab, seed=0))


def test_a_draft_larger_than_the_context() -> None:
    room = target().max_length
    with pytest.raises(UserError, match=f"{room} tokens does not fit the context of {room}"):
        check_draft(ShapeConfig(kind="dynamic", nodes=room), 4, target())


def test_another_vocabulary_points_to_cross() -> None:
    with pytest.raises(UserError, match="cross") as caught:
        check_vocabularies({"a": 0, "b": 1, "c": 2}, {"b": 0, "a": 1}, "draft")
    assert "3" in str(caught.value) and "2" in str(caught.value)


@pytest.mark.parametrize("count", [0, 2, 7])
def test_first_layers_out_of_range(count: int) -> None:
    with pytest.raises(UserError, match=f"first_layers is {count}; the target has 2 layers"):
        first_layers(target(), count)


def test_a_prompt_that_fills_the_context() -> None:
    with pytest.raises(UserError, match="fills the target's context"):
        decode(target(), [[1] * target().max_length], NoneDrafter(), DecodeSettings(2, 4))


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"kind": "cross"}, "give drafter.model"),
        ({"kind": "independent", "model": {"name": "x"}, "first_layers": 2}, "one or the other"),
        ("telepathy", "independent"),
    ],
)
def test_configs_that_cannot_work(config: object, words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        DrafterConfig.model_validate(config)


def test_a_draft_length_of_zero() -> None:
    with pytest.raises(ValidationError, match="draft_length"):
        EvaluateConfig(draft_length=0)


def test_independent_without_a_model_takes_a_third_of_the_layers() -> None:
    big = tiny_target("llama", layers=6, vocab=VOCAB)
    drafter = build_drafter(DrafterConfig(kind="independent"), big, GREEDY, sample_proposals=False, stop_ids=frozenset())
    assert isinstance(drafter, IndependentDrafter) and drafter.model.num_layers == 2
