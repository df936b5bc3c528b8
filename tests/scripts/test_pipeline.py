"""The whole job at toy size, as a user runs it: three commands in processes of their own, and a training that is killed."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import scripts.bench_decode
import scripts.evaluate
import scripts.generate
from eval.report import CYCLE_FIELDS
from tests.tiny import save_tiny_target
from train.state import is_whole, load_head

REPOSITORY = Path(__file__).parents[2]
PROVENANCE = {"recipe.yaml", "command.txt", "versions.json"}
STEPS = 12
ENVIRONMENT = os.environ | {"CUDA_VISIBLE_DEVICES": "", "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
TRAIN = [sys.executable, "train_eagle.py"]


def call(command: Sequence[str], argv: Sequence[str]) -> str:
    done = subprocess.run([*command, *argv], cwd=REPOSITORY, env=ENVIRONMENT, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a recipe, a target, prompts and the corpus of run ``toy`` under ``runs``."""
    root = tmp_path_factory.mktemp("pipeline")
    save_tiny_target(root / "target")
    (root / "prompts.jsonl").write_text("".join(json.dumps({"prompt": f"say {i} please"}) + "\n" for i in range(14)))
    (root / "heldout.jsonl").write_text("".join(json.dumps({"prompt": f"count to {i}"}) + "\n" for i in range(4)))
    text = (REPOSITORY / "tests/toy.yaml").read_text().replace("TARGET", str(root / "target"))
    text = text.replace("PROMPTS", str(root / "prompts.jsonl")).replace("HELDOUT", str(root / "heldout.jsonl"))
    (root / "toy.yaml").write_text(text)
    printed = call([sys.executable, "-m", "scripts.prepare"], arguments(root))
    assert "12 documents" in printed and "next: accelerate launch train_eagle.py" in printed
    return root


def arguments(place: Path, *overrides: str) -> list[str]:
    return [str(place / "toy.yaml"), f"runs={place / 'runs'}", f"train.steps={STEPS}", "train.eval_every=6", *overrides]


@pytest.fixture(scope="module")
def trained(place: Path) -> Path:
    """The finished run."""
    accelerate = shutil.which("accelerate", path=str(Path(sys.executable).parent)) or "accelerate"
    printed = call([accelerate, "launch", "train_eagle.py"], arguments(place))
    assert "EAGLE-3 head" in printed and "next: python -m scripts.evaluate" in printed
    return place / "runs/toy"


def head_of(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / f"checkpoints/step-{STEPS:06d}" / "head.safetensors")


def test_prepare_leaves_a_corpus(place: Path) -> None:
    corpus = place / "runs/toy/corpus"
    files = {p.name for p in corpus.iterdir()}
    assert files >= PROVENANCE | {"identity.json", "manifest.json", "summary.json", "dropped.jsonl", "shard-00000.safetensors"}
    assert not [name for name in files if "tmp" in name]
    assert json.loads((corpus / "versions.json").read_text())["packages"]["torch"]
    assert "regenerate:" in (corpus / "recipe.yaml").read_text() and "toy.yaml" in (corpus / "command.txt").read_text()


def test_training_leaves_checkpoints_and_a_log(trained: Path) -> None:
    checkpoints = trained / "checkpoints"
    last, best = checkpoints / "last", checkpoints / "best"
    assert os.readlink(last) == f"step-{STEPS:06d}" and best.is_symlink()
    for checkpoint in (last, best):
        assert is_whole(checkpoint) and {p.name for p in checkpoint.iterdir()} >= PROVENANCE
    assert load_head(best).arch.draft_vocab_size == 200
    assert json.loads((last / "progress.json").read_text())["step"] == STEPS
    log = [json.loads(line) for line in (trained / "log.jsonl").read_text().splitlines()]
    assert len([row for row in log if "eval/acceptance_length" in json.dumps(row)]) == 2
    assert {p.name for p in trained.iterdir()} >= PROVENANCE


def test_evaluation_leaves_a_report(place: Path, trained: Path) -> None:
    printed = call([sys.executable, "-m", "scripts.evaluate"], arguments(place))
    directory = trained / "report"
    assert {p.name for p in directory.iterdir()} >= PROVENANCE | {"report.json", "report.md"}
    assert len(list(directory.glob("*.svg"))) == 3
    report = json.loads((directory / "report.json").read_text())
    assert len(report["records"]) == 4 == report["identity"]["prompts"]["prompts"]
    cycles = [cycle for record in report["records"] for cycle in record["cycles"]]
    at = {name.split(" ")[0]: i for i, name in enumerate(CYCLE_FIELDS)}
    free = [cycle for cycle in cycles if cycle[at["limit"]] is None]
    tau = 1 + sum(cycle[at["accepted"]] for cycle in free) / len(free)
    assert report["summary"]["acceptance"]["tau"] == pytest.approx(tau, abs=1e-12)
    assert f"Acceptance length {tau:.3f}" in printed and f"Acceptance length {tau:.3f}" in (directory / "report.md").read_text()
    for record in report["records"]:
        assert record["output_tokens"] == 1 + sum(cycle[at["emitted"]] for cycle in record["cycles"])
    assert report["summary"]["lossless"]["equal"] == report["summary"]["lossless"]["compared"] == 4


