"""Tiny targets and tokenizers that tests build themselves; no network, a few milliseconds each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)  # fmt: skip

from heads.eagle3 import Eagle3Architecture, Eagle3Config, Eagle3Head
from heads.target import FrozenTarget
from heads.vocab import DraftVocab

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]

FAMILIES: dict[str, tuple[Any, Any]] = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "gemma2": (Gemma2Config, Gemma2ForCausalLM),
    "gemma3": (Gemma3TextConfig, Gemma3ForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
    "phi3": (Phi3Config, Phi3ForCausalLM),
}


def tiny_model(
    family: str = "llama",
    *,
    vocab: int = 300,
    hidden: int = 32,
    layers: int = 4,
    seed: int = 0,
    scale: float = 1.0,
    **more: Any,
) -> Any:
    """A random causal LM. ``scale`` multiplies the LM head: larger means more peaked distributions."""
    config_class, model_class = FAMILIES[family]
    torch.manual_seed(seed)
    settings: dict[str, Any] = {
        "vocab_size": vocab, "hidden_size": hidden, "intermediate_size": 2 * hidden, "num_hidden_layers": layers, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": hidden // 4, "max_position_embeddings": 512, "pad_token_id": 0, "bos_token_id": 1,
        "eos_token_id": 2, "tie_word_embeddings": False, "attn_implementation": "eager" if family == "gemma2" else "sdpa",
    }  # fmt: skip
    if family in ("gemma2", "gemma3", "mistral"):
        settings["sliding_window"] = 16
    if family == "phi3":
        settings.pop("head_dim")
    model = model_class(config_class(**(settings | more))).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(4.0)  # the library's tiny initial values make every layer almost the identity
        model.get_output_embeddings().weight.mul_(scale)
    return model


def tiny_target(family: str = "llama", taps: tuple[int, ...] | None = None, **more: Any) -> FrozenTarget:
    return FrozenTarget(tiny_model(family, **more), taps)


def tiny_head(target: FrozenTarget, *, vocab: DraftVocab | None = None, seed: int = 1, **config: Any) -> Eagle3Head:
    settings = Eagle3Config(**config)
    vocab = vocab or DraftVocab.full(target.vocab_size)
    head = Eagle3Head(Eagle3Architecture.resolve(settings, target, vocab.size), vocab)
    head.initialise(target, settings, torch.Generator().manual_seed(seed))
    return head.eval()


def tiny_tokenizer(template: str = CHATML) -> PreTrainedTokenizerFast:
    """Bytes plus the ChatML specials: 259 ids, 0-2 special."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate([*SPECIALS, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>", bos_token="<|im_start|>")
    fast.chat_template = template
    return fast


def save_tiny_target(directory: Path, **more: Any) -> Path:
    """A model directory with tokenizer and template, as a user would have one."""
    model = tiny_model(**({"vocab": 259, "scale": 4.0} | more))
    model.generation_config.eos_token_id = 2
    model.save_pretrained(directory)
    tiny_tokenizer().save_pretrained(directory)
    return directory
