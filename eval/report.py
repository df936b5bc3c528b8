"""A summary -> a directory that explains itself: report.json, report.md and three charts.

The directory appears whole or not at all: it is written beside its place and renamed into it.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from eval.records import PromptRecord
from eval.statistics import Interval, Quality, Summary
from heads.errors import UserError

CHARTS = ("per-position-acceptance.svg", "accepted-per-cycle.svg", "acceptance-length-by-category.svg")
CYCLE_FIELDS = [
    "proposed",
    "accepted",
    "emitted",
    "limit (null: it did not bind)",
    "nodes",
    "draft us",
    "draft forward us",
    "verify us",
    "commit us",
]
_OWN = {"report.json", "report.md", *CHARTS}
_BLUE, _ORANGE = "#1f5a99", "#d9822b"

DEFINITIONS: dict[str, str] = {
    "cycle": "One verification by the target. The token that prefill yields belongs to no cycle.",
    "acceptance length": "1 + accepted draft tokens / cycles, pooled over all counted cycles. The bonus token counts: "
    "1 means that no draft token was accepted.",
    "acceptance length, request mean": "Mean over requests (one turn of one prompt) of 1 + the request's mean accepted "
    "draft tokens; requests without a counted cycle are left out.",
    "emitted per cycle": "Tokens that reached the output / cycles, over all cycles, after every cut by an end-of-turn "
    "token or the length limit.",
    "counted cycles": "Cycles that began so near the length limit that a full draft could not have counted are left "
    "out (truncated cycles). A cycle cut by an end-of-turn token counts with all that the acceptance rule took.",
    "draft acceptance rate": "Accepted draft tokens / proposed draft tokens.",
    "per-position acceptance": "r_k: of the cycles that proposed at least k draft tokens, the share that accepted at "
    "least k. Conditional: r_k / r_(k-1), with r_0 = 1.",
    "95 % interval": "Percentile bootstrap over prompts; all turns of a prompt are resampled together.",
    "tokens/s": "All output tokens / all wall seconds, prefill included; plain decoding is the same target in the same "
    "process on the same prompts (those that both decoded).",
    "seconds per output token": "Median over requests of wall seconds, prefill included / output tokens.",
    "lossless": "The greedy speculative output equals the target's own greedy output, token by token: decoded beside it, or, for "
    "prompts that were not, its argmax in one forward over the output. Gap: difference "
    "of the target's two highest logits at the first unequal token (near 0: a rounding tie).",
}


def _number(value: float | None, digits: int = 3) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


def _interval(interval: Interval | None, digits: int = 3) -> str:
    return "-" if interval is None else f"{interval.low:.{digits}f} to {interval.high:.{digits}f}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"


def _lossless_sentence(summary: Summary) -> str:
    result = summary.lossless
    if not result.compared:
        return f"Lossless: {result.status}."
    sentence = f"Lossless: {result.equal} of {result.compared} outputs equal the target's own greedy output"
    if result.equal == result.compared:
        return sentence + "."
    gap = "" if result.largest_gap is None else f" (largest logit gap at a divergence: {result.largest_gap:.3g})"
    return f"{sentence}{gap}."


def _quality_sentence(quality: Quality) -> str:
    spread, agreement = _interval(quality.kl_interval, 4), _share(quality.agreement)
    return (
        f"The target was changed by an adapter: NOT lossless to the original. On answers of the original ({quality.tokens:,} tokens): "
        f"KL {quality.kl:.4f} nats a token (95 % interval {spread}), the same most likely token at {agreement}."
    )


def headline(summary: Summary) -> str:
    """Lines for the terminal: acceptance length, speed, losslessness; of a changed target, quality."""
    acceptance, speed = summary.acceptance, summary.speed
    spread = f" (95 % interval {_interval(acceptance.tau_interval)})" if acceptance.tau_interval is not None else " (no interval)"
    kind = "Acceptance length (typical acceptance, NOT lossless)" if summary.typical else "Acceptance length"
    first = (
        f"{kind} {_number(acceptance.tau)}{spread}, bonus token counted, "
        f"over {summary.counted_cycles:,} cycles of {summary.prompts:,} prompts."
    )
    second = f"{_number(speed.speculative_tokens_per_second, 2)} tokens/s with the drafter"
    if speed.plain_tokens_per_second is not None:
        second += f", {_number(speed.plain_tokens_per_second, 2)} without: {_number(speed.ratio, 2)} x"
        if speed.ratio_interval is not None:
            second += f" (95 % interval {_interval(speed.ratio_interval, 2)})"
    lines = [first, second + ".", _lossless_sentence(summary)]
    return "\n".join(lines if summary.quality is None else [*lines, _quality_sentence(summary.quality)])


def _plain(value: Any) -> Any:
    """Anything -> what JSON can hold; nan and inf, which JSON has not, become words."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


