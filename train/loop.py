"""The loop, under accelerate: step, log, evaluate, save, resume. It knows nothing of what kind of head it trains."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from pydantic import Field
from safetensors.torch import load_file
from tqdm import tqdm

from data.features import FeatureStore
from data.packing import PackedRows, RowOrder
from heads.adapter import has_adapter
from heads.config import Config
from heads.errors import UserError
from heads.target import FrozenTarget
from train.features import Features
from train.objectives import Moment, Objective
from train.pairs import depth_metrics
from train.state import (
    Progress,
    load_head,
    newest_whole,
    optimizer_tensors,
    point,
    prune,
    restore_optimizer,
    save_checkpoint,
)
from train.trackers import Tracker


class TrainConfig(Config):
    """How the head is fitted."""

    steps: int | None = Field(default=None, ge=1)
    """Updates; None: as many as `epochs` takes."""
    epochs: float = Field(default=4.0, gt=0.0)
    """Passes over the corpus, where steps is not given."""
    batch_size: int = Field(default=8, ge=1)
    """Rows of an update, over all processes and accumulation steps."""
    micro_batch_size: int = Field(default=1, ge=1)
    """Rows a process takes at once. Accumulation follows: batch_size / (micro_batch_size x processes)."""
    learning_rate: float = Field(default=1e-4, gt=0.0, le=1.0)
    """Peak."""
    warmup: float = Field(default=0.03, ge=0.0, lt=1.0)
    """Share of the steps in which the rate rises linearly."""
    final_rate: float = Field(default=0.1, ge=0.0, le=1.0)
    """Where the cosine ends, as a share of the peak."""
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = Field(default=0.0, ge=0.0)
    clip: float = Field(default=1.0, gt=0.0)
    """Global gradient norm."""
    seed: int = 0
    """Of the head's initial values and the order of rows."""
    log_every: int = Field(default=10, ge=1)
    """Steps."""
    eval_every: int = Field(default=500, ge=1)
    """Steps between real decodings of the validation prompts; the end always has one."""
    eval_prompts: int = Field(default=16, ge=1)
    """Validation prompts decoded each time."""
    eval_max_new_tokens: int = Field(default=64, ge=2)
    save_every: int = Field(default=500, ge=1)
    """Steps between checkpoints; each evaluation that is the best so far saves one too."""
    keep_last: int = Field(default=2, ge=1)
    """Checkpoints kept besides the best."""
    feature_cache_gib: float = Field(default=0.0, ge=0.0)
    """Memory a process may use to keep features of rows it has seen, so that later epochs skip the target; 0: always online."""


def learning_rate(config: TrainConfig, step: int, steps: int, peak: float | None = None) -> float:
    """Rate of update ``step`` (0-based): linear warm-up, then cosine to final_rate. A pure function, so resuming needs no scheduler.

    Args:
        peak: instead of the config's.
    """
    peak = config.learning_rate if peak is None else peak
    warm = max(1, math.ceil(config.warmup * steps)) if config.warmup else 0
    if step < warm:
        return peak * (step + 1) / warm
    done = (step - warm) / max(1, steps - warm)
    return peak * (config.final_rate + (1 - config.final_rate) * 0.5 * (1 + math.cos(math.pi * done)))


@dataclass(frozen=True)
class Measured:
    """What real decoding of the validation prompts says of the head."""

    acceptance_length: float
    tree: dict[str, Any] | None = None
    """Accuracies by depth and rank, and the static tree built from them; goes with the checkpoint."""


