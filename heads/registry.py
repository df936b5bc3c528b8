"""The one explicit table of draft heads: kind -> config, architecture, module."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

import torch

from heads.config import Config
from heads.eagle import EagleArchitecture, EagleConfig, EagleHead
from heads.eagle3 import Eagle3Architecture, Eagle3Config, Eagle3Head
from heads.errors import UserError
from heads.medusa import MedusaArchitecture, MedusaConfig, MedusaHead
from heads.peagle import PEagleArchitecture, PEagleConfig, PEagleHead
from heads.target import FrozenTarget
from heads.vocab import DraftVocab


@dataclass(frozen=True)
class HeadKind:
    """What a kind of head is made of."""

    title: str
    config: type[Config]
    architecture: type[Config]
    resolve: Callable[[Any, FrozenTarget, int], Any]
    """(config, target, draft vocabulary size) -> architecture."""
    build: Callable[[Any, DraftVocab], Any]
    """(architecture, draft vocabulary) -> module."""
    prunes: bool
    """Whether it may have a draft vocabulary of its own."""


HEADS: dict[str, HeadKind] = {
    "eagle": HeadKind(
        "EAGLE-1", EagleConfig, EagleArchitecture, lambda c, t, n: EagleArchitecture.resolve(c, t), lambda a, v: EagleHead(a), False
    ),
    "eagle3": HeadKind("EAGLE-3", Eagle3Config, Eagle3Architecture, Eagle3Architecture.resolve, Eagle3Head, True),
    "medusa": HeadKind(
        "Medusa", MedusaConfig, MedusaArchitecture, lambda c, t, n: MedusaArchitecture.resolve(c, t), lambda a, v: MedusaHead(a), False
    ),
    "peagle": HeadKind("P-EAGLE", PEagleConfig, PEagleArchitecture, PEagleArchitecture.resolve, PEagleHead, True),
}


def head_kind(kind: str) -> HeadKind:
    """Look a kind up; raises UserError naming what was asked, what is near, what exists."""
    if kind not in HEADS:
        near = get_close_matches(kind, HEADS, n=1)
        hint = f"; did you mean '{near[0]}'?" if near else ""
        raise UserError(f"there is no draft head of kind '{kind}'; the kinds are {', '.join(sorted(HEADS))}{hint}")
    return HEADS[kind]


def new_head(config: Any, target: FrozenTarget, vocab: DraftVocab, seed: int) -> Any:
    """A head with its initial values, on the CPU in float32."""
    kind = head_kind(config.kind)
    head = kind.build(kind.resolve(config, target, vocab.size), vocab)
    head.initialise(target, config, torch.Generator().manual_seed(seed))
    return head
