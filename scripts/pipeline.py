"""What the commands share: opening the parts that a recipe names."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from data.bundled import resolve_target
from data.corpus import TokenCorpus, open_sealed
from data.features import FeatureStore
from data.prompts import Conversation, load_prompts
from data.regenerate import held_back
from data.template import ChatTemplate
from eval.drafters.base import Drafter
from eval.drafters.build import build_drafter, check_draft
from eval.drafters.cross_vocabulary import CrossVocabularyDrafter
from eval.drafters.independent import check_vocabularies
from heads.adapter import TargetAdapter, has_adapter
from heads.errors import UserError
from heads.target import FrozenTarget, TargetConfig, load_target
from heads.vocab import DraftVocab
from train.recipe import Recipe
from train.state import find_checkpoint, load_head


def device() -> torch.device:
    """The GPU where there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def split_prompts(recipe: Recipe) -> tuple[list[Conversation], list[Conversation]]:
    """(training, validation) conversations of the recipe."""
    return held_back(load_prompts(recipe.prompts), recipe.validation)


def recipe_taps(recipe: Recipe) -> tuple[int, ...] | None:
    """The residual streams that the recipe's head reads; None: the usual ones."""
    return getattr(recipe.head, "taps", None)


def draft_vocabulary(recipe: Recipe, counts: torch.Tensor, stop_ids: frozenset[int]) -> DraftVocab:
    """What the recipe's head can say, from how often the target wrote each token (counts [V])."""
    size: Any = getattr(recipe.head, "draft_vocab_size", "full")
    return DraftVocab.from_counts(counts, counts.numel() if size == "full" else size, stop_ids)


def trainer_of(recipe: Recipe) -> str:
    """The script that trains the recipe's kind of head."""
    return "train_medusa.py" if recipe.head.kind == "medusa" else "train_eagle.py"


def open_template(recipe: Recipe) -> ChatTemplate:
    return ChatTemplate.load(
        resolve_target(recipe.target.name), recipe.target.revision, recipe.target.trust_remote_code, recipe.chat.template_variables
    )


def open_target(recipe: Recipe, on: torch.device, taps: tuple[int, ...] | None = None) -> FrozenTarget:
    return load_target(recipe.target, resolve_target(recipe.target.name), on, taps)


def target_identity(recipe: Recipe, target: FrozenTarget, template: ChatTemplate) -> dict[str, Any]:
    """What a corpus must share with a run that trains on it."""
    return {"target": recipe.target.name, "target_fingerprint": target.fingerprint, "template": template.fingerprint}


def corpus_identity(recipe: Recipe, target: FrozenTarget, template: ChatTemplate, conversations: list[Conversation]) -> dict[str, Any]:
    """What makes a corpus: another value of any of these is another corpus."""
    prompts = hashlib.sha256("".join(c.id for c in conversations).encode()).hexdigest()[:16]
    sampling = recipe.regenerate.model_dump(exclude={"batch_size", "keep_features"})
    length = min(recipe.packing.max_length, target.max_length)
    return target_identity(recipe, target, template) | {
        "prompts": prompts,
        "regenerate": sampling,
        "max_length": length,
    }


def open_features(recipe: Recipe, target: FrozenTarget, reading: bool = False) -> FeatureStore | None:
    """The kept states of the recipe's corpus; None where there are none and none are to be written.

    Args:
        reading: for training, which can do without: states of other taps than the head's are left alone, and computed.
    """
    if not recipe.regenerate.keep_features and not recipe.features_dir.exists():
        return None
    known = recipe.features_dir / "identity.json"
    if reading and known.exists() and json.loads(known.read_text()).get("taps") != list(target.taps):
        return None
    identity = {"target_fingerprint": target.fingerprint, "taps": list(target.taps), "dtype": str(target.dtype)}
    return FeatureStore(recipe.features_dir, identity)


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
    found = [p.name for p in run_dir.iterdir()] if run_dir.exists() else []
    foreign = [name for name in found if name not in RUN_FILES and not name.startswith((".", "report-"))]
    if foreign:
        raise UserError(f"{run_dir} holds files that no run wrote ({', '.join(sorted(foreign)[:3])}); choose another name: in the recipe")
    return run_dir


