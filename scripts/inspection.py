"""What scripts.prepare shows of a corpus: the doctor's table, and documents with the loss mask in colour."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from data.corpus import Document, TokenCorpus
from data.coverage import coverage_curve, draw_coverage, half_counts, sizes_for
from data.doctor import as_rows, check_template, examine, first_difference, pieces
from data.features import FeatureStore
from data.prompts import Conversation
from data.template import ChatTemplate, opening
from eval.harness import spread
from heads.errors import UserError
from heads.files import write_atomically
from heads.target import FrozenTarget
from train.recipe import Recipe

STYLES = {"prompt": "bright_black", "answer": "green3", "end": "bold magenta"}
MARKS = {"prompt": "{}", "answer": "⟦{}⟧", "end": "⟪{}⟫"}


def check_serving(recipe: Recipe, template: ChatTemplate, conversations: Sequence[Conversation]) -> None:
    """Raises UserError where the target will be served prompts that look otherwise than those it answers here.

    Another thinking mode, generation prompt or system message halves acceptance without any error (PITFALLS).
    """
    serve = recipe.serve
    variables = template.variables if serve.template_variables is None else serve.template_variables
    served = ChatTemplate(template.tokenizer, sorted(template.stop_ids), variables)
    for conversation in conversations[:50]:
        messages = opening(conversation)
        theirs = messages if serve.system is None else [{"role": "system", "content": serve.system}, messages[-1]]
        difference = first_difference(template.render(messages), served.render(theirs))
        if difference is not None:
            raise UserError(
                f"the prompt at {conversation.source} would be served as another text, {difference}; "
                "make chat.template_variables and prompts.system what serve: says, or mend serve:"
            )


def examine_corpus(corpus: TokenCorpus, template: ChatTemplate, max_length: int) -> str:
    """Print the doctor's table and write doctor.json; returns a line for the summary.

    Raises:
        UserError: there are hard faults, so that the corpus must not be trained on.
    """
    findings, total = examine(corpus.documents(), template.stop_ids, max_length)
    about = check_template(template)
    write_atomically(
        corpus.directory / "doctor.json",
        json.dumps({"documents": total, "findings": as_rows(findings, total), "template": vars(about)}, indent=1),
    )
    if findings:
        table = Table("finding", box=None, pad_edge=False)
        table.add_column("rows", justify="right")
        table.add_column("share", justify="right")
        table.add_column("first rows")
        table.add_column("what it means")
        for f in findings:
            name = Text(f.name, "bold red1" if f.hard else "")
            table.add_row(name, f"{f.count:,}", f"{f.count / max(total, 1):.1%}", ", ".join(map(str, f.rows)), f.means)
        Console(highlight=False).print(table)
    hard = [f for f in findings if f.hard]
    if hard:
        raise UserError(
            f"{hard[0].name} in {hard[0].count:,} of {total:,} documents of {corpus.directory} (documents {hard[0].rows}): {hard[0].means}"
        )
    opens = f"answers open with {about.generation_prompt!r}" if about.generation_prompt else "the template opens no answer"
    stable = "" if about.prefix_stable else "; the template rewrites earlier turns, so each turn is a document of its own"
    return f"all {total:,} documents examined, no hard fault; {opens}, system messages are {about.system}{stable}\n"


def show_documents(documents: Sequence[Document], template: ChatTemplate, count: int) -> None:
    """Print ``count`` documents from all over the corpus: prompt, what the target wrote (it carries loss), its end of turn."""
    console = Console(highlight=False, soft_wrap=True)
    coloured = console.color_system is not None
    console.print(
        Text("prompt ", STYLES["prompt"]) + Text("answer ", STYLES["answer"]) + Text("end of turn", STYLES["end"])
        if coloured
        else Text("answers, which carry loss, stand in ⟦ ⟧, their end of turn in ⟪ ⟫ (FORCE_COLOR=1 turns colours on)")
    )
    for number in sorted(spread(len(documents), count)):
        document = documents[number]
        finish = ", ".join(document.finish)
        console.rule(Text(f"document {number}, {document.category}, {len(document.ids)} tokens, ended by {finish}"))
        for kind, text in pieces(document, template):
            console.print(Text(text if coloured else MARKS[kind].format(text), STYLES[kind] if coloured else ""), end="")
        console.print()


def show_coverage(
    corpus: TokenCorpus, template: ChatTemplate, target: FrozenTarget, chosen: int, features: FeatureStore | None = None
) -> None:
    """Print what draft vocabularies of several sizes cover, and draw it as coverage.svg in the corpus's directory.

    Args:
        chosen: the recipe's size.
        features: kept states of the corpus, for the target's own probability.
    """
    halves = half_counts(corpus.documents(), target.vocab_size)
    hidden = sampled_states(corpus, features) if features is not None else None
    sizes = sizes_for(target.vocab_size, chosen)
    points = coverage_curve(halves, sizes, template.stop_ids, target.hidden_size, hidden, target)
    table = Table("draft vocabulary", box=None, pad_edge=False)
    for column in ("of this corpus", "of its other half", "target probability", "LM head, M parameters"):
        table.add_column(column, justify="right")
    for p in points:
        mass = "-" if p.mass is None else f"{p.mass:.2%}"
        style = "bold" if p.size == chosen else ""
        table.add_row(f"{p.size:,}", f"{p.seen:.2%}", f"{p.unseen:.2%}", mass, f"{p.head_parameters / 1e6:.1f}", style=style)
    Console(highlight=False).print(table)
    aside = corpus.directory / f".coverage.svg.tmp-{os.getpid()}"
    draw_coverage(aside, points, chosen)
    aside.replace(corpus.directory / "coverage.svg")


def sampled_states(corpus: TokenCorpus, features: FeatureStore, positions: int = 1024) -> torch.Tensor | None:
    """[n, H] last hidden states that answer tokens were written from, of documents all over the corpus; None where none were kept."""
    documents = [d for d in corpus.documents() if d.ids in features]
    parts: list[torch.Tensor] = []
    for number in sorted(spread(len(documents), 32)):
        document = documents[number]
        _, hidden = features.read(document.ids)
        parts.append(hidden[torch.from_numpy(document.mask[1:] == 1)])
    if not parts:
        return None
    whole = torch.cat(parts)
    return whole[sorted(spread(len(whole), positions))]
