"""Continuous generation: every answer is what its prompt alone would give, whatever shares the batch, and the batch stays full."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from data.generation import Answer, Request, generate
from data.regenerate import RegenerateConfig
from heads.target import FrozenTarget
from tests.tiny import tiny_model

PROMPTS = [[5, 9, 30], [7] * 11, [40, 41, 42, 43, 44, 45, 46], [100, 3], list(range(50, 80))]
KEYS = [(f"c{i}", 0) for i in range(len(PROMPTS))]
Key = tuple[str, int]


@pytest.fixture(scope="module")
def target() -> FrozenTarget:
    return FrozenTarget(tiny_model(vocab=259, scale=2.0))


def answers(
    target: FrozenTarget,
    prompts: Sequence[list[int]],
    config: RegenerateConfig,
    *,
    keys: Sequence[Key] = KEYS,
    stops: frozenset[int] = frozenset({2}),
    max_length: int = 400,
    keep_states: bool = False,
) -> dict[Key, Answer]:
    queue = deque(Request(key, list(prompt)) for key, prompt in zip(keys, prompts))
    found = {a.request.key: a for a in generate(target, queue, stops, config, max_length, keep_states)}
    assert not queue and len(found) == len(prompts)
    for key, prompt in zip(keys, prompts):
        assert found[key].request.prompt == list(prompt)
    return found


def ids(found: dict[Key, Answer]) -> dict[Key, list[int]]:
    return {key: answer.ids for key, answer in found.items()}


def one_by_one(target: FrozenTarget, prompts: Sequence[list[int]], config: RegenerateConfig, **more: Any) -> dict[Key, list[int]]:
    keys = more.pop("keys", KEYS)
    single = config.model_copy(update={"batch_size": 1})
    found: dict[Key, list[int]] = {}
    for key, prompt in zip(keys, prompts):
        found |= ids(answers(target, [prompt], single, keys=[key], **more))
    return found


def many(count: int, seed: int = 0) -> tuple[list[list[int]], list[Key]]:
    rng = random.Random(seed)
    prompts = [[rng.randrange(3, 259) for _ in range(rng.randint(1, 30))] for _ in range(count)]
    return prompts, [(f"m{i}", 0) for i in range(count)]


@pytest.mark.parametrize("size", [1, 2, 8])
@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral"])
def test_greedy_answers_equal_the_librarys(family: str, size: int) -> None:
    model = tiny_model(family, vocab=259, scale=2.0)
    expected = {}
    for key, prompt in zip(KEYS, PROMPTS):
        row = torch.tensor([prompt])
        whole = model.generate(row, attention_mask=torch.ones_like(row), max_new_tokens=12, do_sample=False, eos_token_id=2)
        expected[key] = whole[0, len(prompt) :].tolist()
    assert ids(answers(FrozenTarget(model), PROMPTS, RegenerateConfig(max_new_tokens=12, batch_size=size))) == expected


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_stop_ids_end_an_answer_and_leave_the_others_alone(target: FrozenTarget, temperature: float) -> None:
    config = RegenerateConfig(max_new_tokens=20, temperature=temperature)
    free = ids(answers(target, PROMPTS, config, stops=frozenset()))
    assert all(len(answer) == 20 for answer in free.values())
    stops = frozenset({free["c1", 0][3], free["c3", 0][8]})
    ended = ids(answers(target, PROMPTS, config, stops=stops))
    for key, before in free.items():
        first = next((i for i, token in enumerate(before) if token in stops), len(before) - 1)
        assert ended[key] == before[: first + 1]
    assert len({len(answer) for answer in ended.values()}) > 1


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_neither_batch_size_nor_order_matters(target: FrozenTarget, temperature: float) -> None:
    """Twenty-one prompts over batches that are refilled line by line (3), in lots (16: two idle lines wait for a third) and never (64)."""
    prompts, keys = many(21)
    config = RegenerateConfig(temperature=temperature, top_p=0.95, max_new_tokens=24)
    stops = frozenset(range(2, 14))  # answers of all lengths
    expected = one_by_one(target, prompts, config, keys=keys, stops=stops)
    assert len({len(a) for a in expected.values()}) > (8 if temperature else 2)
    for size in (3, 16, 64):
        sized = config.model_copy(update={"batch_size": size})
        assert ids(answers(target, prompts, sized, keys=keys, stops=stops)) == expected
        shuffled = random.Random(size).sample(range(21), 21)
        turned = answers(target, [prompts[i] for i in shuffled], sized, keys=[keys[i] for i in shuffled], stops=stops)
        assert ids(turned) == expected


def test_streams_are_told_apart_by_conversation_turn_and_seed(target: FrozenTarget) -> None:
    config = RegenerateConfig(temperature=1.0, max_new_tokens=24)
    other = config.model_copy(update={"seed": 1})
    variants = [
        (config, ("c0", 0)),
        (config, ("c9", 0)),
        (config, ("c0", 1)),
        (other, ("c0", 0)),
    ]
    found = [tuple(one_by_one(target, PROMPTS[:1], c, keys=[key])[key]) for c, key in variants]
    assert len(set(found)) == 4
    assert tuple(one_by_one(target, PROMPTS[:1], config, keys=[("c0", 0)])["c0", 0]) == found[0]


def test_sampled_tokens_follow_the_law(target: FrozenTarget) -> None:
    """First tokens of many streams against the warped distribution, by their total variation."""
    config = RegenerateConfig(temperature=0.8, top_p=0.6, max_new_tokens=1, batch_size=256)
    count = 3000
    found = answers(target, [PROMPTS[0]] * count, config, keys=[(f"s{i}", 0) for i in range(count)])
    p = torch.softmax(target.logits(target.forward(torch.tensor([PROMPTS[0]])).hidden)[0, -1].double() / 0.8, dim=-1)
    ordered, index = p.sort(descending=True)
    kept = index[(ordered.cumsum(0) - ordered) < 0.6]
    law = torch.zeros_like(p)
    law[kept] = p[kept] / p[kept].sum()
    counts = torch.zeros(259, dtype=torch.float64)
    for answer in found.values():
        counts[answer.ids[0]] += 1
    assert not counts[law == 0].any()
    chi = ((counts - count * law)[kept] ** 2 / (count * law[kept])).sum()
    degrees = len(kept) - 1
    assert len(kept) > 5 and chi < degrees + 5 * (2 * degrees) ** 0.5


@pytest.mark.parametrize("size", [1, 3, 16])
def test_the_queue_may_grow_while_answers_are_taken(target: FrozenTarget, size: int) -> None:
    """Second and third turns, put first in the queue as regeneration does; among them one that comes when the queue has run dry."""
    config = RegenerateConfig(temperature=1.0, max_new_tokens=9, batch_size=size)
    prompts, keys = many(7, seed=3)
    queue = deque(Request(key, prompt) for key, prompt in zip(keys, prompts))
    found: dict[Key, tuple[list[int], list[int]]] = {}
    for answer in generate(target, queue, frozenset(range(2, 30)), config, 400):
        name, turn = answer.request.key
        found[name, turn] = (answer.request.prompt, answer.ids)
        if turn < 2:
            queue.appendleft(Request((name, turn + 1), [*answer.request.prompt, *answer.ids, 60 + turn, 61]))
    assert set(found) == {(name, turn) for name, _ in keys for turn in range(3)}
    for key, (prompt, answer_ids) in found.items():
        assert one_by_one(target, [prompt], config, keys=[key], stops=frozenset(range(2, 30)))[key] == answer_ids


def test_nothing_longer_than_the_context(target: FrozenTarget) -> None:
    prompts = PROMPTS[:4]
    found = answers(target, prompts, RegenerateConfig(max_new_tokens=50, batch_size=3), keys=KEYS[:4], stops=frozenset(), max_length=13)
    assert [len(p) + len(found[k].ids) for k, p in zip(KEYS, prompts)] == [13] * 4
    short = answers(target, prompts, RegenerateConfig(max_new_tokens=2), keys=KEYS[:4], stops=frozenset(), max_length=13)
    assert [len(found.ids) for found in short.values()] == [2] * 4


@pytest.mark.parametrize("size", [1, 3, 16])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_kept_states_are_those_of_the_finished_text(family: str, size: int) -> None:
    target = FrozenTarget(tiny_model(family, vocab=259, scale=2.0))
    prompts, keys = many(18, seed=5)
    config = RegenerateConfig(temperature=1.0, max_new_tokens=20, batch_size=size)
    found = answers(target, prompts, config, keys=keys, stops=frozenset(range(2, 20)), keep_states=True)
    for key, prompt in zip(keys, prompts):
        answer = found[key]
        text = prompt + answer.ids
        whole = target.forward(torch.tensor([text]))
        assert answer.taps is not None and answer.hidden is not None and whole.taps is not None
        assert answer.taps.shape == (len(text) - 1, 3 * 32) and answer.hidden.shape == (len(text) - 1, 32)
        torch.testing.assert_close(answer.taps, whole.taps[0, :-1], atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(answer.hidden, whole.hidden[0, :-1], atol=1e-4, rtol=1e-4)
    plain = answers(target, prompts[:3], config, keys=keys[:3])
    assert all(a.taps is None and a.hidden is None for a in plain.values())


class Widths:
    """Rows and columns of every forward of a target."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, target: FrozenTarget) -> None:
        self.seen: list[tuple[int, int]] = []
        original = target.forward

        def forward(rows: torch.Tensor, **more: Any) -> Any:
            self.seen.append((rows.shape[0], rows.shape[1]))
            return original(rows, **more)

        monkeypatch.setattr(target, "forward", forward)


