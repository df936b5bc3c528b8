"""What a checkpoint holds, and nothing else: head, optimizer state, step, the best so far.

The data order is a function of seed and step, the schedule a function of the step, and nothing else in training is random, so this is all
that resuming bit for bit needs. Everything is safetensors and JSON. A checkpoint is written aside, checksummed, and renamed.
"""

from __future__ import annotations

import json
import os
import shutil
import warnings
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from heads.adapter import TargetAdapter
from heads.errors import UserError
from heads.files import sha256_file, write_atomically
from heads.registry import head_kind
from heads.vocab import DraftVocab

TREE = "tree.json"
FILES = ("head.safetensors", "head.json", "optimizer.safetensors", "progress.json")


@dataclass
class Progress:
    """Where training stands."""

    step: int = 0
    """Updates done."""
    best_tau: float = 0.0
    """Highest acceptance length measured on the validation prompts."""
    best_step: int = -1
    evaluations: int = 0


def optimizer_tensors(optimizer: torch.optim.Optimizer, names: dict[torch.nn.Parameter, str]) -> dict[str, torch.Tensor]:
    """AdamW's state as named tensors."""
    flat = {}
    for parameter, name in names.items():
        state = optimizer.state.get(parameter, {})
        for key, value in state.items():
            flat[f"{name}/{key}"] = value.detach().cpu().contiguous() if torch.is_tensor(value) else torch.tensor(value)
    return flat


def restore_optimizer(optimizer: torch.optim.Optimizer, names: dict[torch.nn.Parameter, str], flat: dict[str, torch.Tensor]) -> None:
    """The inverse of ``optimizer_tensors``."""
    by_name = {name: parameter for parameter, name in names.items()}
    for full, value in flat.items():
        name, key = full.rsplit("/", 1)
        parameter = by_name[name]
        # AdamW keeps its step counter on the CPU.
        optimizer.state[parameter][key] = value.clone() if key == "step" else value.to(parameter.device).clone()


def save_checkpoint(
    directory: Path,
    head: Any,
    optimizer: dict[str, torch.Tensor],
    progress: Progress,
    provenance: dict[str, str],
    tree: dict[str, Any] | None = None,
    adapter: TargetAdapter | None = None,
) -> Path:
    """Write ``directory/step-N`` whole or not at all; ``last`` points to it afterwards.

    Args:
        provenance: small text files (recipe.yaml, command.txt, ...) that go with it: name -> content.
        tree: measured accuracies and the static tree built from them, where they were measured at this step.
        adapter: what was trained inside the target.
    """
    final = directory / f"step-{progress.step:06d}"
    aside = directory / f".{final.name}.tmp-{os.getpid()}"
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    save_file({k: v.detach().cpu().contiguous() for k, v in head.state_dict().items()}, aside / "head.safetensors")
    write_atomically(aside / "head.json", head.arch.model_dump_json(indent=1))
    save_file(optimizer, aside / "optimizer.safetensors")
    write_atomically(aside / "progress.json", json.dumps(asdict(progress)))
    for name, text in provenance.items():
        write_atomically(aside / name, text)
    if adapter is not None:
        adapter.save(aside)
    if tree is not None:
        write_atomically(aside / TREE, json.dumps(tree))
    for path in aside.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
    write_atomically(aside / "manifest.json", json.dumps({p.name: sha256_file(p) for p in sorted(aside.iterdir())}, indent=1))
    if final.exists():  # a step trained again after a resume from further back
        shutil.rmtree(final)
    aside.rename(final)
    point(directory / "last", final.name)
    return final


def point(link: Path, name: str) -> None:
    """Make ``link`` a relative symlink to its sibling ``name``, replacing it in one step."""
    aside = link.with_name(f".{link.name}.tmp-{os.getpid()}")
    aside.unlink(missing_ok=True)
    aside.symlink_to(name)
    os.replace(aside, link)


def is_whole(checkpoint: Path) -> bool:
    """Whether every file is there and matches its checksum."""
    try:
        manifest = json.loads((checkpoint / "manifest.json").read_text())
        return set(FILES) <= manifest.keys() and all(sha256_file(checkpoint / name) == digest for name, digest in manifest.items())
    except (OSError, ValueError):
        return False


def newest_whole(directory: Path) -> Path | None:
    """The newest checkpoint that can be trusted; damaged ones are skipped with a warning."""
    for checkpoint in sorted(directory.glob("step-*"), reverse=True):
        if is_whole(checkpoint):
            return checkpoint
        warnings.warn(f"checkpoint {checkpoint} is damaged and is skipped for the one before it", stacklevel=2)
    return None


def prune(directory: Path, keep: int, best_step: int) -> None:
    """Remove all but the ``keep`` newest checkpoints and the best, and what killed runs left half-written."""
    for leftover in directory.glob(".*.tmp-*"):
        if leftover.is_dir():
            shutil.rmtree(leftover, ignore_errors=True)
        else:
            leftover.unlink(missing_ok=True)
    last = os.readlink(directory / "last")
    # Beyond `last` lie only damaged ones that a resume skipped: they must not push out those that are whole.
    known = [c for c in sorted(directory.glob("step-*"), reverse=True) if c.name <= last]
    for checkpoint in known[keep:]:
        if checkpoint.name != f"step-{best_step:06d}":
            shutil.rmtree(checkpoint)


def find_checkpoint(directory: Path, name: str) -> Path:
    """``best``, ``last`` or a step folder under ``directory``; raises UserError naming what is there."""
    path = directory / name
    if "/" in name or name.startswith(".") or not path.exists():
        there = sorted(p.name for p in directory.glob("[!.]*")) if directory.exists() else []
        known = (
            f"there are {', '.join(there)}"
            if there
            else "nothing was trained there yet; train the head first (train_eagle.py, train_medusa.py)"
        )
        raise UserError(f"there is no checkpoint '{name}' in {directory}: {known}")
    if not is_whole(path):
        raise UserError(f"checkpoint {path} is damaged (a file is missing or does not match its checksum); use another one")
    return path.resolve() if path.is_symlink() else path


def load_head(checkpoint: Path) -> Any:
    """The head of a checkpoint, with its draft vocabulary and the accuracies that were measured with it, in float32 on the CPU."""
    text = (checkpoint / "head.json").read_text()
    kind = head_kind(json.loads(text).get("kind", ""))
    arch: Any = kind.architecture.model_validate_json(text)
    tensors = load_file(checkpoint / "head.safetensors")
    maps = [name for name in tensors if name.split(".")[-1] == "d2t"]
    if maps:
        offsets = tensors[maps[0]]
        vocab = DraftVocab(offsets + torch.arange(offsets.numel()), arch.vocab_size)
    else:
        vocab = DraftVocab.full(arch.vocab_size)
    head = kind.build(arch, vocab)
    try:
        head.load_state_dict(tensors)
    except RuntimeError as error:
        raise UserError(f"the tensors in {checkpoint} do not fit its head.json ({str(error).splitlines()[-1].strip()})") from error
    if maps and not torch.equal(tensors[maps[0].replace("d2t", "t2d")], vocab.t2d):
        raise UserError(f"the draft vocabulary maps in {checkpoint} contradict each other; the checkpoint cannot be trusted")
    if (checkpoint / TREE).exists():
        head.accuracies = json.loads((checkpoint / TREE).read_text())["accuracies"] or None
    return head
