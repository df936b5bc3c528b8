"""Two real processes (gloo, DDP) reach the weights of one process with the same batch_size."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file

from heads.errors import UserError
from tests.train.runs import KINDS, kind_run, small_run, weights
from tests.train.worker_two_processes import train, train_kind

ROOT = Path(__file__).resolve().parents[2]


def test_two_processes_equal_one(tmp_path: Path) -> None:
    (tmp_path / "two").mkdir()
    (tmp_path / "one").mkdir()
    kept = {
        k: v
        for k, v in os.environ.items()
        if not k.startswith(("ACCELERATE_", "MASTER_")) and k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    }
    environment = kept | {"ACCELERATE_USE_CPU": "true", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    worker = str(Path(__file__).with_name("worker_two_processes.py"))
    done = subprocess.run([*command, worker, str(tmp_path / "two")], env=environment, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    accelerator = Accelerator(cpu=True)
    assert accelerator.num_processes == 1
    for pack in (True, False):
        train(accelerator, tmp_path / "one", pack)
        same(tmp_path, str(pack), weights(small_run(tmp_path / "unused", accelerator=accelerator, pack=pack)))
    for kind in KINDS:
        train_kind(accelerator, tmp_path / "one", kind)
        same(tmp_path, kind, weights(kind_run(kind, tmp_path / "unused", accelerator=accelerator)))


def same(place: Path, name: str, start: dict[str, torch.Tensor]) -> None:
    """Both heads are equal, and far from where they started."""
    one, two = (load_file(place / which / f"head-{name}.safetensors") for which in ("one", "two"))
    assert one.keys() == two.keys()
    assert sum(not torch.allclose(value, start[key], atol=1e-4) for key, value in one.items()) > len(one) / 2
    for key, value in one.items():
        torch.testing.assert_close(two[key], value, atol=2e-6, rtol=0, msg=lambda m, n=key: f"{name} {n}: {m}")


def test_batch_must_divide_over_processes(tmp_path: Path) -> None:
    class Two:
        num_processes = 2
        is_main_process = True

    with pytest.raises(UserError, match=r"with 2 processes and train\.micro_batch_size 4 it must be a multiple of 8"):
        small_run(tmp_path, accelerator=Two(), micro_batch_size=4)  # type: ignore[arg-type]
