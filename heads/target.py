"""FrozenTarget: the model a draft head hangs on. Taps, last hidden state, embedding, LM head, and a forward with a KV cache.

Layer convention (the only one inside this project): tap ``k`` is the residual stream after ``k`` decoder layers, un-normalised; tap 0 is
the embedding output. It equals ``hidden_states[k]`` of the library for k < L.

Shapes: B sequences, T tokens, H target hidden width, A taps, V vocabulary, L decoder layers.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from pydantic import model_validator
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from heads.cache import TargetCache, visible_slots
from heads.config import Config
from heads.errors import UserError
from heads.packed import PackedWeight, pack_linears

PROBE = (1, 2, 3, 4, 5, 6)  # token ids of the self-check; any will do


class TargetConfig(Config):
    """Which target, and how it is loaded. In a recipe ``target: NAME`` is short for ``target: {name: NAME}``."""

    name: str = "bundled:smollm2-135m"
    """``bundled:NAME``, a local directory, or a Hub id."""
    revision: str | None = None
    """Branch, tag or commit of a Hub id."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """auto: bfloat16 on a GPU that has it, float32 on CPU (bfloat16 is several times slower there)."""
    trust_remote_code: bool = False
    """Run Python code that comes with the checkpoint. Off unless you have read that code."""
    packed: bool = True
    """float32 on a CPU: decode with a second copy of the weights of the target's and the head's linear layers, in oneDNN's order. Verifying
    a draft takes a third less time. Costs the memory of these weights once more, from the first forward of 2 to 64 tokens on; training and
    long prompts make no copy."""

    @model_validator(mode="before")
    @classmethod
    def _short_form(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value


@dataclass(frozen=True)
class TargetOutput:
    """What one forward of the target gives."""

    hidden: torch.Tensor
    """[B, T, H], after the final norm: what the LM head reads."""
    taps: torch.Tensor | None
    """[B, T, A*H], taps concatenated in ascending order; None where they were not asked for."""


def default_taps(layers: int) -> tuple[int, ...]:
    """Low, middle and high taps for a target of this many decoder layers (ALGORITHMS 9.1)."""
    if layers < 8:
        return tuple(sorted({min(1, layers - 1), layers // 2, layers - 1}))
    return (2, layers // 2, layers - 3)


def pick_dtype(name: str, device: torch.device) -> torch.dtype:
    """The torch dtype for a config's dtype on this device."""
    if name != "auto":
        dtype = getattr(torch, name)
        assert isinstance(dtype, torch.dtype)
        return dtype
    return torch.bfloat16 if device.type == "cuda" and torch.cuda.is_bf16_supported() else torch.float32


