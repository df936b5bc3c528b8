"""Drafting across vocabularies: greedy identity, the law of the output, what tokens are to each other, the seam, the choice of a method."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from eval.acceptance import Draws, RandomDraws, accept_compared, accept_sampled
from eval.decoder import DecodeSettings, Generation, decode
from eval.drafters.base import Committed, Drafter
from eval.drafters.cross_vocabulary import CALIBRATION_DRAFT, CALIBRATION_DRAWS, CrossVocabularyDrafter, Reader
from eval.drafters.seam import LOOK_BEHIND, DraftText, Vocabulary, continuation, first_tokens, same_tokens, settled
from eval.drafters.simple import NoneDrafter
from eval.stopping import StopRule
from eval.tree import DraftTree
from heads.errors import UserError
from heads.sampling import Sampling, probabilities
from heads.target import FrozenTarget
from tests.laws import chi_square, joint, laws
from tests.tiny import tiny_model, tiny_target

METHODS = ["slem", "slrs", "tli"]
SPECIALS = ["<unk>", "<s>", "</s>"]
EOS = 2
GREEDY, WARM = Sampling(), Sampling(1.0)

# --- tokenizers ---


def fast(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>")


def bpe(alphabet: Sequence[str], merges: Sequence[tuple[str, str]], **more: Any) -> Tokenizer:
    strings = [*SPECIALS, *alphabet, *(left + right for left, right in merges)]
    return Tokenizer(models.BPE(vocab={s: i for i, s in enumerate(dict.fromkeys(strings))}, merges=list(merges), unk_token="<unk>", **more))


def raw(alphabet: Sequence[str], merges: Sequence[tuple[str, str]] = ()) -> PreTrainedTokenizerFast:
    """Characters and merges of them, nothing else."""
    tokenizer = bpe(alphabet, merges)
    tokenizer.decoder = decoders.Fuse()
    return fast(tokenizer)


@functools.cache
def byte_level() -> PreTrainedTokenizerFast:
    merges = [("t", "h"), ("th", "e"), ("Ġ", "the"), ("Ġ", "c"), ("a", "t"), ("Ġc", "at"), ("ä", "¸")]
    tokenizer = bpe(sorted(pre_tokenizers.ByteLevel.alphabet()), merges)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return fast(tokenizer)


@functools.cache
def sentencepiece() -> PreTrainedTokenizerFast:
    """As Llama 2 has it: space markers, one put before every text, and bytes where there is no character."""
    merges = [("▁", "t"), ("h", "e"), ("▁t", "he"), ("▁", "c"), ("a", "t"), ("▁c", "at"), ("▁", "a")]
    alphabet = [*(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abcdefghijklmnopqrstuvwxyz.ü"]
    tokenizer = bpe(alphabet, merges, byte_fallback=True, fuse_unk=True)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    return fast(tokenizer)


def words(strings: Sequence[str]) -> PreTrainedTokenizerFast:
    """Whole words that bring their space along."""
    vocabulary = {s: i for i, s in enumerate([*SPECIALS, *("▁" + s for s in strings)])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    tokenizer.decoder = decoders.Metaspace()
    return fast(tokenizer)


def ids_of(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def vocabulary(tokenizer: PreTrainedTokenizerFast) -> Vocabulary:
    return Vocabulary(tokenizer, len(tokenizer), "the test")


# --- models that speak one language in different tokens ---

CYCLE = "abcdefghijklmnop "
RING = [("a", "b"), ("c", "d"), ("ab", "cd"), ("e", "f"), ("m", "n"), ("p", " ")]
OTHER_RING = [("b", "c"), ("d", "e"), ("bc", "de"), ("e", "f"), ("i", "j"), ("m", "n"), (" ", "a")]


def ring_model(tokenizer: PreTrainedTokenizerFast, wobble: float, seed: int = 0, hidden: int = 64) -> FrozenTarget:
    """Says the characters of CYCLE in a ring, whatever its tokens; ``wobble`` lets attention interfere, so that it strays now and then."""
    own, size = vocabulary(tokenizer), len(tokenizer)
    ring = ids_of(tokenizer, CYCLE * 4)
    follows = dict(itertools.pairwise(ring[2:-2]))
    table = torch.zeros(size, size)
    for token, piece in enumerate(own.pieces):
        if token not in follows and piece:
            rest = CYCLE.index(piece.decode()[-1]) + 1
            ahead = (CYCLE * 3)[rest:].encode()
            follows[token] = max((t for t, p in enumerate(own.pieces) if p and ahead.startswith(p)), key=lambda t: len(own.pieces[t]))
        table[token, follows.get(token, 3)] = 4.0
    return table_model(table, wobble, seed, hidden)


def table_model(table: torch.Tensor, wobble: float, seed: int = 0, hidden: int = 64) -> FrozenTarget:
    """Logits table[token] after each token, and what ``wobble`` makes of a random attention layer."""
    size = len(table)
    model = tiny_model(vocab=size, hidden=hidden, layers=1, seed=seed)
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(torch.eye(size, hidden))
        model.lm_head.weight.copy_(torch.nn.functional.pad(table.T, (0, hidden - size)) / hidden**0.5)
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.mul_(wobble)
            layer.mlp.down_proj.weight.zero_()
    return FrozenTarget(model)


Pair = tuple[FrozenTarget, PreTrainedTokenizerFast, FrozenTarget, PreTrainedTokenizerFast]
"""target, its tokenizer, draft model, its tokenizer"""


@functools.cache
def ring_pair() -> Pair:
    one, other = raw(CYCLE, RING), raw(CYCLE[::-1], OTHER_RING)
    return ring_model(one, 0.3), one, ring_model(other, 0.05, seed=1), other


@functools.cache
def byte_pair() -> Pair:
    """Random models over bytes: text is mostly no UTF-8, and the draft model is no use."""
    one, other = byte_level(), sentencepiece()
    return (
        tiny_target(vocab=len(one) + 5, layers=1, scale=2.0), one, tiny_target(vocab=len(other), layers=1, scale=2.0, seed=1), other
    )  # fmt: skip


@functools.cache
def twin_pair() -> Pair:
    """The target itself as draft model, under a vocabulary in another order."""
    letters = "abcdefghijklmnopqrst"
    one, other = raw(letters), raw(letters[::-1])
    target = tiny_target(vocab=len(one), layers=2, scale=2.0)
    twin = tiny_model(vocab=len(one), layers=2, scale=2.0)
    order = [one.convert_tokens_to_ids(other.convert_ids_to_tokens(i)) for i in range(len(one))]
    with torch.no_grad():
        for weight in (twin.model.embed_tokens.weight, twin.lm_head.weight):
            weight.copy_(weight[order].clone())
        # Special tokens cannot cross: neither model may want them, or the two would part there.
        for head in (target.lm_head, twin.lm_head.weight):
            head[:3] = 0.0
    return target, one, FrozenTarget(twin), other


@functools.cache
def word_pair() -> Pair:
    """No token in common: whole words with their space against single characters."""
    one, other = words(["a", "b", "ab", "ba", "aab", "abab"]), raw([" ", "a", "b"])
    says_ab, spells = torch.zeros(len(one), len(one)), torch.zeros(len(other), len(other))
    says_ab[:, one.convert_tokens_to_ids("▁ab")] = 2.5
    for now, then in ((" ", "a"), ("a", "b"), ("b", " ")):
        spells[other.convert_tokens_to_ids(now), other.convert_tokens_to_ids(then)] = 4.0
    return table_model(says_ab, 0.5), one, table_model(spells, 0.0), other


def drafter_of(
    pair: Pair, method: Any, sampling: Sampling = GREEDY, sample: bool = True, stop: Sequence[int] = ()
) -> CrossVocabularyDrafter:
    target, tokenizer, model, own = pair
    return CrossVocabularyDrafter(
        model, own, target, tokenizer, sampling, method=method, sample_proposals=sample, stop_ids=frozenset(stop)
    )  # fmt: skip


def run(
    target: FrozenTarget,
    prompts: Sequence[Sequence[int]],
    drafter: Drafter,
    new: int = 12,
    K: int = 4,
    stop: Sequence[int] = (),
    **more: Any,
) -> list[Generation]:
    draws = more.pop("draws", None)
    return decode(target, prompts, drafter, DecodeSettings(K, new, StopRule(frozenset(stop)), **more), draws)


def random_prompts(count: int, vocab: int, seed: int = 0, lowest: int = 0, longest: int = 24) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, longest + 1, (count,), generator=generator).tolist()
    return [torch.randint(lowest, vocab, (n,), generator=generator).tolist() for n in lengths]


def ring_prompts(count: int) -> list[list[int]]:
    tokenizer = ring_pair()[1]
    return [ids_of(tokenizer, (CYCLE * 4)[i % 17 : i % 17 + 3 + i * 5 % 37]) for i in range(count)]


def in_batches(target: FrozenTarget, prompts: Sequence[list[int]], drafter: Drafter, batch: int, **more: Any) -> list[Generation]:
    return [g for i in range(0, len(prompts), batch) for g in run(target, prompts[i : i + batch], drafter, **more)]


# --- greedy identity ---

PAIRS: dict[str, Callable[[], Pair]] = {"ring": ring_pair, "bytes": byte_pair, "twin": twin_pair, "words": word_pair}


@functools.cache
def greedy_reference(name: str) -> tuple[list[list[int]], list[list[int]]]:
    """Prompts and the target's own output."""
    target, tokenizer, _, _ = PAIRS[name]()
    # Special tokens are not read by the draft model; the twin would not be one behind them.
    prompts = random_prompts(18, len(tokenizer), lowest=3 if name == "twin" else 0) + (ring_prompts(18) if name == "ring" else [])
    return prompts, [g.tokens for g in in_batches(target, prompts, NoneDrafter(), 18)]


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize(
    ("name", "method"), [(name, method) for name in PAIRS for method in METHODS if name != "words" or method == "slem"]
)
def test_greedy_output_is_the_targets_own(name: str, method: str, batch: int) -> None:
    pair = PAIRS[name]()
    prompts, expected = greedy_reference(name)
    few = prompts[:: 4 if batch == 1 else 1]
    results = in_batches(pair[0], few, drafter_of(pair, method), batch)
    assert [g.tokens for g in results] == expected[:: 4 if batch == 1 else 1]
    proposed = sum(c.proposed for g in results for c in g.cycles)
    accepted = sum(c.accepted for g in results for c in g.cycles)
    rate = accepted / proposed
    print(f"{name} {method} batch {batch}: {accepted} of {proposed} accepted")
    if name == "ring":
        assert 0.2 < rate < 1, "the two say nearly the same text"
    if name == "words":
        assert accepted > 0
    if name == "twin":
        assert rate > 0.99, "the draft model is the target"