def test_killed_training_ends_at_the_same_head(place: Path, trained: Path) -> None:
    """kill -9 after a checkpoint, remains of one that was being written: the second start ends where an unbroken run does."""
    argv = arguments(place, "name=killed", f"corpus={trained / 'corpus'}")
    run = place / "runs/killed"
    process = subprocess.Popen([*TRAIN, *argv], cwd=REPOSITORY, env=ENVIRONMENT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        until = time.monotonic() + 180
        while not (run / "checkpoints/step-000002").exists() and process.poll() is None and time.monotonic() < until:
            time.sleep(0.002)
    finally:
        process.kill()
    assert process.wait() == -signal.SIGKILL
    reached = sorted(p.name for p in (run / "checkpoints").glob("step-*"))
    assert reached and reached[-1] < f"step-{STEPS:06d}"

    # What the moments before and after the kill could have left, had it come while files were written.
    whole = run / "checkpoints" / reached[-1]
    for name in (".step-000002.tmp-1", "step-000011"):
        (run / "checkpoints" / name).mkdir()
        shutil.copy(whole / "head.safetensors", run / "checkpoints" / name)
    (run / "checkpoints/step-000011/progress.json").write_text('{"step":')

    printed = call(TRAIN, argv)
    assert f"continuing from step {int(reached[-1][-6:])}" in printed
    assert not [p.name for p in (run / "checkpoints").iterdir() if "tmp" in p.name]
    expected, found = head_of(trained), head_of(run)
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    progress = [json.loads((r / "checkpoints/last/progress.json").read_text()) for r in (trained, run)]
    assert progress[0] == progress[1]
    steps = [json.loads(line)["step"] for line in (run / "log.jsonl").read_text().splitlines() if '"loss"' in line]
    assert sorted(set(steps)) == list(range(1, STEPS + 1))


def test_generate_streams_the_targets_own_answer(place: Path, trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = arguments(place, "--prompt", "say 3", "--drafter", "head", "lookup", "independent", "evaluate.max_new_tokens=12")
    scripts.generate.main([*argv, "--show-drafts"])
    printed = capsys.readouterr().out
    assert printed.startswith("accepted drafts stand in")
    assert printed.count("the output is the target's own, token for token") == 3
    scripts.generate.main([*argv[:-5], "--drafter", "none", "evaluate.max_new_tokens=12"])
    plain = capsys.readouterr().out
    # What was streamed is the same text each time, once the marks are taken off.
    streamed = [part.strip("─\n").replace("⟦", "").replace("⟧", "") for part in re.split(r"─ [^─\n]+ ─+\n", printed)[1:]]
    alone = re.split(r"─ [^─\n]+ ─+\n", plain)[1]
    table = streamed[-1].index("drafter ")
    assert len(streamed) == 3 and "⟦" in printed
    assert streamed[0] == streamed[1] == streamed[2][:table].rstrip("\n") == alone[: alone.index("drafter ")].rstrip("\n")


def test_other_drafters_leave_reports_of_their_own(place: Path, trained: Path) -> None:
    own = trained / "report/report.json"
    before = own.read_bytes() if own.exists() else None
    scripts.evaluate.main(arguments(place, "--drafter", "lookup"))
    report = json.loads((trained / "report-lookup/report.json").read_text())
    assert report["identity"]["drafter"]["name"] == "lookup"
    assert report["summary"]["lossless"]["equal"] == report["summary"]["lossless"]["compared"] == 4
    assert (own.read_bytes() if own.exists() else None) == before
    assert "checkpoint: " in call(TRAIN, arguments(place))  # the run's directory is still one


def test_the_bench_holds_both_decoders_to_one_output(
    place: Path, trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--repeats", "1", "--prompts", "2", "--new-tokens", "10", "--layers", "2", "--markdown", str(tmp_path / "bench.md")]
    scripts.bench_decode.main(arguments(place, *options))
    printed = capsys.readouterr().out
    assert "* All 7 methods gave the same output on all 3 prompts." in printed
    assert printed in (tmp_path / "bench.md").read_text()
    assert printed.count("breaks even at an acceptance length of") == 3
