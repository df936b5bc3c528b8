"""The strict recipe loader: every problem at once, near names, overrides, YAML 1.2 scalars, the round trip."""

from __future__ import annotations

import enum
import math
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from pydantic import Field, model_validator

from heads.config import Config
from heads.errors import UserError
from train.strict import RecipeError, describe_keys, dump_recipe, load_strict


class Precision(enum.Enum):
    FULL = "full"
    HALF = "half"


class TargetConfig(Config):
    name: str
    """A hub name or
    a directory."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """What the target computes in."""

    @model_validator(mode="before")
    @classmethod
    def _shorthand(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value


class TrainConfig(Config):
    steps: int = Field(default=10, ge=1)
    """Optimizer steps."""
    warmup: int = 0
    learning_rate: float = Field(default=1e-3, gt=0)
    clip: float | None = 1.0
    amp: bool = False
    precision: Precision = Precision.FULL
    rest: int | Literal["auto"] = "auto"

    @model_validator(mode="after")
    def _warmup_fits(self) -> TrainConfig:
        if self.warmup > self.steps:
            raise ValueError(f"warmup is {self.warmup} steps of {self.steps}; lower it")
        return self


class SourceConfig(Config):
    path: Path
    weight: float = 1.0
    limits: tuple[int, ...] = ()


class EagleConfig(Config):
    kind: Literal["eagle"]
    layers: int = 1


class MedusaConfig(Config):
    kind: Literal["medusa"]
    heads: int = 4


class Recipe(Config):
    target: TargetConfig
    """The model to speed up."""
    train: TrainConfig = TrainConfig()
    sources: list[SourceConfig] = Field(default_factory=list)
    head: Annotated[EagleConfig | MedusaConfig, Field(discriminator="kind")] = EagleConfig(kind="eagle", layers=2)
    """What is trained."""
    note: str = ""
    counts: dict[str, int] = Field(default_factory=dict)


def load(tmp_path: Path, text: str, *overrides: str) -> Recipe:
    path = tmp_path / "recipe.yaml"
    path.write_text(text, encoding="utf-8")
    return load_strict(path, overrides, Recipe)


def problems(tmp_path: Path, text: str, *overrides: str) -> list[str]:
    with pytest.raises(RecipeError) as caught:
        load(tmp_path, text, *overrides)
    header, *lines = str(caught.value).split("\n  ")
    count = "1 problem" if len(lines) == 1 else f"{len(lines)} problems"
    assert header == f"recipe {tmp_path / 'recipe.yaml'}: {count}"
    for word in ("pydantic", "http", "Config", "Input should"):
        assert word not in str(caught.value).replace(str(tmp_path), "")
    return lines


def test_every_problem_at_once(tmp_path: Path) -> None:
    text = """
target: {name: 5, dtype: float23}
train:
  steps: 0
  learning_rte: 0.1
  amp: yes
  clip: -
  precision: double
  rest: 1.5