def test_a_batch_drafts_what_its_sequences_draft_alone() -> None:
    pair = ring_pair()
    prompts = ring_prompts(9)
    for method in METHODS:
        together = run(pair[0], prompts, drafter_of(pair, method))
        alone = in_batches(pair[0], prompts, drafter_of(pair, method), 1)
        assert [[(c.proposed, c.accepted) for c in g.cycles] for g in together] == [
            [(c.proposed, c.accepted) for c in g.cycles] for g in alone
        ]


# --- the law of the output, by enumeration ---


class EnumeratedDraws:
    """Replays a script of choices; where it ends, the first possible one. Keeps the probability of the path."""

    def __init__(self, script: list[int]) -> None:
        self.script, self.path, self.probability = script, list[tuple[int, int]](), 1.0

    def _choose(self, chances: list[float]) -> int:
        possible = [i for i, chance in enumerate(chances) if chance > 0]
        choice = self.script[len(self.path)] if len(self.path) < len(self.script) else 0
        self.path.append((choice, len(possible)))
        self.probability *= chances[possible[choice]]
        return possible[choice]

    def accept(self, p: float, q: float) -> bool:
        assert q > 0, "a draft that q cannot give was put before the rule"
        passes = min(1.0, p / q)
        return self._choose([passes, 1 - passes]) == 0

    def pick(self, weights: torch.Tensor) -> int:
        return self._choose((weights / weights.sum()).tolist())


