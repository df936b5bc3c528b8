"""A head that starts from a trained one instead of from its initial values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from heads.errors import UserError
from heads.registry import head_kind
from train.state import is_whole, load_head

PEAGLE_BASE = "base."


def open_start(path: str) -> Any:
    """The trained head in a checkpoint folder; raises UserError where there is none that can be trusted."""
    folder = Path(path)
    if not (folder / "head.json").is_file():
        raise UserError(
            f"head.init_from is {path}, and no head.json lies there; give a checkpoint folder such as runs/NAME/checkpoints/best"
        )
    if not is_whole(folder):
        raise UserError(f"head.init_from is {path}, a checkpoint that is damaged (a file is missing or does not match its checksum)")
    return load_head(folder)


@torch.no_grad()
def warm_start(head: Any, start: Any, path: str) -> list[str]:
    """Copy a trained head's values into a fresh one.

    The same kind gives everything. An EAGLE-3 head gives a P-EAGLE head its fusion, its layers, its output norm and its LM head; what
    P-EAGLE has beyond that keeps its initial values.

    Returns:
        Names of the parameters that were taken.

    Raises:
        UserError: the shapes do not fit, with the first that does not.
    """
    kind, given = head.arch.kind, start.arch.kind
    if head.vocab.fingerprint != start.vocab.fingerprint:
        raise UserError(f"head.init_from is {path}, whose draft vocabulary is not this head's; both must have the same target")
    if kind != given and (kind, given) != ("peagle", "eagle3"):
        raise UserError(
            f"head.init_from is {path}, a head of kind {given}; a head of kind {kind} can start from {kind}"
            + (" or eagle3" if kind == "peagle" else "")
        )
    prefix = PEAGLE_BASE if kind != given else ""
    own = head.state_dict()
    taken = {prefix + name: value for name, value in start.state_dict().items()}
    wrong = [name for name, value in taken.items() if name not in own or own[name].shape != value.shape]
    left = [] if prefix else [name for name in own if name not in taken]
    base = head.arch.base if prefix else head.arch
    same = ("taps", "rope", "rms_eps", "fc_norm", "n_q", "n_kv", "norm_before_residual")
    differs = [key for key in same if getattr(base, key, None) != getattr(start.arch, key, None)]
    if wrong or left or differs:
        what = (wrong or left or differs)[0].removeprefix(prefix)
        raise UserError(
            f"head.init_from is {path}, a {head_kind(given).title} head that differs from this recipe's in {what}; "
            "make head: the same there, or train from the start"
        )
    head.load_state_dict(own | taken)
    return [name for name, _ in head.named_parameters() if name in taken]
