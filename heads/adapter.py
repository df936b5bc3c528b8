"""Low-rank adapters (LoRA, Hu et al. 2021) on a target's own linear layers: what Medusa-2 trains beside its heads (ALGORITHMS 7.2).

The layers are peft's, injected in place, so that files have the layout every engine and peft itself read. An adapter is switched on and off
here: off, each layer runs its base layer and nothing else, and the target is the original one bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from pydantic import Field
from safetensors.torch import load_file, save_file
from torch import nn

from heads.config import Config
from heads.errors import UserError
from heads.packed import pack_linears
from heads.target import FrozenTarget

WEIGHTS, SETTINGS = "adapter_model.safetensors", "adapter_config.json"
_PREFIX, _NAME = "base_model.model.", "default"  # of peft's files; of the one adapter in the layers


class AdapterConfig(Config):
    """An adapter's shape. It has no dropout: the training of a run that was interrupted repeats bit for bit."""

    rank: int = Field(default=32, ge=1, le=1024)
    """Of each layer's update."""
    alpha: int = Field(default=16, ge=1)
    """The update is scaled by alpha / rank."""


class TargetAdapter(nn.Module):
    """The one adapter of a target; its parameters are those of the injected layers. Switched off after it was made."""

    def __init__(self, target: FrozenTarget, settings: Any, seed: int = 0) -> None:
        """
        Args:
            target: changed in place: each of its decoder's linear layers that ``settings`` names is wrapped.
            settings: peft's LoraConfig.
            seed: of the initial values; the updates start as zero.
        """
        from peft import inject_adapter_in_model
        from peft.tuners.lora import LoraLayer

        super().__init__()
        self.settings = settings
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            inject_adapter_in_model(settings, target.model, adapter_name=_NAME)
        self._target = target
        self._layers = {name: module for name, module in target.model.named_modules() if isinstance(module, LoraLayer)}
        self.values: dict[str, nn.Parameter] = {}
        """Parameters under peft's names, as in its files."""
        for name, layer in self._layers.items():
            for part in ("lora_A", "lora_B"):
                weight = getattr(layer, part)[_NAME].weight
                weight.data = weight.data.float()  # trained in float32, whatever the target's dtype
                self.values[f"{_PREFIX}{name}.{part}.weight"] = weight
        self._registered = nn.ParameterList(self.values.values())
        self._switch(False)

    @classmethod
    def fresh(cls, target: FrozenTarget, config: AdapterConfig, name: str, seed: int) -> TargetAdapter:
        """An adapter of all linear layers of the decoder. ``name``: the target's, written into the adapter's settings."""
        from peft import LoraConfig

        linears = sorted({n.split(".")[-1] for n, m in target.decoder.named_modules() if isinstance(m, nn.Linear)})
        settings = LoraConfig(
            r=config.rank,
            lora_alpha=config.alpha,
            lora_dropout=0.0,
            target_modules=linears,
            base_model_name_or_path=name,
            task_type="CAUSAL_LM",
        )
        return cls(target, settings, seed)

    @classmethod
    def load(cls, target: FrozenTarget, directory: Path) -> TargetAdapter:
        """The adapter that ``save`` wrote, on its target."""
        from peft import LoraConfig

        adapter = cls(target, LoraConfig.from_pretrained(str(directory)))
        adapter.restore(directory)
        return adapter

    @property
    def rank(self) -> int:
        return int(self.settings.r)

    def save(self, directory: Path) -> None:
        """Write WEIGHTS and SETTINGS, as peft does."""
        save_file({name: value.detach().cpu().contiguous() for name, value in self.values.items()}, directory / WEIGHTS)
        self.settings.save_pretrained(str(directory))

    @torch.no_grad()
    def restore(self, directory: Path) -> None:
        """Take the values in ``directory``; raises UserError where they are of another adapter."""
        found = load_file(directory / WEIGHTS)
        wrong = found.keys() ^ self.values.keys() or {n for n, v in found.items() if v.shape != self.values[n].shape}
        if wrong:
            raise UserError(
                f"the adapter in {directory} is for another target or of another rank (first difference: {min(wrong)}); "
                "use the target and head.adapter that it was trained with"
            )
        for name, value in found.items():
            self.values[name].copy_(value)

    @contextmanager
    def on(self) -> Iterator[None]:
        """The target with the adapter, inside; without it again afterwards."""
        self._switch(True)
        try:
            yield
        finally:
            self._switch(False)

    def _switch(self, on: bool) -> None:
        # peft's own switch also stops gradients, and a parameter without one is no longer what DDP was told of.
        for layer in self._layers.values():
            layer._disable_adapters = not on

    @torch.no_grad()
    def merge(self) -> None:
        """Add the updates to the target's weights and take the adapter's layers out: from now on the target is the adapted one, at the
        original's speed. There is no way back."""
        self._switch(True)
        for name, layer in self._layers.items():
            layer.merge()
            parent, _, child = name.rpartition(".")
            setattr(self._target.model.get_submodule(parent), child, layer.get_base_layer())
        pack_linears(self._target.decoder)  # forgets copies of the weights as they were
        self._layers = {}


def has_adapter(directory: Path) -> bool:
    """Whether a checkpoint holds an adapter."""
    return (directory / SETTINGS).exists()
