"""TokenCorpus: what the target wrote, as write-once token shards.

A shard is one safetensors file: ``ids`` int32 [n], ``mask`` uint8 [n], ``offsets`` int64 [documents + 1], and in its header the JSON list
of documents and of what was dropped. It is written under a temporary name, synced, and renamed: a shard that exists is whole. A prompt is
answered when its conversation id stands in a shard; that is all the state resuming needs.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from heads.errors import UserError
from heads.files import sha256_file, write_atomically


@dataclass(frozen=True)
class Document:
    """One training document: a conversation, or one turn of it where the template rewrites history."""

    conversation: str
    category: str
    turns: int
    finish: tuple[str, ...]
    """How each answer ended: stop or length."""
    ids: np.ndarray = field(repr=False)
    """[n] int32."""
    mask: np.ndarray = field(repr=False)
    """[n] uint8: 1 exactly on the ids the target wrote, end of turn included."""


@dataclass(frozen=True)
class Dropped:
    """A conversation that gave no document, and why."""

    conversation: str
    reason: str


class TokenCorpus:
    """A corpus directory, open for appending or reading."""

    def __init__(self, directory: Path, identity: dict[str, Any]) -> None:
        """Open or create.

        Args:
            identity: what the corpus is made of (target, template, sampling, prompts); JSON values.

        Raises:
            UserError: the directory holds a corpus of another identity; the sentence names the first difference.
        """
        self.directory = directory
        self.identity = identity
        known = directory / "identity.json"
        if known.exists():
            self._same_identity(json.loads(known.read_text()))
        else:
            directory.mkdir(parents=True, exist_ok=True)
            write_atomically(known, json.dumps(identity, indent=1, sort_keys=True))
        for leftover in directory.glob(".*.tmp-*"):
            leftover.unlink(missing_ok=True)

    def _same_identity(self, found: dict[str, Any]) -> None:
        for key in sorted(found.keys() | self.identity.keys()):
            if found.get(key) != self.identity.get(key):
                raise UserError(
                    f"{self.directory} holds a corpus of another run: its {key} is {found.get(key)!r}, this recipe's is "
                    f"{self.identity.get(key)!r}; choose another name: or corpus:, or remove that directory"
                )

    @property
    def shards(self) -> list[Path]:
        return sorted(self.directory.glob("shard-*.safetensors"))

    def append(self, documents: Sequence[Document], dropped: Sequence[Dropped]) -> None:
        """Write one shard. Nothing is visible until all of it is on disk."""
        number = int(self.shards[-1].stem.removeprefix("shard-")) + 1 if self.shards else 0
        path = self.directory / f"shard-{number:05d}.safetensors"
        aside = path.with_name(f".{path.name}.tmp-{os.getpid()}")
        lengths = [0, *(len(d.ids) for d in documents)]
        empty = np.zeros(0)
        tensors = {
            "ids": torch.from_numpy(np.concatenate([d.ids for d in documents] or [empty]).astype(np.int32)),
            "mask": torch.from_numpy(np.concatenate([d.mask for d in documents] or [empty]).astype(np.uint8)),
            "offsets": torch.from_numpy(np.cumsum(lengths, dtype=np.int64)),
        }
        about = [{"conversation": d.conversation, "category": d.category, "turns": d.turns, "finish": d.finish} for d in documents]
        save_file(tensors, aside, {"documents": json.dumps(about), "dropped": json.dumps([asdict(d) for d in dropped])})
        with aside.open("rb") as file:
            os.fsync(file.fileno())
        aside.replace(path)

    def answered(self) -> set[str]:
        """Ids of the conversations that need no work any more, dropped ones included."""
        done = {d.conversation for d in self.documents()}
        return done | {d.conversation for d in self.dropped()}

    def _header(self, path: Path, key: str) -> list[dict[str, Any]]:
        try:
            with safe_open(path, "pt") as file:
                return list(json.loads(file.metadata()[key]))
        except (SafetensorError, OSError, KeyError, ValueError, TypeError) as error:
            raise UserError(f"shard {path} is damaged ({error}); remove it and run scripts.prepare again") from error

    def dropped(self) -> Iterator[Dropped]:
        for path in self.shards:
            yield from (Dropped(**row) for row in self._header(path, "dropped"))

    def documents(self) -> Iterator[Document]:
        """All documents in the order they were written."""
        for path in self.shards:
            rows = self._header(path, "documents")
            with safe_open(path, "pt") as file:
                ids, mask, offsets = (file.get_tensor(name).numpy() for name in ("ids", "mask", "offsets"))
            assert len(offsets) == len(rows) + 1
            for row, start, end in zip(rows, offsets[:-1], offsets[1:]):
                row["finish"] = tuple(row["finish"])
                yield Document(**row, ids=ids[start:end], mask=mask[start:end])

    def seal(self, vocab_size: int) -> dict[str, Any]:
        """Write manifest.json (checksums), summary.json and dropped.jsonl; return the summary."""
        counts = np.zeros(vocab_size, dtype=np.int64)
        finish: Counter[str] = Counter()
        tokens = answer_tokens = documents = 0
        for document in self.documents():
            documents += 1
            tokens += len(document.ids)
            answer_tokens += int(document.mask.sum())
            finish.update(document.finish)
            counts += np.bincount(document.ids[document.mask == 1], minlength=vocab_size)
        dropped = list(self.dropped())
        summary = {
            "documents": documents,
            "tokens": tokens,
            "answer_tokens": answer_tokens,
            "distinct_answer_tokens": int((counts > 0).sum()),
            "finish": dict(finish),
            "dropped": dict(Counter(d.reason for d in dropped)),
        }
        write_atomically(self.directory / "dropped.jsonl", "".join(json.dumps(asdict(d)) + "\n" for d in dropped))
        write_atomically(self.directory / "summary.json", json.dumps(summary, indent=1))
        manifest = {
            "identity": self.identity,
            "vocab_size": vocab_size,
            "shards": {p.name: sha256_file(p) for p in self.shards},
        }
        write_atomically(self.directory / "manifest.json", json.dumps(manifest, indent=1))
        return summary


def open_sealed(directory: Path) -> tuple[TokenCorpus, dict[str, Any]]:
    """Open a finished corpus and check every shard against the manifest. Raises UserError where it is unfinished or damaged."""
    path = directory / "manifest.json"
    if not path.exists():
        raise UserError(f"{directory} holds no finished corpus; run: python -m scripts.prepare RECIPE")
    manifest: dict[str, Any] = json.loads(path.read_text())
    corpus = TokenCorpus(directory, manifest["identity"])
    found = {p.name for p in corpus.shards}
    if found != set(manifest["shards"]):
        raise UserError(f"{directory} holds shards that its manifest does not know or lacks some; run scripts.prepare again")
    for name, digest in manifest["shards"].items():
        if sha256_file(directory / name) != digest:
            raise UserError(f"shard {directory / name} does not match its checksum; remove it and run scripts.prepare again")
    return corpus, manifest


def answer_counts(corpus: TokenCorpus, vocab_size: int) -> torch.Tensor:
    """[V] int64: how often the target wrote each token."""
    counts = np.zeros(vocab_size, dtype=np.int64)
    for document in corpus.documents():
        counts += np.bincount(document.ids[document.mask == 1], minlength=vocab_size)
    return torch.from_numpy(counts)
