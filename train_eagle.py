"""Train an EAGLE draft head against its frozen target.

    accelerate launch train_eagle.py recipes/smollm2-135m-eagle3-quick.yaml [key=value ...]
    ACCELERATE_USE_CPU=true accelerate launch --multi_gpu --num_processes 2 train_eagle.py recipes/NAME.yaml     # two CPU processes

Killed and started again, it continues from the newest whole checkpoint.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch
from accelerate import Accelerator

from data.corpus import answer_counts
from data.packing import PackedRows
from data.prompts import Conversation
from data.template import ChatTemplate
from eval.drafters.build import head_drafter
from eval.drafters.shape import ShapeConfig
from eval.harness import evaluate
from heads.eagle3 import Eagle3Architecture, Eagle3Head
from heads.errors import UserError
from heads.sampling import Sampling
from heads.target import FrozenTarget
from heads.vocab import DraftVocab
from scripts.cli import recipe_arguments, run
from scripts.pipeline import PROVENANCE, check_run_directory, open_corpus, open_features, open_target, open_template, split_prompts
from train.loop import Run
from train.objectives import TrainingTimeTest
from train.provenance import write_provenance
from train.recipe import Recipe, load_recipe
from train.strict import dump_recipe
from train.trackers import make_tracker


def build_head(recipe: Recipe, target: FrozenTarget, counts: torch.Tensor, stop_ids: frozenset[int]) -> Eagle3Head:
    """A fresh head with its draft vocabulary, the same on every process."""
    size = recipe.head.draft_vocab_size
    vocab = DraftVocab.from_counts(counts, target.vocab_size if size == "full" else size, stop_ids)
    head = Eagle3Head(Eagle3Architecture.resolve(recipe.head, target, vocab.size), vocab)
    head.initialise(target, recipe.head, torch.Generator().manual_seed(recipe.train.seed))
    return head


def validation_measure(
    recipe: Recipe,
    accelerator: Accelerator,
    target: FrozenTarget,
    template: ChatTemplate,
    head: Eagle3Head,
    prompts: list[Conversation],
) -> float:
    """Acceptance length on the validation prompts, greedy, shared out over the processes."""
    config = recipe.evaluate.model_copy(
        update={"max_new_tokens": recipe.train.eval_max_new_tokens, "temperature": 0.0, "batch_size": recipe.train.eval_prompts}
    )
    drafter = head_drafter(head, target, Sampling(), False, ShapeConfig())
    own = prompts[accelerator.process_index :: accelerator.num_processes]
    head.eval()
    records = evaluate(target, template, drafter, own, config, baseline=False, progress=False)
    head.train()
    cycles = [c for r in records for c in r.cycles if c.limit is None]
    sums = torch.tensor([float(sum(c.accepted for c in cycles)), float(len(cycles))], device=accelerator.device)
    accepted, count = accelerator.reduce(sums).tolist()
    return 1 + accepted / max(count, 1)


def main(argv: list[str]) -> None:
    """Run the command."""
    path, overrides, _ = recipe_arguments(argv, "Train an EAGLE draft head against its frozen target.")
    recipe = load_recipe(path, overrides)
    _, validation = split_prompts(recipe)
    accelerator = Accelerator()
    run_dir = check_run_directory(recipe)
    template = open_template(recipe)
    target = open_target(recipe, accelerator.device, recipe.head.taps)
    corpus, manifest = open_corpus(recipe, target, template)
    rows = PackedRows(list(corpus.documents()), recipe.packing)
    store = open_features(recipe, target)
    counts = answer_counts(corpus, int(manifest["vocab_size"]))
    head = build_head(recipe, target, counts, template.stop_ids).to(accelerator.device)
    prompts = validation[: recipe.train.eval_prompts]
    training = Run(
        accelerator=accelerator,
        target=target,
        objective=TrainingTimeTest(head, recipe.objective),
        rows=rows,
        config=recipe.train,
        checkpoints=run_dir / "checkpoints",
        tracker=make_tracker(recipe.trackers, run_dir, recipe.name, recipe.model_dump(mode="json"), False),
        measure=lambda: validation_measure(recipe, accelerator, target, template, head, prompts),
        provenance={},
        store=store,
    )
    resumed = training.resume()
    if not resumed and (run_dir / "checkpoints").exists() and any((run_dir / "checkpoints").glob("step-*")):
        raise UserError(f"no checkpoint in {run_dir / 'checkpoints'} is whole; remove that directory to start again")
    # Only now: a start that is refused leaves the recipe of the run that is there.
    if accelerator.is_main_process:
        write_provenance(run_dir, dump_recipe(recipe))
    accelerator.wait_for_everyone()
    training.provenance = {name: (run_dir / name).read_text() for name in PROVENANCE}
    step = training.progress.step if resumed else 0
    training.tracker = make_tracker(
        recipe.trackers,
        run_dir,
        recipe.name,
        recipe.model_dump(mode="json"),
        accelerator.is_main_process,
        resume_step=step,
    )
    if accelerator.is_main_process:
        describe(head, rows, counts, training, resumed)
    started = time.perf_counter()
    progress = training.train()
    training.tracker.close()
    if accelerator.is_main_process:
        finish(run_dir, progress.best_tau, progress.best_step, time.perf_counter() - started, argv)
    accelerator.end_training()


def describe(head: Eagle3Head, rows: PackedRows, counts: torch.Tensor, training: Run, resumed: bool) -> None:
    """Print what is about to be trained."""
    trained = sum(p.numel() for p in head.parameters() if p.requires_grad)
    anchors = rows.totals(range(len(rows))).anchors
    store = training.features.store
    kept = sum(d.ids in store for d in rows.documents) if store is not None else 0
    print(
        f"EAGLE-3 head of {trained / 1e6:.1f}M trained parameters, taps {list(head.arch.taps)} (residual stream after that many layers), "
        f"draft vocabulary {head.vocab.size:,} (covers {head.vocab.coverage(counts):.2%} of the answers)\n"
        f"{len(rows.documents)} documents in {len(rows)} rows, {rows.fill:.0%} full, {anchors:,} slots with loss; "
        f"{rows.cut} documents cut at packing.max_length, {rows.without_loss} without loss left out; "
        f"the target's states are kept for {kept} documents and computed for the others\n"
        f"{training.steps} steps on {training.accelerator.num_processes} process(es)"
        + _threads_hint(training.accelerator)
        + (f"; continuing from step {training.progress.step}" if resumed else ""),
        flush=True,
    )


def _threads_hint(accelerator: Accelerator) -> str:
    """A sentence where the CPU's cores lie idle: accelerate launch sets one thread a process unless told otherwise."""
    cores, threads = os.cpu_count() or 1, torch.get_num_threads()
    if accelerator.device.type != "cpu" or threads * accelerator.num_processes >= cores:
        return ""
    best = cores // accelerator.num_processes
    return f", {threads} thread(s) each on {cores} cores: OMP_NUM_THREADS={best} before the command is faster"


def finish(run_dir: Path, tau: float, step: int, seconds: float, argv: list[str]) -> None:
    """Print what training reached."""
    print(
        f"trained in {seconds:.0f} s; best acceptance length on the validation prompts {tau:.2f} at step {step}\n"
        f"checkpoint: {run_dir / 'checkpoints' / 'best'}\n"
        f"next: python -m scripts.evaluate {' '.join(argv)}"
    )


if __name__ == "__main__":
    run(main)
