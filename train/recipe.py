"""The root recipe: nests each part's own config. One YAML a run; all numbers live there."""

from __future__ import annotations

import re
from pathlib import Path

from pydantic import Field, field_validator, model_validator

from data.packing import PackingConfig
from data.prompts import PromptsConfig
from data.regenerate import RegenerateConfig
from eval.harness import EvaluateConfig
from heads.config import Config
from heads.eagle3 import Eagle3Config
from heads.target import TargetConfig
from train.loop import TrainConfig
from train.objectives import ObjectiveConfig
from train.strict import load_strict
from train.trackers import TrackerConfig


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
    regenerate: RegenerateConfig = RegenerateConfig()
    head: Eagle3Config = Eagle3Config()
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