def every_path(run: Callable[[Draws], list[int]]) -> Iterator[tuple[list[int], float]]:
    script: list[int] = []
    while True:
        draws = EnumeratedDraws(script)
        yield run(draws), draws.probability
        path = draws.path
        while path and path[-1][0] + 1 == path[-1][1]:
            path.pop()
        if not path:
            return
        script = [choice for choice, _ in path[:-1]] + [path[-1][0] + 1]


PROMPT = [3, 4, 5, 3]


@functools.cache
def small_pair() -> Pair:
    """Target tokens a b c ab ca (8 ids), draft tokens b a d bc ca (8 ids): shared a, b, ca; float64."""
    one = raw("abc", [("a", "b"), ("c", "a")])
    other = raw("badc", [("b", "c"), ("c", "a")])
    target, model = (
        FrozenTarget(tiny_model(vocab=len(t), hidden=16, layers=1, scale=s, seed=seed).double())
        for t, s, seed in ((one, 2.0, 3), (other, 2.0, 5))
    )
    return target, one, model, other


def enumerated(p: Sequence[torch.Tensor], run: Callable[[Draws], list[int]]) -> tuple[torch.Tensor, set[int]]:
    """Law of the first three tokens, extended by the target where a path gave fewer; and the lengths of the paths."""
    law, lengths = torch.zeros_like(p[2]), set()
    for tokens, chance in every_path(run):
        lengths.add(len(tokens))
        rest = p[2] if len(tokens) == 3 else p[1][tokens[0]][:, None] * p[2][tokens[0]] if len(tokens) == 1 else p[2][tuple(tokens)]
        if len(tokens) == 3:
            law[tuple(tokens)] += chance
        else:
            law[tuple(tokens)] += chance * rest
    return law, lengths


def speculation(
    drafter: CrossVocabularyDrafter,
    prompt: Sequence[int],
    p: Sequence[torch.Tensor],
    change: Callable[[DraftTree], DraftTree] = lambda t: t,
) -> Callable[[Draws], list[int]]:
    """One cycle of the drafter behind the prompt, whose last token is pending."""
    drafter.start([prompt[:-1]])
    drafter.observe(Committed(torch.zeros(1, 0, 1), None, [[*prompt[1:]]]))
    read = drafter._reader.read
    seen: dict[tuple[int, ...], torch.Tensor] = {}

    def remembered(contexts: Sequence[Sequence[int] | None]) -> torch.Tensor:
        assert contexts[0] is not None
        if (key := tuple(contexts[0])) not in seen:
            seen[key] = read(contexts)
        return seen[key]

    drafter._reader.read = remembered  # type: ignore[method-assign]

    def law(node: int, path: Sequence[int]) -> torch.Tensor:
        return p[len(path)][tuple(path)]

    def cycle(draws: Draws) -> list[int]:
        tree = change(drafter.propose([2], [draws])[0])
        if tree.q is None:
            verdict = accept_compared(tree, lambda node, path: draws.pick(law(node, path)))
        else:
            verdict = accept_sampled(tree, law, draws)
        return [*(tree.tokens[n - 1] for n in verdict.path), verdict.extra]

    return cycle


