"""Which candidates a drafter puts before the target: a chain, or a tree."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from heads.config import Config


class ShapeConfig(Config):
    """The shape of the draft."""

    kind: Literal["chain", "dynamic", "static"] = "chain"
    """chain: one token after the other. dynamic: the most probable nodes of each cycle (EAGLE-2). static: one tree for all cycles,
    built from measured accuracies (Medusa, EAGLE-1)."""
    nodes: int = Field(default=60, ge=1, le=1024)
    """Most draft tokens of a tree."""
    beam: int = Field(default=10, ge=1, le=64)
    """dynamic: nodes extended at each depth, and children of each. static: most children of a node."""
