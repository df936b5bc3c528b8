"""Where outputs end: stop ids and stop strings, against looking at the whole text after each token."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Sequence

import pytest

from eval.decoder import DecodeSettings, Generation, decode
from eval.drafters.base import Drafter
from eval.drafters.simple import NoneDrafter, ScriptedDrafter
from eval.stopping import StopRule
from heads.target import FrozenTarget
from tests.tiny import random_prompts, tiny_target, tiny_tokenizer

PIECES = [b"a", b"ab", b"b", b"\xc3", b"\xa9", "é".encode(), b"\xe2\x82", b"\xac", b"\n", b" ", b"\xf0\x9f", b"\x98\x80", b"<|im_end|>"]
STRINGS = [("aé",), ("€",), ("ba", "aba"), ("\n\n",), ("😀a",), ("é€",), ("aab",), ("<|im",), ("b a", "é")]


def text_of(tokens: Sequence[int]) -> str:
    """Tokens are bytes, whole characters or parts of them."""
    return b"".join(PIECES[t] for t in tokens).decode("utf-8", errors="replace")


def plain_end(tokens: Sequence[int], rule: StopRule) -> int | None:
    """Tokens until the first that is a stop id or after which the whole text holds a stop string; None where there is none."""
    assert rule.decode is not None
    for count in range(1, len(tokens) + 1):
        text = rule.decode(tokens[:count])
        if tokens[count - 1] in rule.ids or any(s in text for s in rule.strings):
            return count
    return None


@pytest.mark.parametrize("strings", STRINGS, ids=repr)
def test_tokens_come_in_any_portions(strings: tuple[str, ...]) -> None:
    rng = random.Random(repr(strings))
    ended = went_on = 0
    for _ in range(60):
        tokens = [rng.randrange(len(PIECES)) for _ in range(40)]
        rule = StopRule(frozenset({12}) if rng.random() < 0.3 else frozenset(), strings, text_of)
        expected = plain_end(tokens, rule)
        out: list[int] = []
        end = False
        while len(out) < len(tokens) and not end:
            portion = tokens[len(out) : len(out) + rng.randint(1, 7)]
            assert rule.ends(out) is False
            count, end = rule.emitted(out, portion)
            assert count == len(portion) or end
            out += portion[:count]
        assert (len(out) if end else None) == expected
        assert rule.ends(out) == end
        ended += end
        went_on += not end
    assert ended > 5


def test_a_string_that_spans_many_tokens_and_one_inside_a_token() -> None:
    rule = StopRule(strings=("é" * 20,), decode=text_of)
    tokens = [0, 2, *[3, 4] * 20, 0]
    assert rule.emitted([], tokens) == (42, True)
    assert rule.emitted(tokens[:41], tokens[41:]) == (1, True)
    assert rule.emitted([], tokens[:41]) == (41, False)
    inside = StopRule(strings=("im",), decode=text_of)
    assert inside.emitted([0, 0], [1, 12, 0]) == (2, True)


def test_half_a_character_ends_nothing() -> None:
    rule = StopRule(strings=("é",), decode=text_of)
    assert rule.emitted([], [0, 3]) == (2, False)
    assert rule.emitted([0, 3], [4, 0]) == (1, True)
    assert rule.emitted([0, 3], [0, 4]) == (2, False)


def test_stop_ids_alone() -> None:
    rule = StopRule(frozenset({5, 7}))
    assert rule.emitted([5], [1, 2, 3]) == (3, False)  # what came before is not looked at again
    assert rule.emitted([], [1, 7, 5]) == (2, True)
    assert rule.emitted([1], []) == (0, False)
    assert rule.ends([5]) and not rule.ends([5, 1]) and not rule.ends([]) and not StopRule().ends([5])


def test_strings_need_a_decoder() -> None:
    with pytest.raises(AssertionError):
        StopRule(strings=("x",))


# --- in the decoder ---

VOCAB, NEW = 64, 14


@functools.cache
def target() -> FrozenTarget:
    return tiny_target("qwen3", layers=2, vocab=VOCAB, scale=2.0)


def run(prompts: Sequence[Sequence[int]], drafter: Drafter, stop: StopRule, new: int = NEW) -> list[Generation]:
    return decode(target(), prompts, drafter, DecodeSettings(4, new, stop))


@functools.cache
def lively() -> tuple[list[list[int]], list[list[int]]]:
    """Prompts of unequal length and their greedy outputs; several of which hardly repeat themselves."""
    prompts = random_prompts(60, VOCAB, seed=8)
    outputs = [g.tokens for g in run(prompts, NoneDrafter(), StopRule())]
    best = sorted(range(60), key=lambda i: -len(set(outputs[i])))[:5]
    assert min(len(set(outputs[i])) for i in best) >= 6, "the tiny target is too dull for this test"
    return [prompts[i] for i in best], [outputs[i] for i in best]


def spelled(tokens: Sequence[int], text: str) -> Callable[[Sequence[int]], str]:
    """A decoder in which these tokens spell the text, byte by byte from its start; other tokens are dots."""
    pieces: dict[int, bytes] = {}
    letters = iter(text.encode())
    for token in tokens:
        if token not in pieces:
            letter = next(letters, None)
            pieces[token] = b"." if letter is None else bytes([letter])
    return lambda ids: b"".join(pieces.get(i, b".") for i in ids).decode("utf-8", errors="replace")


@pytest.mark.parametrize("strings", [("é",), ("aé",), ("€x", "a."), ("é€",), ("never",)], ids=repr)
def test_a_stop_string_in_an_accepted_draft_ends_the_output_there(strings: tuple[str, ...]) -> None:
    prompts, outputs = lively()
    ends = set()
    for prompt, tokens in zip(prompts, outputs, strict=True):
        for text in ("aé€x", "é€x", "xyaé"):
            rule = StopRule(strings=strings, decode=spelled(tokens, text))
            expected = plain_end(tokens, rule)
            # The oracle's drafts go on beyond the stop: plain decoding's end is not known to it.
            for drafter in (NoneDrafter(), ScriptedDrafter("oracle", [tokens])):
                (result,) = run([prompt], drafter, rule)
                assert result.tokens == tokens[: expected or NEW]
                assert result.finish == ("stop" if expected else "length")
                assert 1 + sum(c.emitted for c in result.cycles) == len(result.tokens) == len(result.origins)
            ends.add(expected)
    assert len(ends - {None}) >= (0 if strings == ("never",) else 2)


def test_stops_in_a_batch_end_each_sequence_alone() -> None:
    prompts, outputs = lively()
    letters = [chr(97 + i % 26) for i in range(VOCAB)]
    rule = StopRule(
        frozenset({outputs[0][7]}), (letters[outputs[1][4]] + letters[outputs[1][5]],), lambda ids: "".join(letters[i] for i in ids)
    )
    ends = [plain_end(o, rule) for o in outputs]
    assert len(set(ends)) > 2
    for drafter in (
        NoneDrafter(),
        ScriptedDrafter("oracle", outputs),
        ScriptedDrafter("mixed", outputs, lambda t: (t + (t % 3 == 0)) % VOCAB),
    ):
        results = run(prompts, drafter, rule)
        assert [g.tokens for g in results] == [o[:end] for o, end in zip(outputs, ends, strict=True)]
        assert [g.finish for g in results] == ["stop" if end else "length" for end in ends]


def test_the_prompt_ends_nothing() -> None:
    """A stop string that the prompt holds, or that begins in it, is not the output's."""
    prompts, outputs = lively()
    letters = [chr(0x4E00 + i) for i in range(VOCAB)]  # each token a character of its own
    prompt, tokens = prompts[0], outputs[0]
    for string in (letters[prompt[0]] if prompt[0] not in tokens else "none", letters[prompt[-1]] + letters[tokens[0]]):
        rule = StopRule(strings=(string,), decode=lambda ids: "".join(letters[i] for i in ids))
        (result,) = run([prompt], ScriptedDrafter("oracle", [tokens]), rule)
        assert len(result.tokens) == (plain_end(tokens, rule) or NEW)


def test_with_a_tokenizer() -> None:
    """Bytes of the tiny tokenizer: the string ends in the middle of an accepted draft."""
    tokenizer = tiny_tokenizer()
    for text, string in (("so – gut", "– g"), ("naïve 😀 end", "😀"), ("a\n\nb", "\n\n")):
        ids = tokenizer(text)["input_ids"]
        rule = StopRule(strings=(string,), decode=tokenizer.decode)
        count, ended = rule.emitted([], ids)
        assert ended and count == len(text[: text.index(string) + len(string)].encode())
