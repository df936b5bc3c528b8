"""Bad input: one sentence and exit code 2, before anything is written."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from transformers import MambaConfig, MambaForCausalLM

import scripts.evaluate
import scripts.prepare
import train_eagle
from heads.errors import UserError
from tests.tiny import save_tiny_target, tiny_tokenizer

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directories of targets: good, without a chat template, without a cache that can be cropped."""
    root = tmp_path_factory.mktemp("targets")
    save_tiny_target(root / "good")
    save_tiny_target(root / "bare")
    bare = tiny_tokenizer()
    bare.chat_template = None
    for leftover in (root / "bare").glob("*template*"):
        leftover.unlink()
    bare.save_pretrained(root / "bare")
    config = MambaConfig(vocab_size=259, hidden_size=32, num_hidden_layers=4, state_size=8, pad_token_id=0, eos_token_id=2)
    MambaForCausalLM(config).save_pretrained(root / "mamba")
    tiny_tokenizer().save_pretrained(root / "mamba")
    return root


@pytest.fixture
def place(tmp_path: Path, targets: Path) -> Path:
    """A directory with toy.yaml and its prompts; runs go to its ``runs``."""
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"prompt": f"say {i}"}) + "\n" for i in range(8)))
    (tmp_path / "heldout.jsonl").write_text("".join(json.dumps({"prompt": f"count {i}"}) + "\n" for i in range(3)))
    text = (REPOSITORY / "tests/toy.yaml").read_text().replace("TARGET", str(targets / "good"))
    text = text.replace("PROMPTS", str(tmp_path / "prompts.jsonl")).replace("HELDOUT", str(tmp_path / "heldout.jsonl"))
    (tmp_path / "toy.yaml").write_text(text)
    return tmp_path


def arguments(place: Path, *overrides: str) -> list[str]:
    return [str(place / "toy.yaml"), f"runs={place / 'runs'}", *overrides]


def tree(directory: Path) -> dict[str, bytes]:
    return {str(p.relative_to(directory)): p.read_bytes() if p.is_file() else b"" for p in directory.rglob("*")}


def refuse(main: Callable[[list[str]], object], argv: Sequence[str], place: Path, *words: str, lines: int = 1) -> None:
    """The command fails as the user's error, says ``words``, and leaves every file as it was."""
    before = tree(place)
    with pytest.raises(UserError) as caught:
        main(list(argv))
    message = str(caught.value)
    assert len(message.splitlines()) == lines, message
    for word in words:
        assert word in message
    assert tree(place) == before


def test_a_missing_prompt_file(place: Path) -> None:
    refuse(scripts.prepare.main, arguments(place, "prompts.source=nowhere.jsonl"), place, "no such file", "nowhere.jsonl")


def test_an_empty_prompt_file(place: Path) -> None:
    (place / "prompts.jsonl").write_text("")
    refuse(scripts.prepare.main, arguments(place), place, "holds no prompts", "prompts.jsonl")


def test_a_row_of_no_known_shape(place: Path) -> None:
    with (place / "prompts.jsonl").open("a") as file:
        file.write('{"txet": "hello"}\n')
    refuse(scripts.prepare.main, arguments(place), place, "prompts.jsonl:9", "txet")


def test_too_few_prompts_to_hold_any_back(place: Path) -> None:
    refuse(scripts.prepare.main, arguments(place, "validation=8"), place, "validation is 8", "8 prompts")


@pytest.mark.parametrize("main", [scripts.prepare.main, train_eagle.main, scripts.evaluate.main])
def test_misspelt_keys(place: Path, main: Callable[[list[str]], object]) -> None:
    wrong = arguments(place, "train.lerning_rate=1", "regenerate.temprature=1")
    refuse(main, wrong, place, "2 problems", "learning_rate", "temperature", lines=3)


