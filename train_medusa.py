"""Train Medusa heads against their frozen target.

    accelerate launch train_medusa.py recipes/smollm2-135m-medusa-quick.yaml [key=value ...]

Killed and started again, it continues from the newest whole checkpoint.
"""

from __future__ import annotations

from scripts.cli import run
from scripts.train import train


def main(argv: list[str]) -> None:
    """Run the command."""
    train(argv, "train_medusa.py", "Train Medusa heads against their frozen target.")


if __name__ == "__main__":
    run(main)
