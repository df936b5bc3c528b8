"""Speed of the decoder beside transformers' own: plain, prompt lookup, a draft of the target's first layers, and the recipe's trained head.

python -m scripts.bench_decode recipes/smollm2-135m-eagle3-quick.yaml
python -m scripts.bench_decode recipes/smollm2-135m-eagle3-quick.yaml --repeats 5 --markdown docs/bench_decode.md

All methods decode the same prompts greedily, one at a time, in one process. They take turns in a new order each repeat, so that drift of
the machine's speed falls on all of them; of each prompt and method the median counts. transformers runs a model of its own, loaded
from the same files and left as the library makes it: no hooks, no packed layers.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from data.bundled import resolve_target
from data.prompts import Conversation, load_prompts
from data.template import ChatTemplate, check_fit, opening
from eval.decoder import DecodeSettings, decode
from eval.drafters.base import Drafter
from eval.drafters.build import first_layers, head_drafter, shortened
from eval.drafters.independent import IndependentDrafter
from eval.drafters.lookup import LookupDrafter
from eval.drafters.simple import NoneDrafter
from eval.harness import spread
from eval.records import Cycle, acceptance_length
from eval.statistics import overhead_share
from eval.stopping import StopRule
from heads.errors import UserError
from heads.files import write_atomically
from heads.sampling import Sampling
from heads.target import FrozenTarget, load_model
from scripts.cli import recipe_arguments, run
from scripts.pipeline import device, open_for_decoding
from train.provenance import command_line, machine_class, versions
from train.recipe import Recipe, load_recipe

COPYING = (
    "Here is a note. Correct its only spelling mistake and give it back otherwise unchanged.\n\n"
    "The harbour committee met on Tuesday to discuss the new landing stage. The engineer explained that the old piles had been "
    "weakened by shipworm and that the deck would have to be raised by forty centimetres. The treasurer asked for a second estimate. "
    "The commitee agreed to meet again in three weeks, when both estimates and the tide tables would be at hand."
)
"""The task whose answer is mostly text of the prompt: what prompt lookup is for."""

PAIRS = (
    ("plain", "transformers plain", 1.0),
    ("lookup", "transformers lookup", 1.15),
    ("first layers", "transformers first layers", 1.15),
)
"""Ours, theirs, and the least ratio of tokens/s that we hold ourselves to."""

Method = Callable[[list[int]], "Run"]


@dataclass(frozen=True)
class Run:
    """One prompt decoded once."""

    tokens: list[int]
    seconds: float
    cpu_seconds: float
    cycles: tuple[Cycle, ...] = ()
    """Ours only."""


@dataclass
class Results:
    """runs[method][prompt] are the repeats of it."""

    runs: dict[str, list[list[Run]]] = field(default_factory=dict)

    def speed(self, method: str, prompts: Sequence[int]) -> float:
        """Tokens/s over the prompts, of each the median time."""
        chosen = [self.runs[method][p] for p in prompts]
        return sum(len(r[0].tokens) for r in chosen) / sum(statistics.median(x.seconds for x in r) for r in chosen)

    def cpu(self, method: str, prompts: Sequence[int]) -> float:
        """CPU milliseconds a token."""
        chosen = [self.runs[method][p] for p in prompts]
        return 1e3 * sum(statistics.median(x.cpu_seconds for x in r) for r in chosen) / sum(len(r[0].tokens) for r in chosen)

    def cycles(self, method: str, prompts: Sequence[int]) -> list[Cycle]:
        return [c for p in prompts for r in self.runs[method][p] for c in r.cycles]


def ours(target: FrozenTarget, drafter: Drafter, settings: DecodeSettings) -> Method:
    """A method of this decoder."""

    def method(prompt: list[int]) -> Run:
        result = decode(target, [prompt], drafter, settings)[0]
        return Run(result.tokens, result.seconds, result.cpu_seconds, tuple(result.cycles))

    return method


def theirs(model: Any, template: ChatTemplate, new: int, **options: Any) -> Method:
    """A method of transformers' ``generate``."""

    @torch.no_grad()
    def method(prompt: list[int]) -> Run:
        ids = torch.tensor([prompt], device=model.device)
        began, cpu = time.perf_counter(), time.process_time()
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new,
            do_sample=False,
            temperature=None,
            top_p=None,
            top_k=None,
            repetition_penalty=1.0,
            eos_token_id=sorted(template.stop_ids),
            pad_token_id=min(template.stop_ids),
            **options,
        )
        return Run(output[0, len(prompt) :].tolist(), time.perf_counter() - began, time.process_time() - cpu)

    return method


