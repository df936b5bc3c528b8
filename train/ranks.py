"""How often the token of each rank is the one the target wrote: what static draft trees are built from (ALGORITHMS 3.3, 7.2).

Shapes: S depths, R ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F

from data.corpus import Document
from data.packing import PackedRows, PackingConfig
from eval.records import PromptRecord
from heads.errors import UserError
from heads.target import FrozenTarget
from train.objectives import Moment, Objective, run_target

RANKS = 10
CHUNK = 256


def held_out_documents(records: Sequence[PromptRecord]) -> list[Document]:
    """Decoded prompts as documents: what the target wrote is masked in."""
    return [
        Document(
            r.prompt_id,
            r.category,
            1,
            (r.finish,),
            np.asarray([*r.context, *r.output], np.int32),
            np.asarray([0] * len(r.context) + [1] * len(r.output), np.uint8),
        )
        for r in records
    ]


@torch.no_grad()
def rank_counts(objective: Objective, target: FrozenTarget, documents: Sequence[Document], ranks: int = RANKS) -> torch.Tensor:
    """[S, R + 1] float64: the count of labels, then how many of them were the head's token of each rank.

    A label is a token that the target wrote, x_{t+2+i} of depth i at slot t; the draft tokens before it are taken as accepted.
    """
    counts = torch.zeros(objective.depths, ranks + 1, dtype=torch.float64)
    longest = max((len(d.ids) for d in documents), default=0)
    try:
        rows = PackedRows(documents, PackingConfig(max_length=max(16, longest), pack=False))
    except UserError:  # answers of one token carry nothing
        return counts
    training = objective.training
    objective.eval()
    draft_ids = objective.head.vocab.target_ids.to(target.device)
    for number in range(len(rows)):
        batch = rows.batch([number]).to(target.device)
        plan = objective.plan(batch, Moment())
        features = run_target(target, batch)
        outputs = objective.outputs(plan, batch, features, target.embedding, Moment())
        depth, _, column = plan.valid.nonzero(as_tuple=True)
        written = batch.ids[0, plan.slots[0, column] + 2 + depth]
        for step in range(objective.depths):
            layer = objective.layer(step, target.lm_head, target.softcap)
            here = depth == step
            for out, true in zip(outputs[here].split(CHUNK), written[here].split(CHUNK), strict=True):
                # A soft cap keeps the order of logits.
                best = F.linear(out, layer.weight.to(out.dtype)).topk(min(ranks, len(draft_ids)), dim=-1).indices
                hits = (draft_ids[best] == true.unsqueeze(1)).sum(0).double().cpu()
                counts[step, 0] += len(true)
                counts[step, 1 : 1 + len(hits)] += hits
    objective.train(training)
    return counts


def accuracies(counts: torch.Tensor) -> list[list[float]]:
    """[S][R] shares from rank_counts; depths that no answer was long enough for are left out."""
    found = []
    for total, *hits in counts.tolist():
        if total == 0:
            break
        found.append([hit / total for hit in hits])
    return found