class FrozenTarget:
    """A causal language model that is never trained, with hooks on the layers a head reads.

    Not an nn.Module on purpose: nothing that walks over modules (optimizers, DDP, checkpoints) can pick its weights up.
    """

    def __init__(self, model: Any, taps: Sequence[int] | None = None, packed: bool = True) -> None:
        """
        Args:
            model: a causal LM of the library; it is changed in place (hooks, frozen parameters, packed linear layers).
            taps: ascending; None: default_taps.
            packed: see TargetConfig.

        Raises:
            UserError: the model cannot serve as a target; the sentence says what is missing.
        """
        self.model: Any = model.eval().requires_grad_(False)
        self.config: Any = model.config.get_text_config()
        self.decoder: Any = self.model.get_decoder()
        layers = getattr(self.decoder, "layers", None)
        if layers is None:
            raise UserError(f"a target must have a list of decoder layers to tap; {type(model).__name__} has none")
        self.num_layers = len(layers)
        self.taps = self._check_taps(default_taps(self.num_layers) if taps is None else tuple(taps))
        self._captured: dict[int, torch.Tensor] | None = None
        for tap in self.taps:
            if tap == 0:
                layers[0].register_forward_pre_hook(self._entry_hook, with_kwargs=True)
            else:
                layers[tap - 1].register_forward_hook(self._hook(tap))
        self._sliding_mask: torch.Tensor | None = None
        self.window = self._hook_sliding_layers(layers)
        self.embedding: torch.Tensor = self.model.get_input_embeddings().weight
        self.lm_head: torch.Tensor = self.model.get_output_embeddings().weight
        self.packed_head: PackedWeight | None = None
        """The LM head's; a draft model made of this target's layers shares it."""
        self.softcap: float | None = getattr(self.config, "final_logit_softcapping", None)
        self._self_check()
        if packed:  # after the check, whose few tokens would have every weight copied in a process that only trains
            self.packed_head = PackedWeight()
            pack_linears(self.decoder)

    def _check_taps(self, taps: tuple[int, ...]) -> tuple[int, ...]:
        wrong = [tap for tap in taps if not 0 <= tap <= self.num_layers]
        if wrong or not taps or list(taps) != sorted(set(taps)):
            raise UserError(
                f"head.taps is {list(taps)}; taps are distinct whole numbers from 0 to {self.num_layers} "
                f"(the target has {self.num_layers} layers) in ascending order; leave it out for {list(default_taps(self.num_layers))}"
            )
        return taps

    def _hook(self, tap: int) -> Any:
        def capture(module: nn.Module, args: Any, output: Any) -> None:
            if self._captured is not None:
                self._captured[tap] = output[0] if isinstance(output, tuple) else output

        return capture

    def _entry_hook(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if self._captured is not None:
            self._captured[0] = args[0] if args else kwargs["hidden_states"]

    def _hook_sliding_layers(self, layers: Any) -> int | None:
        """Let sliding-window layers see the mask made for them; returns the window in tokens, None where no layer slides.

        The library takes one ready-made mask for all layers; a mask of our own must reach each kind of layer in its own form.
        """
        window = getattr(self.config, "sliding_window", None)
        types = getattr(self.config, "layer_types", None)
        slides = [t == "sliding_attention" for t in types] if types else [window is not None] * self.num_layers
        if window is None or not any(slides):
            return None

        def replace(module: nn.Module, args: Any, kwargs: Any) -> Any:
            return (args, kwargs) if self._sliding_mask is None else (args, kwargs | {"attention_mask": self._sliding_mask})

        for layer, sliding in zip(layers, slides, strict=True):
            if sliding:
                layer.register_forward_pre_hook(replace, with_kwargs=True)
        return int(window)

    @property
    def device(self) -> torch.device:
        return self.embedding.device

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.dtype

    @property
    def hidden_size(self) -> int:
        return int(self.embedding.shape[1])

    @property
    def vocab_size(self) -> int:
        """Rows of the LM head, padding rows included."""
        return int(self.lm_head.shape[0])

    @property
    def max_length(self) -> int:
        """The context the target was made for, in tokens."""
        return int(getattr(self.config, "max_position_embeddings", 1 << 30))

    def forward(
        self,
        ids: torch.Tensor,
        *,
        cache: TargetCache | None = None,
        position: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        visible: torch.Tensor | None = None,
        taps: bool = True,
    ) -> TargetOutput:
        """Run the target without its LM head.

        Args:
            ids: [B, T].
            cache: extended in place by T slots a line, which are not committed.
            position: [B, T]; without a cache and a mask, a position that does not follow its left neighbour starts a new document,
                and attention stays inside documents.
            attention_mask: [B, cached + T] of 0/1 over left-padded rows.
            visible: [B, T, columns] bool, which columns of the cache (these T included) each token sees (heads.cache.visible_slots);
                for trees and for lines of unequal length. Sliding windows are applied on top of it. Needs cache and position. What the
                cache holds already, committed or not, must be a chain (position = column).
            taps: whether to capture them.
        """
        with torch.no_grad():
            if visible is not None:
                assert cache is not None and position is not None and attention_mask is None
                attention_mask = self._masks(visible, position, cache)
            return self._run(ids, position, taps, cache, attention_mask)

    def trace(self, ids: torch.Tensor, position: torch.Tensor) -> TargetOutput:
        """``forward`` over packed rows [B, T] without taps, with a gradient for what is trained inside the target (an adapter)."""
        return self._run(ids, position, False)

    def _run(
        self,
        ids: torch.Tensor,
        position: torch.Tensor | None,
        taps: bool,
        cache: TargetCache | None = None,
        attention_mask: torch.Tensor | None = None,
    ) -> TargetOutput:
        self._captured = {} if taps else None
        try:
            output = self.decoder(
                input_ids=ids,
                cache=None if cache is None else cache.library,
                position_ids=position,
                attention_mask=attention_mask,
                use_cache=cache is not None,
            )
            captured = self._captured
        finally:
            self._captured = self._sliding_mask = None
        if cache is not None:
            cache.advance(ids.shape[1])
        joined = torch.cat([captured[tap] for tap in self.taps], dim=-1) if captured is not None else None
        return TargetOutput(hidden=output.last_hidden_state, taps=joined)

    def _masks(self, visible: torch.Tensor, position: torch.Tensor, cache: TargetCache) -> torch.Tensor:
        """Additive mask [B, 1, T, columns] for full layers; the one for sliding layers is left where their hook finds it."""
        if self.window is not None:
            before = torch.tensor(cache.lengths or [0] * len(visible), device=visible.device).unsqueeze(1) + cache.lines.extra
            column = torch.arange(visible.shape[2], device=visible.device)
            relative = (column - before).clamp(0, position.shape[1] - 1)
            key_position = torch.where(column < before, column, position.gather(1, relative))
            near = position.unsqueeze(2) - key_position.unsqueeze(1) < self.window
            self._sliding_mask = self._additive(visible & near)
        return self._additive(visible)

    def _additive(self, visible: torch.Tensor) -> torch.Tensor:
        mask = torch.zeros(visible.shape, dtype=self.dtype, device=visible.device)
        return mask.masked_fill_(~visible, torch.finfo(self.dtype).min).unsqueeze(1)

    @torch.no_grad()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Next-token logits [..., V] from last hidden states [..., H]."""
        linear = F.linear if self.packed_head is None else self.packed_head.linear
        return self.cap(linear(hidden, self.lm_head))

    def cap(self, logits: torch.Tensor) -> torch.Tensor:
        """The target's own soft cap on logits, where it has one."""
        return logits if self.softcap is None else torch.tanh(logits / self.softcap) * self.softcap

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows of the embedding table, unscaled: what serving engines give a draft head, also for targets that scale their own input."""
        return F.embedding(ids, self.embedding)

    @torch.no_grad()
    def final_norm_weight(self) -> torch.Tensor:
        """[H]: the factor the final norm multiplies with. Read by running it, since families store it as w or as 1 + w."""
        ones = torch.ones(1, self.hidden_size, device=self.device, dtype=torch.float32)
        return self.decoder.norm(ones.to(self.dtype)).float().squeeze(0)

    @property
    def rope(self) -> dict[str, Any]:
        """The rotary parameters of the (full attention) layers, for the head to copy."""
        rope = dict(getattr(self.config, "rope_parameters", None) or {"rope_type": "default", "rope_theta": 10000.0})
        if "rope_theta" not in rope:  # one set per layer type, as in Gemma 3
            rope = dict(rope.get("full_attention") or next(iter(rope.values())))
        rope.pop("partial_rotary_factor", None)  # the head rotates whole heads
        rope.setdefault("rope_type", "default")
        return rope

    @property
    def fingerprint(self) -> str:
        """A hash of the config and a few weights: tells one target (or fine-tune) from another."""
        config = {k: v for k, v in self.config.to_dict().items() if k not in ("_name_or_path", "transformers_version", "dtype")}
        digest = hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode())
        # A few numbers of every weight: a fine-tune may have left any of them alone. Without what an adapter adds.
        names = {name.replace(".base_layer", ""): value for name, value in self.model.named_parameters() if ".lora_" not in name}
        for name in sorted(names):
            flat = names[name].detach().flatten()
            digest.update(flat[:: max(1, flat.numel() // 64)].float().cpu().numpy().tobytes())
        return digest.hexdigest()[:16]

    @torch.no_grad()
    def _self_check(self) -> None:
        """Prove on six tokens what the rest relies on: the hooks fire, the LM head is the model's own, the cache can be cropped, a mask of
        ours is obeyed (a token that is hidden, in the tree's other branch, changes nothing)."""
        ids = torch.tensor([PROBE], device=self.device) % self.vocab_size
        name = type(self.model).__name__
        reference = self.model(input_ids=ids, use_cache=False).logits.float()
        whole = self.forward(ids)
        tolerance = 1e-3 if self.dtype == torch.float32 else 0.25
        if not torch.allclose(self.logits(whole.hidden).float(), reference, atol=tolerance, rtol=tolerance):
            raise UserError(f"{name} changes its logits after the LM head in a way that is not known here; it cannot serve as a target")
        cache = TargetCache()
        try:
            self.forward(ids, cache=cache, taps=False)
            cache.keep([3])
            again = self.forward(ids[:, 3:], cache=cache, taps=False)
            cache.keep([3])
            # Token 3, its child 4, a foreign sibling of 4, and 5 below 4.
            own = torch.tensor([[[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 0, 1]]], device=self.device).bool()
            position = torch.tensor([[3, 4, 4, 5]], device=self.device)
            branched = torch.cat((ids[:, 3:5], ids[:, :1], ids[:, 5:]), dim=1)
            visible = visible_slots(torch.tensor([3], device=self.device), own, 7)
            tree = self.forward(branched, cache=cache, position=position, visible=visible, taps=False)
        except Exception as error:
            raise UserError(f"{name} has no KV cache that can be cropped ({error}); speculative decoding needs one") from error
        expected = whole.hidden[:, 3:].float()
        if cache.used != len(PROBE) + 1 or not torch.allclose(again.hidden.float(), expected, atol=tolerance, rtol=tolerance):
            raise UserError(
                f"{name} keeps recurrent or other state that cropping its KV cache does not undo; speculative decoding cannot use it"
            )
        if not torch.allclose(tree.hidden[:, [0, 1, 3]].float(), expected, atol=tolerance, rtol=tolerance):
            raise UserError(f"{name} does not obey a ready-made attention mask (load it with sdpa or eager attention)")


def load_target(config: TargetConfig, path: str | Path, device: torch.device, taps: Sequence[int] | None = None) -> FrozenTarget:
    """Load the target from ``path`` (a directory or a Hub id; bundled names are resolved by data.bundled)."""
    return FrozenTarget(load_model(config, path, device, taps), taps, config.packed)


def load_model(config: TargetConfig, path: str | Path, device: torch.device, taps: Sequence[int] | None = None) -> Any:
    """The library's model, as it is; raises UserError where it cannot be loaded or has no such taps."""
    try:
        options: dict[str, Any] = {"revision": config.revision, "trust_remote_code": config.trust_remote_code}
        architecture = AutoConfig.from_pretrained(path, **options).get_text_config()
        if taps is not None and max(taps, default=0) > getattr(architecture, "num_hidden_layers", 1 << 30):
            # Before gigabytes are read, not after.
            raise UserError(
                f"head.taps is {list(taps)}; the target has {architecture.num_hidden_layers} layers, so taps run from 0 to that"
            )
        model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=pick_dtype(config.dtype, device), **options)
    except (OSError, KeyError) as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UserError(
            f"target '{config.name}' cannot be loaded ({first}); give bundled:smollm2-135m, a model directory or a Hub id"
        ) from error
    return model.to(device)
