"""Where training has its features from: the target, run online; a store; or memory, from a row's second time on."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from data.features import FeatureStore
from data.packing import Batch, PackedRows
from heads.target import FrozenTarget, TargetOutput
from train.losses import Labels, LabelStatistics, label_statistics
from train.objectives import run_target


class Features:
    """Target states of packed rows, and what their labels say of the whole vocabulary: computed online, or read from a store; what was
    computed or read is kept in memory up to a budget."""

    def __init__(
        self, target: FrozenTarget, rows: PackedRows, draft_ids: torch.Tensor, budget_gib: float, store: FeatureStore | None = None
    ) -> None:
        self.target, self.rows, self.store = target, rows, store
        self._draft_ids = draft_ids.to(target.device)
        self._budget = int(budget_gib * 2**30)
        self._keeps = self._budget > 0
        self._kept: dict[int, tuple[TargetOutput, LabelStatistics]] = {}

    def __call__(self, batch: Batch) -> tuple[TargetOutput, LabelStatistics | None]:
        """States [B, T, ...] and label statistics [B, T] (None where they are left to the loss)."""
        if not self._keeps and self.store is None:
            return run_target(self.target, batch), None
        # Row by row, each alone: what is kept has the same bits whichever batch asked for it first.
        outputs, statistics = zip(*(self._row(row) for row in batch.rows), strict=True)
        device, width = batch.ids.device, batch.ids.shape[1]

        def joined(parts: list[torch.Tensor]) -> torch.Tensor:
            return nn.utils.rnn.pad_sequence([p[0].to(device) for p in parts], batch_first=True)[:, :width]

        states = TargetOutput(joined([o.hidden for o in outputs]), joined([o.taps for o in outputs]))
        return states, LabelStatistics(joined([s.log_mass for s in statistics]), joined([s.best for s in statistics]))

    def _row(self, row: int) -> tuple[TargetOutput, LabelStatistics]:
        if row in self._kept:
            return self._kept[row]
        batch = self.rows.batch([row]).to(self.target.device)
        output = self._stored(batch, row) or run_target(self.target, batch)
        assert output.taps is not None
        # Only where a label can be: the logits over the whole vocabulary cost a third as much as the target's layers on a small target.
        written = batch.mask[0]
        found = label_statistics(Labels(output.hidden[0, written], self.target.lm_head, self._draft_ids, self.target.softcap))
        log_mass = torch.zeros(written.shape, device=written.device).masked_scatter(written, found.log_mass)
        best = torch.zeros(written.shape, dtype=torch.int64, device=written.device).masked_scatter(written, found.best)
        statistics = LabelStatistics(log_mass[None], best[None])
        size = (output.hidden.numel() + output.taps.numel()) * output.hidden.element_size()
        if size <= self._budget:
            self._budget -= size
            output = TargetOutput(output.hidden.cpu(), output.taps.cpu())
            statistics = LabelStatistics(statistics.log_mass.cpu(), statistics.best.cpu())
            self._kept[row] = output, statistics
        return output, statistics

    def _stored(self, batch: Batch, row: int) -> TargetOutput | None:
        """The row's states from the store; None where a document of it is not in there."""
        documents = [self.rows.documents[i] for i in self.rows.rows[row]]
        if self.store is None or not all(d.ids in self.store for d in documents):
            return None
        parts = [self.store.read(d.ids) for d in documents]
        sizes = [min(len(d.ids), self.rows.length) for d in documents]
        width = batch.ids.shape[1]

        def joined(which: int) -> torch.Tensor:
            # The last position of a document has no features and carries no loss: zeros.
            whole = torch.cat([F.pad(p[which], (0, 0, 0, 1))[:n] for p, n in zip(parts, sizes, strict=True)])
            return F.pad(whole, (0, 0, 0, width - len(whole))).unsqueeze(0).to(self.target.device)

        return TargetOutput(hidden=joined(1), taps=joined(0))