@pytest.mark.parametrize("sampling", [WARM, Sampling(0.7, top_p=0.8)], ids=["T1", "top-p"])
@pytest.mark.parametrize("sample", [True, False], ids=["sampled", "argmax"])
@pytest.mark.parametrize("method", METHODS)
def test_proposals_keep_the_law_of_the_target(method: str, sample: bool, sampling: Sampling) -> None:
    pair = small_pair()
    p = laws(pair[0], PROMPT, sampling)
    drafter = drafter_of(pair, method, sampling, sample)
    got, lengths = enumerated(p, speculation(drafter, PROMPT, p))
    assert float((got - joint(p)).abs().max()) < 1e-12
    assert 1 in lengths and (len(lengths) > 1 or sampling != WARM)


@pytest.mark.parametrize("method", ["slrs", "tli"])
def test_the_enumeration_sees_a_wrong_q(method: str) -> None:
    """A q that is not what was drawn from: blurred, as if precision or mask differed."""
    pair = small_pair()
    p = laws(pair[0], PROMPT, WARM)

    def blurred(tree: DraftTree) -> DraftTree:
        assert tree.q is not None
        return DraftTree(tree.tokens, tree.parents, {n: (q + 0.05) / (q + 0.05).sum() for n, q in tree.q.items()})

    got, _ = enumerated(p, speculation(drafter_of(pair, method, WARM), PROMPT, p, blurred))
    assert float((got - joint(p)).abs().sum()) > 1e-2


def test_psi_is_the_law_of_the_proposals() -> None:
    """psi by hand: what each draft token is worth, and who gets it."""
    _, one, model, other = small_pair()
    text = "".join(one.convert_ids_to_tokens(PROMPT))
    logits = model.logits(model.forward(torch.tensor([ids_of(other, text)]), taps=False).hidden[0, -1])
    # other: <unk> <s> </s> b a d c bc ca; one: <unk> <s> </s> a b c ab ca
    by_hand = {
        "slrs": {"b": "b", "a": "a", "c": "c", "bc": "b", "ca": "ca", "</s>": "</s>"},
        "tli": {"b": "b", "a": "a", "c": "c", "ca": "ca", "</s>": "</s>"},
    }
    for method, image in by_hand.items():
        drafter = drafter_of(small_pair(), method, WARM)
        speculation(drafter, PROMPT, [])
        tree = drafter.propose([1], [RandomDraws(0)])[0]
        assert tree.q is not None
        weights = {d: float(logits[other.convert_tokens_to_ids(d)].exp()) for d in image}
        expected = torch.zeros(len(one), dtype=torch.float64)
        for d, t in image.items():
            expected[one.convert_tokens_to_ids(t)] += weights[d] / sum(weights.values())
        assert torch.allclose(tree.q[0], expected, atol=1e-12)


# --- the law of whole outputs ---


def chi_square_p(observed: torch.Tensor, law: torch.Tensor) -> float:
    p, freedom = chi_square(observed, law)
    assert freedom >= 5
    return p


def counts(method: str, decodes: int, pair: Pair, prompt: list[int]) -> tuple[torch.Tensor, float]:
    """Counts [V, V, V] of the first three tokens over seeded decodes in batches, and the share of drafts accepted."""
    table = torch.zeros(*[pair[0].vocab_size] * 3, dtype=torch.float64)
    drafter, batch, cycles = drafter_of(pair, method, WARM), 200, []
    for first in range(0, decodes, batch):
        draws = [RandomDraws(seed) for seed in range(first, first + batch)]
        for result in run(pair[0], [prompt] * batch, drafter, new=4, K=2, sampling=WARM, draws=draws):
            table[tuple(result.tokens[:3])] += 1
            cycles += result.cycles
    return table, sum(c.accepted for c in cycles) / max(1, sum(c.proposed for c in cycles))


@functools.cache
def small_float_pair() -> Pair:
    _, one, _, other = small_pair()
    return (
        FrozenTarget(tiny_model(vocab=len(one), hidden=16, layers=1, scale=2.0, seed=3)), one,
        FrozenTarget(tiny_model(vocab=len(other), hidden=16, layers=1, scale=2.0, seed=5)), other,
    )  # fmt: skip


@pytest.mark.parametrize("method", METHODS)
def test_sampled_output_has_the_law_of_the_target(method: str) -> None:
    pair = small_float_pair()
    observed, rate = counts(method, 1000, pair, PROMPT)
    law = joint(laws(pair[0], PROMPT, WARM))
    assert 0.02 < rate < 0.95
    assert abs(float(law.sum()) - 1) < 1e-5
    for dims in ((), (2,), (0, 1)):
        o, e = (observed.sum(dims), law.sum(dims)) if dims else (observed, law)
        assert chi_square_p(o, e) > 1e-4


def test_the_chi_square_sees_a_wrong_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    import eval.acceptance

    monkeypatch.setattr(eval.acceptance.RandomDraws, "accept", lambda self, p, q: True)
    pair = small_float_pair()
    observed, rate = counts("slrs", 200, pair, PROMPT)
    assert rate == 1
    assert chi_square_p(observed.sum((0, 2)), joint(laws(pair[0], PROMPT, WARM)).sum((0, 2))) < 1e-6


# --- what tokens are to each other ---


def token_map(image: torch.Tensor, draft: PreTrainedTokenizerFast, target: PreTrainedTokenizerFast) -> dict[str, str | None]:
    return {draft.convert_ids_to_tokens(d): target.convert_ids_to_tokens(t) if t >= 0 else None for d, t in enumerate(image.tolist())}


