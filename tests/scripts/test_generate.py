"""What scripts.generate shows: text in whole characters, colours by origin; wrong options are refused."""

from __future__ import annotations

import io
import random
from pathlib import Path

import pytest
from rich.console import Console
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import scripts.bench_decode
import scripts.generate
from data.template import ChatTemplate
from eval.decoder import BONUS, CORRECTION, PREFILL
from heads.errors import UserError
from scripts.generate import Streamer, TokenText, legend, style_of
from tests.tiny import save_tiny_target, tiny_tokenizer

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
    with pytest.raises(UserError, match="there is no directory nowhere"):
        scripts.bench_decode.main(["tests/toy.yaml", "--markdown", "nowhere/bench.md"])


def test_a_draft_model_with_another_tokenizer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """scripts.generate --drafter cross with two model directories: says which method it took and why, output is the target's own."""
    target = save_tiny_target(tmp_path / "target")
    draft = save_tiny_target(tmp_path / "draft", layers=2, seed=1)
    # The same bytes in another order, and merges that the target has not.
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet(), reverse=True)
    vocabulary = {token: i for i, token in enumerate(["<|end|>", *alphabet, "th", "the"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[("t", "h"), ("th", "e")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>").save_pretrained(draft)
    text = (Path(__file__).parents[1] / "toy.yaml").read_text().replace("TARGET", str(target))
    (tmp_path / "toy.yaml").write_text(text)
    recipe = [str(tmp_path / "toy.yaml"), "--prompt", "the three", "evaluate.max_new_tokens=12"]
    scripts.generate.main([*recipe, "--drafter", "cross", "oracle", f"evaluate.drafter.model={draft}"])
    printed = capsys.readouterr().out
    assert "has the best estimated acceptance" in printed
    assert printed.count("the output is the target's own, token for token") == 2
    with pytest.raises(UserError, match="cross"):
        scripts.generate.main([*recipe, "--drafter", "independent", f"evaluate.drafter.model={draft}"])
