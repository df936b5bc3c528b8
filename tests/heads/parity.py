"""What the parity tests of all heads share: packed documents, heads with lively weights, decoding slot by slot."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from data.packing import Batch, PackedRows, PackingConfig
from heads.cache import LineCache, visible_slots
from heads.recurrent import RecurrentHead
from heads.target import FrozenTarget
from tests.tiny import chain_visible
from tests.train.runs import document
from train import pairs
from train.pairs import plan_unroll, shifted_tokens

DEPTHS = 4
VOCAB = 60


def batch_of(pack: bool) -> Batch:
    """Three documents, one of two turns, in one packed row (with padding at its end) or in three padded rows."""
    generator = torch.Generator().manual_seed(5)
    documents = []
    for index, mask in enumerate(([0] * 3 + [1] * 7, [0, 0] + [1] * 6 + [0] * 3 + [1] * 5, [0] * 4 + [1] * 4)):
        documents.append(document(torch.randint(3, VOCAB, (len(mask),), generator=generator).numpy(), mask, f"c{index}"))
    rows = PackedRows(documents, PackingConfig(max_length=40, pack=pack))
    return rows.batch(range(len(rows)))


def spans(batch: Batch) -> list[tuple[int, int, int]]:
    """(row, start, end) of every document; padding is none."""
    found = []
    for row in range(len(batch.ids)):
        for number in batch.document[row].unique().tolist():
            there = (batch.document[row] == number).nonzero().squeeze(1)
            if batch.mask[row, there].any():
                found.append((row, int(there[0]), int(there[-1]) + 1))
    return found


def lively(head: Any, gain: float = 8.0) -> Any:
    """Weights with which attention is far from uniform and norms are far from ones, so that mistakes show. LM heads stay."""
    generator = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            if "lm_head" in name or name == "table":
                continue
            if parameter.ndim == 1:
                parameter.copy_(0.5 + torch.rand(parameter.shape, generator=generator))
            else:
                parameter.mul_(gain)
    return head.eval()


def without_gradient(module: nn.Module) -> list[str]:
    """Names of the trainable parameters that got none."""
    return [n for n, p in module.named_parameters() if p.requires_grad and (p.grad is None or not p.grad.abs().sum() > 0)]


@torch.no_grad()
def decode(head: RecurrentHead, target: FrozenTarget, ids: torch.Tensor, features: torch.Tensor, slot: int) -> list[torch.Tensor]:
    """Logits of every step from a slot of one document, as decoding computes them: prefill in two calls, then one draft slot a call.

    Args:
        ids: [n].
        features: [n, F].
    """
    cache = LineCache()
    split = slot // 2
    output, state = torch.empty(0), torch.empty(0)
    for low, high in ((0, split), (split, slot + 1)):
        if low == high:
            continue
        token = target.embed(ids[None, low + 1 : high + 1])
        visible = chain_visible(cache, 1, high - low)
        output, state = head.extend(features[None, low:high], None, token, torch.arange(low, high)[None], cache, visible)
        cache.commit([range(high - low)])
    found = [head.draft_logits(output, target)[0, -1]]
    state = state[:, -1:]
    for step in range(1, DEPTHS):
        if slot + 1 + step >= len(ids):
            break
        token = target.embed(ids[None, slot + 1 + step : slot + 2 + step])
        output, state = head.extend(None, state, token, torch.tensor([[slot + step]]), cache, chain_visible(cache, 1, 1))
        assert cache.lengths == [slot + 1] and cache.lines.extra == step  # draft slots are never committed
        found.append(head.draft_logits(output, target)[0, 0])
    return found


@torch.no_grad()
def check_ragged_trees(head: RecurrentHead, target: FrozenTarget, width: int) -> None:
    """Lines of unequal length extended by unequal numbers of slots, then two levels of a draft tree: as each node's chain alone.

    Args:
        width: F.
    """
    generator = torch.Generator().manual_seed(4)
    counts = [(1, 5, 3), (4, 1, 2)]
    total = [sum(row) for row in zip(*counts, strict=True)]
    features = torch.randn(3, max(total), width, generator=generator)
    tokens = torch.randn(3, max(total), head.arch.hidden_size, generator=generator)  # type: ignore[union-attr]
    cache = LineCache()
    for new in counts:
        lengths, most = torch.tensor(cache.lengths or [0] * 3), max(new)
        at = (lengths.unsqueeze(1) + torch.arange(most)).clamp_max(max(total) - 1)
        line = torch.arange(3).unsqueeze(1)
        output, state = head.extend(features[line, at], None, tokens[line, at], at, cache, chain_visible(cache, 3, most))
        cache.commit([range(n) for n in new])
    assert cache.lengths == total
    last = [(output[b, n - 1], state[b, n - 1]) for b, n in enumerate(counts[-1])]
    root = torch.stack([s for _, s in last])
    # Two children of the last slot, then two of the second and one of the first; one call a level.
    level1 = torch.randn(3, 2, tokens.shape[2], generator=generator)
    level2 = torch.randn(3, 3, tokens.shape[2], generator=generator)
    parents = [1, 0, 1]
    lengths = torch.tensor(total)
    own = torch.eye(2, dtype=torch.bool).expand(3, -1, -1)
    position = lengths.unsqueeze(1).expand(-1, 2)
    one = head.extend(None, root.unsqueeze(1).expand(-1, 2, -1), level1, position, cache, visible_slots(lengths, own, cache.used + 2))
    own = torch.cat((torch.eye(2, dtype=torch.bool)[parents], torch.eye(3, dtype=torch.bool)), dim=1).expand(3, -1, -1)
    position = (lengths + 1).unsqueeze(1).expand(-1, 3)
    two = head.extend(None, one[1][:, parents], level2, position, cache, visible_slots(lengths, own, cache.used + 3))
    for b, n in enumerate(total):
        for node, parent in enumerate(parents):
            single = LineCache()
            found = head.extend(
                features[b : b + 1, :n], None, tokens[b : b + 1, :n], torch.arange(n)[None], single, chain_visible(single, 1, n)
            )
            torch.testing.assert_close(found[0][0, -1], last[b][0], atol=1e-5, rtol=1e-5)
            found = found[0][:, -1:], found[1][:, -1:]
            for depth, token in enumerate((level1[b, parent], level2[b, node])):
                visible = chain_visible(single, 1, 1)
                found = head.extend(None, found[1], token[None, None], torch.tensor([[n + depth]]), single, visible)
                expected = (one[0][b, parent], one[1][b, parent]) if depth == 0 else (two[0][b, node], two[1][b, node])
                for mine, theirs in zip(expected, found, strict=True):
                    torch.testing.assert_close(mine, theirs[0, 0], atol=1e-5, rtol=1e-5)


def check_parity(head: RecurrentHead, target: FrozenTarget, batch: Batch, features: torch.Tensor) -> None:
    """Training forward against incremental decoding, at every step of every slot that carries loss."""
    plan = plan_unroll(batch, DEPTHS)
    tokens = target.embed(shifted_tokens(batch.ids, DEPTHS))
    with torch.no_grad():
        outputs = head.unroll(features, tokens, batch.position, pairs.visible_slots(batch), plan.slots)
        trained = head.draft_logits(outputs, target)  # [S, B, N, V_d]
    assert trained.shape[-1] == head.vocab.size
    compared = 0
    found = spans(batch)
    assert len(found) == 3
    for row, start, end in found:
        for column, slot in enumerate(plan.slots[row].tolist()):
            if not plan.valid[0, row, column] or not start <= slot < end:
                continue
            for step, logits in enumerate(decode(head, target, batch.ids[row, start:end], features[row, start:end], slot - start)):
                torch.testing.assert_close(trained[step, row, column], logits, atol=1e-5, rtol=1e-5)
                compared += 1
    assert compared >= int(plan.valid.sum()) > 40


def check_detach(head: RecurrentHead, target: FrozenTarget, features: torch.Tensor) -> None:
    """Cut between steps: the same values, and the loss of a step reaches no value of the steps before it."""
    batch = batch_of(True)
    tokens = target.embed(shifted_tokens(batch.ids, DEPTHS))
    plan = plan_unroll(batch, DEPTHS)
    finished = head.finished
    found = []
    for detach in (False, True):
        values: list[torch.Tensor] = []

        def record(value: torch.Tensor, values: list[torch.Tensor] = values) -> torch.Tensor:
            values.append(value)
            return finished(value)

        head.finished = record  # type: ignore[method-assign]
        visible = pairs.visible_slots(batch)
        outputs = head.unroll(features, tokens, batch.position, visible, plan.slots, detach=detach)
        assert len(values) == DEPTHS
        for step in range(DEPTHS):
            gradients = torch.autograd.grad(outputs[step].square().sum(), values, retain_graph=True, allow_unused=True)
            reached = [g is not None and bool(g.abs().sum() > 0) for g in gradients]
            assert reached == [s == step or (s < step and not detach) for s in range(DEPTHS)], (detach, step)
        found.append(outputs)
    head.finished = finished  # type: ignore[method-assign]
    assert torch.equal(found[0], found[1])