def test_special_tokens_have_no_text_and_no_image() -> None:
    one, other = vocabulary(byte_level()), vocabulary(sentencepiece())
    assert one.pieces[:3] == other.pieces[:3] == [b"", b"", b""]
    for image in (same_tokens(one, other), first_tokens(one, other)):
        assert image[:3].tolist() == [-1, -1, -1] and not set(image.tolist()) & {0, 1, 2}
    inside = [1, *ids_of(byte_level(), "the cat"), 2, *ids_of(byte_level(), " sat"), 2]
    assert one.text(inside) == b"the cat sat"
    # In a word spelled out they are text, and never become the special token.
    assert 2 not in continuation(one, ids_of(byte_level(), "the"), b"</s>")[0]


def test_a_special_token_cuts_the_window() -> None:
    target = vocabulary(raw("abc", [("a", "b")]))
    a, ab = ids_of(target.tokenizer, "a")[0], ids_of(target.tokenizer, "ab")[0]
    assert continuation(target, [a], b"b") == ([], False)  # together they are one token
    assert continuation(target, [a, EOS], b"b")[1] and continuation(target, [ab], b"c")[1]


def test_leading_spaces_are_one_character_to_both() -> None:
    one, other = byte_level(), sentencepiece()
    same = token_map(same_tokens(vocabulary(one), vocabulary(other)), one, other)
    assert (same["Ġthe"], same["Ġcat"], same["at"]) == ("▁the", "▁cat", "at")
    assert same["the"] is None and same["th"] is None
    first = token_map(first_tokens(vocabulary(one), vocabulary(other)), one, other)
    assert first["Ġthe"] == "▁the" and first["the"] == "t" and first["th"] == "t" and first["a"] == "a"
    back = token_map(first_tokens(vocabulary(other), vocabulary(one)), other, one)
    assert back["▁the"] == "Ġthe" and back["he"] == "h" and back["▁a"] == "Ġ" and back["▁"] == "Ġ"
    # The space that stands before every text is not in it.
    assert vocabulary(other).text(ids_of(other, "the cat")) == b"the cat"
    assert vocabulary(one).text(ids_of(one, " the cat")) == b" the cat"


def test_byte_fallback() -> None:
    one, other = byte_level(), sentencepiece()
    theirs = vocabulary(other)
    assert theirs.pieces[other.convert_tokens_to_ids("<0xE4>")] == b"\xe4"
    assert theirs.by_bytes[b"a"] == other.convert_tokens_to_ids("a")  # not <0x61>
    assert theirs.text(ids_of(other, "a中ü")) == "a中ü".encode()
    same = token_map(same_tokens(vocabulary(one), theirs), one, other)
    assert same["ä"] == "<0xE4>" and same["a"] == "a" and same["A"] == "<0x41>" and same["ä¸"] is None
    back = token_map(same_tokens(theirs, vocabulary(one)), other, one)
    assert back["a"] == back["<0x61>"] == "a" and back["ü"] is None
    first = token_map(first_tokens(theirs, vocabulary(one)), other, one)
    assert first["ü"] == "Ã" and first["<0xBC>"] == "¼"


def test_an_unknown_decoder_and_a_slow_tokenizer_are_refused() -> None:
    wordpiece = fast(Tokenizer(models.WordPiece({"<unk>": 0, "a": 1, "##b": 2}, unk_token="<unk>")))
    wordpiece.backend_tokenizer.decoder = decoders.WordPiece()
    with pytest.raises(UserError, match="tokenizer of the draft model joins tokens .*decoder WordPiece"):
        Vocabulary(wordpiece, 3, "the draft model")
    with pytest.raises(UserError, match="needs a fast one"):
        Vocabulary(object(), 3, "the draft model")  # type: ignore[arg-type]


# --- the seam ---

TEXT = "the cat at the hat, a cat! 中文 über 🙂 and the thé — the cat the the catthecat the"


def test_incomplete_characters_are_never_settled() -> None:
    import codecs

    for text in (TEXT.encode(), b"\xff\xfe a\xe4\xb8", b"\x80\x80\x80", b"a\xf0\x9f\x99", b"\xe4a\xe4\xb8\xad"):
        for end in range(len(text) + 1):
            reader = codecs.getincrementaldecoder("utf-8")("replace")
            reader.decode(text[:end])
            assert settled(text[:end]) == end - len(reader.getstate()[0]), text[:end]
    assert [settled(t) for t in (b"", b"a", b"a\xe4", b"a\xe4\xb8", b"a\xe4\xb8\xad", b"a\xe4b", b"\xff")] == [0, 1, 1, 1, 4, 3, 1]


@pytest.mark.parametrize("draft", [byte_level, sentencepiece])
def test_a_context_that_grows_is_the_text_tokenised_at_once(draft: Callable[[], PreTrainedTokenizerFast]) -> None:
    own = vocabulary(draft())
    for seed in range(6):
        generator = torch.Generator().manual_seed(seed)
        text = (TEXT * 2).encode()
        rest, context = text, DraftText(own, b"")
        while rest:
            step = int(torch.randint(1, 9, (), generator=generator))
            context.append(rest[:step])
            rest = rest[step:]
            so_far = text[: len(text) - len(rest)]
            whole, tail = so_far[: settled(so_far)], so_far[settled(so_far) :]
            expected = [*ids_of(draft(), whole.decode()), *(own.by_bytes[bytes([byte])] for byte in tail)]
            assert context.context == expected and context.rest == b"" and context.text == so_far


