"""Where a run's numbers go: log.jsonl always, and Weights & Biases and TensorBoard where the recipe asks for them."""

from __future__ import annotations

import json
import math
import secrets
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal, Protocol

from heads.config import Config
from heads.errors import UserError
from heads.files import write_atomically

Value = float | int | str


class TrackerConfig(Config):
    """Which trackers a run has besides log.jsonl."""

    wandb: bool = False
    """Log to Weights & Biases."""
    wandb_project: str = "draftsmith"
    """The Weights & Biases project."""
    wandb_mode: Literal["online", "offline"] = "offline"
    """Send to the server as the run goes, or keep in the run directory for `wandb sync`; offline needs no account."""
    tensorboard: bool = False
    """Write TensorBoard event files under tensorboard/ of the run directory."""


class Tracker(Protocol):
    """What takes a run's numbers."""

    def log(self, step: int, values: Mapping[str, Value]) -> None:
        """Records values of one step; a step may be logged in several calls."""

    def close(self) -> None:
        """Writes out what is held back; a second call does nothing."""


class NullTracker:
    """Takes everything and keeps nothing: for the processes that are not the main one."""

    def log(self, step: int, values: Mapping[str, Value]) -> None:
        """Does nothing."""

    def close(self) -> None:
        """Does nothing."""


class CompositeTracker:
    """Passes everything on to several trackers."""

    def __init__(self, trackers: Sequence[Tracker]) -> None:
        self.trackers = list(trackers)

    def log(self, step: int, values: Mapping[str, Value]) -> None:
        """Logs to each."""
        for tracker in self.trackers:
            tracker.log(step, values)

    def close(self) -> None:
        """Closes each, even when closing one fails."""
        with ExitStack() as stack:
            for tracker in reversed(self.trackers):
                stack.callback(tracker.close)


class JsonLinesTracker:
    """Appends a line ``{"step": ..., ...}`` a call; what is not a finite number is written as text, "NaN"."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        # A line cut short by a killed run would swallow the first one of this run.
        self.truncate_after(path, math.inf)
        self._file = path.open("a", encoding="utf-8")

    def log(self, step: int, values: Mapping[str, Value]) -> None:
        """Writes one line and flushes it."""
        entry = {"step": step} | {key: _jsonable(value) for key, value in values.items() if key != "step"}
        self._file.write(json.dumps(entry, allow_nan=False, ensure_ascii=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Closes the file."""
        self._file.close()

    @staticmethod
    def truncate_after(path: Path, step: float) -> None:
        """Drops the lines of steps after ``step`` and any that are no JSON, in one atomic rewrite.

        For a run that resumes from a checkpoint: what it logged past that checkpoint it will log again.
        """
        if not path.exists():
            return
        content = path.read_bytes()
        kept = []
        for line in content.split(b"\n"):
            try:
                entry = json.loads(line)
            except ValueError:
                continue
            if isinstance(entry, dict) and entry.get("step", -math.inf) <= step:
                kept.append(line + b"\n")
        if b"".join(kept) != content:
            write_atomically(path, b"".join(kept))


class WandbTracker:
    """Logs to Weights & Biases; the run's id is kept in wandb_id.txt, so that a resumed run goes on as the same one."""

    def __init__(self, config: TrackerConfig, run_dir: Path, run_name: str, recipe: Mapping[str, Any]) -> None:
        try:
            import wandb
        except ImportError:
            wandb = None  # type: ignore[assignment]
        # Offline runs leave a folder wandb/ behind, which Python takes for an empty package where there is no real one.
        if not hasattr(wandb, "init"):
            raise UserError("wandb is true but the package is not there: pip install wandb, or set wandb to false")
        run_dir.mkdir(parents=True, exist_ok=True)
        id_file = run_dir / "wandb_id.txt"
        if not id_file.exists():
            write_atomically(id_file, secrets.token_hex(4) + "\n")
        try:
            self._run: Any = wandb.init(
                project=config.wandb_project,
                name=run_name,
                id=id_file.read_text(encoding="utf-8").strip(),
                resume="allow",
                dir=run_dir,
                mode=config.wandb_mode,
                config=dict(recipe),
            )
        except wandb.Error as error:
            reason = " ".join(str(error).split()).rstrip(".")
            raise UserError(
                f"Weights & Biases did not start in mode {config.wandb_mode}: {reason}; run `wandb login`, or set wandb_mode to offline"
            ) from error

    def log(self, step: int, values: Mapping[str, Value]) -> None:
        """Logs to the run."""
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        """Finishes the run."""
        if self._run is not None:
            self._run.finish()
            self._run = None


class TensorboardTracker:
    """Writes event files."""

    def __init__(self, directory: Path, recipe: Mapping[str, Any], resume_step: int | None = None) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise UserError(
                "tensorboard is true but the package is not there: pip install 'draftsmith[tensorboard]', or set tensorboard to false"
            ) from None
        purge = None if resume_step is None else resume_step + 1
        self._writer: Any = SummaryWriter(str(directory), purge_step=purge)
        self._writer.add_text("recipe", f"```\n{json.dumps(recipe, indent=2, default=str)}\n```", resume_step or 0)

    def log(self, step: int, values: Mapping[str, Value]) -> None:
        """Adds a scalar, or a text, for each value."""
        for key, value in values.items():
            if isinstance(value, str):
                self._writer.add_text(key, value, step)
            else:
                self._writer.add_scalar(key, value, step)

    def close(self) -> None:
        """Flushes and closes the event file."""
        self._writer.close()


def make_tracker(
    config: TrackerConfig,
    run_dir: Path,
    run_name: str,
    recipe: dict[str, Any],
    is_main: bool,
    resume_step: int | None = None,
) -> Tracker:
    """The trackers a run has.

    Args:
        config: which ones.
        run_dir: where log.jsonl, tensorboard/ and wandb/ go.
        run_name: what Weights & Biases calls the run.
        recipe: the resolved recipe, stored with the run.
        is_main: whether this is the main process; the others log nothing.
        resume_step: the step of the checkpoint a run resumes from; what was logged after it is dropped.
    """
    if not is_main:
        return NullTracker()
    path = run_dir / "log.jsonl"
    if resume_step is not None:
        JsonLinesTracker.truncate_after(path, resume_step)
    trackers: list[Tracker] = []
    try:
        if config.tensorboard:
            trackers.append(TensorboardTracker(run_dir / "tensorboard", recipe, resume_step))
        if config.wandb:
            trackers.append(WandbTracker(config, run_dir, run_name, recipe))
        return CompositeTracker([JsonLinesTracker(path), *trackers])
    except BaseException:
        CompositeTracker(trackers).close()
        raise


def _jsonable(value: Any) -> Any:
    """Numbers of numpy and torch become Python's; what JSON cannot hold becomes text."""
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value
