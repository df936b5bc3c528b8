"""Records of decoding -> the numbers of a report. Pure functions; the definitions of ALGORITHMS 13 are coded here once.

One convention on the end of an answer. A cycle whose ``limit`` is set began so near the length limit that a full draft
could not have counted: it says nothing of the drafter, is left out of the acceptance length, of the per-position rates
and of the histogram, and is counted as truncated. (Where every cycle is such, all are kept, and the summary says so.)
A cycle cut by an end-of-turn token counts in full, with what the acceptance rule took; ``tau_emit``, over all cycles,
is printed beside and shows what such cuts cost.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from eval.records import Cycle, PromptRecord, acceptance_length
from heads.errors import UserError

FloatArray = NDArray[np.float64]
LEVEL = 0.95
_CHUNK_ELEMENTS = 1_000_000  # float64 gathered at once while resampling: 8 MB


@dataclass(frozen=True)
class Interval:
    """Bounds of a percentile bootstrap interval over prompts."""

    low: float
    high: float


@dataclass(frozen=True)
class Acceptance:
    """Acceptance over the counted cycles, in tokens; an interval is None where fewer than two prompts have cycles."""

    tau: float
    """Acceptance length, step-weighted: 1 + sum a_c / C, pooled over cycles."""
    tau_interval: Interval | None
    tau_request_mean: float
    """Mean over requests (turns with counted cycles) of 1 + mean a_c."""
    tau_request_mean_interval: Interval | None
    tau_emit: float
    """Emitted tokens / cycles over ALL cycles, after every cut."""
    draft_acceptance_rate: float | None
    """sum a_c / sum K_c; None where nothing was proposed."""
    mean_proposed: float
    """Draft tokens of the longest path, a cycle."""
    mean_nodes: float = 0.0
    """Draft tokens verified a cycle, all branches together."""
    overhead_share: float | None = None
    """Of the cycles' time: what is spent outside model forwards (trees, masks, acceptance, sampling, cache)."""


@dataclass(frozen=True)
class Position:
    """Per-position acceptance at draft position k (1 = the first draft token)."""

    k: int
    proposed: int
    """Counted cycles with K_c >= k."""
    accepted: int
    """Counted cycles with a_c >= k."""
    rate: float
    """r_k = accepted / proposed."""
    conditional: float | None
    """alpha_k = r_k / r_{k-1}, r_0 = 1; None where r_{k-1} = 0. May pass 1 where K varies: the cycles differ."""


@dataclass(frozen=True)
class Category:
    name: str
    prompts: int
    cycles: int
    """Counted cycles."""
    tau: float | None
    """Step-weighted; None where the category has no counted cycle."""
    tau_interval: Interval | None


@dataclass(frozen=True)
class Speed:
    """Pooled over requests, those that the target decoded alone too where there are such; wall clock with prefill.
    What needs plain decoding is None where it was not run at all."""

    requests: int
    """Requests behind these figures."""

    plain_tokens_per_second: float | None
    speculative_tokens_per_second: float | None
    ratio: float | None
    ratio_interval: Interval | None
    plain_cpu_seconds_per_token: float | None
    speculative_cpu_seconds_per_token: float | None
    plain_median_seconds_per_token: float | None
    """Median over requests of wall seconds (with prefill) / output tokens."""
    speculative_median_seconds_per_token: float | None
    draft_share: float | None
    """Shares of the speculative wall time; other = prefill, acceptance, cache bookkeeping."""
    verify_share: float | None
    other_share: float | None


@dataclass(frozen=True)
class DivergenceAt:
    """Where one request's greedy output left the target's own; tokens and gap are None if one only ends early."""

    prompt_id: str
    turn: int
    position: int
    expected: int | None
    got: int | None
    gap: float | None


@dataclass(frozen=True)
class Lossless:
    status: str
    """"compared", or "not compared (why)"."""
    compared: int
    equal: int
    divergences: tuple[DivergenceAt, ...]
    largest_gap: float | None


@dataclass(frozen=True)
class Quality:
    """A changed target beside the original, on answers that the original wrote."""

    prompts: int
    tokens: int
    kl: float
    """Mean over tokens of KL(original || changed), nats."""
    kl_interval: Interval | None
    agreement: float
    """Share of tokens where both have the same most likely token."""
    agreement_interval: Interval | None