def test_a_context_without_bytes_waits_for_the_whole_character() -> None:
    own = vocabulary(raw("ab中"))
    context = DraftText(own, b"ab\xe4")
    assert context.rest == b"\xe4" and own.tokenizer.decode(context.context) == "ab"
    context.append(b"\xb8")
    assert context.rest == b"\xe4\xb8" and own.tokenizer.decode(context.context) == "ab"
    context.append(b"\xad")
    assert context.rest == b"" and own.tokenizer.decode(context.context) == "ab中"


def test_the_known_token_is_put_behind_a_context_as_it_is() -> None:
    own = vocabulary(raw("abc", [("a", "b")]))
    a, b, c = (own.by_bytes[s] for s in (b"a", b"b", b"c"))
    context = DraftText(own, b"a")
    fork = context.fork()
    context.append(b"b", b)
    assert context.context == [a, b]
    fork.append(b"b")
    assert fork.context == [own.by_bytes[b"ab"]] and context.context == [a, b]
    context.append(b"c", c)
    assert context.context == [a, b, c] and context.text == b"abc"


def test_text_the_tokenizer_changes_still_has_a_context() -> None:
    own = vocabulary(raw("ab "))
    unknown = 0
    context = DraftText(own, "ab中ab".encode())
    for _ in range(3 * LOOK_BEHIND):
        context.append(b"ab ")
    assert context.context == ids_of(own.tokenizer, "ab中ab" + "ab " * 3 * LOOK_BEHIND) and unknown in context.context
    assert DraftText(own, b"\xff\xff").context == [0] * len(DraftText(own, b"\xff\xff").context)


def test_new_text_is_tokenised_across_the_seam() -> None:
    one = byte_level()
    target = vocabulary(one)
    committed = ids_of(one, "the hat and the")
    assert continuation(target, committed, b" cat the")[0] == ids_of(one, "the hat and the cat the")[len(committed) :]
    # " ca" + "t": one token with what was committed already, so nothing can be said.
    split = [*committed, *(one.convert_tokens_to_ids(t) for t in ("Ġ", "c", "a"))]
    assert continuation(target, split, b"t the") == ([], False)
    # An odd split further back does not matter, for its end is a token's end all the same.
    odd = [*(one.convert_tokens_to_ids(t) for t in ("t", "h", "e")), *ids_of(one, " cat")]
    assert continuation(target, odd, b" the cat") == (ids_of(one, " the cat"), True)
    # Incomplete characters: committed, and at the end of the new text.
    half = [*committed, one.convert_tokens_to_ids("Ġ"), one.convert_tokens_to_ids("ä¸")]
    assert continuation(target, half, "中".encode()[2:] + b" th\xe4") == (
        [one.convert_tokens_to_ids(t) for t in ("Ń", "Ġ", "th")], False
    )  # fmt: skip