def methods_of(
    recipe: Recipe, target: FrozenTarget, library: Any, template: ChatTemplate, head: Any, layers: int, ngram: int
) -> tuple[dict[str, Method], dict[str, str]]:
    """All methods by name, and a few words about each. ``library`` is the target's model once more, untouched, for transformers."""
    K, new = recipe.evaluate.draft_length, recipe.evaluate.max_new_tokens
    settings = DecodeSettings(K, new, StopRule(template.stop_ids))
    draft = first_layers(target, layers)
    assistant = shortened(library, layers)
    assistant.generation_config = constant = copy.deepcopy(library.generation_config)
    # What generate calls a constant draft length, without its own early stop.
    constant.num_assistant_tokens, constant.num_assistant_tokens_schedule, constant.assistant_confidence_threshold = K, "constant", 0.0
    lookup = LookupDrafter(ngram, "recent", template.stop_ids)
    methods = {
        "plain": ours(target, NoneDrafter(), settings),
        "transformers plain": theirs(library, template, new),
        "lookup": ours(target, lookup, settings),
        "transformers lookup": theirs(library, template, new, prompt_lookup_num_tokens=K, max_matching_ngram_size=ngram),
        "first layers": ours(target, IndependentDrafter(draft, target, Sampling()), settings),
        "transformers first layers": theirs(library, template, new, assistant_model=assistant),
    }
    about = {
        "lookup": f"n-grams of at most {ngram}",
        "first layers": f"the target's first {layers} of {target.num_layers} layers, its norm and LM head",
    }
    if head is not None:
        methods["head"] = ours(target, head_drafter(head, target, Sampling(), False, recipe.evaluate.drafter.shape), settings)
        about["head"] = f"{recipe.name}, {recipe.evaluate.drafter.shape.kind}"
    return methods, about


def measure(methods: Mapping[str, Method], prompts: Sequence[list[int]], repeats: int) -> Results:
    """Every method on every prompt, ``repeats`` times, in turn."""
    results = Results({name: [[] for _ in prompts] for name in methods})
    names = list(methods)
    for method in methods.values():
        method(prompts[0][:32])
    with tqdm(total=len(names) * len(prompts) * repeats, unit="run", desc="decoding") as bar:
        for repeat in range(repeats):
            for p, prompt in enumerate(prompts):
                turn = (repeat + p) % len(names)
                for name in names[turn:] + names[:turn]:
                    results.runs[name][p].append(methods[name](prompt))
                    bar.update(1)
    return results


def table(results: Results, groups: Mapping[str, Sequence[int]], about: Mapping[str, str]) -> list[str]:
    """Markdown rows: a method a row, a task a group of columns."""
    titles = [f"{name}: tokens/s | x plain | acceptance | CPU ms/token" for name in groups]
    lines = ["| method | " + " | ".join(titles) + " | overhead |", "|---|" + "---:|" * (4 * len(groups) + 1)]
    everything = [p for prompts in groups.values() for p in prompts]
    for method in results.runs:
        cells = []
        for prompts in groups.values():
            cycles = results.cycles(method, prompts)
            speed, plain = results.speed(method, prompts), results.speed("plain", prompts)
            length = f"{acceptance_length(cycles):.2f}" if cycles else ""
            cells += [f"{speed:.2f}", f"{speed / plain:.2f}", length, f"{results.cpu(method, prompts):.0f}"]
        overhead = overhead_share(results.cycles(method, everything))
        label = f"{method} ({about[method]})" if method in about else method
        lines.append(f"| {label} | {' | '.join(cells)} | {'' if overhead is None else f'{overhead:.1%}'} |")
    return lines


def verdicts(results: Results, groups: Mapping[str, Sequence[int]]) -> list[str]:
    """What is asked of these figures, and whether they hold."""
    lines = []
    for name, prompts in groups.items():
        for mine, other, least in PAIRS:
            ratio = results.speed(mine, prompts) / results.speed(other, prompts)
            lines.append(f"* {name}: {mine} is {ratio:.2f} x {other} (asked: {least:.2f}; {'holds' if ratio >= least else 'MISSED'}).")
    expected = [r[0].tokens for r in results.runs["plain"]]
    for method, runs in results.runs.items():
        differing = [p for p, r in enumerate(runs) if any(x.tokens != expected[p] for x in r)]
        if differing:
            lines.append(f"* {method}: the output differs from plain decoding's on prompts {differing} of {len(expected)}.")
    if all(x.tokens == e for runs in results.runs.values() for r, e in zip(runs, expected, strict=True) for x in r):
        lines.append(f"* All {len(results.runs)} methods gave the same output on all {len(expected)} prompts.")
    return lines


