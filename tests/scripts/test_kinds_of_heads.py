"""Every kind of head through the commands, at toy size: prepared once, trained, evaluated; the wrong command and foreign keys refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

import scripts.evaluate
import scripts.generate
import scripts.merge_adapter
import scripts.prepare
import train_eagle
import train_medusa
from heads.errors import UserError
from tests.scripts.test_pipeline import REPOSITORY
from tests.tiny import save_tiny_target
from train.strict import RecipeError

KINDS = {
    "eagle3": "{kind: eagle3, draft_vocab_size: 200}",
    "eagle": "{kind: eagle}",
    "medusa": "{kind: medusa, heads: 3}",
    "medusa2": "{kind: medusa, heads: 3, adapter: {rank: 4}}",
    "peagle": "{kind: peagle, layers: 1, depths: 4, draft_vocab_size: 200}",
}
Main = Callable[[list[str]], object]


def trainer(kind: str) -> Main:
    return train_medusa.main if kind.startswith("medusa") else train_eagle.main


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a recipe, a target, prompts and a corpus."""
    root = tmp_path_factory.mktemp("kinds")
    save_tiny_target(root / "target")
    (root / "prompts.jsonl").write_text("".join(json.dumps({"prompt": f"say {i} please"}) + "\n" for i in range(10)))
    (root / "heldout.jsonl").write_text("".join(json.dumps({"prompt": f"count to {i}"}) + "\n" for i in range(3)))
    text = (REPOSITORY / "tests/toy.yaml").read_text().replace("TARGET", str(root / "target"))
    (root / "toy.yaml").write_text(text.replace("PROMPTS", str(root / "prompts.jsonl")).replace("HELDOUT", str(root / "heldout.jsonl")))
    scripts.prepare.main(arguments(root, "eagle3"))
    return root


def arguments(place: Path, kind: str, *overrides: str) -> list[str]:
    return [
        str(place / "toy.yaml"),
        f"runs={place / 'runs'}",
        f"name={kind}",
        f"corpus={place / 'runs/eagle3/corpus'}",
        f"head={KINDS[kind]}",
        "objective.depths=null",
        "train.steps=4",
        "train.eval_every=4",
        *overrides,
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_trained_and_evaluated(place: Path, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    trainer(kind)(arguments(place, kind))
    checkpoint = place / "runs" / kind / "checkpoints/last"
    # A run of six updates draws next to nothing the target takes; the figures are other tests' matter.
    scripts.evaluate.main(arguments(place, kind, "evaluate.checkpoint=last"))
    report = json.loads((place / "runs" / kind / "report/report.json").read_text())
    lossless, head = report["summary"]["lossless"], report["identity"]["head"]
    assert lossless["equal"] == lossless["compared"] == 3 and head["kind"] == KINDS[kind].strip("{}").split(",")[0].split(": ")[1]
    assert head["trained_parameters"] > 0 and head["steps"] == 4
    assert (report["summary"]["quality"] is not None) == (kind == "medusa2") == (checkpoint / "adapter_model.safetensors").exists()
    printed = capsys.readouterr().out
    assert ("NOT lossless to the original" in printed) == (kind == "medusa2") == ("an adapter of rank 4 on the target" in printed)
    scripts.generate.main(arguments(place, kind, "evaluate.checkpoint=last", "--prompt", "say 3"))
    printed = capsys.readouterr().out
    assert "the output is the target's own, token for token" in printed and ("adapted one" in printed) == (kind == "medusa2")


@pytest.mark.parametrize("kind", KINDS)
def test_the_other_trainer_refuses(place: Path, kind: str) -> None:
    wrong, right = (train_eagle.main, "train_medusa.py") if kind.startswith("medusa") else (train_medusa.main, "train_eagle.py")
    with pytest.raises(UserError, match=f"run {right} with this recipe"):
        wrong(arguments(place, kind))


@pytest.mark.parametrize(
    ("kind", "override", "sentence"),
    [
        ("medusa", "objective.eagle.noise=0.2", "objective.eagle is for head.kind eagle"),
        ("eagle3", "objective.peagle.keep=0.5", "objective.peagle is for head.kind peagle"),
        ("medusa", "objective.depths=3", "from head.heads"),
        ("peagle", "objective.depths=3", "from head.depths"),
        ("medusa", "objective.joint.start=0.2", "there is no head.adapter"),
        ("eagle3", "head.adapter.rank=4", "adapter"),
    ],
)
def test_keys_of_another_kind_are_refused(place: Path, kind: str, override: str, sentence: str) -> None:
    with pytest.raises(RecipeError, match=sentence):
        trainer(kind)(arguments(place, kind, override))


def test_the_adapted_target_is_written_whole(place: Path, tmp_path: Path) -> None:
    """Merged, it is what peft makes of the original and the adapter; heads decode it without the adapter."""
    argv = arguments(place, "medusa2", "name=merged", "train.learning_rate=0.01", "objective.joint.learning_rate=0.05")
    train_medusa.main(argv)
    scripts.merge_adapter.main([*argv, "evaluate.checkpoint=last", "--output", str(tmp_path / "model")])
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    original = AutoModelForCausalLM.from_pretrained(place / "target")
    ids = torch.arange(3, 20)[None]
    with torch.no_grad():
        before = original(input_ids=ids).logits
        theirs = PeftModel.from_pretrained(original, str((place / "runs/merged/checkpoints/last").resolve()))(input_ids=ids).logits
        found = merged(input_ids=ids).logits
    torch.testing.assert_close(found, theirs, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(found, before, atol=1e-3)
    assert (tmp_path / "model/tokenizer_config.json").exists()


def test_merging_refuses(place: Path, tmp_path: Path) -> None:
    train_medusa.main(arguments(place, "medusa", "name=plain"))
    argv = arguments(place, "medusa", "name=plain")
    with pytest.raises(UserError, match="trained without an adapter"):
        scripts.merge_adapter.main([*argv, "--output", str(tmp_path / "model")])
    with pytest.raises(UserError, match="which exists; name a new directory"):
        scripts.merge_adapter.main([*argv, "--output", str(tmp_path)])
    assert not list(tmp_path.iterdir())
