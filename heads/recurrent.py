"""The two faces of a head that feeds on its own output (EAGLE-1, EAGLE-3): unrolled for training, incremental for decoding. They agree.

Slot t is the pair (features of position t, token x_{t+1}); it predicts x_{t+2}; its position id is t. At step i the slot's token is
x_{t+1+i}, its state the head's own output of step i-1, its position t+i.

Shapes: B sequences, T real slots, N query slots, S unroll steps, F feature width, H hidden width, V_d draft vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import nn

from heads.cache import LineCache
from heads.layers import KeysValues, Rotary, StepCache
from heads.target import FrozenTarget
from heads.vocab import DraftVocab


class RecurrentHead(nn.Module, ABC):
    """What a subclass brings: layers, how features become a state, how the last layer's value becomes an output."""

    vocab: DraftVocab
    layers: nn.ModuleList
    """Each has inputs(token, state) -> (attention input, residual), ``attention``, and finish(residual, attended)."""
    rotary: Rotary

    @abstractmethod
    def fuse(self, features: torch.Tensor) -> torch.Tensor:
        """Features [..., F] of complete slots -> state [..., H]."""

    @abstractmethod
    def finished(self, value: torch.Tensor) -> torch.Tensor:
        """The last layer's value [..., H] -> output [..., H], which the LM head reads."""

    @property
    @abstractmethod
    def recurs_finished(self) -> bool:
        """Whether the output recurs, rather than the value before it."""

    @abstractmethod
    def draft_logits(self, output: torch.Tensor, target: FrozenTarget) -> torch.Tensor:
        """Draft logits [..., V_d] from outputs."""

    @abstractmethod
    def output_weight(self, target_lm_head: torch.Tensor) -> torch.Tensor:
        """[V_d, H], the LM head's matrix (the target's own [V, H] is given, for heads that have none)."""

    def unroll(
        self,
        features: torch.Tensor,
        tokens: torch.Tensor,
        position: torch.Tensor,
        visible: torch.Tensor,
        slots: torch.Tensor,
        detach: bool = False,
    ) -> torch.Tensor:
        """Training-time test (ALGORITHMS 9.3): S teacher-forced steps from every chosen slot, in parallel.

        Every real slot of the row gives step-0 keys and values; queries, and all later steps, exist at the chosen slots only.

        Args:
            features: [B, T, F], what complete slots feed on.
            tokens: [S, B, T, H] embedded tokens; step i at slot t holds E(x_{t+1+i}). Steps after the first are read at ``slots`` only.
            position: [B, T] position ids of the slots.
            visible: [B, T, T] bool; which real slots a slot sees (causal, same document, itself included).
            slots: [B, N] int64; the slots that are unrolled. Rows with fewer repeat one (the caller gives it no weight).
            detach: cut the gradient between steps (HASS, ALGORITHMS 8.4); EAGLE-3 lets it flow.

        Returns:
            [S, B, N, H] outputs, the LM head's input.
        """
        batch = torch.arange(slots.shape[0], device=slots.device).unsqueeze(1)
        caches: list[StepCache] = []
        chosen_visible = visible[batch, slots]
        value: torch.Tensor = self.fuse(features)
        for index, layer in enumerate(self.layers):
            # Layers below the last must give their output at every slot: the next layer's real keys are made of it.
            last = index == len(self.layers) - 1
            inputs, residual = layer.inputs(tokens[0], value)  # type: ignore[operator]
            caches.append(StepCache(layer.attention.keys_values(inputs, position, self.rotary)))  # type: ignore[union-attr,operator]
            if last:
                inputs, residual = inputs[batch, slots], residual[batch, slots]
            where = position[batch, slots] if last else position
            attended = layer.attention(inputs, where, self.rotary, caches[-1], chosen_visible if last else visible)  # type: ignore[operator]
            value = layer.finish(residual, attended)  # type: ignore[operator]
        outputs = [self.finished(value)]
        for step in range(1, tokens.shape[0]):
            state = outputs[-1] if self.recurs_finished else value
            if detach:
                state = state.detach()
            where = position[batch, slots] + step
            token = tokens[step][batch, slots]
            for layer, cache in zip(self.layers, caches, strict=True):
                inputs, residual = layer.inputs(token, state)  # type: ignore[operator]
                cache.own.append(layer.attention.keys_values(inputs, where, self.rotary))  # type: ignore[union-attr,operator]
                state = layer.finish(residual, layer.attention(inputs, where, self.rotary, cache, chosen_visible))  # type: ignore[operator]
            value = state
            outputs.append(self.finished(value))
        return torch.stack(outputs)

    def extend(
        self,
        features: torch.Tensor | None,
        state: torch.Tensor | None,
        token: torch.Tensor,
        position: torch.Tensor,
        cache: LineCache,
        visible: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Incremental forward (ALGORITHMS 9.7): T new slots behind those in ``cache``, which is advanced and not committed.

        Args:
            features: [B, T, F] for complete slots, or None when
            state: [B, T, H], the recurrent output of each slot's parent, drives draft slots.
            token: [B, T, H] embedded tokens.
            position: [B, T].
            visible: [B, T, columns] bool, what each slot sees of the cache, these T included (heads.cache.visible_slots).

        Returns:
            Output [B, T, H], the LM head's input, and recurrent state [B, T, H].
        """
        assert (features is None) != (state is None)
        value: Any = state if features is None else self.fuse(features)
        for index, layer in enumerate(self.layers):
            inputs, residual = layer.inputs(token, value)  # type: ignore[operator]
            new = layer.attention.keys_values(inputs, position, self.rotary)  # type: ignore[union-attr,operator]
            seen = StepCache(KeysValues(*cache.layer(index).write(new.keys, new.values)))
            attended = layer.attention(inputs, position, self.rotary, seen, visible)  # type: ignore[operator]
            value = layer.finish(residual, attended)  # type: ignore[operator]
        cache.advance(token.shape[1])
        output = self.finished(value)
        return output, (output if self.recurs_finished else value)
