"""Prompts x drafter -> records, and the divergence finder."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

import eval.decoder
from data.prompts import Conversation
from data.template import ChatTemplate
from eval.acceptance import Verdict
from eval.drafters.base import Committed
from eval.drafters.build import head_drafter
from eval.drafters.shape import ShapeConfig
from eval.drafters.simple import NoneDrafter
from eval.harness import EvaluateConfig, choose, evaluate, first_departure, first_divergence, spread
from eval.records import PromptRecord
from eval.tree import DraftTree
from heads.errors import UserError
from heads.sampling import Sampling
from heads.target import FrozenTarget
from tests.tiny import tiny_head, tiny_target, tiny_tokenizer

CONFIG = EvaluateConfig(draft_length=3, max_new_tokens=10)


@pytest.fixture(scope="module")
def target() -> FrozenTarget:
    return tiny_target(layers=3, vocab=259, scale=2.0)


@pytest.fixture(scope="module")
def template() -> ChatTemplate:
    return ChatTemplate(tiny_tokenizer())


def talk(*turns: str, category: str = "chat", source: str = "made-up:1") -> Conversation:
    return Conversation.make(turns=turns, category=category, source=source)


class Listener(NoneDrafter):
    """Proposes tokens that are seldom right; keeps the prompt (but its first id) and the output of every decode."""

    name = "listener"

    def __init__(self) -> None:
        super().__init__()
        self.heard: list[list[int]] = []

    def start(self, prompts: Sequence[Sequence[int]]) -> None:
        self.heard.append([])

    def observe(self, committed: Committed) -> None:
        self.heard[-1] += committed.tokens[0]

    def propose(self, counts: Sequence[int], draws: object) -> list[DraftTree]:
        return [DraftTree.chain((7, 8, 9)[:count]) for count in counts]


def assert_accounts(record: PromptRecord) -> None:
    assert record.output_tokens == 1 + sum(c.emitted for c in record.cycles)
    assert record.speculative_seconds > 0


def test_two_turns_give_two_records(target: FrozenTarget, template: ChatTemplate) -> None:
    drafter = head_drafter(tiny_head(target), target, Sampling(), False, ShapeConfig())
    conversations = [talk("Hi", "And then?"), talk("One turn", category="other")]
    records = evaluate(target, template, drafter, conversations, CONFIG, progress=False)
    assert [(r.prompt_id, r.category, r.turn) for r in records] == [
        (conversations[0].id, "chat", 0),
        (conversations[0].id, "chat", 1),
        (conversations[1].id, "other", 0),
    ]
    for record in records:
        assert_accounts(record)
        assert record.divergence is None
        assert record.plain_tokens == record.output_tokens <= 10
        assert record.plain_seconds > 0
        assert record.finish == ("length" if record.output_tokens == 10 else "stop")


def test_the_second_turn_follows_the_speculative_answer(target: FrozenTarget, template: ChatTemplate) -> None:
    listener = Listener()
    first, second = evaluate(target, template, listener, [talk("Hi", "And then?")], CONFIG, baseline=False, progress=False)
    opening = template.encode(template.render([{"role": "user", "content": "Hi"}]))
    assert len(listener.heard) == 2 and first.prompt_tokens == len(opening)
    assert listener.heard[0][: len(opening) - 1] == opening[1:]
    answer = listener.heard[0][len(opening) - 1 :][: first.output_tokens]
    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": template.answer_text(answer)},
        {"role": "user", "content": "And then?"},
    ]
    rendered = template.render([{"role": "user", "content": "Hi"}])
    expected, _, _ = template.continue_ids([*opening, *answer], rendered, answer, messages)
    assert second.prompt_tokens == len(expected) > len(opening)
    assert listener.heard[1][: len(expected) - 1] == expected[1:]
    assert "And then?" in template.decode(expected)


def test_without_a_baseline_its_fields_are_zero(target: FrozenTarget, template: ChatTemplate) -> None:
    (record,) = evaluate(target, template, Listener(), [talk("Hi")], CONFIG, baseline=False, progress=False)
    assert_accounts(record)
    assert (record.plain_tokens, record.plain_seconds, record.plain_cpu_seconds, record.divergence) == (0, 0.0, 0.0, None)


@pytest.mark.parametrize("plain", [None, 0])
def test_a_wrong_rule_shows_as_divergence(
    target: FrozenTarget, template: ChatTemplate, monkeypatch: pytest.MonkeyPatch, plain: int | None
) -> None:
    monkeypatch.setattr(
        eval.decoder, "accept_compared", lambda tree, choose: Verdict(tuple(range(1, tree.size)), choose(tree.size - 1, []), False)
    )
    config = CONFIG.model_copy(update={"plain_prompts": plain})
    (record,) = evaluate(target, template, Listener(), [talk("Hi")], config, progress=False)
    assert record.checked and bool(record.plain_tokens) == (plain is None)
    # Token 0 comes from prefill; the first draft, 7, is the first that can be wrong.
    assert record.divergence is not None and record.divergence.position == 1
    assert record.divergence.got == 7 != record.divergence.expected and record.divergence.gap > 0


def test_some_prompts_are_timed_and_all_are_checked(target: FrozenTarget, template: ChatTemplate) -> None:
    prompts = [talk(f"Number {i}") for i in range(6)]
    records = evaluate(target, template, Listener(), prompts, CONFIG.model_copy(update={"plain_prompts": 2}), progress=False)
    assert [bool(r.plain_tokens) for r in records] == [False, True, False, False, True, False]
    assert all(r.checked and r.divergence is None for r in records)


def test_spread_takes_even_distances() -> None:
    assert spread(5, None) == spread(5, 9) == frozenset(range(5))
    assert spread(10, 0) == frozenset() and spread(9, 3) == frozenset({1, 4, 7})


def test_sampled_outputs_are_not_compared(target: FrozenTarget, template: ChatTemplate) -> None:
    config = EvaluateConfig(draft_length=3, max_new_tokens=10, temperature=1.0)
    (record,) = evaluate(target, template, Listener(), [talk("Hi")], config, progress=False)
    assert record.divergence is None and record.plain_tokens > 0


def test_too_long_a_prompt_is_named_before_anything_is_decoded(target: FrozenTarget, template: ChatTemplate) -> None:
    listener = Listener()
    with pytest.raises(UserError, match=r"prompts\.jsonl:12 is \d+ tokens long.*context.* 512"):
        evaluate(target, template, listener, [talk("Hi"), talk("x" * 600, source="prompts.jsonl:12")], CONFIG, progress=False)
    assert not listener.heard


@pytest.mark.parametrize(
    ("expected", "got", "found"),
    [
        ([5, 6, 7], [5, 9, 7], (1, 6, 9)),
        ([5, 6, 7], [4, 6, 7], (0, 5, 4)),
        ([5, 6], [5, 6, 7], (2, -1, 7)),
        ([5, 6, 7], [5, 6], (2, 7, -1)),
    ],
)
def test_first_divergence(target: FrozenTarget, expected: list[int], got: list[int], found: tuple[int, int, int]) -> None:
    prompt = [10, 11, 12]
    divergence = first_divergence(target, prompt, expected, got)
    assert divergence is not None
    assert (divergence.position, divergence.expected, divergence.got) == found
    prefix = torch.tensor([prompt + expected[: found[0]]])
    ordered = target.model(input_ids=prefix, use_cache=False).logits[0, -1].sort(descending=True).values
    assert divergence.gap == pytest.approx(float(ordered[0] - ordered[1]), abs=1e-4)


def test_first_departure_agrees_with_decoding_step_by_step(target: FrozenTarget) -> None:
    prompt, output = [10, 11, 12], [5]
    for _ in range(6):
        logits = target.model(input_ids=torch.tensor([prompt + output]), use_cache=False).logits[0, -1]
        output.append(int(logits.argmax()))
    first = int(target.model(input_ids=torch.tensor([prompt]), use_cache=False).logits[0, -1].argmax())
    departed = first_departure(target, prompt, output)
    if first == 5:
        assert departed is None
    else:
        assert departed is not None and (departed.position, departed.expected, departed.got) == (0, first, 5)
    assert first_departure(target, [*prompt, 5], output[1:]) is None
    wrong = [*output[1:4], (output[4] + 1) % 259, *output[5:]]
    departed = first_departure(target, [*prompt, 5], wrong)
    assert departed is not None and (departed.position, departed.expected) == (3, output[4]) and departed.gap > 0


def test_equal_outputs_do_not_diverge(target: FrozenTarget) -> None:
    assert first_divergence(target, [10, 11], [5, 6], (5, 6)) is None


def test_choose_takes_the_first_of_each_category() -> None:
    rows = [talk(str(i), category="ab"[i % 2]) for i in range(6)]
    assert choose(rows, None) == rows
    assert choose(rows, 2) == rows[:4]
    assert choose([rows[0], rows[2], rows[1], rows[4]], 1) == [rows[0], rows[1]]
