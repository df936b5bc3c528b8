"""The target's law of the first three tokens of an output, and the chi-square test of counts against it.

Shapes: V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from heads.sampling import Sampling, probabilities
from heads.target import FrozenTarget


def laws(target: FrozenTarget, prompt: Sequence[int], sampling: Sampling) -> list[torch.Tensor]:
    """[V], [V, V], [V, V, V]: the target's next-token laws after the prompt and 0, 1, 2 more tokens."""
    size, prefixes, levels = target.vocab_size, torch.tensor([list(prompt)]), list[torch.Tensor]()
    for depth in range(3):
        p = probabilities(target.logits(target.forward(prefixes, taps=False).hidden[:, -1]), sampling)
        levels.append(p.double().reshape(*[size] * depth, size))
        prefixes = torch.cat([prefixes.repeat_interleave(size, 0), torch.arange(size).repeat(len(prefixes)).unsqueeze(1)], 1)
    return levels


def joint(p: Sequence[torch.Tensor]) -> torch.Tensor:
    """[V, V, V]: the law of three tokens."""
    return p[0][:, None, None] * p[1][:, :, None] * p[2]


def chi_square(observed: torch.Tensor, law: torch.Tensor) -> tuple[float, int]:
    """P-value of counts under a law (Wilson-Hilferty), and degrees of freedom; cells that expect fewer than 5 are pooled. P is 0 where the
    impossible was seen, and 1 without a degree of freedom."""
    observed, expected = observed.flatten(), law.flatten() * observed.sum()
    rare = expected < 5
    o = torch.cat([observed[~rare], observed[rare].sum().reshape(1)])
    e = torch.cat([expected[~rare], expected[rare].sum().reshape(1)])
    o, e = (o, e) if float(e[-1]) > 5 else (o[:-1], e[:-1])
    freedom = len(o) - 1
    if float(observed[expected == 0].sum()) > 0:
        return 0.0, freedom
    if freedom < 1:
        return 1.0, freedom
    variance = 2 / (9 * freedom)
    z = ((float(((o - e) ** 2 / e).sum()) / freedom) ** (1 / 3) - (1 - variance)) / math.sqrt(variance)
    return 0.5 * math.erfc(z / math.sqrt(2)), freedom