@dataclass(frozen=True)
class Opened:
    """What decoding needs."""

    template: ChatTemplate
    target: FrozenTarget
    head: Any = None
    checkpoint: Path | None = None
    """Where the head lies."""
    adapter: TargetAdapter | None = None
    """On the target, switched off, where the head was trained with one."""


def open_for_decoding(recipe: Recipe, on: torch.device, with_head: bool) -> Opened:
    """Template and target, and the trained head that recipe.evaluate.checkpoint names."""
    if not with_head:
        return Opened(open_template(recipe), open_target(recipe, on))
    checkpoint = find_checkpoint(recipe.run_dir / "checkpoints", recipe.evaluate.checkpoint)
    head = load_head(checkpoint).to(on).eval()
    template, target = open_template(recipe), open_target(recipe, on, head.arch.taps)
    return Opened(template, target, head, checkpoint, TargetAdapter.load(target, checkpoint) if has_adapter(checkpoint) else None)


def about_drafter(drafter: Drafter, about: str) -> str:
    """A sentence about a drafter; one that chose its method from a prompt says why."""
    choice = getattr(drafter, "choice", None)
    return about if choice is None else f"{about}; {choice.reason}"


def open_drafter(recipe: Recipe, target: FrozenTarget, template: ChatTemplate, on: torch.device, head: Any = None) -> tuple[Drafter, str]:
    """The drafter of recipe.evaluate, and a sentence about it."""
    config, sampling = recipe.evaluate.drafter, recipe.evaluate.sampling
    if head is not None and (head.arch.vocab_size != target.vocab_size or head.arch.hidden_size != target.hidden_size):
        raise UserError(
            f"the head in {recipe.run_dir / 'checkpoints'} was trained for another target: its vocabulary or width differs from "
            f"{recipe.target.name}'s"
        )
    check_draft(config.shape, recipe.evaluate.draft_length, target, head)
    sampled = recipe.evaluate.proposals == "sampled"
    model = None
    if config.model is not None and config.kind in ("independent", "cross"):
        path = resolve_target(config.model.name)
        tokenizer = load_tokenizer(path, config.model)
        if config.kind == "independent":
            check_vocabularies(template.tokenizer.get_vocab(), tokenizer.get_vocab(), config.model.name)
        model = load_target(config.model, path, on)
        if config.kind == "cross":
            drafter = CrossVocabularyDrafter(
                model, tokenizer, target, template.tokenizer, sampling,
                method=config.method, sample_proposals=sampled, stop_ids=template.stop_ids,
            )  # fmt: skip
            return drafter, f"cross-vocabulary drafts by {config.model.name}"
    drafter_of_recipe = build_drafter(
        config, target, sampling, sample_proposals=sampled, stop_ids=template.stop_ids, head=head, model=model
    )
    return drafter_of_recipe, f"drafts by {drafter_of_recipe.name}"


def load_tokenizer(path: str, config: TargetConfig) -> Any:
    """The tokenizer of a draft model."""
    try:
        return AutoTokenizer.from_pretrained(path, revision=config.revision, trust_remote_code=config.trust_remote_code)
    except (OSError, ValueError) as error:
        raise UserError(f"the tokenizer of draft model '{config.name}' cannot be loaded ({str(error).splitlines()[0]})") from error


PROVENANCE = ("recipe.yaml", "command.txt", "versions.json")
TRAINING = "training.json"
"""What the last start of a training took."""
RUN_FILES = frozenset(
    {*PROVENANCE, TRAINING, "corpus", "features", "checkpoints", "log.jsonl", "report", "export", "wandb", "wandb_id.txt", "tensorboard"}
)
