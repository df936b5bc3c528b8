"""Linear layers of few rows on a CPU: a product with a copy of the weight in the order that oneDNN reads.

Decoding multiplies a handful of rows (a draft under verification, a batch, a level of a tree) with every weight. The BLAS behind
``F.linear`` is slow there: six rows cost more than twice what one row costs, although the time should go into reading the weight, once in
both cases. oneDNN's kernels come close to that when the weight has been reordered for them beforehand. ``docs/decoding.md`` has the figures
that the limits below were read from.

The copy is made where it is first wanted and made again where the weight has changed; results differ from ``F.linear``'s by rounding only.
Nothing here acts on other dtypes or devices, where a gradient is wanted, under autocast, or where torch was built without oneDNN: there
it is ``F.linear``.
"""

from __future__ import annotations

from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import nn

MOST_ROWS = 64
"""Above this the BLAS is as fast (one thread) or nearly (two); and oneDNN compiles and keeps a quarter to half a megabyte of code for every
combination of row count and weight shape, which prompts of all lengths would drive to a gigabyte."""
LEAST_NUMBERS = 1 << 16
"""Smaller weights are left alone: the call itself costs about 25 microseconds, F.linear's 5."""
NARROW, LONG = 768, 4096
"""A single row is a reading of the weight, which the BLAS does well, except where the weight is many (``LONG``) short (``NARROW``) rows, as
the LM head of a small model is."""
HINT = 16  # rows to reorder for; any number from 2 up gives the same order of the weight, and 1 gives one that gains nothing


def _operators() -> tuple[Any, Any] | None:
    """oneDNN's product and its reordering, None where this torch lacks them. They are not public, so nothing may depend on them."""
    ops = torch.ops.mkldnn
    if not torch.backends.mkldnn.is_available() or not hasattr(ops, "_linear_pointwise") or not hasattr(ops, "_reorder_linear_weight"):
        return None
    return ops._linear_pointwise.default, ops._reorder_linear_weight.default


OPERATORS = _operators()


def _suits(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
    """Whether the reordered copy is allowed and worth its call for x [..., in] and weight [out, in]."""
    outputs, width = weight.shape
    if OPERATORS is None or weight.numel() < LEAST_NUMBERS or x.shape[-1] != width:
        return False
    rows = x.numel() // width
    if not 2 <= rows <= MOST_ROWS and not (rows == 1 and width <= NARROW and outputs >= LONG):
        return False
    parts = (x, weight) if bias is None else (x, weight, bias)
    if not all(p.is_cpu and p.dtype is torch.float32 for p in parts) or torch.is_autocast_enabled("cpu"):
        return False
    # A weight of a class of its own (quantised, sharded) says itself what a product with it is; one of inference mode tells no changes.
    if type(weight) not in (torch.Tensor, nn.Parameter) or weight.is_inference():
        return False
    return not (torch.is_grad_enabled() and any(p.requires_grad for p in parts))


class PackedWeight:
    """The reordered copy of one weight, or none yet. Copies and pickles of this object are empty."""

    def __init__(self) -> None:
        self._copy: tuple[torch.Tensor, int, torch.Tensor] | None = None

    def linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """``F.linear(x, weight, bias)``: x [..., in], weight [out, in], bias [out] -> [..., out].

        A change of the weight is noticed, in place or by another storage, where torch counts it. It does not count changes through
        ``weight.data`` or by a fused optimizer; PackedLinear.train and pack_linears forget the copies for their sake.
        """
        if not _suits(x, weight, bias):
            return F.linear(x, weight, bias)
        assert OPERATORS is not None
        product, reorder = OPERATORS
        copy = self._copy
        if copy is None or copy[0].data_ptr() != weight.data_ptr() or copy[1] != weight._version:
            # The source is kept (it shares the weight's memory), so that no other weight can come to lie at its address unnoticed.
            source = weight.detach()
            copy = self._copy = (source, weight._version, reorder(source, HINT))
        return product(x, copy[2], bias, "none", [], "")

    def __deepcopy__(self, memo: dict[int, Any]) -> PackedWeight:
        return PackedWeight()

    def __reduce__(self) -> tuple[type[PackedWeight], tuple[()]]:
        return PackedWeight, ()


class PackedLinear(nn.Linear):
    """An nn.Linear that ``pack_linears`` has changed. Parameters, state_dict and training are an nn.Linear's."""

    packed: PackedWeight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.packed.linear(x, self.weight, self.bias)

    def train(self, mode: bool = True) -> Self:
        """Also forgets the copy: training changes the weight, not always by ways that torch counts, and needs the memory."""
        self.packed = PackedWeight()
        return super().train(mode)


def pack_linears(module: nn.Module) -> None:
    """Let every nn.Linear in a module, in place, use a reordered copy from now on; subclasses are left alone. Called again, it forgets the
    copies there are. A copy takes the memory of its weight."""
    if OPERATORS is None:
        return
    for part in module.modules():
        if type(part) is nn.Linear:
            part.__class__ = PackedLinear
        if type(part) is PackedLinear:
            part.packed = PackedWeight()
