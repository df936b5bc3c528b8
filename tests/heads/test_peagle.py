"""P-EAGLE: the training forward over slots (anchor, depth) equals the one-pass draft (ALGORITHMS 10.2, 16.5) and the visibility rule."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from data.packing import Batch
from heads.cache import LineCache
from heads.peagle import PEagleConfig, PEagleHead
from heads.registry import new_head
from heads.target import FrozenTarget
from heads.vocab import DraftVocab
from tests.heads.parity import VOCAB, batch_of, lively, spans, without_gradient
from tests.tiny import tiny_target
from train.objectives import run_target

DEPTHS = 5


def fresh_head(target: FrozenTarget, full: bool = False, **config: Any) -> PEagleHead:
    counts = torch.randint(0, 9, (target.vocab_size,), generator=torch.Generator().manual_seed(2))
    vocab = DraftVocab.full(VOCAB) if full else DraftVocab.from_counts(counts, 25)
    head: PEagleHead = new_head(PEagleConfig(**({"layers": 2, "depths": DEPTHS} | config)), target, vocab, seed=1)
    return head.eval()


def lively_head(target: FrozenTarget, **config: Any) -> PEagleHead:
    head: PEagleHead = lively(fresh_head(target, **config))
    return head


Slots = list[tuple[int, int]]


def all_slots(batch: Batch, row: int, depths: int = DEPTHS, thin: random.Random | None = None) -> Slots:
    """Every position at depth 0, every anchor's deeper slots inside its document; thinned at random to nested prefixes."""
    slots = []
    for at, start, end in spans(batch):
        for anchor in range(start, end) if at == row else ():
            deepest = min(depths, end - anchor - 1)
            if thin is not None and deepest:
                deepest = thin.randint(1, deepest)
            slots += [(anchor, depth) for depth in range(max(1, deepest))]
    if thin is not None:
        thin.shuffle(slots)  # the order of slots says nothing
    return slots


def rule(slots: Slots, document: list[int]) -> list[list[bool]]:
    """visible(query -> key) of ALGORITHMS 10.2, pair by pair."""
    return [
        [
            document[k_anchor] == document[q_anchor]
            and ((k_depth == 0 and k_anchor <= q_anchor) or (k_anchor == q_anchor and k_depth <= q_depth))
            for k_anchor, k_depth in slots
        ]
        for q_anchor, q_depth in slots
    ]


def train_forward(head: PEagleHead, target: FrozenTarget, batch: Batch, taps: torch.Tensor, slots: list[Slots]) -> torch.Tensor:
    """Draft logits [B, M, V_d] of the training forward; rows with fewer slots repeat their first."""
    most = max(map(len, slots))
    padded = [row + [row[0]] * (most - len(row)) for row in slots]
    anchor = torch.tensor([[a for a, _ in row] for row in padded])
    depth = torch.tensor([[d for _, d in row] for row in padded])
    visible = torch.tensor([rule(row, batch.document[b].tolist()) for b, row in enumerate(padded)])
    for b, row in enumerate(slots):
        visible[b, : len(row), len(row) :] = False  # a repeated slot is nobody's key but its own
    shifted = torch.cat((batch.ids[:, 1:], batch.ids[:, -1:]), dim=1)
    tokens = head.embed(shifted, target.embedding)
    return head.base.logits(head.parallel(taps, tokens, batch.position, anchor, depth, visible))


