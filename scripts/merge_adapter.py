"""Medusa-2: write the adapted target as a model of its own, for engines that are to serve it without an adapter.

    python -m scripts.merge_adapter recipes/smollm2-135m-medusa2.yaml --output merged

The adapter alone lies in the checkpoint, in peft's layout (adapter_model.safetensors, adapter_config.json).
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

from data.bundled import resolve_target
from heads.errors import UserError
from scripts.cli import recipe_arguments, run
from scripts.pipeline import device, load_tokenizer, open_for_decoding
from train.recipe import load_recipe


def main(argv: list[str]) -> None:
    """Run the command."""
    path, overrides, options = recipe_arguments(argv, "Merge a Medusa-2 adapter into its target and save the model.", _add_options)
    recipe = load_recipe(path, overrides)
    output: Path = options.output
    if output.exists():
        raise UserError(f"--output is {output}, which exists; name a new directory")
    opened = open_for_decoding(recipe, device(), with_head=True)
    if opened.adapter is None:
        raise UserError(
            f"the head in {opened.checkpoint} was trained without an adapter, so there is nothing to merge; it serves the target as it is"
        )
    opened.adapter.merge()
    aside = output.with_name(f".{output.name}.tmp")
    shutil.rmtree(aside, ignore_errors=True)
    opened.target.model.save_pretrained(aside)
    load_tokenizer(str(resolve_target(recipe.target.name)), recipe.target).save_pretrained(aside)
    aside.rename(output)
    print(f"the adapted target: {output}\nits heads: {opened.checkpoint}")


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--output", type=Path, required=True, metavar="DIRECTORY", help="where the model is written; must not exist")


if __name__ == "__main__":
    run(main)
