"""Train an EAGLE-1, EAGLE-3 or P-EAGLE draft head against its frozen target.

    accelerate launch train_eagle.py recipes/smollm2-135m-eagle3-quick.yaml [key=value ...]
    ACCELERATE_USE_CPU=true accelerate launch --multi_gpu --num_processes 2 train_eagle.py recipes/NAME.yaml     # two CPU processes

Killed and started again, it continues from the newest whole checkpoint.
"""

from __future__ import annotations

from scripts.cli import run
from scripts.train import train


def main(argv: list[str]) -> None:
    """Run the command."""
    train(argv, "train_eagle.py", "Train an EAGLE draft head against its frozen target.")


if __name__ == "__main__":
    run(main)
