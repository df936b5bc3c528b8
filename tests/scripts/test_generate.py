"""What scripts.generate shows: text in whole characters, colours by origin; wrong options are refused."""

from __future__ import annotations

import io
import random

import pytest
from rich.console import Console

import scripts.bench_decode
import scripts.generate
from data.template import ChatTemplate
from eval.decoder import BONUS, CORRECTION, PREFILL
from heads.errors import UserError
from scripts.generate import Streamer, TokenText, legend, style_of
from tests.tiny import tiny_tokenizer

TEXTS = ["plain words", "naïve café", "東京タワー", "🙂🙃 and 👩‍👩‍👧", "", " leading", "tab\tand\nline"]


@pytest.mark.parametrize("text", TEXTS)
def test_pieces_are_the_text_and_end_at_whole_characters(text: str) -> None:
    template = ChatTemplate(tiny_tokenizer())
    ids = template.encode(text)
    shown = TokenText(template.decode)
    pieces = [shown.push(i) for i in ids]
    assert "".join(pieces) == template.decode(ids) == text
    assert all("\N{REPLACEMENT CHARACTER}" not in piece for piece in pieces)


def test_bytes_that_are_no_text_do_not_hold_the_stream_up() -> None:
    template = ChatTemplate(tiny_tokenizer())
    lead = next(i for i in range(len(template.tokenizer)) if template.decode([i]) == "\N{REPLACEMENT CHARACTER}")
    shown = TokenText(template.decode)
    pieces = [shown.push(i) for i in [lead] * 20 + template.encode("on")]
    assert "".join(pieces).endswith("on")


def test_every_origin_has_a_colour_of_its_own() -> None:
    styles = [style_of(origin) for origin in (PREFILL, BONUS, CORRECTION, 1, 2, 3, 4, 5, 6)]
    assert len(set(styles)) == len(styles) and style_of(6) == style_of(60)


@pytest.mark.parametrize("colour", [True, False])
def test_drafts_are_marked_with_and_without_colours(colour: bool) -> None:
    template = ChatTemplate(tiny_tokenizer())
    out = io.StringIO()
    console = Console(file=out, force_terminal=colour, color_system="truecolor" if colour else None, soft_wrap=True, highlight=False)
    streamer = Streamer(console, template, show_drafts=True)
    ids = template.encode("abcd")
    assert len(ids) == 4
    streamer(0, ids[:1], [PREFILL])
    streamer(0, ids[1:], [1, 2, BONUS])
    if colour:
        assert out.getvalue().count("\x1b[") >= 8  # each of four tokens is coloured and reset
    else:
        assert out.getvalue() == "a⟦b⟧⟦c⟧d"
        assert "FORCE_COLOR" in legend(console).plain
    assert streamer.seconds > 0


def test_without_show_drafts_the_answer_alone_is_printed() -> None:
    template = ChatTemplate(tiny_tokenizer())
    out = io.StringIO()
    streamer = Streamer(Console(file=out, force_terminal=False, soft_wrap=True, highlight=False), template, show_drafts=False)
    text = "".join(random.Random(0).choices("ab [bold]c\n", k=60))
    ids = [*template.encode(text), next(iter(template.stop_ids))]
    streamer(0, ids, [1] * len(ids))
    assert out.getvalue() == text


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["tests/toy.yaml", "--prompt", " "], "--prompt is empty"),
        (["tests/toy.yaml", "--prompt", "x", "--drafter", "telepathy"], "telepathy"),
        (["tests/toy.yaml", "--prompt", "x", "--drafter", "cross"], "give drafter.model"),
        (["nowhere.yaml", "--prompt", "x"], "nowhere.yaml"),
        (["tests/toy.yaml", "--prompt", "x", "evaluate.draft_length=0"], "evaluate.draft_length"),
    ],
)
def test_wrong_options_are_refused_before_anything_is_loaded(argv: list[str], words: str) -> None:
    with pytest.raises(UserError, match=words):
        scripts.generate.main(argv)


def test_wrong_options_of_the_bench() -> None:
    with pytest.raises(UserError, match="--repeats is 0"):
        scripts.bench_decode.main(["tests/toy.yaml", "--repeats", "0"])
