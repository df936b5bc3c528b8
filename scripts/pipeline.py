"""What the commands share: opening the parts that a recipe names."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch

from data.bundled import resolve_target
from data.corpus import TokenCorpus, open_sealed
from data.prompts import Conversation, load_prompts
from data.regenerate import held_back
from data.template import ChatTemplate
from heads.errors import UserError
from heads.target import FrozenTarget, load_target
from train.recipe import Recipe


def device() -> torch.device:
    """The GPU where there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def split_prompts(recipe: Recipe) -> tuple[list[Conversation], list[Conversation]]:
    """(training, validation) conversations of the recipe."""
    return held_back(load_prompts(recipe.prompts), recipe.validation)


def open_template(recipe: Recipe) -> ChatTemplate:
    return ChatTemplate.load(resolve_target(recipe.target.name), recipe.target.revision, recipe.target.trust_remote_code)


def open_target(recipe: Recipe, on: torch.device, taps: tuple[int, ...] | None = None) -> FrozenTarget:
    return load_target(recipe.target, resolve_target(recipe.target.name), on, taps)


def target_identity(recipe: Recipe, target: FrozenTarget, template: ChatTemplate) -> dict[str, Any]:
    """What a corpus must share with a run that trains on it."""
    return {"target": recipe.target.name, "target_fingerprint": target.fingerprint, "template": template.fingerprint}


def corpus_identity(recipe: Recipe, target: FrozenTarget, template: ChatTemplate, conversations: list[Conversation]) -> dict[str, Any]:
    """What makes a corpus: another value of any of these is another corpus."""
    prompts = hashlib.sha256("".join(c.id for c in conversations).encode()).hexdigest()[:16]
    sampling = recipe.regenerate.model_dump(exclude={"batch_size"})
    length = min(recipe.packing.max_length, target.max_length)
    return target_identity(recipe, target, template) | {
        "prompts": prompts,
        "regenerate": sampling,
        "max_length": length,
    }


def open_corpus(recipe: Recipe, target: FrozenTarget, template: ChatTemplate) -> tuple[TokenCorpus, dict[str, Any]]:
    """The finished corpus of a recipe; raises UserError where it was written by another target or template."""
    corpus, manifest = open_sealed(recipe.corpus_dir)
    for key, value in target_identity(recipe, target, template).items():
        if key != "target" and manifest["identity"].get(key) != value:
            raise UserError(
                f"the corpus in {recipe.corpus_dir} was written by {manifest['identity'].get('target')} with {key} "
                f"{manifest['identity'].get(key)}, this recipe's is {value}; prepare a corpus with this target"
            )
    return corpus, manifest


def check_run_directory(recipe: Recipe) -> Path:
    """runs/NAME, checked to hold nothing but what runs write. Nothing is made: the first file that is written makes it."""
    run_dir = recipe.run_dir
    if run_dir.exists() and not run_dir.is_dir():
        raise UserError(f"{run_dir} is a file; choose another name: in the recipe")
    foreign = [p.name for p in run_dir.iterdir() if p.name not in RUN_FILES and not p.name.startswith(".")] if run_dir.exists() else []
    if foreign:
        raise UserError(f"{run_dir} holds files that no run wrote ({', '.join(sorted(foreign)[:3])}); choose another name: in the recipe")
    return run_dir


PROVENANCE = ("recipe.yaml", "command.txt", "versions.json")
RUN_FILES = frozenset(
    {*PROVENANCE, "corpus", "features", "checkpoints", "log.jsonl", "report", "export", "wandb", "wandb_id.txt", "tensorboard"}
)
