"""Oracles: a hand-computed example, plain loops on random records, a plain-loop bootstrap, coverage on a known law."""

from __future__ import annotations

import dataclasses
import json
import random

import numpy as np
import pytest

from eval.records import Cycle, Divergence, PromptRecord
from eval.statistics import (
    Interval,
    bootstrap_interval,
    counted,
    request_mean_tau,
    step_weighted_tau,
    summarise,
)
from heads.errors import UserError


def record(prompt_id: str, cycles: list[Cycle], *, category: str = "chat", turn: int = 0, **changes: object) -> PromptRecord:
    """A record whose tokens agree with its cycles; 2 s plain, 1 s speculative, of which 0.2 draft and 0.6 verify."""
    tokens = 1 + sum(cycle.emitted for cycle in cycles)
    base = PromptRecord(
        prompt_id=prompt_id, category=category, turn=turn, prompt_tokens=5, output_tokens=tokens, cycles=tuple(cycles),
        finish="stop", plain_tokens=tokens, plain_seconds=2.0, speculative_seconds=1.0, plain_cpu_seconds=4.0,
        speculative_cpu_seconds=1.5, draft_seconds=0.2, verify_seconds=0.6, checked=True, divergence=None,
    )  # fmt: skip
    return dataclasses.replace(base, **changes)  # type: ignore[arg-type]


def full(accepted: int, proposed: int = 3) -> Cycle:
    return Cycle(proposed, accepted, accepted + 1)


def random_records(seed: int, prompts: int = 12, fixed: int | None = None) -> list[PromptRecord]:
    """Prompts of one or two turns, K_c random or fixed, some cycles cut by the limit, some by an end-of-turn token."""
    rng = random.Random(seed)
    records = []
    for i in range(prompts):
        for turn in range(1 + i % 2):
            cycles = []
            for _ in range(rng.randint(0, 9)):
                proposed = rng.randint(0, 5) if fixed is None else fixed
                accepted = rng.randint(0, proposed)
                cycles.append(Cycle(proposed, accepted, accepted + 1))
            if cycles and rng.random() < 0.5:
                last = cycles[-1]
                limit = rng.randint(0, 2) if fixed is None and rng.random() < 0.5 else None
                cycles[-1] = Cycle(last.proposed, last.accepted, rng.randint(1, last.accepted + 1), limit)
            changes = {"speculative_seconds": rng.uniform(0.9, 2), "plain_seconds": rng.uniform(1, 3)}
            records.append(record(f"p{i}", cycles, category="abc"[i % 3], turn=turn, **changes))
    return records


def test_hand_computed() -> None:
    records = [
        record("a", [full(3), full(1), full(0)]),  # mean accepted 4/3
        record("b", [full(2), Cycle(3, 3, 1)], category="code"),  # 5/2; the last cut by an end-of-turn token
    ]
    summary = summarise(records, greedy=True, bootstrap=100)
    acceptance = summary.acceptance
    assert acceptance.tau == pytest.approx(1 + 9 / 5)
    assert acceptance.tau_request_mean == pytest.approx(1 + (4 / 3 + 5 / 2) / 2)
    assert acceptance.tau_emit == pytest.approx((4 + 2 + 1 + 3 + 1) / 5)
    assert acceptance.draft_acceptance_rate == pytest.approx(9 / 15)
    assert acceptance.mean_proposed == 3
    assert [p.rate for p in summary.positions] == pytest.approx([4 / 5, 3 / 5, 2 / 5])
    assert [p.conditional for p in summary.positions] == pytest.approx([4 / 5, 3 / 4, 2 / 3])
    assert summary.accepted_histogram == (1, 1, 1, 2)
    assert (summary.cycles, summary.truncated_cycles, summary.stop_cut_cycles) == (5, 0, 1)
    assert [(c.name, c.prompts, c.cycles) for c in summary.categories] == [("chat", 1, 3), ("code", 1, 2)]
    assert [c.tau for c in summary.categories] == pytest.approx([1 + 4 / 3, 1 + 5 / 2])
    assert all(c.tau_interval is None for c in summary.categories)  # one prompt shows no spread
    assert summary.output_tokens == 13
    speed = summary.speed
    assert speed.speculative_tokens_per_second == pytest.approx(13 / 2)
    assert speed.plain_tokens_per_second == pytest.approx(13 / 4)
    assert speed.ratio == pytest.approx(2)
    assert speed.ratio_interval is not None and (speed.ratio_interval.low, speed.ratio_interval.high) == (2, 2)
    assert speed.plain_cpu_seconds_per_token == pytest.approx(8 / 13)
    assert speed.speculative_cpu_seconds_per_token == pytest.approx(3 / 13)
    assert speed.speculative_median_seconds_per_token == pytest.approx((1 / 8 + 1 / 5) / 2)
    assert speed.plain_median_seconds_per_token == pytest.approx((2 / 8 + 2 / 5) / 2)
    assert (speed.draft_share, speed.verify_share, speed.other_share) == pytest.approx((0.2, 0.6, 0.2))


