"""What a draft vocabulary of each size would cover: acceptance is bounded by it (ALGORITHMS 9.4).

Shapes: V target vocabulary, V_d draft vocabulary, n sampled positions, H hidden width.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from data.corpus import Document
from heads.target import FrozenTarget
from heads.vocab import DraftVocab

SIZES = (1024, 2048, 4096, 8192, 16384, 32768, 65536)
_CHUNK = 64


@dataclass(frozen=True)
class CoveragePoint:
    """One size."""

    size: int
    """V_d."""
    seen: float
    """Share of the corpus's answer tokens; it flatters a small corpus, from which the vocabulary was chosen."""
    unseen: float
    """The same on answers the vocabulary was not chosen from: each half of the corpus judged by the vocabulary of the other half."""
    mass: float | None
    """Mean probability that the target gives to the vocabulary, over sampled answer positions; None where no states were kept."""
    head_parameters: int
    """Of the draft LM head, V_d x H."""


def half_counts(documents: Iterable[Document], vocab_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """[V] int64 each: how often the target wrote each token in every other document."""
    counts = np.zeros((2, vocab_size), np.int64)
    for number, document in enumerate(documents):
        counts[number % 2] += np.bincount(document.ids[document.mask == 1], minlength=vocab_size)
    return torch.from_numpy(counts[0]), torch.from_numpy(counts[1])


def sizes_for(vocab_size: int, chosen: int) -> list[int]:
    """The sizes of a curve: powers of two below V, the chosen one, and V itself."""
    return sorted({size for size in (*SIZES, chosen, vocab_size) if size <= vocab_size})


def coverage_curve(
    halves: tuple[torch.Tensor, torch.Tensor],
    sizes: Sequence[int],
    stop_ids: frozenset[int],
    width: int,
    hidden: torch.Tensor | None = None,
    target: FrozenTarget | None = None,
) -> list[CoveragePoint]:
    """What each size covers.

    Args:
        halves: counts [V] of the two halves of the corpus.
        width: H.
        hidden: [n, H] last hidden states at answer positions.
        target: whose LM head reads them.
    """
    counts = halves[0] + halves[1]
    total = max(int(counts.sum()), 1)
    vocabularies = [DraftVocab.from_counts(counts, size, stop_ids) for size in sizes]
    masses = [None] * len(sizes) if hidden is None or target is None else target_masses(vocabularies, hidden, target)
    points = []
    for size, vocab, mass in zip(sizes, vocabularies, masses, strict=True):
        crossed = 0
        for mine, other in (halves, halves[::-1]):
            crossed += int(other[DraftVocab.from_counts(mine, size, stop_ids).target_ids].sum())
        points.append(CoveragePoint(size, vocab.coverage(counts), crossed / total, mass, size * width))
    return points


@torch.no_grad()
def target_masses(vocabularies: Sequence[DraftVocab], hidden: torch.Tensor, target: FrozenTarget) -> list[float | None]:
    """Mean probability inside each vocabulary; hidden [n, H]."""
    sums = torch.zeros(len(vocabularies), dtype=torch.float64)
    for part in hidden.split(_CHUNK):
        p = torch.softmax(target.logits(part.to(target.device, target.dtype)).float(), dim=-1)
        for number, vocab in enumerate(vocabularies):
            sums[number] += p[:, vocab.target_ids.to(p.device)].sum().double().cpu()
    return [float(s) / max(len(hidden), 1) for s in sums]


def draw_coverage(path: Path, points: Sequence[CoveragePoint], chosen: int) -> None:
    """The curve as an SVG file."""
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    FigureCanvasSVG(figure)
    axes = figure.add_subplot()
    sizes = [p.size for p in points]
    axes.plot(sizes, [100 * p.seen for p in points], marker="o", label="answer tokens of this corpus")
    axes.plot(sizes, [100 * p.unseen for p in points], marker="s", label="answer tokens of the other half")
    if all(p.mass is not None for p in points):
        axes.plot(sizes, [100 * float(p.mass or 0) for p in points], marker="^", label="the target's probability")
    axes.axvline(chosen, color="0.6", linestyle="--", label=f"head.draft_vocab_size = {chosen:,}")
    axes.set_xscale("log", base=2)
    axes.set_xlabel("draft vocabulary, tokens")
    axes.set_ylabel("covered, %")
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    figure.savefig(path, format="svg")
