"""FeatureStore: taps and last hidden states that the target had when it wrote the corpus, so that training need not run it again.

One safetensors file a corpus shard, ``taps/KEY`` [n, A*H] and ``hidden/KEY`` [n, H] a document. KEY is a hash of the document's ids:
features can never be taken for those of other text. They cover every position but the document's last, which nothing is trained on.

Shapes: n positions, A taps, H hidden width.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from heads.errors import UserError
from heads.files import write_atomically

States = tuple[torch.Tensor, torch.Tensor]


def document_key(ids: np.ndarray) -> str:
    """The name of a document's features."""
    return hashlib.sha256(np.ascontiguousarray(ids, dtype=np.int32).tobytes()).hexdigest()[:24]


class FeatureStore:
    """A directory of features, open for appending or reading."""

    def __init__(self, directory: Path, identity: dict[str, Any]) -> None:
        """Open or create.

        Args:
            identity: target, taps, dtype; JSON values.

        Raises:
            UserError: the directory holds features of another identity, or a damaged file.
        """
        self.directory = directory
        known = directory / "identity.json"
        if known.exists():
            found = json.loads(known.read_text())
            different = [k for k in sorted(found.keys() | identity.keys()) if found.get(k) != identity.get(k)]
            if different:
                key = different[0]
                raise UserError(
                    f"{directory} holds features of another {key} ({found.get(key)!r}, this recipe's is {identity.get(key)!r}); "
                    "remove that directory, and the target's states are computed again"
                )
        else:
            directory.mkdir(parents=True, exist_ok=True)
            write_atomically(known, json.dumps(identity, indent=1, sort_keys=True))
        for leftover in directory.glob(".*.tmp-*"):
            leftover.unlink(missing_ok=True)
        self._files: dict[str, Path] = {}
        for path in sorted(directory.glob("features-*.safetensors")):
            self._know(path)

    def _know(self, path: Path) -> None:
        try:
            with safe_open(path, "pt") as file:
                self._files.update({name.removeprefix("taps/"): path for name in file.keys() if name.startswith("taps/")})  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            raise UserError(f"feature file {path} is damaged ({error}); remove it, and the target's states are computed again") from error

    def __len__(self) -> int:
        return len(self._files)

    def __contains__(self, ids: object) -> bool:
        return isinstance(ids, np.ndarray) and document_key(ids) in self._files

    def append(self, documents: Sequence[tuple[np.ndarray, States]]) -> None:
        """Write the features of some documents (ids [n + 1], (taps [n, A*H], hidden [n, H])) as one file, whole or not at all."""
        if not documents:
            return
        tensors: dict[str, torch.Tensor] = {}
        for ids, (taps, hidden) in documents:
            assert len(taps) == len(hidden) == len(ids) - 1
            tensors[f"taps/{document_key(ids)}"] = taps.contiguous()
            tensors[f"hidden/{document_key(ids)}"] = hidden.contiguous()
        # Not the number of files: one that was damaged may have been removed from among them.
        last = max(self.directory.glob("features-*.safetensors"), default=None)
        number = int(last.stem.removeprefix("features-")) + 1 if last is not None else 0
        path = self.directory / f"features-{number:05d}.safetensors"
        aside = path.with_name(f".{path.name}.tmp-{os.getpid()}")
        save_file(tensors, aside)
        with aside.open("rb") as file:
            os.fsync(file.fileno())
        aside.replace(path)
        self._know(path)

    def read(self, ids: np.ndarray) -> States:
        """(taps [n, A*H], hidden [n, H]) of a document of n + 1 ids that is in the store."""
        key = document_key(ids)
        with safe_open(self._files[key], "pt") as file:
            return file.get_tensor(f"taps/{key}"), file.get_tensor(f"hidden/{key}")
