"""The report is whole, its files agree with each other, and it takes the place of an older one in one step."""

from __future__ import annotations

import dataclasses
import json
import os
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest

import eval.report
from eval.records import Cycle, Divergence, PromptRecord
from eval.report import CHARTS, check_report_directory, headline, write_report
from eval.statistics import Summary, summarise
from heads.errors import UserError

IDENTITY: dict[str, Any] = {
    "target": {"name": "tiny", "layers": 2},
    "template": "a|b",
    "sampling": {"temperature": 0.0, "stop": [1, 2]},
    "versions": {"torch": "2.8"},
}


def records() -> list[PromptRecord]:
    made = []
    for i in range(6):
        cycles = tuple(Cycle(3, (i + j) % 4, (i + j) % 4 + 1) for j in range(5 + i))
        if i == 0:
            cycles = (*cycles, Cycle(3, 0, 1, limit=1))
        tokens = 1 + sum(cycle.emitted for cycle in cycles)
        made.append(
            PromptRecord(
                prompt_id=f"p{i}",
                category=("ch|at", "cost $5 to $6")[i % 2],
                turn=0,
                prompt_tokens=4,
                output_tokens=tokens,
                cycles=cycles,
                finish="stop",
                plain_tokens=tokens,
                plain_seconds=1.0 + i / 7,
                speculative_seconds=0.5 + i / 11,
                plain_cpu_seconds=2.0,
                speculative_cpu_seconds=1.0,
                draft_seconds=0.1,
                verify_seconds=0.3,
                checked=True,
                divergence=Divergence(3, 5, 6, 0.000125) if i == 4 else None,
            )
        )
    return made


@pytest.fixture
def summary() -> Summary:
    return summarise(records(), greedy=True, bootstrap=200)


def table_row(markdown: str, first: str) -> list[str]:
    """Cells of the first table row whose first cell is ``first``."""
    line = next(line for line in markdown.splitlines() if line.startswith(f"| {first} |"))
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_files_and_json(tmp_path: Path, summary: Summary) -> None:
    place = tmp_path / "runs" / "report"
    write_report(place, summary, records(), IDENTITY)
    assert {entry.name for entry in place.iterdir()} == {"report.json", "report.md", *CHARTS}
    assert [entry.name for entry in place.parent.iterdir()] == ["report"]  # nothing temporary stays
    report = json.loads((place / "report.json").read_text())
    assert report["identity"] == IDENTITY
    assert report["summary"] == json.loads(json.dumps(dataclasses.asdict(summary)))
    assert [c[:3] for c in report["records"][0]["cycles"]] == [[3, j % 4, j % 4 + 1] for j in range(5)] + [[3, 0, 1]]
    assert report["records"][4]["divergence"]["gap"] == 0.000125
    assert len(report["records"]) == 6 and report["definitions"]["lossless"]
    for name in CHARTS:
        assert ElementTree.parse(place / name).getroot().tag.endswith("svg")
    for name in ("report.json", "report.md"):
        assert str(tmp_path) not in (place / name).read_text()


def test_markdown_agrees_with_json(tmp_path: Path, summary: Summary) -> None:
    write_report(tmp_path / "r", summary, records(), IDENTITY)
    markdown = (tmp_path / "r" / "report.md").read_text()
    found = json.loads((tmp_path / "r" / "report.json").read_text())["summary"]
    acceptance = found["acceptance"]
    spread = acceptance["tau_interval"]
    expected = [f"{acceptance['tau']:.3f}", f"{spread['low']:.3f} to {spread['high']:.3f}"]
    assert table_row(markdown, "acceptance length")[1:] == expected
    assert table_row(markdown, "emitted per cycle")[1] == f"{acceptance['tau_emit']:.3f}"
    speed = found["speed"]
    rates = [speed["plain_tokens_per_second"], speed["speculative_tokens_per_second"]]
    assert table_row(markdown, "tokens/s")[1:] == [f"{rate:.2f}" for rate in rates]
    section = markdown.split("## Per-position acceptance")[1].split("## ")[0]
    for row in found["positions"]:
        numbers = [str(row["proposed"]), str(row["accepted"]), f"{row['rate']:.3f}", f"{row['conditional']:.3f}"]
        assert table_row(section, str(row["k"]))[1:] == numbers
    section = markdown.split("## Accepted draft tokens per cycle")[1].split("## ")[0]
    for i, count in enumerate(found["accepted_histogram"]):
        assert table_row(section, str(i))[1] == str(count)
    assert table_row(markdown, "p4")[1:] == ["0", "3", "0.000125"]
    for line in headline(summary).splitlines():
        assert line in markdown
    for name in CHARTS:
        assert f"]({name})" in markdown


