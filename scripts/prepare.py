"""Prompts -> answers by the target -> token shards.

    python -m scripts.prepare recipes/smollm2-135m-eagle3-quick.yaml
    python -m scripts.prepare recipes/smollm2-135m-eagle3-quick.yaml --inspect 5
    python -m scripts.prepare recipes/smollm2-135m-eagle3-quick.yaml name=toy prompts.limit=40 validation=4 regenerate.max_new_tokens=16

Killed and started again, it continues; each prompt is answered once.
"""

from __future__ import annotations

import argparse
import time

from data.corpus import TokenCorpus, answer_counts
from data.regenerate import regenerate
from data.template import check_fit
from scripts.cli import recipe_arguments, run
from scripts.inspection import check_serving, examine_corpus, show_coverage, show_documents
from scripts.pipeline import (
    check_run_directory,
    corpus_identity,
    device,
    draft_vocabulary,
    open_features,
    open_target,
    open_template,
    recipe_taps,
    split_prompts,
    trainer_of,
)
from train.provenance import write_provenance
from train.recipe import load_recipe
from train.strict import dump_recipe


def main(argv: list[str]) -> None:
    """Run the command."""
    path, overrides, options = recipe_arguments(argv, "Let the target answer the recipe's prompts and store what it wrote.", _add_options)
    recipe = load_recipe(path, overrides)
    conversations, _ = split_prompts(recipe)
    run_dir = check_run_directory(recipe)
    template = open_template(recipe)
    # Taps are not read here, but wrong ones are told before hours of answers rather than after.
    target = open_target(recipe, device(), recipe_taps(recipe))
    identity = corpus_identity(recipe, target, template, conversations)
    check_fit(conversations, template, int(identity["max_length"]))
    check_serving(recipe, template, conversations)
    corpus = TokenCorpus(recipe.corpus_dir, identity)
    for directory in {run_dir, recipe.corpus_dir}:
        write_provenance(directory, dump_recipe(recipe))
    started = time.perf_counter()
    features = open_features(recipe, target) if recipe.regenerate.keep_features else None
    regenerate(conversations, target, template, corpus, recipe.regenerate, int(identity["max_length"]), features)
    examination = examine_corpus(corpus, template, recipe.packing.max_length)
    summary = corpus.seal(target.vocab_size)
    counts = answer_counts(corpus, target.vocab_size)
    vocab = draft_vocabulary(recipe, counts, template.stop_ids)
    show_coverage(corpus, template, target, vocab.size, features)
    finish = ", ".join(f"{k} {v}" for k, v in sorted(summary["finish"].items()))
    dropped = ", ".join(f"{k} {v}" for k, v in sorted(summary["dropped"].items())) or "none"
    covered = vocab.coverage(counts)
    print(
        f"{summary['documents']} documents, {summary['answer_tokens']:,} answer tokens of {summary['tokens']:,} in "
        f"{time.perf_counter() - started:.0f} s; answers ended by {finish}; dropped: {dropped}\n"
        f"{summary['distinct_answer_tokens']:,} distinct answer tokens; {vocab.size:,} in the draft vocabulary cover {covered:.2%}\n"
        f"{examination}corpus: {recipe.corpus_dir}\n"
        f"next: accelerate launch {trainer_of(recipe)} {' '.join([str(path), *overrides])}"
    )
    if options.inspect:
        show_documents(list(corpus.documents()), template, options.inspect)


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--inspect", type=int, default=0, metavar="N", help="show N documents, what the target wrote in colour")


if __name__ == "__main__":
    run(main)