def test_taps_that_the_target_has_not(place: Path) -> None:
    refuse(scripts.prepare.main, arguments(place, "head.taps=[1,2,9]"), place, "head.taps is [1, 2, 9]", "4 layers")
    refuse(scripts.prepare.main, arguments(place, "head.taps=[-1,2,3]"), place, "head.taps is [-1, 2, 3]", "4 layers")


def test_a_prompt_longer_than_the_context(place: Path) -> None:
    with (place / "prompts.jsonl").open("a") as file:
        file.write(json.dumps({"prompt": "x" * 200}) + "\n")
    refuse(scripts.prepare.main, arguments(place), place, "prompts.jsonl:9", "tokens long", "128")


def test_a_target_without_a_chat_template(place: Path, targets: Path) -> None:
    refuse(scripts.prepare.main, arguments(place, f"target={targets / 'bare'}"), place, "has no chat template")


def test_a_target_whose_cache_cannot_be_cropped(place: Path, targets: Path) -> None:
    refuse(scripts.prepare.main, arguments(place, f"target={targets / 'mamba'}"), place, "MambaForCausalLM", "KV cache")


def test_a_target_that_is_not_there(place: Path) -> None:
    missing = place / "no-model"
    refuse(scripts.prepare.main, arguments(place, f"target={missing}"), place, "no-model", "cannot be loaded")
    refuse(scripts.prepare.main, arguments(place, "target=bundled:nothing"), place, "no bundled target 'nothing'")


@pytest.mark.parametrize("main", [scripts.prepare.main, train_eagle.main])
def test_a_directory_of_something_else(place: Path, main: Callable[[list[str]], object]) -> None:
    (place / "runs/toy").mkdir(parents=True)
    (place / "runs/toy/thesis.tex").write_text("my only copy")
    refuse(main, arguments(place), place, "thesis.tex", "choose another name")


def test_a_run_directory_that_is_a_file(place: Path) -> None:
    (place / "runs").mkdir()
    (place / "runs/toy").write_text("")
    refuse(scripts.prepare.main, arguments(place), place, "is a file")


def test_commands_out_of_order_and_another_run_s_directory(place: Path) -> None:
    refuse(train_eagle.main, arguments(place), place, "no finished corpus", "scripts.prepare")
    refuse(scripts.evaluate.main, arguments(place), place, "no checkpoint", "train the head first")
    scripts.prepare.main(arguments(place))
    refuse(scripts.evaluate.main, arguments(place), place, "no checkpoint", "train the head first")
    other = arguments(place, "regenerate.seed=1")
    refuse(scripts.prepare.main, other, place, "corpus of another run", "regenerate")
    elsewhere = arguments(place, "regenerate.seed=1", "name=other", f"corpus={place / 'runs/toy/corpus'}")
    refuse(scripts.prepare.main, elsewhere, place, "corpus of another run", "regenerate")
    save_tiny_target(place / "tuned", seed=5)
    tuned = arguments(place, f"target={place / 'tuned'}")
    refuse(train_eagle.main, tuned, place, "was written by", "target_fingerprint")
    # A bad number that shows only once training is put together must not touch the finished run's files either.
    refuse(train_eagle.main, arguments(place, "train.batch_size=3", "train.micro_batch_size=2"), place, "multiple of 2")


@pytest.mark.parametrize(
    ("command", "override", "words"),
    [
        (["-m", "scripts.prepare"], "target=TARGETS/bare", "has no chat template"),
        (["train_eagle.py"], "train.batch_size=4", "no finished corpus"),
    ],
)
def test_the_exit_code(place: Path, targets: Path, command: list[str], override: str, words: str) -> None:
    before = tree(place)
    done = subprocess.run(
        [sys.executable, *command, *arguments(place, override.replace("TARGETS", str(targets)))],
        cwd=REPOSITORY,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    errors = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    assert len(errors) == 1 and words in errors[0]
    assert done.stderr.rstrip().splitlines()[-1] == errors[0] and "Traceback" not in done.stderr
    assert tree(place) == before
