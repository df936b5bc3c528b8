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
from tests.train.runs import small_run, weights
from tests.train.worker_two_processes import train

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
        one, two = (load_file(tmp_path / which / f"head-{pack}.safetensors") for which in ("one", "two"))
        assert one.keys() == two.keys()
        start = weights(small_run(tmp_path / "unused", accelerator=accelerator, pack=pack))
        assert not torch.allclose(one["fc.weight"], start["fc.weight"], atol=1e-4)
        for name, value in one.items():
            torch.testing.assert_close(two[name], value, atol=1e-6, rtol=0, msg=lambda m, n=name: f"{n}: {m}")


def test_batch_must_divide_over_processes(tmp_path: Path) -> None:
    class Two:
        num_processes = 2
        is_main_process = True

    with pytest.raises(UserError, match=r"with 2 processes and train\.micro_batch_size 4 it must be a multiple of 8"):
        small_run(tmp_path, accelerator=Two(), micro_batch_size=4)  # type: ignore[arg-type]