def test_a_line_that_ends_makes_room_for_the_next_prompt(target: FrozenTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    """One answer of 60 tokens beside five of 12: as many steps as the long one takes. In fixed batches of two: 59 + 11 + 11."""
    widths = Widths(monkeypatch, target)
    prompts = [[9] * 10] + [[8] * 58] * 5  # limits by max_length
    found = answers(
        target,
        prompts,
        RegenerateConfig(max_new_tokens=70, batch_size=2),
        keys=[(f"l{i}", 0) for i in range(6)],
        stops=frozenset(),
        max_length=70,
    )
    assert sorted(len(a.ids) for a in found.values()) == [12] * 5 + [60]
    steps = [rows for rows, columns in widths.seen if columns == 1]
    assert len(steps) == 59
    assert all(rows <= 2 for rows, _ in widths.seen) and sum(rows == 2 for rows in steps) >= 55
    assert len(widths.seen) - len(steps) == 5  # the first two prompts were read together


def test_the_batch_shrinks_when_nobody_waits(target: FrozenTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    widths = Widths(monkeypatch, target)
    prompts = [[9] * 10] + [[8] * 40] * 7
    answers(
        target,
        prompts,
        RegenerateConfig(max_new_tokens=70, batch_size=8),
        keys=[(f"l{i}", 0) for i in range(8)],
        stops=frozenset(),
        max_length=50,
    )
    assert [rows for rows, _ in widths.seen] == [8] * 10 + [1] * 30


def test_an_empty_queue() -> None:
    nobody: Any = None
    assert list(generate(nobody, deque(), frozenset({2}), RegenerateConfig(), 10)) == []