def test_identity_is_flattened_and_pipes_are_escaped(tmp_path: Path, summary: Summary) -> None:
    write_report(tmp_path / "r", summary, records(), IDENTITY)
    markdown = (tmp_path / "r" / "report.md").read_text()
    assert "| target: name | tiny |" in markdown
    assert "| sampling: stop | [1, 2] |" in markdown
    assert "| template | a\\|b |" in markdown
    assert "| ch\\|at | 3 |" in markdown


def test_headline(summary: Summary) -> None:
    first, second, third = headline(summary).splitlines()
    interval = summary.acceptance.tau_interval
    assert interval is not None
    spread = f"(95 % interval {interval.low:.3f} to {interval.high:.3f})"
    assert first.startswith(f"Acceptance length {summary.acceptance.tau:.3f} {spread}")
    assert f"{summary.speed.ratio:.2f} x" in second
    assert third.startswith("Lossless: 5 of 6 outputs equal") and "0.000125" in third
    assert "not compared (sampled)" in headline(summarise(records(), greedy=False, bootstrap=0))


def test_one_prompt_without_plain_decoding(tmp_path: Path) -> None:
    """The smallest report: no intervals, no ratio, nothing accepted or even proposed."""
    one = dataclasses.replace(
        records()[0], cycles=(Cycle(0, 0, 1),), output_tokens=2, plain_tokens=0, plain_seconds=0.0, checked=False, divergence=None
    )
    summary = summarise([one], greedy=True)
    write_report(tmp_path / "r", summary, [one], {})
    assert "no interval" in headline(summary) and "not compared (not checked)" in headline(summary)
    assert "nan" not in (tmp_path / "r" / "report.md").read_text()


def test_odd_values_become_json(tmp_path: Path, summary: Summary) -> None:
    identity = {"machine": {"path": Path("x/y"), "load": float("nan")}, "versions": {"deep": {"a": 1}}}
    write_report(tmp_path / "r", summary, records(), identity)
    loaded = json.loads((tmp_path / "r" / "report.json").read_text())["identity"]
    assert loaded == {"machine": {"path": "x/y", "load": "nan"}, "versions": {"deep": {"a": 1}}}


def test_an_older_report_is_replaced(tmp_path: Path, summary: Summary) -> None:
    place = tmp_path / "r"
    write_report(place, summary, records(), {"target": "old"})
    (place / "notes.txt").write_text("mine")
    write_report(place, summary, records(), {"target": "new"})
    assert json.loads((place / "report.json").read_text())["identity"] == {"target": "new"}
    assert (place / "notes.txt").read_text() == "mine"  # what the report did not write, it does not delete
    assert [entry.name for entry in tmp_path.iterdir()] == ["r"]


@pytest.mark.parametrize("failing", ["_draw_charts", "_markdown"])
def test_a_failure_leaves_the_older_report(tmp_path: Path, summary: Summary, monkeypatch: pytest.MonkeyPatch, failing: str) -> None:
    place = tmp_path / "r"
    write_report(place, summary, records(), {"target": "old"})
    before = {entry.name: entry.read_bytes() for entry in place.iterdir()}

    def fail(*_: object) -> None:
        raise RuntimeError("disk")

    monkeypatch.setattr(eval.report, failing, fail)
    with pytest.raises(RuntimeError, match="disk"):
        write_report(place, summary, records(), {"target": "new"})
    assert {entry.name: entry.read_bytes() for entry in place.iterdir()} == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["r"]


def test_a_failed_rename_puts_the_older_report_back(tmp_path: Path, summary: Summary, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "r"
    write_report(place, summary, records(), {"target": "old"})
    rename = Path.rename

    def fail(self: Path, target: Path) -> Path:
        if self.name == f"r.tmp-{os.getpid()}":
            raise OSError("no")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(OSError, match="no"):
        write_report(place, summary, records(), {"target": "new"})
    assert json.loads((place / "report.json").read_text())["identity"] == {"target": "old"}
    assert [entry.name for entry in tmp_path.iterdir()] == ["r"]


def test_equal_numbers_give_equal_files(tmp_path: Path, summary: Summary) -> None:
    for name in ("a", "b"):
        write_report(tmp_path / name, summary, records(), IDENTITY)
    for entry in (tmp_path / "a").iterdir():
        assert entry.read_bytes() == (tmp_path / "b" / entry.name).read_bytes()


def test_other_directories_are_refused(tmp_path: Path, summary: Summary) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").write_text("x")
    with pytest.raises(UserError, match=r"holds other files and no report\.json"):
        write_report(tmp_path / "full", summary, records(), IDENTITY)
    assert (tmp_path / "full" / "thesis.tex").read_text() == "x"
    (tmp_path / "file").write_text("x")
    with pytest.raises(UserError, match="it is a file"):
        check_report_directory(tmp_path / "file")
    (tmp_path / "empty").mkdir()
    check_report_directory(tmp_path / "empty")
    check_report_directory(tmp_path / "absent")
