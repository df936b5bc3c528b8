"""Tiny targets and tokenizers that tests build themselves; no network, a few milliseconds each."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
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

from data.generation import Answer, Request
from eval.acceptance import Draws
from eval.drafters.base import Committed, Drafter
from eval.tree import DraftTree
from heads.cache import LineCache, causal, visible_slots
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


def chain_visible(cache: LineCache, batch: int, count: int) -> torch.Tensor:
    """[B, count, columns] bool: new slots behind each line, and behind its uncommitted ones, as a chain."""
    lengths = torch.tensor(cache.lengths or [0] * batch)
    own = causal(batch, count, lengths.device, before=cache.lines.extra)
    return visible_slots(lengths, own, cache.used + count)


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


def scripted_generate(answers: Sequence[list[int]], prompts: list[list[int]]) -> Any:
    """Stands in for data.generation.generate: turn k of every conversation is answered with ``answers[k]``; prompts are noted."""

    def generate(target: Any, queue: deque[Request], *rest: Any) -> Iterator[Answer]:
        while queue:
            request = queue.popleft()
            prompts.append(list(request.prompt))
            yield Answer(request, list(answers[request.key[1]]))

    return generate


def save_tiny_target(directory: Path, **more: Any) -> Path:
    """A model directory with tokenizer and template, as a user would have one."""
    model = tiny_model(**({"vocab": 259, "scale": 4.0} | more))
    model.generation_config.eos_token_id = 2
    model.save_pretrained(directory)
    tiny_tokenizer().save_pretrained(directory)
    return directory


def heated(head: Any, seed: int = 0) -> Any:
    """A head of any kind whose weights are all noise on top of their initial values: it drafts nonsense, another one at each place."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.add_(noise * (0.3 if parameter.ndim == 1 else (0.3 if "lm_head" in name else 1.5) / parameter.shape[1] ** 0.5))
    return head.eval()


def random_prompts(count: int, vocab: int, longest: int = 40, seed: int = 0) -> list[list[int]]:
    """Prompts of 1 to ``longest`` random tokens."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, longest + 1, (count,), generator=generator).tolist()
    return [torch.randint(0, vocab, (n,), generator=generator).tolist() for n in lengths]


def library_greedy(target: FrozenTarget, prompt: Sequence[int], new: int, stop: Sequence[int] = (), **more: Any) -> list[int]:
    """The model's own greedy output, by the library's generate."""
    ids = torch.tensor([list(prompt)])
    target.model.generation_config.eos_token_id = target.model.generation_config.bos_token_id = None
    mask = torch.ones_like(ids)
    out = target.model.generate(
        ids, attention_mask=mask, do_sample=False, max_new_tokens=new, eos_token_id=list(stop) or None, pad_token_id=0, **more
    )
    return out[0, len(prompt) :].tolist()


class Watched(Drafter):
    """Passes everything on to another drafter; keeps what each sequence has committed, and calls check before each proposal."""

    needs_taps = True

    def __init__(self, inner: Drafter, check: Callable[[Watched], None] = lambda watched: None) -> None:
        super().__init__()
        self.name, self.inner, self.check = f"watched {inner.name}", inner, check
        self.proposals: list[list[DraftTree]] = []

    def start(self, prompts: Sequence[Sequence[int]]) -> None:
        self.inner.start(prompts)
        self.committed = [list(p[:1]) for p in prompts]
        self.hidden = [torch.empty(0) for _ in prompts]
        self.taps = [torch.empty(0) for _ in prompts]

    def select(self, rows: Sequence[int]) -> None:
        self.inner.select(rows)
        self.committed, self.hidden, self.taps = ([column[r] for r in rows] for column in (self.committed, self.hidden, self.taps))

    def observe(self, committed: Committed) -> None:
        assert committed.taps is not None
        for b, new in enumerate(committed.tokens):
            self.committed[b] = [*self.committed[b], *new]
            self.hidden[b] = torch.cat((self.hidden[b], committed.hidden[b, : len(new)]))
            self.taps[b] = torch.cat((self.taps[b], committed.taps[b, : len(new)]))
        self.inner.observe(committed)

    def propose(self, counts: Sequence[int], draws: Sequence[Draws]) -> list[DraftTree]:
        self.check(self)
        self.proposals.append(self.inner.propose(counts, draws))
        return self.proposals[-1]


class EnumeratedDraws:
    """Draws (eval.acceptance) that replay a script of outcomes and then take the first possible one of each draw.

    ``probability`` is that of the path taken, ``untried`` the scripts that begin every path branching off after the given script.
    """

    def __init__(self, script: Sequence[int] = ()) -> None:
        self.script = script
        self.taken: list[int] = []
        self.untried: list[list[int]] = []
        self.probability = 1.0

    def _choose(self, chances: Sequence[float]) -> int:
        at = len(self.taken)
        if at < len(self.script):
            choice = self.script[at]
        else:
            choice, *others = [i for i, chance in enumerate(chances) if chance > 0]
            self.untried += [[*self.taken, other] for other in others]
        self.taken.append(choice)
        self.probability *= chances[choice]
        return choice

    def accept(self, p: float, q: float) -> bool:
        assert q > 0, "a draft that q cannot give was put before the rule"
        passes = min(1.0, p / q)
        return self._choose([passes, 1 - passes]) == 0

    def pick(self, weights: torch.Tensor) -> int:
        chances = weights.tolist()
        total = sum(chances)
        assert min(chances) >= 0 and total > 0
        return self._choose([chance / total for chance in chances])


def every_path(run: Callable[[EnumeratedDraws], Any]) -> Iterator[tuple[Any, float]]:
    """(result, probability) of every way the draws of ``run`` can fall out."""
    scripts: list[list[int]] = [[]]
    while scripts:
        draws = EnumeratedDraws(scripts.pop())
        yield run(draws), draws.probability
        scripts += draws.untried


def chi_square_p(observed: torch.Tensor, law: torch.Tensor) -> float:
    """P-value of counts under a law (Wilson-Hilferty); cells that expect fewer than 5 are pooled. A count where the law has 0 gives 0."""
    observed, law = observed.flatten(), law.flatten()
    if float(observed[law == 0].sum()) > 0:
        return 0.0
    expected = law * observed.sum()
    rare = expected < 5
    pooled = [observed[~rare]], [expected[~rare]]
    if float(expected[rare].sum()) > 0:
        pooled[0].append(observed[rare].sum().reshape(1))
        pooled[1].append(expected[rare].sum().reshape(1))
    o, e = torch.cat(pooled[0]), torch.cat(pooled[1])
    freedom = len(o) - 1
    assert freedom >= 5
    statistic = float(((o - e) ** 2 / e.clamp_min(1e-9)).sum())
    variance = 2 / (9 * freedom)
    z = ((statistic / freedom) ** (1 / 3) - (1 - variance)) / math.sqrt(variance)
    return 0.5 * math.erfc(z / math.sqrt(2))
