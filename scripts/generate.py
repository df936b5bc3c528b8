"""Answer one prompt with a drafter, streaming: a person sees speculation work.

python -m scripts.generate recipes/smollm2-135m-eagle3-quick.yaml --prompt "What is a tide?" --show-drafts
python -m scripts.generate recipes/smollm2-135m-eagle3-quick.yaml --prompt - --drafter head lookup evaluate.temperature=0.7 < question.txt
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from data.prompts import Conversation
from data.template import ChatTemplate, check_fit, opening
from eval.acceptance import RandomDraws
from eval.decoder import BONUS, CORRECTION, PREFILL, Generation, decode
from eval.drafters.simple import NoneDrafter
from eval.harness import first_divergence, warm_up
from eval.records import acceptance_length
from heads.errors import UserError
from heads.target import FrozenTarget
from scripts.cli import add_drafter_option, drafter_override, recipe_arguments, run
from scripts.pipeline import about_drafter, device, open_drafter, open_for_decoding
from train.recipe import load_recipe

DEPTH_STYLES = ("green4", "green3", "spring_green2", "chartreuse3", "yellow3", "gold1")
"""Of tokens accepted at depth 1, 2, ...; deeper ones share the last."""
ORIGIN_STYLES = {PREFILL: "bright_black", BONUS: "dodger_blue1", CORRECTION: "red1"}


class TokenText:
    """The text of a growing list of tokens, in pieces that end at whole characters."""

    def __init__(self, decode_ids: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode_ids
        self._known: list[int] = []
        """Tokens already shown that the next ones are decoded behind: some tokenizers treat the first token of a text differently."""
        self._waiting: list[int] = []

    def push(self, token: int) -> str:
        """The text that a token adds; "" while a character is incomplete."""
        self._waiting.append(token)
        before, text = self._decode(self._known), self._decode(self._known + self._waiting)
        if text.endswith("\N{REPLACEMENT CHARACTER}") and len(self._waiting) < 8:
            return ""
        self._known, self._waiting = self._waiting, []
        return text[len(before) :]


class Streamer:
    """Prints tokens as they come, coloured by origin where asked to. Counts the seconds that takes, so that speeds can leave them out."""

    def __init__(self, console: Console, template: ChatTemplate, show_drafts: bool) -> None:
        self._console, self._show, self._stops = console, show_drafts, template.stop_ids
        self._text = TokenText(template.decode)
        self.seconds = 0.0

    def __call__(self, _: int, tokens: list[int], origins: list[int]) -> None:
        began = time.perf_counter()
        for token, origin in zip(tokens, origins, strict=True):
            piece = "" if token in self._stops and not self._show else self._text.push(token)
            if not piece:
                continue
            if self._show and self._console.color_system is None and origin > 0:
                piece = f"⟦{piece}⟧"
            self._console.print(Text(piece, style_of(origin) if self._show else ""), end="")
        self._console.file.flush()
        self.seconds += time.perf_counter() - began


def style_of(origin: int) -> str:
    """The colour of a token by where it came from."""
    return DEPTH_STYLES[min(origin, len(DEPTH_STYLES)) - 1] if origin > 0 else ORIGIN_STYLES[origin]


def legend(console: Console) -> Text:
    """What the colours mean."""
    if console.color_system is None:
        return Text("accepted drafts stand in ⟦ ⟧, one pair a token (no colours on this output; FORCE_COLOR=1 turns them on)")
    line = Text("accepted at depth ")
    for depth, style in enumerate(DEPTH_STYLES, start=1):
        line.append(f"{depth}{'+' if depth == len(DEPTH_STYLES) else ''} ", style)
    for name, origin in (("bonus", BONUS), ("correction", CORRECTION), ("prefill", PREFILL)):
        line.append(f"· {name} ", style_of(origin))
    return line


def main(argv: list[str]) -> None:
    """Run the command."""
    path, overrides, options = recipe_arguments(argv, "Answer one prompt, streaming, with one or several drafters.", _add_options)
    names = [item for item in options.drafter or [] if "=" not in item] or [None]
    overrides += [item for item in options.drafter or [] if "=" in item]  # an override behind --drafter NAME
    recipes = [load_recipe(path, overrides + drafter_override(name)) for name in names]
    prompt = sys.stdin.read() if options.prompt == "-" else options.prompt
    if not prompt.strip():
        raise UserError("--prompt is empty; give the user's message, or - to read it from standard input")
    on, config = device(), recipes[0].evaluate
    opened = open_for_decoding(recipes[0], on, any(r.evaluate.drafter.kind == "head" for r in recipes))
    template, target, head = opened.template, opened.target, opened.head
    if opened.adapter is not None:
        opened.adapter.merge()
    conversation = Conversation.make(turns=[prompt], system=config.prompts.system, source="--prompt")
    check_fit([conversation], template, target.max_length)
    ids = template.encode(template.render(opening(conversation)))
    drafters = [open_drafter(r, target, template, on, head if r.evaluate.drafter.kind == "head" else None) for r in recipes]

    console = Console(highlight=False, soft_wrap=True)
    settings = config.settings(template)
    if options.show_drafts:
        console.print(legend(console))
    results = []
    for drafter, _ in drafters:
        warm_up(target, ids, drafter, settings)
        console.rule(Text(drafter.name))
        streamer = Streamer(console, template, options.show_drafts)
        result = decode(target, [ids], drafter, settings, [RandomDraws(config.seed)], streamer)[0]
        console.print()
        results.append((drafter.name, result, result.seconds - streamer.seconds))
    warm_up(target, ids, NoneDrafter(), settings)
    plain = decode(target, [ids], NoneDrafter(), settings, [RandomDraws(config.seed)])[0]
    console.print(table(results, plain))
    for drafter, about in drafters:
        console.print(Text(about_drafter(drafter, about)))
    if config.sampling.greedy and config.lossless:
        for name, result, _ in results:
            console.print(lossless_sentence(target, ids, name, result, plain))
    if opened.adapter is not None:
        console.print("The target is the adapted one (Medusa-2), plain decoding too: NOT lossless to the original.")
    if not config.lossless:
        console.print("Typical acceptance: NOT lossless, the output has another law than the target's.")


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--prompt", required=True, metavar="TEXT", help="the user's message; - reads it from standard input")
    add_drafter_option(parser, several=True)
    parser.add_argument("--show-drafts", action="store_true", help="colour each token by where it came from")


def table(results: Sequence[tuple[str, Generation, float]], plain: Generation) -> Table:
    """Acceptance length and speed of each drafter, beside plain decoding."""
    shown = Table("drafter", box=None, pad_edge=False)
    for column in ("tokens", "cycles", "acceptance length", "tokens/s", "x plain"):
        shown.add_column(column, justify="right")
    base = len(plain.tokens) / plain.seconds
    for name, result, seconds in results:
        length = f"{acceptance_length(result.cycles):.2f}" if result.cycles else "-"
        speed = len(result.tokens) / seconds
        shown.add_row(name, str(len(result.tokens)), str(len(result.cycles)), length, f"{speed:.2f}", f"{speed / base:.2f}")
    shown.add_row("plain decoding", str(len(plain.tokens)), str(len(plain.cycles)), "1.00", f"{base:.2f}", "1.00")
    return shown


def lossless_sentence(target: FrozenTarget, prompt: list[int], name: str, result: Generation, plain: Generation) -> str:
    """Whether greedy output is the target's own."""
    divergence = first_divergence(target, prompt, plain.tokens, result.tokens)
    if divergence is None:
        return f"{name}: the output is the target's own, token for token."
    tie = " (a tie within rounding)" if divergence.gap < 1e-3 else ""
    return (
        f"{name}: the output leaves the target's own at token {divergence.position}, its two best logits {divergence.gap:.2g} apart{tie}."
    )


if __name__ == "__main__":
    run(main)