@torch.no_grad()
def decode(head: PEagleHead, target: FrozenTarget, ids: torch.Tensor, taps: torch.Tensor, anchor: int, depth: int) -> torch.Tensor:
    """[depth, V_d], from one document, as decoding does: earlier slots verified over two cycles, then this one."""
    cache = LineCache()
    cuts = sorted({0, (anchor + 1) // 2, anchor + 1})
    logits = torch.empty(0)
    for low, high in zip(cuts[:-1], cuts[1:], strict=True):  # noqa: RUF007
        token = head.embed(ids[None, low + 1 : high + 1], target.embedding)
        logits = head.draft(taps[None, low:high], token, [high - low], depth, cache)
        cache.keep([high])  # mask slots are forgotten, verified ones stay
    return logits[0]


@pytest.mark.parametrize("full", [True, False], ids=["full", "reduced"])
@pytest.mark.parametrize("layers", [1, 2, 4])
@pytest.mark.parametrize("pack", [True, False], ids=["packed", "padded"])
def test_training_equals_one_pass_drafting(pack: bool, layers: int, full: bool) -> None:
    target = tiny_target("llama", vocab=VOCAB)
    head = lively_head(target, layers=layers, full=full)
    batch = batch_of(pack)
    taps = run_target(target, batch).taps
    assert taps is not None
    slots = [all_slots(batch, row) for row in range(len(batch.ids))]
    with torch.no_grad():
        trained = train_forward(head, target, batch, taps, slots)
    compared = 0
    for row, start, end in spans(batch):
        for anchor in range(start, end - 1):
            depth = min(DEPTHS, end - anchor - 1)
            drafted = decode(head, target, batch.ids[row, start:end], taps[row, start:end], anchor - start, depth)
            for j in range(depth):
                torch.testing.assert_close(trained[row, slots[row].index((anchor, j))], drafted[j], atol=1e-5, rtol=1e-5)
                compared += 1
    assert compared > 100


def test_dropped_slots_change_no_other() -> None:
    """Conditional drop-token sampling keeps nested prefixes: those that are kept have the values they have among all."""
    target = tiny_target("llama", vocab=VOCAB)
    head = lively_head(target)
    batch = batch_of(True)
    taps = run_target(target, batch).taps
    assert taps is not None
    every = all_slots(batch, 0)
    few = all_slots(batch, 0, thin=random.Random(3))
    assert 20 < len(few) < len(every) - 20
    with torch.no_grad():
        whole = train_forward(head, target, batch, taps, [every])[0]
        kept = train_forward(head, target, batch, taps, [few])[0]
    for index, slot in enumerate(few):
        torch.testing.assert_close(kept[index], whole[every.index(slot)], atol=1e-5, rtol=1e-5)


def test_depth_0_is_an_eagle3_slot() -> None:
    """The worked example of ALGORITHMS 10.2 aside, the first draft is what the EAGLE-3 head inside would say."""
    target = tiny_target("llama", vocab=VOCAB)
    head = lively_head(target)
    ids = torch.randint(3, VOCAB, (1, 9), generator=torch.Generator().manual_seed(0))
    taps = target.forward(ids).taps
    assert taps is not None
    from tests.tiny import chain_visible

    with torch.no_grad():
        cache = LineCache()
        token = target.embed(ids[:, 1:])
        output, _ = head.base.extend(taps[:, :-1], None, token, torch.arange(8)[None], cache, chain_visible(cache, 1, 8))
        drafted = head.draft(taps[:, :-1], token, [8], DEPTHS, LineCache())
    torch.testing.assert_close(drafted[:, 0], head.base.logits(output[:, -1]), atol=1e-5, rtol=1e-5)


def test_the_rule_gives_the_worked_example() -> None:
    """ALGORITHMS 10.2: slot 3:2 sees 0:0 1:0 2:0 3:0 3:1 3:2."""
    slots = [(a, 0) for a in range(6)] + [(0, 1), (1, 1), (3, 1), (4, 1), (0, 2), (3, 2), (0, 3)]
    seen = rule(slots, [0] * 6)[slots.index((3, 2))]
    assert [s for s, visible in zip(slots, seen) if visible] == [(0, 0), (1, 0), (2, 0), (3, 0), (3, 1), (3, 2)]


def test_mask_slots_of_one_anchor_never_see_anothers() -> None:
    """By gradients: the output at (a, j) depends on the inputs that the rule allows and on no other."""
    target = tiny_target("llama", vocab=VOCAB)
    head = lively_head(target)
    batch = batch_of(True)
    taps = run_target(target, batch).taps
    assert taps is not None
    slots = all_slots(batch, 0)
    visible = torch.tensor([rule(slots, batch.document[0].tolist())])
    generator = torch.Generator().manual_seed(0)
    value = torch.randn(1, len(slots), 32, generator=generator, requires_grad=True)
    token = torch.randn(1, len(slots), 32, generator=generator, requires_grad=True)
    position = torch.tensor([[int(batch.position[0, a]) + d for a, d in slots]])
    output = head.run(value, token, position, visible)
    document = batch.document[0].tolist()
    for query in random.Random(0).sample(range(len(slots)), 12):
        gradients = torch.autograd.grad(output[0, query].square().sum(), (value, token), retain_graph=True)
        for gradient in gradients:
            reached = (gradient[0].abs().sum(-1) > 0).tolist()
            for key, slot in enumerate(slots):
                q_anchor, q_depth = slots[query]
                same = slot[0] == q_anchor and slot[1] <= q_depth
                before = slot[1] == 0 and slot[0] <= q_anchor and document[slot[0]] == document[q_anchor]
                assert reached[key] == (same or before), (slots[query], slot)


def test_a_ragged_batch_drafts_as_each_sequence_alone() -> None:
    target = tiny_target("llama", vocab=VOCAB)
    head = lively_head(target)
    generator = torch.Generator().manual_seed(6)
    rng = random.Random(0)
    ids = torch.randint(3, VOCAB, (3, 40), generator=generator)
    taps = target.forward(ids).taps
    assert taps is not None
    cache = LineCache()
    for cycle in range(4):
        counts = [rng.randint(1, 6) for _ in range(3)] if cycle else [1, 9, 4]
        depth = (DEPTHS, 1, 3, DEPTHS)[cycle]
        lengths = list(cache.lengths) or [0] * 3
        at = torch.tensor(lengths).unsqueeze(1) + torch.arange(max(counts))
        line = torch.arange(3).unsqueeze(1)
        with torch.no_grad():
            drafted = head.draft(taps[line, at], head.embed(ids[line, at + 1], target.embedding), counts, depth, cache)
        assert drafted.shape == (3, depth, 25)
        cache.keep([n + c for n, c in zip(lengths, counts)])
        for b, n in enumerate(cache.lengths):
            alone = decode(head, target, ids[b], taps[b], n - 1, depth)
            torch.testing.assert_close(drafted[b], alone, atol=1e-5, rtol=1e-5)
    assert len(set(cache.lengths)) > 1


@pytest.mark.parametrize("table", [False, True], ids=["target's embedding", "own embedding"])
def test_every_parameter_gets_a_gradient(table: bool) -> None:
    target = tiny_target("llama", vocab=VOCAB)
    head = fresh_head(target, layers=4, train_embedding=table)
    batch = batch_of(True)
    taps = run_target(target, batch).taps
    assert taps is not None
    train_forward(head, target, batch, taps, [all_slots(batch, 0)]).log_softmax(-1)[..., 3].sum().backward()
    assert without_gradient(head) == []
    assert target.embedding.grad is None
    if table:
        assert head.table is not None and head.table.grad is not None
        used = {int(i) for row, start, end in spans(batch) for i in batch.ids[row, start + 1 : end]}
        moved = set(head.table.grad.abs().sum(1).nonzero()[:, 0].tolist())
        assert used <= moved <= used | {0}  # the slot before padding reads id 0


def test_trained_embedding_is_read_and_starts_as_the_targets() -> None:
    target = tiny_target("llama", vocab=VOCAB)
    head = fresh_head(target, train_embedding=True)
    plain = fresh_head(target)
    ids = torch.arange(VOCAB)
    assert head.table is not None and plain.table is None
    assert torch.equal(head.embed(ids, target.embedding), target.embed(ids))
    assert torch.equal(plain.embed(ids, target.embedding), target.embed(ids))
    with torch.no_grad():
        head.table.mul_(2)
    assert torch.equal(head.embed(ids, target.embedding), 2 * target.embed(ids))
    assert head.embed(ids[:6].view(2, 3), target.embedding).shape == (2, 3, 32)


def test_initial_values() -> None:
    target = tiny_target("llama", vocab=VOCAB)
    head = fresh_head(target, full=True)
    torch.testing.assert_close(head.mask_embedding.detach(), target.embedding.mean(0))
    assert float(head.mask_hidden.std()) == pytest.approx(1.0, abs=0.25) and head.mask_hidden.shape == (96,)
    assert torch.equal(head.base.lm_head.weight, target.lm_head)
    assert head.arch.taps == target.taps and head.arch.base.layers == 2
    frozen = fresh_head(target, train_lm_head=False)
    assert [n for n, p in frozen.named_parameters() if not p.requires_grad] == ["base.lm_head.weight"]


def test_cannot_draft_deeper_than_it_was_trained() -> None:
    target = tiny_target("llama", vocab=VOCAB)
    head = fresh_head(target)
    with pytest.raises(AssertionError):
        head.draft(torch.zeros(1, 1, 96), torch.zeros(1, 1, 32), [1], DEPTHS + 1, LineCache())