@dataclass(frozen=True)
class Summary:
    prompts: int
    requests: int
    """Records: a two-turn prompt is two requests."""
    requests_without_cycles: int
    """Requests without a counted cycle: absent from the request mean."""
    output_tokens: int
    cycles: int
    counted_cycles: int
    truncated_cycles: int
    """Cycles with a binding length limit."""
    truncated_kept: bool
    """True where every cycle was truncated, so that all were counted after all."""
    stop_cut_cycles: int
    """Counted cycles that emitted fewer than accepted + 1 tokens."""
    bootstrap: int
    seed: int
    acceptance: Acceptance
    positions: tuple[Position, ...]
    accepted_histogram: tuple[int, ...]
    """[i] = counted cycles with a_c = i, for i in 0..max K_c."""
    categories: tuple[Category, ...]
    speed: Speed
    lossless: Lossless
    typical: bool = False
    """Drafts were accepted by the typical rule: the figures must not stand beside lossless ones."""
    quality: Quality | None = None
    """Where the target was changed for the head's sake."""


def _ratio(numerator: float, denominator: float) -> float | None:
    return numerator / denominator if denominator > 0 else None


def bootstrap_interval(
    columns: FloatArray,
    statistic: Callable[[FloatArray], FloatArray],
    *,
    resamples: int,
    seed: int,
    level: float = LEVEL,
) -> Interval | None:
    """Percentile interval (Efron) of a statistic of column sums, the rows being the units that are resampled.

    ``columns`` [n units, c]; ``statistic`` maps sums [b, c] to values [b]. None where n < 2 (no spread can be seen
    in one unit) or ``resamples`` is 0.
    """
    n, c = columns.shape
    if n < 2 or resamples < 1:
        return None
    rng = np.random.default_rng(seed)
    chunk = max(1, _CHUNK_ELEMENTS // (n * c))
    values = [
        statistic(columns[rng.integers(0, n, size=(min(chunk, resamples - done), n))].sum(axis=1)) for done in range(0, resamples, chunk)
    ]
    tail = 50 * (1 - level)
    low, high = np.percentile(np.concatenate(values), [tail, 100 - tail])
    return Interval(float(low), float(high))


def by_prompt(records: Sequence[PromptRecord], rows: Sequence[Sequence[float]]) -> FloatArray:
    """Rows [records, c] summed to [prompts, c]: the turns of one prompt are one unit, as they are not independent."""
    index: dict[str, int] = {}
    units = np.array([index.setdefault(record.prompt_id, len(index)) for record in records], dtype=np.intp)
    table = np.asarray(rows, dtype=np.float64).reshape(len(records), -1)
    sums = np.zeros((len(index), table.shape[1]))
    np.add.at(sums, units, table)
    return sums


def _mean_of_sums(sums: FloatArray) -> FloatArray:
    """Sums [b, 2] of (value, count) -> mean value [b]."""
    mean: FloatArray = sums[:, 0] / sums[:, 1]
    return mean


def interval_of_mean(sums: FloatArray, *, bootstrap: int, seed: int) -> Interval | None:
    """Of the mean value behind rows [prompts, 2] of (sum of values, count)."""
    return bootstrap_interval(sums, _mean_of_sums, resamples=bootstrap, seed=seed)


def counted(records: Sequence[PromptRecord]) -> tuple[list[tuple[Cycle, ...]], bool]:
    """The cycles of each record that the acceptance statistics count, and whether truncated ones had to be kept."""
    keep_all = all(cycle.limit is not None for record in records for cycle in record.cycles)
    if keep_all:
        return [record.cycles for record in records], any(record.cycles for record in records)
    return [tuple(cycle for cycle in record.cycles if cycle.limit is None) for record in records], False


def step_weighted_tau(
    records: Sequence[PromptRecord], cycles: Sequence[Sequence[Cycle]], *, bootstrap: int, seed: int
) -> tuple[float | None, Interval | None]:
    """1 + sum a_c / C over ``cycles`` ([records] lists of counted cycles), and its interval over prompts."""
    pooled = [cycle for group in cycles for cycle in group]
    if not pooled:
        return None, None
    sums = by_prompt(records, [(sum(cycle.accepted for cycle in group), len(group)) for group in cycles])
    sums = sums[sums[:, 1] > 0]  # a prompt without cycles bears on nothing, and could leave a resample empty
    interval = bootstrap_interval(sums, lambda s: 1 + _mean_of_sums(s), resamples=bootstrap, seed=seed)
    return acceptance_length(pooled), interval


def request_mean_tau(
    records: Sequence[PromptRecord], cycles: Sequence[Sequence[Cycle]], *, bootstrap: int, seed: int
) -> tuple[float, Interval | None]:
    """Mean over records with counted cycles of 1 + mean a_c, and its interval over prompts."""
    pairs = [(record, group) for record, group in zip(records, cycles) if group]
    taus = [acceptance_length(group) for _, group in pairs]
    sums = by_prompt([record for record, _ in pairs], [(tau, 1.0) for tau in taus])
    interval = bootstrap_interval(sums, _mean_of_sums, resamples=bootstrap, seed=seed)
    return sum(taus) / len(taus), interval


def per_position(cycles: Sequence[Cycle]) -> tuple[Position, ...]:
    """r_k and alpha_k for k = 1..max K_c (ALGORITHMS 13)."""
    positions: list[Position] = []
    before = 1.0
    for k in range(1, max((cycle.proposed for cycle in cycles), default=0) + 1):
        proposed = sum(cycle.proposed >= k for cycle in cycles)
        accepted = sum(cycle.accepted >= k for cycle in cycles)
        rate = accepted / proposed
        positions.append(Position(k, proposed, accepted, rate, _ratio(rate, before)))
        before = rate
    return tuple(positions)


def accepted_histogram(cycles: Sequence[Cycle]) -> tuple[int, ...]:
    counts = [0] * (max((cycle.proposed for cycle in cycles), default=0) + 1)
    for cycle in cycles:
        counts[cycle.accepted] += 1
    return tuple(counts)


def by_category(records: Sequence[PromptRecord], cycles: Sequence[Sequence[Cycle]], *, bootstrap: int, seed: int) -> tuple[Category, ...]:
    """One row a category, in the order in which the records bring them."""
    rows = []
    for name in dict.fromkeys(record.category for record in records):
        chosen = [(record, group) for record, group in zip(records, cycles) if record.category == name]
        members, groups = [record for record, _ in chosen], [group for _, group in chosen]
        tau, interval = step_weighted_tau(members, groups, bootstrap=bootstrap, seed=seed)
        prompts = len({record.prompt_id for record in members})
        rows.append(Category(name, prompts, sum(len(group) for group in groups), tau, interval))
    return tuple(rows)


def speed(records: Sequence[PromptRecord], *, bootstrap: int, seed: int) -> Speed:
    """Tokens/s = all tokens / all wall seconds, so that a long answer weighs by its length."""
    records = [record for record in records if record.plain_tokens > 0 and record.plain_seconds > 0] or records
    tokens = sum(record.output_tokens for record in records)
    seconds = sum(record.speculative_seconds for record in records)
    draft = sum(record.draft_seconds for record in records)
    verify = sum(record.verify_seconds for record in records)
    has_plain = all(record.plain_tokens > 0 and record.plain_seconds > 0 for record in records)
    plain_tokens = sum(record.plain_tokens for record in records) if has_plain else 0
    with_head = _ratio(tokens, seconds)
    plain = _ratio(plain_tokens, sum(record.plain_seconds for record in records)) if has_plain else None
    interval = None
    if plain is not None and all(record.speculative_seconds > 0 for record in records):
        rows = [(r.output_tokens, r.speculative_seconds, r.plain_tokens, r.plain_seconds) for r in records]
        interval = bootstrap_interval(
            by_prompt(records, rows),
            lambda s: (s[:, 0] / s[:, 1]) / (s[:, 2] / s[:, 3]),
            resamples=bootstrap,
            seed=seed,
        )
    return Speed(
        requests=len(records),
        plain_tokens_per_second=plain,
        speculative_tokens_per_second=with_head,
        ratio=_ratio(with_head, plain) if with_head is not None and plain is not None else None,
        ratio_interval=interval,
        plain_cpu_seconds_per_token=_ratio(sum(record.plain_cpu_seconds for record in records), plain_tokens),
        speculative_cpu_seconds_per_token=_ratio(sum(record.speculative_cpu_seconds for record in records), tokens),
        plain_median_seconds_per_token=(
            float(np.median([record.plain_seconds / record.plain_tokens for record in records])) if has_plain else None
        ),
        speculative_median_seconds_per_token=float(np.median([record.speculative_seconds / record.output_tokens for record in records])),
        draft_share=_ratio(draft, seconds),
        verify_share=_ratio(verify, seconds),
        other_share=_ratio(seconds - draft - verify, seconds),
    )


def lossless(records: Sequence[PromptRecord], *, greedy: bool, typical: bool = False) -> Lossless:
    """Compares with the target's own greedy output; an output that only ends elsewhere is a divergence too."""
    if typical:
        return Lossless("NOT lossless (typical acceptance)", 0, 0, (), None)
    if not greedy:
        return Lossless("not compared (sampled)", 0, 0, (), None)
    compared = [record for record in records if record.checked]
    if not compared:
        return Lossless("not compared (not checked)", 0, 0, (), None)
    found = []
    for record in compared:
        at = record.divergence
        if at is not None:
            found.append(DivergenceAt(record.prompt_id, record.turn, at.position, at.expected, at.got, at.gap))
        elif record.plain_tokens and record.output_tokens != record.plain_tokens:
            end = min(record.output_tokens, record.plain_tokens)
            found.append(DivergenceAt(record.prompt_id, record.turn, end, None, None, None))
    gaps = [at.gap for at in found if at.gap is not None]
    return Lossless("compared", len(compared), len(compared) - len(found), tuple(found), max(gaps, default=None))


def overhead_share(cycles: Sequence[Cycle]) -> float | None:
    """Share of the cycles' wall time outside the forwards of target and draft model."""
    total = sum(c.draft_seconds + c.verify_seconds + c.commit_seconds for c in cycles)
    return _ratio(total - sum(c.forward_seconds + c.verify_seconds for c in cycles), total)


def _check(records: Sequence[PromptRecord]) -> None:
    """What every decoder must leave true; a failure is a bug in the decoder, not in the user's input."""
    for record in records:
        where = f"prompt {record.prompt_id} turn {record.turn}"
        for cycle in record.cycles:
            assert 0 <= cycle.accepted <= cycle.proposed, f"{where}: accepted outside 0..proposed in {cycle}"
            assert 0 <= cycle.emitted <= cycle.accepted + 1, f"{where}: emitted outside 0..accepted + 1 in {cycle}"
        emitted = sum(cycle.emitted for cycle in record.cycles)
        assert record.output_tokens == 1 + emitted, f"{where}: {record.output_tokens} output tokens, 1 + {emitted} emitted"


def summarise(
    records: Sequence[PromptRecord],
    *,
    greedy: bool,
    typical: bool = False,
    bootstrap: int = 10_000,
    seed: int = 0,
    quality: Quality | None = None,
) -> Summary:
    """All numbers of a report.

    Args:
        greedy: both runs were greedy, so that their outputs must agree token by token.
        typical: drafts were accepted by rule 2.6, so that the output is not the target's.
        quality: of the changed target that decoded.
    """
    if not records:
        raise UserError("There is nothing to measure: no prompt was decoded. Give at least one prompt.")
    _check(records)
    everything = [cycle for record in records for cycle in record.cycles]
    if not everything:
        raise UserError(
            "There is no acceptance length to measure: every answer ended at its first token, so no cycle ran. "
            "Raise max_new_tokens, or check that the chat template is the target's."
        )
    cycles, kept = counted(records)
    pooled = [cycle for group in cycles for cycle in group]
    tau, tau_interval = step_weighted_tau(records, cycles, bootstrap=bootstrap, seed=seed)
    mean, mean_interval = request_mean_tau(records, cycles, bootstrap=bootstrap, seed=seed)
    positions = per_position(pooled)
    assert tau is not None
    if len({cycle.proposed for cycle in pooled}) == 1:  # ALGORITHMS 13: exact for fixed K
        assert abs(tau - 1 - sum(position.rate for position in positions)) < 1e-9, "tau != 1 + sum r_k at fixed K"
    proposed = sum(cycle.proposed for cycle in pooled)
    return Summary(
        prompts=len({record.prompt_id for record in records}),
        requests=len(records),
        requests_without_cycles=sum(not group for group in cycles),
        output_tokens=sum(record.output_tokens for record in records),
        cycles=len(everything),
        counted_cycles=len(pooled),
        truncated_cycles=sum(cycle.limit is not None for cycle in everything),
        truncated_kept=kept,
        stop_cut_cycles=sum(cycle.emitted < cycle.accepted + 1 for cycle in pooled if cycle.limit is None),
        bootstrap=bootstrap,
        seed=seed,
        acceptance=Acceptance(
            tau=tau,
            tau_interval=tau_interval,
            tau_request_mean=mean,
            tau_request_mean_interval=mean_interval,
            tau_emit=sum(cycle.emitted for cycle in everything) / len(everything),
            draft_acceptance_rate=_ratio(sum(cycle.accepted for cycle in pooled), proposed),
            mean_proposed=proposed / len(pooled),
            mean_nodes=sum(cycle.nodes for cycle in pooled) / len(pooled),
            overhead_share=overhead_share(everything),
        ),
        positions=positions,
        accepted_histogram=accepted_histogram(pooled),
        categories=by_category(records, cycles, bootstrap=bootstrap, seed=seed),
        speed=speed(records, bootstrap=bootstrap, seed=seed),
        typical=typical,
        lossless=lossless(records, greedy=greedy, typical=typical),
        quality=quality,
    )
