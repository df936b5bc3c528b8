"""Reports -> one table: heads and drafters side by side.

    python -m scripts.compare runs/*/report*/report.json
    python -m scripts.compare runs/*/report*/report.json --markdown docs/results.md

Each report is one row; reports on other prompts than the first one's, or another target, are refused: their figures do not compare.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from heads.errors import UserError
from heads.files import write_atomically
from heads.registry import HEADS
from scripts.cli import run

COLUMNS = (
    "head",
    "run",
    "trained parameters",
    "training, CPU s",
    "temperature",
    "draft",
    "acceptance length (95 %)",
    "accepted at position 1, 2, ...",
    "drafts a cycle",
    "tokens/s against plain",
    "equal to the target's",
)


def main(argv: list[str]) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description="Put evaluation reports side by side.")
    parser.add_argument("reports", nargs="+", type=Path, metavar="REPORT", help="report.json files, or the folders they lie in")
    parser.add_argument("--markdown", type=Path, help="write the table to this file too, in place of the one between its markers")
    options = parser.parse_args(argv)
    if options.markdown is not None and not options.markdown.parent.is_dir():
        raise UserError(f"--markdown is {options.markdown}, and {options.markdown.parent} is no directory")
    reports = [read_report(path) for path in options.reports]
    same_question(options.reports, reports)
    text = table(reports)
    print(text, end="")
    if options.markdown is not None:
        write_atomically(options.markdown, between_markers(options.markdown, text))


def read_report(path: Path) -> dict[str, Any]:
    """A report, from its file or its folder; raises UserError where it is none."""
    file = path / "report.json" if path.is_dir() else path
    try:
        report = json.loads(file.read_text(encoding="utf-8"))
        report["identity"]["target"]["fingerprint"], report["summary"]["acceptance"]["tau"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{file} is not a report that scripts.evaluate wrote ({type(error).__name__}: {error})") from None
    return dict(report)


def same_question(paths: Sequence[Path], reports: Sequence[dict[str, Any]]) -> None:
    """Raises UserError unless all reports are of one target, template and set of prompts, with answers of one length."""

    def asked(report: dict[str, Any]) -> dict[str, Any]:
        identity = report["identity"]
        return {
            "target": identity["target"]["fingerprint"],
            "template": identity["template"]["fingerprint"],
            "prompts": sorted({r["prompt_id"] for r in report["records"]}),
            "max_new_tokens": identity["sampling"]["max_new_tokens"],
        }

    first = asked(reports[0])
    for path, report in zip(paths[1:], reports[1:], strict=True):
        differs = [key for key, value in asked(report).items() if value != first[key]]
        if differs:
            raise UserError(f"{path} and {paths[0]} differ in {', '.join(differs)}, so their figures do not compare; evaluate both alike")


def table(reports: Sequence[dict[str, Any]]) -> str:
    """A Markdown table, a row a report, greedy ones first and by falling acceptance length."""
    rows = sorted(reports, key=lambda r: (r["identity"]["sampling"]["temperature"], -r["summary"]["acceptance"]["tau"]))
    lines = [f"| {' | '.join(COLUMNS)} |", f"|{'---|' * len(COLUMNS)}"]
    return "\n".join(lines + [f"| {' | '.join(cells(report))} |" for report in rows]) + "\n"


def cells(report: dict[str, Any]) -> list[str]:
    """A report's row."""
    identity, summary = report["identity"], report["summary"]
    head, sampling, acceptance = identity["head"], identity["sampling"], summary["acceptance"]
    interval = acceptance["tau_interval"]
    spread = f" ({interval['low']:.3f} to {interval['high']:.3f})" if interval else ""
    rates = ", ".join(f"{p['rate']:.2f}" for p in summary["positions"])
    ratio, lossless = summary["speed"]["ratio"], summary["lossless"]
    kind = HEADS[head["kind"]].title if head.get("kind") in HEADS else identity["drafter"]["name"]
    quality = summary.get("quality")
    return [
        kind if quality is None else f"{kind}-2, changed target: KL {quality['kl']:.4f}, same top-1 {quality['agreement']:.1%}",
        head.get("checkpoint", "-").split("/")[0],
        f"{head['trained_parameters'] / 1e6:.1f} M" if "trained_parameters" in head else "-",
        f"{head['training_cpu_seconds']:,}" if "training_cpu_seconds" in head else "-",
        f"{sampling['temperature']:g}",
        f"{sampling['draft']}, {sampling['draft_length']} deep, {sampling['proposals']}",
        f"{acceptance['tau']:.3f}{spread}",
        rates,
        f"{acceptance['mean_nodes']:.1f}",
        "-" if ratio is None else f"{ratio:.2f}",
        f"{lossless['equal']} of {lossless['compared']}" if lossless["compared"] else "-",
    ]


START, END = "<!-- table: written by scripts.compare -->", "<!-- end of table -->"


def between_markers(path: Path, text: str) -> str:
    """The file's text with the table in place of what lies between its markers; the table alone where there is no file.

    Raises:
        UserError: a file without the markers, which may be anything.
    """
    block = f"{START}\n{text}{END}"
    if not path.exists():
        return block + "\n"
    whole = path.read_text(encoding="utf-8")
    if START not in whole or END not in whole:
        raise UserError(f"{path} holds no lines '{START}' and '{END}' for the table to stand between; add them or name a new file")
    before, rest = whole.split(START, 1)
    return before + block + rest.split(END, 1)[1]


if __name__ == "__main__":
    run(main)