def why_slower(results: Results, method: str, prompts: Sequence[int]) -> str:
    """What a drafter's cycle costs here in plain steps, hence the acceptance length at which it breaks even."""
    cycles, steps = results.cycles(method, prompts), results.cycles("plain", prompts)

    def mean(of: Sequence[Cycle], part: str) -> float:
        return sum(getattr(c, part) for c in of) / len(of)

    plain = sum(mean(steps, part) for part in ("draft_seconds", "verify_seconds", "commit_seconds"))
    verify, draft = mean(cycles, "verify_seconds") / plain, mean(cycles, "draft_seconds") / plain
    cost, has = verify + draft + mean(cycles, "commit_seconds") / plain, acceptance_length(cycles)
    outcome = "faster than" if has > cost else "slower than"
    return (
        f"* {method}: verifying {mean(cycles, 'nodes') + 1:.1f} tokens costs {verify:.2f} plain steps and drafting {draft:.2f}, so it "
        f"breaks even at an acceptance length of {cost:.2f}; it has {has:.2f}, and is {outcome} plain decoding on this machine."
    )


def main(argv: list[str]) -> None:
    """Run the command."""
    path, overrides, options = recipe_arguments(argv, "Time this decoder beside transformers' own.", _add_options)
    recipe = load_recipe(path, [f"evaluate.max_new_tokens={options.new_tokens}", *overrides])
    for name in ("repeats", "prompts", "layers", "ngram"):
        if getattr(options, name) < 1:
            raise UserError(f"--{name} is {getattr(options, name)}; give 1 or more")
    if options.markdown and not options.markdown.parent.is_dir():
        raise UserError(f"--markdown is {options.markdown}, and there is no directory {options.markdown.parent}; make it first")
    on = device()
    opened = open_for_decoding(recipe, on, not options.no_head)
    template, target, head = opened.template, opened.target, opened.head
    if opened.adapter is not None:
        raise UserError("this head was trained with an adapter on the target, which transformers would not decode with; give --no-head")
    held_out = load_prompts(recipe.evaluate.prompts)
    chosen = [held_out[i] for i in sorted(spread(len(held_out), options.prompts))]
    conversations = [*chosen, Conversation.make(turns=[COPYING], source="the copying task")]
    check_fit(conversations, template, target.max_length)
    prompts = [template.encode(template.render(opening(c))) for c in conversations]
    library = load_model(recipe.target, resolve_target(recipe.target.name), on)
    methods, about = methods_of(recipe, target, library, template, head, options.layers, options.ngram)
    results = measure(methods, prompts, options.repeats)
    groups = {"held-out": range(len(chosen)), "copying": range(len(chosen), len(prompts))}
    everything = range(len(prompts))
    speculative = [m for m in ("lookup", "first layers", "head") if m in methods]
    lines = [
        f"{recipe.target.name}, {target.dtype}, greedy, batch 1, draft length {recipe.evaluate.draft_length}, {options.new_tokens} new "
        f"tokens; {len(chosen)} held-out prompts and one copying task; medians of {options.repeats} interleaved repeats.",
        "",
        *table(results, groups, about),
        "",
        *verdicts(results, groups),
        *[why_slower(results, m, everything) for m in speculative],
    ]
    text = "\n".join(lines)
    print(text)
    if options.markdown:
        write_atomically(options.markdown, f"# Decoding speed\n\n{_made_by(argv)}\n\n{text}\n")


def _made_by(argv: Sequence[str]) -> str:
    """Command, date, machine and versions."""
    command = command_line(["python", "-m", "scripts.bench_decode", *argv])
    machine, packages = machine_class(), versions()["packages"]
    where = ", ".join([f"{machine['cores']} cores of {machine['cpu']}", *machine["gpus"], f"{machine['memory_gib']} GiB memory"])
    return f"`{command}`, {date.today().isoformat()}, {where}, torch {packages['torch']}, transformers {packages['transformers']}."


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--repeats", type=int, default=3, help="times each method decodes each prompt (default 3)")
    parser.add_argument("--prompts", type=int, default=4, help="held-out prompts, spread over the set (default 4)")
    parser.add_argument("--new-tokens", type=int, default=64, help="longest answer (default 64)")
    parser.add_argument("--layers", type=int, default=10, help="decoder layers of the independent draft (default 10)")
    parser.add_argument("--ngram", type=int, default=3, help="longest n-gram that lookup matches (default 3)")
    parser.add_argument("--no-head", action="store_true", help="leave the recipe's trained head out")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="also write the result there")


if __name__ == "__main__":
    run(main)
