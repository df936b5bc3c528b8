"""The root recipe: nests each part's own config. One YAML a run; all numbers live there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any

from pydantic import Discriminator, Field, Tag, field_validator, model_validator

from data.packing import PackingConfig
from data.prompts import PromptsConfig
from data.regenerate import RegenerateConfig
from data.template import ChatConfig, ServeConfig
from eval.harness import EvaluateConfig
from heads.config import Config
from heads.eagle import EagleConfig
from heads.eagle3 import Eagle3Config
from heads.medusa import MedusaConfig
from heads.peagle import PEagleConfig
from heads.target import TargetConfig
from train.loop import TrainConfig
from train.objective_config import ObjectiveConfig
from train.strict import load_strict
from train.trackers import TrackerConfig


def _head_kind(value: Any) -> str:
    """The kind a head section says; eagle3 where it says none."""
    found = value.get("kind", "eagle3") if isinstance(value, dict) else getattr(value, "kind", "eagle3")
    return str(found)


AnyHead = Annotated[
    Annotated[Eagle3Config, Tag("eagle3")]
    | Annotated[EagleConfig, Tag("eagle")]
    | Annotated[MedusaConfig, Tag("medusa")]
    | Annotated[PEagleConfig, Tag("peagle")],
    Discriminator(_head_kind),
]


class Recipe(Config):
    """Everything a run is made of."""

    name: str
    """Names the run's directory, runs/NAME."""
    runs: Path = Path("runs")
    """Where run directories lie."""
    target: TargetConfig
    """The model that is made faster. A plain name is short for target.name."""
    prompts: PromptsConfig = PromptsConfig()
    """What the target is asked, to write the training answers."""
    validation: int = Field(default=24, ge=1)
    """Prompts held back from training; the head decodes them every train.eval_every steps, and `best` is chosen by them."""
    corpus: Path | None = None
    """Corpus directory to use instead of runs/NAME/corpus; recipes of one family can share one."""
    chat: ChatConfig = ChatConfig()
    serve: ServeConfig = ServeConfig()
    regenerate: RegenerateConfig = RegenerateConfig()
    head: AnyHead = Eagle3Config()
    """What is trained: kind is eagle3, eagle, medusa or peagle, and the other keys are that kind's."""
    packing: PackingConfig = PackingConfig()
    objective: ObjectiveConfig = ObjectiveConfig()
    train: TrainConfig = TrainConfig()
    trackers: TrackerConfig = TrackerConfig()
    evaluate: EvaluateConfig = EvaluateConfig()

    @field_validator("name")
    @classmethod
    def _plain_name(cls, name: str) -> str:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
            raise ValueError("must be a plain folder name of letters, digits, '.', '_' and '-'")
        return name

    @model_validator(mode="after")
    def _answers_fit_rows(self) -> Recipe:
        if self.regenerate.max_new_tokens >= self.packing.max_length:
            raise ValueError(
                f"regenerate.max_new_tokens is {self.regenerate.max_new_tokens}; it must be less than packing.max_length "
                f"({self.packing.max_length}), which holds prompt and answer"
            )
        return self

    @model_validator(mode="after")
    def _objective_of_the_head(self) -> Recipe:
        kind, objective, plain = self.head.kind, self.objective, ObjectiveConfig()
        for section in ("eagle", "peagle"):
            if kind != section and getattr(objective, section) != getattr(plain, section):
                raise ValueError(f"objective.{section} is for head.kind {section}, and head.kind is {kind}; leave it out")
        if objective.joint != plain.joint and getattr(self.head, "adapter", None) is None:
            raise ValueError("objective.joint is for Medusa-2, and there is no head.adapter; give one (head.kind medusa), or leave it out")
        if objective.depths is not None and kind != "eagle3":
            theirs = {"medusa": "head.heads", "peagle": "head.depths", "eagle": "objective.eagle.align_passes"}[kind]
            raise ValueError(
                f"objective.depths is {objective.depths}; a head of kind {kind} has its depths from {theirs}, so leave objective.depths out"
            )
        return self

    @property
    def run_dir(self) -> Path:
        return self.runs / self.name

    @property
    def corpus_dir(self) -> Path:
        return self.corpus or self.run_dir / "corpus"

    @property
    def features_dir(self) -> Path:
        """Beside the corpus, whose text the features belong to."""
        corpus = self.corpus_dir
        return corpus.with_name("features" if corpus.name == "corpus" else f"{corpus.name}-features")


def load_recipe(path: Path, overrides: list[str]) -> Recipe:
    """Read, override, validate; raises RecipeError with all problems at once."""
    return load_strict(path, overrides, Recipe)