def _record_row(record: PromptRecord) -> dict[str, Any]:
    """One record, each of its cycles a list in the order of CYCLE_FIELDS; times in microseconds."""
    row = dataclasses.asdict(record)
    del row["context"], row["output"]  # whose texts may be nobody else's business
    row["cycles"] = [
        [c.proposed, c.accepted, c.emitted, c.limit, c.nodes]
        + [round(1e6 * s) for s in (c.draft_seconds, c.forward_seconds, c.verify_seconds, c.commit_seconds)]
        for c in record.cycles
    ]
    return row


def _dump(report: Mapping[str, Any]) -> str:
    """JSON, indented but for the records, which take one line each."""
    head = {key: value for key, value in report.items() if key != "records"}
    text = json.dumps(_plain(head), indent=2, ensure_ascii=False, allow_nan=False)
    lines = ",\n    ".join(json.dumps(_plain(row), ensure_ascii=False, allow_nan=False, separators=(",", ":")) for row in report["records"])
    return f'{text[:-2]},\n  "records": [\n    {lines}\n  ]\n}}\n'


def _cell(value: Any) -> str:
    """One markdown table cell: a pipe would end it, a line break would end the row."""
    text = value if isinstance(value, str) else json.dumps(_plain(value), ensure_ascii=False)
    return " ".join(text.replace("\\", "\\\\").replace("|", "\\|").split())


def _table(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(_cell(cell) for cell in line) + " |" for line in lines)