@pytest.mark.parametrize("seed", range(5))
def test_tau_is_one_plus_sum_of_rates_at_fixed_draft_length(seed: int) -> None:
    summary = summarise(random_records(seed, fixed=4), greedy=True, bootstrap=0)
    assert summary.acceptance.tau == pytest.approx(1 + sum(p.rate for p in summary.positions), abs=1e-12)
    product = 1.0
    for position in summary.positions:  # and r_k is the product of the conditionals
        product *= position.conditional or 0.0
        assert position.rate == pytest.approx(product)


@pytest.mark.parametrize("seed", range(5))
def test_against_plain_loops(seed: int) -> None:
    records = random_records(seed)
    summary = summarise(records, greedy=True, bootstrap=0)
    cycles, taus, emitted, total = [], [], 0, 0
    for r in records:
        kept = []
        for c in r.cycles:
            total += 1
            emitted += c.emitted
            if c.limit is None:
                kept.append(c)
        cycles += kept
        if kept:
            taus.append(1 + sum(c.accepted for c in kept) / len(kept))
    accepted = sum(c.accepted for c in cycles)
    assert summary.acceptance.tau == pytest.approx(1 + accepted / len(cycles))
    assert summary.acceptance.tau_request_mean == pytest.approx(sum(taus) / len(taus))
    assert summary.requests_without_cycles == len(records) - len(taus)
    assert summary.acceptance.tau_emit == pytest.approx(emitted / total)
    assert summary.acceptance.draft_acceptance_rate == pytest.approx(accepted / sum(c.proposed for c in cycles))
    assert summary.truncated_cycles == total - len(cycles)
    before: float = 1
    for position in summary.positions:
        reach = hit = 0
        for c in cycles:
            reach += c.proposed >= position.k
            hit += c.accepted >= position.k
        assert (position.proposed, position.accepted, position.rate) == (reach, hit, hit / reach)
        assert position.conditional == (hit / reach / before if before else None)
        before = hit / reach
    assert sum(summary.accepted_histogram) == len(cycles)
    assert all(n == sum(c.accepted == i for c in cycles) for i, n in enumerate(summary.accepted_histogram))
    assert sum(category.cycles for category in summary.categories) == len(cycles)
    plain = sum(r.plain_tokens for r in records) / sum(r.plain_seconds for r in records)
    spec = sum(r.output_tokens for r in records) / sum(r.speculative_seconds for r in records)
    assert summary.speed.ratio == pytest.approx(spec / plain)


def plain_bootstrap(records: list[PromptRecord], resamples: int, seed: int) -> tuple[list[float], list[float], list[float]]:
    """[low, high] of step-weighted tau, request-mean tau and speed ratio, prompt by prompt in Python loops."""
    rng = random.Random(seed)
    prompts: dict[str, list[PromptRecord]] = {}
    for r in records:
        prompts.setdefault(r.prompt_id, []).append(r)
    names = list(prompts)
    pooled, means, ratios = [], [], []
    for _ in range(resamples):
        drawn = [r for _ in names for r in prompts[rng.choice(names)]]
        groups = [[c.accepted for c in r.cycles if c.limit is None] for r in drawn]
        groups = [g for g in groups if g]
        pooled.append(1 + sum(map(sum, groups)) / sum(map(len, groups)))
        means.append(sum(1 + sum(g) / len(g) for g in groups) / len(groups))
        spec = sum(r.output_tokens for r in drawn) / sum(r.speculative_seconds for r in drawn)
        ratios.append(spec / (sum(r.plain_tokens for r in drawn) / sum(r.plain_seconds for r in drawn)))
    low, mid, high = (np.percentile(v, [2.5, 97.5]).tolist() for v in (pooled, means, ratios))
    return low, mid, high


