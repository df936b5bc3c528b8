"""Rows of any common shape -> Conversation (stub until the loader lands)."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Literal

from pydantic import Field

from heads.config import Config


@dataclass(frozen=True)
class Conversation:
    id: str
    category: str
    system: str | None
    turns: tuple[str, ...]
    source: str

    @classmethod
    def make(cls, *, turns, system=None, category="uncategorised", source=""):
        digest = hashlib.sha256(json.dumps([system, list(turns)]).encode()).hexdigest()[:16]
        return cls(digest, category, system, tuple(turns), source)
