"""The one explicit table of draft heads: kind -> config, architecture, module."""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches

from heads.eagle3 import Eagle3Architecture, Eagle3Config, Eagle3Head
from heads.errors import UserError


@dataclass(frozen=True)
class HeadKind:
    """What a kind of head is made of."""

    config: type[Eagle3Config]
    architecture: type[Eagle3Architecture]
    module: type[Eagle3Head]


HEADS: dict[str, HeadKind] = {"eagle3": HeadKind(Eagle3Config, Eagle3Architecture, Eagle3Head)}


def head_kind(kind: str) -> HeadKind:
    """Look a kind up; raises UserError naming what was asked, what is near, what exists."""
    if kind not in HEADS:
        near = get_close_matches(kind, HEADS, n=1)
        hint = f"; did you mean '{near[0]}'?" if near else ""
        raise UserError(f"there is no draft head of kind '{kind}'; the kinds are {', '.join(sorted(HEADS))}{hint}")
    return HEADS[kind]