def test_bootstrap_against_a_plain_loop() -> None:
    records = random_records(3, prompts=30)
    records = [r for r in records if any(c.limit is None for c in r.cycles)]
    summary = summarise(records, greedy=True, bootstrap=10_000)
    expected = plain_bootstrap(records, resamples=4000, seed=5)
    a = summary.acceptance
    found = (a.tau_interval, a.tau_request_mean_interval, summary.speed.ratio_interval)
    for interval, (low, high) in zip(found, expected):
        assert interval is not None
        width = high - low
        # Monte-Carlo noise of a 2.5 % quantile at 4,000 draws is about 1.5 % of the width.
        assert interval.low == pytest.approx(low, abs=0.06 * width)
        assert interval.high == pytest.approx(high, abs=0.06 * width)


def test_chunks_do_not_change_the_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    columns = np.random.default_rng(0).uniform(1, 2, size=(7, 2))

    def run() -> Interval | None:
        return bootstrap_interval(columns, lambda s: s[:, 0] / s[:, 1], resamples=501, seed=1)

    whole = run()
    monkeypatch.setattr("eval.statistics._CHUNK_ELEMENTS", 50)
    assert run() == whole


def test_coverage_on_a_known_law() -> None:
    """Truncated geometric acceptance with a rate per prompt: the interval holds the true tau about 95 times in 100."""
    rng = np.random.default_rng(11)
    draft_length, prompts, cycles, trials = 4, 60, 20, 400
    # E[a] = E[p + p^2 + p^3 + p^4], p uniform on [0.4, 0.9]: moments in closed form; cycles a prompt are constant.
    truth = 1 + sum((0.9 ** (k + 1) - 0.4 ** (k + 1)) / (k + 1) / 0.5 for k in range(1, draft_length + 1))
    inside = 0
    for trial in range(trials):
        p = rng.uniform(0.4, 0.9, size=(prompts, 1, 1))
        hits = rng.random((prompts, cycles, draft_length)) < p
        accepted = np.cumprod(hits, axis=2).sum(axis=(1, 2))
        columns = np.stack([accepted, np.full(prompts, cycles)], axis=1).astype(np.float64)
        interval = bootstrap_interval(columns, lambda s: 1 + s[:, 0] / s[:, 1], resamples=1000, seed=trial)
        assert interval is not None
        inside += interval.low <= truth <= interval.high
    # Binomial sd at 400 trials: 1.1 points; the percentile method runs a little low.
    assert 0.91 <= inside / trials <= 0.98


def test_turns_of_a_prompt_are_resampled_together() -> None:
    """Two turns that cancel out within each prompt leave no spread; as separate prompts they would."""
    together = [record(f"p{i}", [full(accepted)], turn=t) for i in range(6) for t, accepted in enumerate((0, 3))]
    apart = [dataclasses.replace(r, prompt_id=f"{r.prompt_id}/{r.turn}", turn=0) for r in together]
    summary = summarise(together, greedy=True, bootstrap=500)
    assert (summary.prompts, summary.requests) == (6, 12)
    for interval in (summary.acceptance.tau_interval, summary.acceptance.tau_request_mean_interval):
        assert interval == Interval(2.5, 2.5)
    spread = summarise(apart, greedy=True, bootstrap=500).acceptance.tau_interval
    assert spread is not None and spread.high - spread.low > 0.5
    interleaved = summarise([*together[::2], *together[1::2]], greedy=True, bootstrap=500)  # order does not matter
    assert interleaved.acceptance.tau_interval == Interval(2.5, 2.5)


def test_truncated_cycles_are_left_out() -> None:
    records = [
        record("a", [full(2), Cycle(3, 0, 1, limit=1)], finish="length"),
        record("b", [Cycle(3, 3, 2, limit=1)], finish="length", category="code"),
    ]
    summary = summarise(records, greedy=True, bootstrap=50)
    assert summary.acceptance.tau == summary.acceptance.tau_request_mean == 3
    assert summary.acceptance.tau_emit == pytest.approx((3 + 1 + 2) / 3)
    assert (summary.cycles, summary.counted_cycles, summary.truncated_cycles) == (3, 1, 2)
    assert (summary.truncated_kept, summary.requests_without_cycles, summary.stop_cut_cycles) == (False, 1, 0)
    assert summary.accepted_histogram == (0, 0, 1, 0)
    assert summary.categories[1].tau is None and summary.categories[1].cycles == 0


