"""Trains three steps and saves the head. Run by torchrun in test_two_processes.py: worker_two_processes.py OUT DIRECTORY."""

from __future__ import annotations

import sys
from pathlib import Path

from accelerate import Accelerator
from safetensors.torch import save_file

from tests.train.runs import small_run, weights


def train(accelerator: Accelerator, directory: Path, pack: bool) -> None:
    """Three steps of four rows, one row at a time, whatever the number of processes."""
    run = small_run(directory / str(pack), accelerator=accelerator, steps=3, micro_batch_size=1, pack=pack)
    run.train()
    if accelerator.is_main_process:
        save_file(weights(run), directory / f"head-{pack}.safetensors")


def main() -> None:
    accelerator = Accelerator(cpu=True)
    assert accelerator.num_processes == 2, f"{accelerator.num_processes} processes"
    for pack in (True, False):
        train(accelerator, Path(sys.argv[1]), pack)
    accelerator.end_training()


if __name__ == "__main__":
    main()
