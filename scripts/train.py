"""What train_eagle.py and train_medusa.py run: one loop for every kind of head."""

from __future__ import annotations

import json
import os
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from data.corpus import answer_counts
from data.packing import PackedRows
from data.prompts import Conversation
from data.template import ChatTemplate
from eval.drafters.build import head_drafter
from eval.drafters.shape import ShapeConfig
from eval.harness import evaluate
from eval.tree import static_tree
from heads.adapter import TargetAdapter
from heads.errors import UserError
from heads.files import write_atomically
from heads.registry import head_kind, new_head
from heads.sampling import Sampling
from heads.target import FrozenTarget
from scripts.cli import recipe_arguments
from scripts.pipeline import (
    PROVENANCE,
    TRAINING,
    check_run_directory,
    draft_vocabulary,
    open_corpus,
    open_features,
    open_target,
    open_template,
    recipe_taps,
    split_prompts,
    trainer_of,
)
from train.kinds import make_objective
from train.loop import Measured, Run
from train.objectives import Objective
from train.provenance import write_provenance
from train.ranks import accuracies, held_out_documents, rank_counts
from train.recipe import Recipe, load_recipe
from train.strict import dump_recipe
from train.trackers import make_tracker
from train.warm_start import open_start, warm_start


def build_head(recipe: Recipe, target: FrozenTarget, counts: torch.Tensor, stop_ids: frozenset[int]) -> Any:
    """The head with its initial values and draft vocabulary, the same on every process; from another run's where the recipe says so."""
    start = open_start(recipe.head.init_from) if recipe.head.init_from else None
    vocab = start.vocab if start is not None else draft_vocabulary(recipe, counts, stop_ids)
    if vocab.vocab_size != target.vocab_size:
        raise UserError(
            f"head.init_from is {recipe.head.init_from}, a head for {vocab.vocab_size:,} tokens; the target has {target.vocab_size:,}"
        )
    head = new_head(recipe.head, target, vocab, recipe.train.seed)
    if start is not None:
        warm_start(head, start, str(recipe.head.init_from))
    return head


def validation_measure(
    recipe: Recipe,
    accelerator: Accelerator,
    target: FrozenTarget,
    template: ChatTemplate,
    objective: Objective,
    prompts: list[Conversation],
) -> Measured:
    """Acceptance length on the validation prompts, greedy, shared out over the processes, and accuracies on the same answers."""
    head, shape = objective.head, recipe.evaluate.drafter.shape
    most = {"medusa": "heads", "peagle": "depths"}.get(head.arch.kind)
    length = recipe.evaluate.draft_length if most is None else min(recipe.evaluate.draft_length, getattr(head.arch, most))
    config = recipe.evaluate.model_copy(
        update={
            "max_new_tokens": recipe.train.eval_max_new_tokens,
            "temperature": 0.0,
            "batch_size": recipe.train.eval_prompts,
            "draft_length": length,
        }
    )
    drafter = head_drafter(head, target, Sampling(), False, ShapeConfig())
    own = prompts[accelerator.process_index :: accelerator.num_processes]
    objective.eval()
    with objective.adapter.on() if objective.adapter is not None else nullcontext():
        records = evaluate(target, template, drafter, own, config, baseline=False, progress=False)
        counts = rank_counts(objective, target, held_out_documents(records)).float().to(accelerator.device)
    objective.train()
    cycles = [c for r in records for c in r.cycles if c.limit is None]
    sums = torch.tensor([float(sum(c.accepted for c in cycles)), float(len(cycles))], device=accelerator.device)
    accepted, count = accelerator.reduce(sums).tolist()
    shares = accuracies(accelerator.reduce(counts))
    paths = static_tree(shares, shape.nodes + 1, shape.beam) if shares else ()
    return Measured(1 + accepted / max(count, 1), {"accuracies": shares, "nodes": shape.nodes, "paths": [list(p) for p in paths]})


