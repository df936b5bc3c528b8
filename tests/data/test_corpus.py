"""TokenCorpus: what was written comes back, damage and foreign corpora are refused, a killed preparation continues."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import scripts.prepare
from data.corpus import Document, Dropped, TokenCorpus, answer_counts, open_sealed
from data.prompts import PromptsConfig, load_prompts
from heads.errors import UserError
from tests.tiny import save_tiny_target

IDENTITY: dict[str, Any] = {"target": "t", "template": "1", "regenerate": {"seed": 0}}
REPOSITORY = Path(__file__).parents[2]


def document(name: str, ids: list[int], answer: int, finish: tuple[str, ...] = ("stop",)) -> Document:
    """The last ``answer`` ids are the answer."""
    mask = [0] * (len(ids) - answer) + [1] * answer
    return Document(name, "math", len(finish), finish, np.array(ids, np.int32), np.array(mask, np.uint8))


def content(corpus: TokenCorpus) -> list[Any]:
    return [(d.conversation, d.category, d.turns, d.finish, d.ids.tolist(), d.mask.tolist()) for d in corpus.documents()]


DOCUMENTS = [document("a", [1, 2, 3, 4], 2), document("b", [5, 6, 7], 1, ("stop", "length")), document("c", [9, 3, 3], 2)]


@pytest.fixture
def corpus(tmp_path: Path) -> TokenCorpus:
    made = TokenCorpus(tmp_path / "corpus", IDENTITY)
    made.append(DOCUMENTS[:2], [Dropped("x", "empty")])
    made.append([], [Dropped("y", "degenerate")])
    made.append(DOCUMENTS[2:], [])
    return made


def test_round_trip(corpus: TokenCorpus) -> None:
    summary = corpus.seal(10)
    reopened, manifest = open_sealed(corpus.directory)
    wanted = [(d.conversation, d.category, d.turns, d.finish, d.ids.tolist(), d.mask.tolist()) for d in DOCUMENTS]
    assert content(reopened) == wanted
    assert list(reopened.dropped()) == [Dropped("x", "empty"), Dropped("y", "degenerate")]
    assert reopened.answered() == {"a", "b", "c", "x", "y"}
    assert manifest["identity"] == IDENTITY and manifest["vocab_size"] == 10 and len(manifest["shards"]) == 3
    assert summary == json.loads((corpus.directory / "summary.json").read_text())
    assert (summary["documents"], summary["tokens"], summary["answer_tokens"], summary["distinct_answer_tokens"]) == (3, 10, 5, 3)
    assert summary["finish"] == {"stop": 3, "length": 1} and summary["dropped"] == {"empty": 1, "degenerate": 1}
    assert answer_counts(reopened, 10).tolist() == [0, 0, 0, 3, 1, 0, 0, 1, 0, 0]
    lines = (corpus.directory / "dropped.jsonl").read_text().splitlines()
    assert [json.loads(line)["conversation"] for line in lines] == ["x", "y"]


@pytest.mark.parametrize(
    ("other", "key"),
    [({"template": "2"}, "template"), ({"regenerate": {"seed": 1}}, "regenerate"), ({"max_length": 9}, "max_length")],
)
def test_another_identity_is_refused(corpus: TokenCorpus, other: dict[str, Any], key: str) -> None:
    before = content(corpus)
    with pytest.raises(UserError, match=f"its {key} is"):
        TokenCorpus(corpus.directory, IDENTITY | other)
    assert content(TokenCorpus(corpus.directory, IDENTITY)) == before


def test_an_unfinished_corpus_is_refused(corpus: TokenCorpus, tmp_path: Path) -> None:
    for directory in (corpus.directory, tmp_path / "none"):
        with pytest.raises(UserError, match=r"no finished corpus; run: python -m scripts\.prepare"):
            open_sealed(directory)
    assert not (tmp_path / "none").exists()


def test_damaged_shards_are_refused(corpus: TokenCorpus) -> None:
    corpus.seal(10)
    shard = corpus.shards[2]
    whole = shard.read_bytes()
    for at in (len(whole) - 1, 20):  # in a tensor, in the header
        shard.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        with pytest.raises(UserError, match="shard-00002.safetensors does not match its checksum"):
            open_sealed(corpus.directory)
    shard.unlink()
    with pytest.raises(UserError, match="lacks some"):
        open_sealed(corpus.directory)
    shard.write_bytes(whole)
    open_sealed(corpus.directory)


def test_a_cut_shard_is_named(corpus: TokenCorpus) -> None:
    shard = corpus.shards[0]
    shard.write_bytes(shard.read_bytes()[:40])
    with pytest.raises(UserError, match=r"shard .*shard-00000\.safetensors is damaged"):
        corpus.answered()


def test_what_a_killed_run_left_is_no_shard(corpus: TokenCorpus) -> None:
    leftover = corpus.directory / ".shard-00003.safetensors.tmp-1"
    leftover.write_bytes(b"half")
    assert corpus.answered() == {"a", "b", "c", "x", "y"}
    again = TokenCorpus(corpus.directory, IDENTITY)
    assert not leftover.exists()
    again.append([document("d", [1, 2, 3], 2)], [])
    again.seal(10)
    assert [p.name for p in again.shards][-1] == "shard-00003.safetensors"
    assert len(content(open_sealed(corpus.directory)[0])) == 4


def test_a_killed_preparation_continues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """kill -9 between shards; every conversation is answered once, and just as without the kill."""
    monkeypatch.setattr(scripts.prepare, "device", lambda: torch.device("cpu"))
    target = save_tiny_target(tmp_path / "target")
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"turns": [f"say {i}", "more"][: 1 + i % 2]}) + "\n" for i in range(51)))
    toy = (REPOSITORY / "tests/toy.yaml").read_text().replace("TARGET", str(target)).replace("PROMPTS", str(prompts))
    (tmp_path / "toy.yaml").write_text(toy)

    def arguments(runs: str) -> list[str]:
        options = ["regenerate.batch_size=2", "validation=1", "regenerate.max_new_tokens=12"]
        return [str(tmp_path / "toy.yaml"), f"runs={tmp_path / runs}", *options]

    directory = tmp_path / "killed/toy/corpus"
    process = subprocess.Popen(
        [sys.executable, "-m", "scripts.prepare", *arguments("killed")],
        cwd=REPOSITORY,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        until = time.monotonic() + 120
        while len(list(directory.glob("shard-*"))) < 3 and process.poll() is None and time.monotonic() < until:
            time.sleep(0.005)
    finally:
        process.kill()
    assert process.wait() == -signal.SIGKILL
    shards = {p.name: p.read_bytes() for p in directory.glob("shard-*")}
    assert 3 <= len(shards) < 25 and not (directory / "manifest.json").exists()

    scripts.prepare.main(arguments("killed"))
    scripts.prepare.main(arguments("whole"))
    continued, _ = open_sealed(directory)
    whole, _ = open_sealed(tmp_path / "whole/toy/corpus")
    assert all((directory / name).read_bytes() == data for name, data in shards.items())  # write-once
    wanted = {c.id for c in load_prompts(PromptsConfig(source=str(prompts)))}
    answered = [d.conversation for d in continued.documents()] + [d.conversation for d in continued.dropped()]
    assert len(set(answered)) == 50 and set(answered) < wanted  # one is held back for validation
    assert content(continued) == content(whole)
    assert list(continued.dropped()) == list(whole.dropped())
    # Random answers end by length, so no conversation gave two documents.
    assert len(answered) == 50
