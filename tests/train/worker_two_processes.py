"""Trains three steps and saves the head. Run by torchrun in test_two_processes.py: worker_two_processes.py OUT DIRECTORY."""

from __future__ import annotations

import sys
from pathlib import Path

from accelerate import Accelerator
from safetensors.torch import save_file

from tests.train.runs import KINDS, kind_run, small_run, weights


def train(accelerator: Accelerator, directory: Path, pack: bool) -> None:
    """Three steps of four rows, one row at a time, whatever the number of processes."""
    run = small_run(directory / str(pack), accelerator=accelerator, steps=3, micro_batch_size=1, pack=pack)
    run.train()
    if accelerator.is_main_process:
        save_file(weights(run), directory / f"head-{pack}.safetensors")


def train_kind(accelerator: Accelerator, directory: Path, kind: str) -> None:
    """The same for every kind of head."""
    run = kind_run(kind, directory / kind, accelerator=accelerator, steps=3, micro_batch_size=1)
    run.train()
    if accelerator.is_main_process:
        save_file(weights(run), directory / f"head-{kind}.safetensors")


def main() -> None:
    accelerator = Accelerator(cpu=True)
    assert accelerator.num_processes == 2, f"{accelerator.num_processes} processes"
    for pack in (True, False):
        train(accelerator, Path(sys.argv[1]), pack)
    for kind in KINDS:
        train_kind(accelerator, Path(sys.argv[1]), kind)
    accelerator.end_training()


if __name__ == "__main__":
    main()