def test_truncated_cycles_are_kept_where_there_are_no_others() -> None:
    records = [record("a", [Cycle(3, 0, 1, limit=1)]), record("b", [Cycle(3, 3, 2, limit=1)])]
    summary = summarise(records, greedy=True, bootstrap=50)
    assert summary.truncated_kept
    assert (summary.counted_cycles, summary.truncated_cycles) == (2, 2)
    assert summary.acceptance.tau == 2.5


def test_nothing_proposed_is_an_acceptance_length_of_one() -> None:
    summary = summarise([record("a", [full(0, 0)] * 3)], greedy=True, bootstrap=50)
    assert summary.acceptance.tau == 1
    assert summary.acceptance.draft_acceptance_rate is None
    assert summary.positions == () and summary.accepted_histogram == (3,)


def test_conditional_is_undefined_after_a_rate_of_zero() -> None:
    summary = summarise([record("a", [full(0, 2)])], greedy=True, bootstrap=50)
    assert [p.conditional for p in summary.positions] == [0, None]


def test_lossless() -> None:
    split = Divergence(position=2, expected=7, got=8, gap=0.25)
    records = [
        record("a", [full(1)]),
        record("b", [full(1)], turn=1, divergence=split),
        record("c", [full(1)], plain_tokens=2),  # equal as far as it goes, but the target stopped earlier
    ]
    result = summarise(records, greedy=True, bootstrap=0).lossless
    assert (result.status, result.compared, result.equal, result.largest_gap) == ("compared", 3, 1, 0.25)
    found = [(d.prompt_id, d.turn, d.position, d.gap) for d in result.divergences]
    assert found == [("b", 1, 2, 0.25), ("c", 0, 2, None)]
    sampled = summarise(records, greedy=False, bootstrap=0).lossless
    assert (sampled.status, sampled.compared, sampled.divergences) == ("not compared (sampled)", 0, ())


def test_speeds_are_compared_on_prompts_that_both_decoded() -> None:
    alone = record("a", [full(1)], plain_tokens=0, plain_seconds=0.0, speculative_seconds=100.0)
    both = [record("b", [full(1)]), record("c", [full(2)])]
    summary = summarise([alone, *both], greedy=True, bootstrap=50)
    assert summary.speed == summarise(both, greedy=True, bootstrap=50).speed and summary.speed.requests == 2
    assert summary.lossless.compared == 3  # checked by a forward, though not decoded


def test_without_plain_decoding_there_is_no_ratio() -> None:
    records = [record(name, [full(1)], plain_tokens=0, plain_seconds=0.0) for name in "ab"]
    speed = summarise(records, greedy=True, bootstrap=50).speed
    assert speed.ratio is None and speed.ratio_interval is None and speed.plain_tokens_per_second is None
    assert speed.plain_cpu_seconds_per_token is None and speed.speculative_tokens_per_second == 3


def test_is_seeded_and_turns_to_json() -> None:
    records = random_records(0)
    first, again = (summarise(records, greedy=True, bootstrap=300, seed=4) for _ in range(2))
    assert first == again
    other = summarise(records, greedy=True, bootstrap=300, seed=5)
    assert first.acceptance.tau_interval != other.acceptance.tau_interval
    json.dumps(dataclasses.asdict(first), allow_nan=False)


def test_pieces_agree_with_the_summary() -> None:
    records = random_records(1)
    cycles, kept = counted(records)
    summary = summarise(records, greedy=True, bootstrap=200)
    tau = step_weighted_tau(records, cycles, bootstrap=200, seed=0)
    mean = request_mean_tau(records, cycles, bootstrap=200, seed=0)
    a = summary.acceptance
    assert not kept
    assert tau == (a.tau, a.tau_interval) and mean == (a.tau_request_mean, a.tau_request_mean_interval)


def test_nothing_to_measure_is_said() -> None:
    with pytest.raises(UserError, match="no prompt was decoded"):
        summarise([], greedy=True)
    with pytest.raises(UserError, match="every answer ended at its first token"):
        summarise([record("a", []), record("b", [])], greedy=True)


@pytest.mark.parametrize(
    "bad",
    [
        record("a", [Cycle(2, 3, 3)]),
        record("a", [Cycle(2, 1, 3)]),
        record("a", [full(1)], output_tokens=9),
    ],
)
def test_impossible_records_are_refused(bad: PromptRecord) -> None:
    with pytest.raises(AssertionError, match="prompt a turn 0"):
        summarise([bad], greedy=True)