def train(argv: list[str], script: str, description: str) -> None:
    """Run a training command.

    Args:
        script: its name; a recipe that another one trains is refused.
    """
    path, overrides, _ = recipe_arguments(argv, description)
    recipe = load_recipe(path, overrides)
    if trainer_of(recipe) != script:
        raise UserError(f"head.kind is {recipe.head.kind}, which {script} does not train; run {trainer_of(recipe)} with this recipe")
    _, validation = split_prompts(recipe)
    accelerator = Accelerator()
    run_dir = check_run_directory(recipe)
    template = open_template(recipe)
    target = open_target(recipe, accelerator.device, recipe_taps(recipe))
    corpus, manifest = open_corpus(recipe, target, template)
    rows = PackedRows(list(corpus.documents()), recipe.packing)
    store = open_features(recipe, target, reading=True)
    counts = answer_counts(corpus, int(manifest["vocab_size"]))
    head = build_head(recipe, target, counts, template.stop_ids).to(accelerator.device)
    adapter = fresh_adapter(recipe, target)
    objective = make_objective(head, recipe.objective, target, adapter)
    prompts = validation[: recipe.train.eval_prompts]
    training = Run(
        accelerator=accelerator,
        target=target,
        objective=objective,
        rows=rows,
        config=recipe.train,
        checkpoints=run_dir / "checkpoints",
        tracker=make_tracker(recipe.trackers, run_dir, recipe.name, recipe.model_dump(mode="json"), False),
        measure=lambda: validation_measure(recipe, accelerator, target, template, objective, prompts),
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
        describe(objective, rows, counts, training, resumed)
    started, cpu = time.perf_counter(), time.process_time()
    progress = training.train()
    training.tracker.close()
    if accelerator.is_main_process:
        seconds, cpu_seconds = time.perf_counter() - started, time.process_time() - cpu
        if progress.step > step:
            effort = {"from_step": step, "steps": progress.step, "seconds": seconds, "cpu_seconds": cpu_seconds}
            effort |= {"processes": accelerator.num_processes, "slots_with_loss": rows.totals(range(len(rows))).anchors}
            effort |= {"trained_parameters": trained_parameters(objective)}
            write_atomically(run_dir / TRAINING, json.dumps(effort, indent=1))
        finish(run_dir, progress.best_tau, progress.best_step, seconds, argv)
    accelerator.end_training()


def fresh_adapter(recipe: Recipe, target: FrozenTarget) -> TargetAdapter | None:
    """The adapter that is trained on the target, where the recipe asks for one."""
    config = getattr(recipe.head, "adapter", None)
    return None if config is None else TargetAdapter.fresh(target, config, recipe.target.name, recipe.train.seed)


def trained_parameters(objective: Objective) -> int:
    return sum(p.numel() for p in objective.parameters() if p.requires_grad)


def describe(objective: Objective, rows: PackedRows, counts: torch.Tensor, training: Run, resumed: bool) -> None:
    """Print what is about to be trained."""
    head, adapter, trained = objective.head, objective.adapter, trained_parameters(objective)
    anchors = rows.totals(range(len(rows))).anchors
    store = training.features.store
    kept = sum(d.ids in store for d in rows.documents) if store is not None else 0
    reads = f"taps {list(head.arch.taps)} (residual stream after that many layers)" if head.arch.taps else "the last hidden state"
    print(
        f"{head_kind(head.arch.kind).title} head of {trained / 1e6:.1f}M trained parameters, reads {reads}, "
        f"draft vocabulary {head.vocab.size:,} (covers {head.vocab.coverage(counts):.2%} of the answers)\n"
        f"{len(rows.documents)} documents in {len(rows)} rows, {rows.fill:.0%} full, {anchors:,} slots with loss; "
        f"{rows.cut} documents cut at packing.max_length, {rows.without_loss} without loss left out; "
        f"the target's states are kept for {kept} documents and computed for the others\n"
        f"{_about_adapter(adapter, objective.first_joint_step(training.steps))}"
        f"{training.steps} steps on {training.accelerator.num_processes} process(es)"
        + _threads_hint(training.accelerator)
        + (f"; continuing from step {training.progress.step}" if resumed else ""),
        flush=True,
    )


def _about_adapter(adapter: TargetAdapter | None, first: int) -> str:
    if adapter is None:
        return ""
    size = sum(p.numel() for p in adapter.parameters())
    return (
        f"with them an adapter of rank {adapter.rank} on the target ({size / 1e6:.1f}M), from step {first + 1} on: what will be served is "
        "the adapted target, not the original one\n"
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