def test_a_draft_must_begin_with_the_character_that_is_open() -> None:
    """SLEM where the target has emitted half a character and the draft model has no bytes."""
    one, other = byte_level(), raw("ab中丮 ")
    pair = (tiny_target(vocab=len(one), layers=1), one, tiny_target(vocab=len(other), layers=1), other)
    drafter = drafter_of(pair, "slem")
    tokens = [*ids_of(one, "ab"), one.convert_tokens_to_ids("ä¸")]
    text = DraftText(vocabulary(other), vocabulary(one).text(tokens))
    assert text.rest == b"\xe4\xb8"
    proper, wrong = ids_of(other, "中a"), ids_of(other, "abba")
    assert drafter._candidates(tokens, text, proper) == [one.convert_tokens_to_ids("Ń"), one.convert_tokens_to_ids("a")]
    assert drafter._candidates(tokens, text, wrong) == []


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", ["ring", "bytes"])
def test_the_draft_models_cache_is_that_of_its_context(name: str, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = PAIRS[name]()
    model, read, compared = pair[2], Reader.read, 0

    def checked(self: Reader, contexts: Sequence[Sequence[int] | None]) -> torch.Tensor:
        nonlocal compared
        logits = read(self, contexts)
        for row, context in enumerate(contexts):
            if context is not None:
                fresh = model.logits(model.forward(torch.tensor([list(context)]), taps=False).hidden[0, -1])
                assert torch.allclose(logits[row], fresh, atol=1e-4)
                compared += 1
        return logits

    monkeypatch.setattr(Reader, "read", checked)
    prompts = ring_prompts(3) if name == "ring" else random_prompts(3, 260, seed=3)
    drafter = drafter_of(pair, method, WARM)
    run(pair[0], prompts, drafter, new=14, sampling=WARM)
    assert compared > 40


@pytest.mark.parametrize("method", METHODS)
def test_end_of_text_crosses_by_its_role(method: str) -> None:
    """The draft model's </s> has another number than the target's, and ends a draft; the output ends where the target's does."""
    one = raw(CYCLE, RING)
    shifted = Tokenizer(models.BPE(vocab={s: i for i, s in enumerate([*CYCLE, "<s>", "<unk>", "</s>"])}, merges=[], unk_token="<unk>"))
    shifted.decoder = decoders.Fuse()
    other = fast(shifted)
    target, model = ring_model(one, 0.0), ring_model(other, 0.0)
    with torch.no_grad():  # both end at the space
        for m, tokenizer in ((target, one), (model, other)):
            for space in (t for t, i in tokenizer.get_vocab().items() if t.endswith(" ")):
                m.lm_head[tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids(space)] = 3.0
    pair, prompts = (target, one, model, other), [ids_of(one, "abcdefghijkl"), ids_of(one, "mno")]
    expected = run(target, prompts, NoneDrafter(), stop=[EOS])
    assert all(g.tokens[-1] == EOS and g.finish == "stop" for g in expected)
    proposals: list[tuple[int, ...]] = []
    drafter = drafter_of(pair, method, stop=[EOS])
    propose = drafter.propose

    def kept(counts: Sequence[int], draws: Sequence[Draws]) -> list[DraftTree]:
        trees = propose(counts, draws)
        proposals.extend(t.tokens for t in trees)
        return trees

    drafter.propose = kept  # type: ignore[method-assign]
    got = run(target, prompts, drafter, stop=[EOS])
    assert [g.tokens for g in got] == [g.tokens for g in expected]
    ended = [t for t in proposals if EOS in t]
    assert ended and all(t.index(EOS) == len(t) - 1 for t in ended)
    assert any(g.origins[-1] > 0 for g in got), "an end of text was accepted from a draft"


# --- what cannot be drafted ---


def test_an_empty_intersection_leaves_slem() -> None:
    pair = word_pair()
    assert drafter_of(pair, "slem").shared == 0
    with pytest.raises(UserError, match="shares no token with the target's .* drafter.method=tli cannot draft"):
        drafter_of(pair, "tli")
    with pytest.raises(UserError, match="no token that begins with one of the target's"):
        drafter_of(pair, "slrs")
    drafter = drafter_of(pair, "auto", WARM)
    run(pair[0], [[3, 4, 5]], drafter, sampling=WARM)
    assert drafter.choice is not None and drafter.choice.method == "slem" and drafter.choice.estimates["tli"] == 0


def test_slem_with_an_empty_intersection_has_the_law_of_the_target() -> None:
    pair = word_pair()
    prompt = [4, 3, 5]
    observed, rate = counts("slem", 1000, pair, prompt)
    assert rate > 0.02
    assert chi_square_p(observed, joint(laws(pair[0], prompt, WARM))) > 1e-4


@pytest.mark.parametrize("method", METHODS)
def test_a_context_that_is_outgrown_drafts_nothing(method: str) -> None:
    target, one, _, other = ring_pair()
    short = tiny_target(vocab=len(other), layers=1, max_position_embeddings=24)
    prompts = [ids_of(one, CYCLE), ids_of(one, CYCLE * 3), ids_of(one, "abc")]
    drafter = drafter_of((target, one, short, other), method)
    results = run(target, prompts, drafter, new=24)
    assert [g.tokens for g in results] == [g.tokens for g in run(target, prompts, NoneDrafter(), new=24)]
    assert sum(c.proposed for c in results[1].cycles) == 0 < sum(c.proposed for c in results[0].cycles)
    assert results[0].cycles[-3].proposed == 0 < results[0].cycles[0].proposed


def test_a_prompt_without_text_drafts_nothing_until_there_is_some() -> None:
    pair = ring_pair()
    for method in METHODS:
        results = run(pair[0], [[1]], drafter_of(pair, method))
        assert [g.tokens for g in results] == [g.tokens for g in run(pair[0], [[1]], NoneDrafter())]


# --- auto ---

CALIBRATION = [3, 4, 6, 5, 7, 3]  # a b ab c ca a


def next_law(model: FrozenTarget, contexts: Sequence[Sequence[int]], sampling: Sampling) -> torch.Tensor:
    hidden = model.forward(torch.tensor([list(c) for c in contexts]), taps=False).hidden[:, -1]
    return probabilities(model.logits(hidden), sampling).double()


def string_psi(pair: Pair, text: str, sampling: Sampling, depth: int) -> torch.Tensor:
    """[V_T] of draft sequences of up to ``depth`` tokens, how likely the first target token of their text is each; the rest fits none."""
    target, one, model, other = pair
    usable = [i for i, t in enumerate(other.convert_ids_to_tokens(range(len(other)))) if t not in SPECIALS or i == EOS]
    open_paths: list[tuple[list[int], float]] = [([], 1.0)]
    closed: list[tuple[list[int], float]] = []
    for _ in range(depth):
        q = next_law(model, [[*ids_of(other, text), *path] for path, _ in open_paths], Sampling(1.0))
        masked = torch.zeros_like(q)
        masked[:, usable] = q[:, usable]
        q = masked / masked.sum(-1, keepdim=True)
        if sampling.greedy:
            q = torch.zeros_like(q).scatter_(-1, q.argmax(-1, keepdim=True), 1.0)
        grown = [([*path, d], chance * float(row[d])) for (path, chance), row in zip(open_paths, q) for d in usable if row[d] > 0]
        closed += [(path, chance) for path, chance in grown if path[-1] == EOS]
        open_paths = [(path, chance) for path, chance in grown if path[-1] != EOS]
    psi = torch.zeros(target.vocab_size, dtype=torch.float64)
    for path, chance in closed + open_paths:
        new = "".join(other.convert_ids_to_tokens(d) for d in path if d != EOS)
        encoded = one.convert_ids_to_tokens(ids_of(one, text + new))
        boundaries = [0, *itertools.accumulate(map(len, encoded))]
        if not new and path == [EOS]:
            psi[EOS] += chance
        elif new and len(text) in boundaries:
            at = boundaries.index(len(text))
            first = encoded[at]
            if first != "<unk>":
                psi[one.convert_tokens_to_ids(first)] += chance
    return psi


@functools.cache
def auto_pair() -> Pair:
    target, one, _, _ = small_float_pair()
    other = raw("bac", [("b", "c"), ("c", "a"), ("b", "a")])
    return target, one, tiny_target(vocab=len(other), hidden=16, layers=1, scale=1.5, seed=5), other


@pytest.mark.parametrize("sampling", [GREEDY, WARM], ids=["greedy", "sampled"])
def test_the_estimates_are_those_of_brute_force(sampling: Sampling) -> None:
    pair = auto_pair()
    target, one, model, other = pair
    images = {
        "slrs": {"b": "b", "a": "a", "c": "c", "bc": "b", "ca": "ca", "ba": "b", "</s>": "</s>"},
        "tli": {"b": "b", "a": "a", "c": "c", "ca": "ca", "</s>": "</s>"},
    }
    exact: dict[str, list[float]] = {method: [] for method in METHODS}
    variance = 0.0
    for i in range(len(CALIBRATION)):
        text = "".join(one.convert_ids_to_tokens(CALIBRATION[: i + 1]))
        p = next_law(target, [CALIBRATION[: i + 1]], sampling)[0]
        q = next_law(model, [ids_of(other, text)], WARM)[0]
        for method, image in images.items():
            own = [other.convert_tokens_to_ids(d) for d in image]
            weights = q[own] / q[own].sum()
            if sampling.greedy:
                weights = torch.nn.functional.one_hot(weights.argmax(), len(own)).double()
            psi = torch.zeros_like(p)
            for weight, t in zip(weights, image.values()):
                psi[one.convert_tokens_to_ids(t)] += weight
            exact[method].append(float(torch.minimum(p, psi).sum()))
        psi = string_psi(pair, text, sampling, CALIBRATION_DRAFT)
        exact["slem"].append(float((p * psi).sum()))
        variance += float((p**2 * psi).sum() - (p * psi).sum() ** 2)
    expected = {method: sum(values) / len(values) for method, values in exact.items()}
    drafter = drafter_of(pair, "auto", sampling)
    choice = drafter.calibrate(CALIBRATION)
    print(expected, choice)
    for method in ("slrs", "tli"):
        assert choice.estimates[method] == pytest.approx(expected[method], abs=1e-5)
    # SLEM's is a mean over drawn texts: four standard errors, of the exact variance. Greedy has none.
    error = math.sqrt(variance / CALIBRATION_DRAWS) / len(CALIBRATION)
    assert abs(choice.estimates["slem"] - expected["slem"]) < 4 * error + 1e-5
    assert error < 0.05 and 0 < expected["slem"] < 1
    assert choice.estimates[choice.method] == max(choice.estimates.values())


def test_auto_takes_the_best_and_says_why() -> None:
    pair = ring_pair()
    drafter = drafter_of(pair, "auto")
    assert drafter.choice is None
    prompts = ring_prompts(3)[1:]
    results = run(pair[0], prompts, drafter)
    assert [g.tokens for g in results] == [g.tokens for g in run(pair[0], prompts, NoneDrafter())]
    choice = drafter.choice
    assert choice is not None and choice.estimates[choice.method] == max(choice.estimates.values()) > 0
    assert choice.reason.startswith(f"{choice.method} has the best estimated acceptance")
    assert all(f"{method} {choice.estimates[method]:.2f}" in choice.reason for method in METHODS)
    run(pair[0], ring_prompts(9)[8:], drafter)
    assert drafter.choice is choice, "chosen once"


def test_auto_finds_the_same_tokens_and_the_longer_ones() -> None:
    """TLI for a twin; SLEM where the target's tokens are words and the draft model spells them."""
    twin = twin_pair()
    assert drafter_of(twin, "auto", WARM).calibrate([3, 4, 5, 6, 7, 8]).method == "tli"
    syllables = [("a", "b"), ("ab", "c"), ("d", "e"), ("de", "f"), ("g", "h"), ("gh", "i"), ("j", "k"), ("jk", "l")]
    one, other = raw(CYCLE, syllables), raw(CYCLE)
    speller = (ring_model(one, 0.0), one, ring_model(other, 0.0), other)
    choice = drafter_of(speller, "auto").calibrate(ids_of(one, "abcdefghijkl"))
    assert choice.method == "slem" and choice.estimates["slem"] > 0.9 > 0.5 > choice.estimates["slrs"]
