"""A recipe's drafter config -> a drafter, with everything that cannot work refused in a sentence."""

from __future__ import annotations

import copy
from typing import Any, Literal

from pydantic import Field, model_validator
from torch import nn

from eval.drafters.base import Drafter
from eval.drafters.independent import IndependentDrafter
from eval.drafters.lookup import LookupDrafter
from eval.drafters.parallel import MedusaDrafter, PEagleDrafter
from eval.drafters.recurrent import RecurrentDrafter
from eval.drafters.shape import ShapeConfig
from eval.drafters.simple import NoneDrafter
from heads.config import Config
from heads.errors import UserError
from heads.packed import pack_linears
from heads.sampling import Sampling
from heads.target import FrozenTarget, TargetConfig


class DrafterConfig(Config):
    """Who drafts. In a recipe ``drafter: NAME`` is short for ``drafter: {kind: NAME}``."""

    kind: Literal["head", "none", "lookup", "independent", "cross", "oracle"] = "head"
    """head: the trained draft head. lookup: the text so far. independent: a smaller model of the same vocabulary. cross: a model with
    another tokenizer. none: plain decoding. oracle: the target drafts for itself, so that all is accepted: a test of the loop."""
    shape: ShapeConfig = ShapeConfig()
    """head: chain or tree."""
    model: TargetConfig | None = None
    """independent, cross: the draft model, a directory or a Hub id."""
    first_layers: int | None = Field(default=None, ge=1)
    """independent: draft with the target's own first so many layers, its norm and LM head, instead of a model; a third of them where
    neither is given."""
    schedule: Literal["constant", "additive", "confidence"] = "constant"
    """independent: draft length. constant: evaluate.draft_length. additive: from 5, 2 more after a cycle accepted whole, else 1 less.
    confidence: until a draft is less probable than `threshold`. evaluate.draft_length is the most in all three."""
    threshold: float = Field(default=0.4, gt=0.0, lt=1.0)
    """independent, confidence: see schedule."""
    ngram: int = Field(default=3, ge=1, le=16)
    """lookup: longest n-gram that is matched, in tokens."""
    match: Literal["recent", "earliest"] = "recent"
    """lookup: which occurrence wins."""
    method: Literal["auto", "slem", "slrs", "tli"] = "auto"
    """cross: how drafts cross the tokenizers (ALGORITHMS 6); auto estimates the acceptance of each on the first prompt."""

    @model_validator(mode="before")
    @classmethod
    def _short_form(cls, value: Any) -> Any:
        return {"kind": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _whole(self) -> DrafterConfig:
        if self.model is not None and self.first_layers is not None:
            raise ValueError("drafter.model and drafter.first_layers are both given; an independent drafter is one or the other")
        if self.kind == "cross" and self.model is None:
            raise ValueError("drafter.kind is cross; give drafter.model, a directory or a Hub id")
        return self


def head_drafter(head: Any, target: FrozenTarget, sampling: Sampling, sample_proposals: bool, shape: ShapeConfig) -> Drafter:
    """The drafter for a trained head of any kind. Its linear layers are packed where the target's are (in place; training goes on with it
    as before)."""
    if target.packed_head is not None:
        pack_linears(head)
    kind = head.arch.kind
    accuracies = getattr(head, "accuracies", None)
    if kind in ("medusa", "peagle"):
        drafter = MedusaDrafter if kind == "medusa" else PEagleDrafter
        return drafter(head, target, sampling, sample_proposals=sample_proposals, shape=shape, accuracies=accuracies)
    features = "taps" if kind == "eagle3" else "hidden"
    return RecurrentDrafter(
        kind, head, target, sampling, features=features, sample_proposals=sample_proposals, shape=shape, accuracies=accuracies
    )


def check_draft(shape: ShapeConfig, draft_length: int, target: FrozenTarget, head: Any = None) -> None:
    """Raises UserError for a draft that the head or the target's context cannot hold."""
    most = {"medusa": "heads", "peagle": "depths"}.get(head.arch.kind) if head is not None else None
    if most is not None and draft_length > getattr(head.arch, most):
        raise UserError(
            f"evaluate.draft_length is {draft_length}, and this {head.arch.kind} head was trained for {getattr(head.arch, most)} tokens "
            f"(head.{most}); draft at most that many"
        )
    nodes = draft_length if shape.kind == "chain" else shape.nodes
    if nodes + 1 >= target.max_length:
        raise UserError(
            f"a draft of {nodes} tokens does not fit the context of {target.max_length}; lower evaluate.draft_length or shape.nodes"
        )


def first_layers(target: FrozenTarget, count: int) -> FrozenTarget:
    """A draft model made of the target's own first ``count`` decoder layers, its final norm and LM head. Weights are shared, not copied."""
    if not 1 <= count < target.num_layers:
        raise UserError(
            f"drafter.first_layers is {count}; the target has {target.num_layers} layers, so it runs from 1 to {target.num_layers - 1}"
        )
    draft = FrozenTarget(shortened(target.model, count), (count,), packed=False)
    draft.packed_head = target.packed_head  # the layers are the target's own, packed or not
    return draft


def shortened(model: Any, count: int) -> Any:
    """The library's model without its decoder layers after the first ``count``; it shares all weights with ``model``, which stays whole."""
    whole = model.get_decoder()
    short, decoder = _shallow(model), _shallow(whole)
    decoder.layers = nn.ModuleList(list(whole.layers)[:count])
    for name, child in model.named_children():
        if child is whole:
            setattr(short, name, decoder)
    for part in (short, decoder):
        part.config = copy.deepcopy(part.config)
        config = part.config.get_text_config()
        config.num_hidden_layers = count
        if getattr(config, "layer_types", None):  # which layers slide, one entry a layer
            config.layer_types = list(config.layer_types[:count])
    return short


def _shallow(module: Any) -> Any:
    """A module that shares its children and parameters with another, but not the tables that hold them."""
    twin = copy.copy(module)
    twin._modules, twin._parameters, twin._buffers = dict(module._modules), dict(module._parameters), dict(module._buffers)
    return twin


def build_drafter(
    config: DrafterConfig,
    target: FrozenTarget,
    sampling: Sampling,
    *,
    sample_proposals: bool,
    stop_ids: frozenset[int],
    head: Any = None,
    model: FrozenTarget | None = None,
) -> Drafter:
    """Any drafter but cross (which needs tokenizers).

    Args:
        head: the trained head, for kind head.
        model: the loaded draft model, for kind independent with drafter.model; its vocabulary was checked.
    """
    if config.kind == "none":
        return NoneDrafter()
    if config.kind == "oracle":
        return IndependentDrafter(target, target, sampling, sample_proposals=sample_proposals, name="oracle")
    if config.kind == "lookup":
        return LookupDrafter(config.ngram, config.match, stop_ids)
    if config.kind == "independent":
        model = model or first_layers(target, config.first_layers or max(1, target.num_layers // 3))
        return IndependentDrafter(
            model, target, sampling, sample_proposals=sample_proposals, schedule=config.schedule, threshold=config.threshold
        )
    assert config.kind == "head" and head is not None
    return head_drafter(head, target, sampling, sample_proposals, config.shape)