def _identity_rows(identity: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Nested identity, flattened by one level."""
    rows: list[tuple[str, Any]] = []
    for key, value in identity.items():
        if isinstance(value, Mapping):
            rows += [(f"{key}: {name}", item) for name, item in value.items()]
        else:
            rows.append((str(key), value))
    return rows


def _defined(*names: str) -> str:
    return "\n".join(f"- **{name}**: {DEFINITIONS[name]}" for name in names)


def _acceptance_section(summary: Summary) -> list[str]:
    acceptance = summary.acceptance
    rows = [
        ("acceptance length", _number(acceptance.tau), _interval(acceptance.tau_interval)),
        (
            "acceptance length, request mean",
            _number(acceptance.tau_request_mean),
            _interval(acceptance.tau_request_mean_interval),
        ),
        ("emitted per cycle", _number(acceptance.tau_emit), ""),
        ("draft acceptance rate", _number(acceptance.draft_acceptance_rate), ""),
        ("draft depth proposed per cycle", _number(acceptance.mean_proposed), ""),
        ("draft tokens verified per cycle", _number(acceptance.mean_nodes), ""),
    ]
    kept = (
        "Every cycle was truncated by the length limit, so all are counted; raise max_new_tokens for a fair figure. "
        if summary.truncated_kept
        else ""
    )
    counts = (
        f"{kept}{summary.prompts:,} prompts, {summary.requests:,} requests ({summary.requests_without_cycles:,} "
        f"without a counted cycle), {summary.output_tokens:,} output tokens. {summary.cycles:,} cycles: "
        f"{summary.counted_cycles:,} counted, {summary.truncated_cycles:,} truncated by the length limit; "
        f"{summary.stop_cut_cycles:,} of the counted ones cut by an end-of-turn token. "
        f"Intervals: {summary.bootstrap:,} resamples, seed {summary.seed}."
    )
    names = ("cycle", "acceptance length", "acceptance length, request mean", "emitted per cycle", "counted cycles")
    return [
        "## Acceptance",
        _table(("quantity", "value", "95 % interval"), rows),
        counts,
        _defined(*names, "draft acceptance rate", "95 % interval"),
    ]


def _position_section(summary: Summary) -> list[str]:
    rows = [(p.k, p.proposed, p.accepted, _number(p.rate), _number(p.conditional)) for p in summary.positions]
    total = summary.counted_cycles
    counts = [(i, count, _share(count / total)) for i, count in enumerate(summary.accepted_histogram)]
    categories = [(c.name, c.prompts, c.cycles, _number(c.tau), _interval(c.tau_interval)) for c in summary.categories]
    return [
        "## Per-position acceptance",
        _table(("k", "cycles proposing k", "accepting k", "acceptance", "conditional"), rows),
        _defined("per-position acceptance"),
        f"![Per-position acceptance]({CHARTS[0]})",
        "## Accepted draft tokens per cycle",
        _table(("accepted", "cycles", "share"), counts),
        f"![Accepted draft tokens per cycle]({CHARTS[1]})",
        "## Acceptance length by category",
        _table(("category", "prompts", "counted cycles", "acceptance length", "95 % interval"), categories),
        f"![Acceptance length by category]({CHARTS[2]})",
    ]


def _speed_section(summary: Summary) -> list[str]:
    s = summary.speed
    median = (s.plain_median_seconds_per_token, s.speculative_median_seconds_per_token)
    rows = [
        ("tokens/s", _number(s.plain_tokens_per_second, 2), _number(s.speculative_tokens_per_second, 2)),
        ("seconds per output token", *(_number(value, 5) for value in median)),
        (
            "CPU seconds per token",
            _number(s.plain_cpu_seconds_per_token, 5),
            _number(s.speculative_cpu_seconds_per_token, 5),
        ),
    ]
    shares = (
        f"Speculative wall time: {_share(s.draft_share)} drafting, {_share(s.verify_share)} verification, "
        f"{_share(s.other_share)} other (prefill, acceptance, cache bookkeeping). "
        f"Of the cycles, {_share(summary.acceptance.overhead_share)} is spent outside model forwards."
    )
    return [
        "## Speed",
        _table(("quantity", "plain", "speculative"), rows),
        f"Ratio of tokens/s: {_number(s.ratio)} (95 % interval {_interval(s.ratio_interval)}), over {s.requests:,} requests.",
        shares,
        _defined("tokens/s", "seconds per output token"),
    ]


def _lossless_section(summary: Summary) -> list[str]:
    parts = ["## Lossless", _lossless_sentence(summary)]
    if summary.lossless.divergences:
        rows = [(d.prompt_id, d.turn, d.position, "-" if d.gap is None else f"{d.gap:.6g}") for d in summary.lossless.divergences]
        parts.append(_table(("prompt", "turn", "position", "gap"), rows))
    return [*parts, _defined("lossless")]


def _quality_section(quality: Quality) -> list[str]:
    rows = [
        ("KL(original, adapted), nats a token", f"{quality.kl:.5f}", _interval(quality.kl_interval, 5)),
        ("same most likely token", f"{quality.agreement:.4f}", _interval(quality.agreement_interval, 4)),
    ]
    return [
        "## Quality",
        _quality_sentence(quality) + ' "Lossless" above is about the adapted target.',
        _table(("quantity", "value", "95 % interval"), rows),
    ]


def _markdown(summary: Summary, identity: Mapping[str, Any]) -> str:
    parts = [
        "# Acceptance length report",
        "\n".join(f"**{line}**  " for line in headline(summary).splitlines()),
        "## What was measured",
        _table(("what", "value"), _identity_rows(identity)),
        *_acceptance_section(summary),
        *_position_section(summary),
        *_speed_section(summary),
        *_lossless_section(summary),
        *(_quality_section(summary.quality) if summary.quality is not None else []),
        "All numbers, and every cycle of every request, are in [report.json](report.json).",
    ]
    return "\n\n".join(parts) + "\n"


def _position_chart(axes: Any, summary: Summary) -> None:
    k = [position.k for position in summary.positions]
    conditional = [position.conditional or 0.0 for position in summary.positions]
    axes.bar([i - 0.2 for i in k], [p.rate for p in summary.positions], 0.4, color=_BLUE, label="acceptance")
    axes.bar([i + 0.2 for i in k], conditional, 0.4, color=_ORANGE, label="conditional on k - 1")
    axes.set(xlabel="draft position k", ylabel="share of cycles", xticks=k, title="Per-position acceptance")
    axes.set_ylim(0, max([1.0, *conditional]))
    axes.legend(frameon=False)


def _histogram_chart(axes: Any, summary: Summary) -> None:
    counts = summary.accepted_histogram
    axes.bar(range(len(counts)), [100 * count / summary.counted_cycles for count in counts], 0.8, color=_BLUE)
    axes.set(xlabel="accepted draft tokens", ylabel="% of cycles", xticks=range(len(counts)))
    axes.set_title("Accepted draft tokens per cycle")


def _category_chart(axes: Any, summary: Summary) -> None:
    """Dots, not bars: an acceptance length starts at 1, so a bar's length would say nothing."""
    shown = [c for c in summary.categories if c.tau is not None][::-1]
    for row, category in enumerate(shown):
        if category.tau_interval is not None:
            axes.plot([category.tau_interval.low, category.tau_interval.high], [row, row], color=_BLUE, lw=2)
        axes.plot([category.tau], [row], "o", color=_BLUE)
    axes.axvline(summary.acceptance.tau, color=_ORANGE, ls="--", label="all prompts")
    # A dollar sign in a category's name would open matplotlib's math mode.
    axes.set_yticks(range(len(shown)), [category.name.replace("$", r"\$") for category in shown])
    axes.set(xlabel="acceptance length (95 % interval)", ylim=(-0.6, len(shown) - 0.4))
    axes.set_xlim(left=1)
    axes.set_title("Acceptance length by category")
    axes.legend(frameon=False)


def _draw_charts(directory: Path, summary: Summary) -> None:
    """Three SVG files, byte-equal for equal numbers (no date, fixed ids); no pyplot, so no display and no state."""
    import matplotlib  # here, since it takes a second that no other command should pay
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    heights = (3.5, 3.5, 1.5 + 0.35 * len(summary.categories))
    with matplotlib.rc_context({"svg.hashsalt": "draftsmith", "svg.fonttype": "none"}):
        for name, height, draw in zip(CHARTS, heights, (_position_chart, _histogram_chart, _category_chart)):
            figure = Figure(figsize=(6.5, height), layout="constrained")
            FigureCanvasAgg(figure)
            axes = figure.subplots()
            axes.spines[["top", "right"]].set_visible(False)
            draw(axes, summary)
            figure.savefig(directory / name, format="svg", metadata={"Date": None})


def check_report_directory(directory: Path) -> None:
    """Refuses a place that a report may not take: a file, or a filled directory that holds no report. Call it early."""
    if directory.exists() and not directory.is_dir():
        raise UserError(f"The report cannot be written to {directory}: it is a file. Give a directory.")
    if directory.is_dir() and any(directory.iterdir()) and not (directory / "report.json").is_file():
        raise UserError(
            f"The report would replace {directory}, which holds other files and no report.json. "
            "Give a new or empty directory, or that of an older report."
        )


def _replace(new: Path, directory: Path) -> None:
    """Renames ``new`` to ``directory``. Files in an older report's directory that are not a report's own move over."""
    older = directory.with_name(f"{directory.name}.old-{os.getpid()}")
    if not directory.exists():
        new.rename(directory)
        return
    directory.rename(older)
    try:
        new.rename(directory)
    except OSError:
        older.rename(directory)
        raise
    for entry in older.iterdir():
        if entry.name not in _OWN:
            entry.rename(directory / entry.name)
    shutil.rmtree(older)


def write_report(directory: Path, summary: Summary, records: Sequence[PromptRecord], identity: dict[str, Any]) -> None:
    """Writes the report to ``directory``, in place of an older one. ``identity`` is printed as it is brought."""
    directory = directory.resolve()  # a link to a directory keeps its name and place
    check_report_directory(directory)
    directory.parent.mkdir(parents=True, exist_ok=True)
    new = directory.with_name(f"{directory.name}.tmp-{os.getpid()}")
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir()
    try:
        report = {
            "identity": identity,
            "headline": headline(summary),
            "definitions": DEFINITIONS,
            "summary": dataclasses.asdict(summary),
            "record_cycles": CYCLE_FIELDS,
            "records": [_record_row(record) for record in records],
        }
        (new / "report.json").write_text(_dump(report), encoding="utf-8")
        (new / "report.md").write_text(_markdown(summary, identity), encoding="utf-8")
        _draw_charts(new, summary)
        _replace(new, directory)
    finally:
        shutil.rmtree(new, ignore_errors=True)