@dataclass
class Run:
    """One training run: what the loop needs, put together by scripts/train.py."""

    accelerator: Accelerator
    target: FrozenTarget
    objective: Objective
    rows: PackedRows
    config: TrainConfig
    checkpoints: Path
    tracker: Tracker
    measure: Callable[[], Measured]
    """The head as it is, by real decoding; called on every process at once."""
    provenance: dict[str, str]
    store: FeatureStore | None = None
    """Kept states of the corpus."""
    progress: Progress = field(default_factory=Progress)

    def __post_init__(self) -> None:
        config, world = self.config, self.accelerator.num_processes
        share = config.micro_batch_size * world
        if config.batch_size % share:
            raise UserError(
                f"train.batch_size is {config.batch_size}; with {world} processes and train.micro_batch_size {config.micro_batch_size} "
                f"it must be a multiple of {share}"
            )
        self.steps = config.steps or math.ceil(config.epochs * len(self.rows) / config.batch_size)
        self.order = RowOrder(len(self.rows), config.seed)
        self.features = Features(self.target, self.rows, self.objective.head.vocab.target_ids, config.feature_cache_gib, self.store)
        self.head = self.objective.head
        self.adapter = self.objective.adapter
        self.names = {p: n for n, p in self.head.named_parameters()}
        groups = [{"params": [p for p in self.head.parameters() if p.requires_grad]}]
        if self.adapter is not None:
            self.names |= {p: n for n, p in self.adapter.values.items()}
            groups.append({"params": list(self.adapter.values.values())})
        self.optimizer = torch.optim.AdamW(groups, lr=config.learning_rate, betas=config.betas, weight_decay=config.weight_decay)

    def resume(self) -> bool:
        """Continue from the newest whole checkpoint, where there is one."""
        checkpoint = newest_whole(self.checkpoints)
        if checkpoint is None:
            return False
        saved = load_head(checkpoint)
        if saved.arch != self.head.arch or saved.vocab.fingerprint != self.head.vocab.fingerprint:
            raise UserError(
                f"{self.checkpoints} holds checkpoints of another head (its shape or draft vocabulary differs from this recipe's); "
                "choose another name:, or remove that directory"
            )
        if has_adapter(checkpoint) != (self.adapter is not None):
            raise UserError(
                f"{self.checkpoints} holds checkpoints {'with' if self.adapter is None else 'without'} an adapter on the target, unlike "
                "this recipe (head.adapter); choose another name:, or remove that directory"
            )
        self.head.load_state_dict(saved.state_dict())
        if self.adapter is not None:
            self.adapter.restore(checkpoint)
        restore_optimizer(self.optimizer, self.names, load_file(checkpoint / "optimizer.safetensors"))
        self.progress = Progress(**json.loads((checkpoint / "progress.json").read_text()))
        return True

    def train(self) -> Progress:
        """Run to the last step. Returns where it ended; `best` and `last` lie under ``checkpoints``."""
        accelerator = self.accelerator
        model, self.optimizer = accelerator.prepare(self.objective, self.optimizer)
        started, done_before = time.perf_counter(), self.progress.step
        with tqdm(
            total=self.steps,
            initial=self.progress.step,
            unit="step",
            desc="training",
            disable=not accelerator.is_main_process,
        ) as bar:
            while self.progress.step < self.steps:
                step = self.progress.step
                rates = self.rates(step)
                for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
                    group["lr"] = rate
                loss, sums, norm = self._update(model, step)
                self.progress.step += 1
                bar.update(1)
                best = f", best acceptance length {self.progress.best_tau:.2f}" if self.progress.best_step >= 0 else ""
                bar.set_postfix_str(f"loss {loss:.3f}{best}")
                if step == 0 or self.progress.step % self.config.log_every == 0:
                    per_step = (time.perf_counter() - started) / (self.progress.step - done_before)
                    values = {"loss": loss, "learning_rate": rates[0], "grad_norm": norm, "seconds_per_step": per_step}
                    self.tracker.log(self.progress.step, values | depth_metrics(sums))
                self._evaluate_and_save()
        return self.progress

    def rates(self, step: int) -> list[float]:
        """Learning rates of an update: the head's, and the adapter's where there is one."""
        rates = [learning_rate(self.config, step, self.steps)]
        if self.adapter is not None:
            first = self.objective.first_joint_step(self.steps)
            peak = self.objective.config.joint.learning_rate
            rates.append(0.0 if step < first else learning_rate(self.config, step - first, self.steps - first, peak))
        return rates

    def _update(self, model: torch.nn.Module, step: int) -> tuple[float, torch.Tensor, float]:
        """Forward, backward and one optimizer step over this process's share of the update's rows."""
        accelerator, config = self.accelerator, self.config
        every = self.order.update(step, config.batch_size)
        total = self.rows.totals(every)
        own = every[accelerator.process_index :: accelerator.num_processes]
        micro = [own[i : i + config.micro_batch_size] for i in range(0, len(own), config.micro_batch_size)]
        sums = torch.zeros(self.objective.depths, 6, device=accelerator.device)
        moment, target = Moment(config.seed, step, self.steps), self.target
        loss_sum = torch.zeros((), device=accelerator.device)
        for index, rows in enumerate(micro):
            batch = self.rows.batch(rows).to(accelerator.device)
            features, statistics = self.features(batch)
            last = index == len(micro) - 1
            with accelerator.no_sync(model) if not last else nullcontext(), accelerator.autocast():
                loss, counted = model(batch, features, target.embedding, target.lm_head, target.softcap, total, statistics, moment)
                # Weights are shares of the whole update; DDP averages over processes, so their number is multiplied back in.
                accelerator.backward(loss * accelerator.num_processes)
            loss_sum += loss.detach()
            sums += counted
        loss_sum, sums = accelerator.reduce(loss_sum), accelerator.reduce(sums)
        if not math.isfinite(float(loss_sum)):
            raise FloatingPointError(self._culprit(step, every, float(loss_sum)))
        norm = float(accelerator.clip_grad_norm_(model.parameters(), config.clip))
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss_sum), sums, norm

    def _culprit(self, step: int, rows: list[int], loss: float) -> str:
        documents = [self.rows.documents[i].conversation for r in rows for i in self.rows.rows[r]]
        return (
            f"the loss of step {step + 1} is {loss}, so training stopped before the optimizer used it; the batch holds rows {rows} "
            f"with conversations {documents}; the newest checkpoint is sound"
        )

    def _evaluate_and_save(self) -> None:
        config, step = self.config, self.progress.step
        final = step == self.steps
        improved, measured = False, None
        if final or step % config.eval_every == 0:
            measured = self.measure()
            tau = measured.acceptance_length
            self.tracker.log(step, {"eval/acceptance_length": tau})
            self.progress.evaluations += 1
            improved = tau > self.progress.best_tau
            if improved:
                self.progress.best_tau, self.progress.best_step = tau, step
        if (improved or final or step % config.save_every == 0) and self.accelerator.is_main_process:
            save_checkpoint(
                self.checkpoints,
                self.head,
                optimizer_tensors(self._raw_optimizer(), self.names),
                self.progress,
                self.provenance,
                measured.tree if measured else None,
                self.adapter,
            )
            if improved:
                point(self.checkpoints / "best", f"step-{step:06d}")
            prune(self.checkpoints, config.keep_last, self.progress.best_step)
        self.accelerator.wait_for_everyone()

    def _raw_optimizer(self) -> torch.optim.Optimizer:
        inner = getattr(self.optimizer, "optimizer", self.optimizer)
        assert isinstance(inner, torch.optim.Optimizer)
        return inner