sources:
- {weight: 1}
- {path: a, weight: heavy}
lerning_rate: 1
zzz: 1
"""
    assert problems(tmp_path, text.replace("clip: -", 'clip: "1"'), "train.warmup=x", "noequals", "note") == [
        "override 'noequals': must be written key=value, as in a.b=1",
        "override 'note': must be written key=value, as in a.b=1",
        "target.name = 5: must be text (write it in quotes)",
        "target.dtype = 'float23': must be one of 'float32' or 'bfloat16' (did you mean 'float32'?)",
        "train.steps = 0: must be at least 1",
        "train.warmup = 'x': must be a whole number",
        "train.precision = 'double': must be one of 'full' or 'half'",
        "train.rest = 1.5: must be a whole number or 'auto'",
        "train.learning_rte = 0.1: unknown key; did you mean train.learning_rate?",
        "sources.0.path: missing, it has no default",
        "sources.1.weight = 'heavy': must be a number",
        "lerning_rate = 1: unknown key; did you mean train.learning_rate?",
        "zzz = 1: unknown key; known here: target, train, sources, head, note, counts",
        "train.clip = '1': must be a number",
        "train.amp = 'yes': must be true or false",
    ]


def test_validators_speak_for_their_section(tmp_path: Path) -> None:
    assert problems(tmp_path, "target: x\ntrain: {warmup: 20}", "note=1") == [
        "train: warmup is 20 steps of 10; lower it",
        "note = 1: must be text (write it in quotes)",
    ]


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("train.steps='5'", "train.steps = '5': must be a whole number"),
        ("train.steps=true", "train.steps = true: must be a whole number"),
        ("train.amp=1", "train.amp = 1: must be true or false"),
        ("train.rest='5'", "train.rest = '5': must be a whole number or 'auto'"),
        ("counts={1: 2}", "counts.1 = 2: its key must be text (write it in quotes)"),
        ("counts.a='5'", "counts.a = '5': must be a whole number"),
        ("sources=[{path: a, limits: [1, '2']}]", "sources.0.limits.1 = '2': must be a whole number"),
        ("target=", "target = null: must be a section of keys"),
        ("train=3", "train = 3: must be a section of keys"),
        ("train.steps.x=3", "train.steps = a section of keys: must be a whole number"),
        ("trian.steps=3", "trian: unknown key; did you mean train?"),
        ("train.stps=3", "train.stps = 3: unknown key; did you mean train.steps?"),
        ("Learning-Rate=3", "Learning-Rate = 3: unknown key; did you mean train.learning_rate?"),
        ("train={a: 1, a: 2}", "train = '{a: 1, a: 2}': gives a key twice"),
        ("head={kind: eagel}", "head.kind = 'eagel': must be one of 'eagle', 'medusa'"),
        ("head={layers: 1}", "head.kind: missing, it has no default"),
        ("head={kind: medusa, layres: 1}", "head.layres = 1: unknown key; did you mean head.layers?"),
        ("head={kind: medusa, head: 1}", "head.head = 1: unknown key; did you mean head.heads or head?"),
        ("note.x=1", "override 'note.x=1': note is 'hi', a value with no keys below it"),
        ("sources.3.path=x", "override 'sources.3.path=x': the list it goes into has entries 0 to 0, not '3'"),
        ("note=@x", "note = '@x': not a YAML value; write it in quotes within quotes, as in 'note=\"...\"'"),
    ],
)
def test_one_problem(tmp_path: Path, override: str, problem: str) -> None:
    assert problems(tmp_path, "target: x\nnote: hi\nsources: [{path: a}]", override) == [problem]


def test_overrides(tmp_path: Path) -> None:
    recipe = load(
        tmp_path,
        "target: org/name\nsources: &s [{path: a}, {path: b}]\n",
        "target.dtype=float32",
        "train.learning_rate=1e-4",
        "train.steps=20",
        "train.steps=1e4",
        "train.clip=null",
        "train.precision=half",
        "sources.1.weight=2",
        "sources.1.limits=[1, 2]",
        "head.kind=medusa",
        "note=yes",
        "counts.a=1_000",
    )
    assert recipe.target == TargetConfig(name="org/name", dtype="float32")
    assert recipe.train.learning_rate == 1e-4 and recipe.train.steps == 10_000 and recipe.train.clip is None
    assert recipe.train.precision is Precision.HALF
    assert recipe.sources[1] == SourceConfig(path=Path("b"), weight=2.0, limits=(1, 2))
    assert recipe.head == MedusaConfig(kind="medusa") and recipe.note == "yes" and recipe.counts == {"a": 1000}


def test_override_leaves_the_other_users_of_an_alias_alone(tmp_path: Path) -> None:
    recipe = load(tmp_path, "target: x\nsources: [&a {path: p}, *a]", "sources.1.weight=3")
    assert [source.weight for source in recipe.sources] == [1.0, 3.0]


@pytest.mark.parametrize(
    ("text", "value"),
    [("1e-4", 1e-4), ("1E3", 1e3), ("-.5e+2", -50.0), ("3", 3.0), ("1_000.5", 1000.5), ("0x10", 16.0), ("010", 10.0)],
)
def test_numbers_in_files(tmp_path: Path, text: str, value: float) -> None:
    recipe = load(tmp_path, f"target: x\nsources: [{{path: a, weight: {text}}}]")
    assert recipe.sources[0].weight == value


@pytest.mark.parametrize("text", ["yes", "off", "12:30", "2024-01-01", "1.2.3", "1e", "-", "."])
def test_what_stays_text(tmp_path: Path, text: str) -> None:
    recipe = load(tmp_path, f"target: x\nnote: {text}" if text != "-" else "target: x\nnote: '-'")
    assert recipe.note == text


def test_duplicate_keys_are_problems_with_their_lines(tmp_path: Path) -> None:
    text = "target: x\ntrain:\n  steps: 1\n  warmup: 0\n  steps: 2\ntarget: y\n"
    assert problems(tmp_path, text, "train.amp=3") == [
        "line 5: the key 'steps' is already given on line 3",
        "line 6: the key 'target' is already given on line 1",
        "train.amp = 3: must be true or false",
    ]


def test_merge_keys_are_no_duplicates(tmp_path: Path) -> None:
    recipe = load(tmp_path, "target: x\nsources:\n- &a {path: p, weight: 2}\n- {<<: *a, weight: 3}\n")
    assert recipe.sources[1] == SourceConfig(path=Path("p"), weight=3.0)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"# nothing\n", "is empty"),
        (b"- a\n", "must hold a mapping (key: value) at its top level, not ['a']"),
        (b"a: 1\nb: c: d\n", ", line 2, column 5: not valid YAML, mapping values are not allowed here"),
        (b"a: !!python/name:os.system x\n", ", line 1, column 4: not valid YAML, could not determine a constructor"),
        (b"a: \xff\n", "is not UTF-8 text"),
        (b"sources: &a [*a]\n", "a value contains itself"),
        (b"a: " + b"[" * 5000, "nested too deeply"),
        (b"a: \x00\n", "is not valid YAML"),
    ],
)
def test_unreadable_files(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_bytes(content)
    with pytest.raises(UserError) as caught:
        load_strict(path, [], Recipe)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_missing_file_and_directory(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="does not exist"):
        load_strict(tmp_path / "none.yaml", [], Recipe)
    with pytest.raises(UserError, match="is a directory"):
        load_strict(tmp_path, [], Recipe)


def test_dump_reads_back_equal(tmp_path: Path) -> None:
    notes = ["", "yes", "1e-4", "010", "1_0", "null", "~", "a: b # c", "é\n two\n", "12:30", "0o7", "<<", " lead"]
    notes += ["=", "*", "x y " * 100, "\t", "\x85", "- a", "'", '"', "0x1F", ".5", ".inf", "-", "1e5", "+.INF"]
    for note in notes:
        recipe = Recipe(
            target=TargetConfig(name=note),
            train=TrainConfig(learning_rate=1e-5, clip=math.inf, precision=Precision.HALF),
            sources=[SourceConfig(path=Path("a/b"), limits=(1, 2))],
            head=MedusaConfig(kind="medusa"),
            note=note,
        )
        assert load(tmp_path, dump_recipe(recipe)) == recipe


def test_describe_keys() -> None:
    rows = describe_keys(Recipe)
    assert ("target", "required", "The model to speed up.") in rows
    assert ("target.name", "required", "A hub name or a directory.") in rows
    assert ("train.steps", "10", "Optimizer steps.") in rows
    assert ("train.precision", "'full'", "") in rows
    assert ("sources[].path", "required", "") in rows
    assert ("head.layers", "2", "(eagle)") in rows and ("head.heads", "4", "(medusa)") in rows
    assert [key for key, _, _ in rows][:3] == ["target", "target.name", "target.dtype"]
