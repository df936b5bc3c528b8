"""The table of reports: figures as they stand in the reports, only reports that compare, and nothing else of a page touched."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

import scripts.compare
from eval.records import Cycle, PromptRecord
from eval.report import write_report
from eval.statistics import summarise
from heads.errors import UserError
from scripts.compare import END, START
from tests.eval.test_report import records


def identity(kind: str, temperature: float = 0.0, length: int = 48, **head: Any) -> dict[str, Any]:
    return {
        "target": {"name": "tiny", "fingerprint": "t1"},
        "drafter": {"name": kind, "about": ""},
        "head": {"kind": kind, "checkpoint": f"run-{kind}/step-000009"} | head if kind != "lookup" else {},
        "template": {"fingerprint": "x1"},
        "sampling": {
            "temperature": temperature, "draft": "chain", "draft_length": 3, "proposals": "most likely", "max_new_tokens": length,
        },
    }  # fmt: skip


def report(place: Path, name: str, made: list[PromptRecord], **of: Any) -> Path:
    directory = place / name
    greedy = of.get("temperature", 0.0) == 0.0
    write_report(directory, summarise(made, greedy=greedy, bootstrap=200), made, identity(**of))
    return directory


def rows(text: str) -> list[list[str]]:
    return [[c.strip() for c in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("| ")]


def test_one_row_a_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    none = [dataclasses.replace(r, cycles=tuple(Cycle(3, 0, 1) for _ in range(r.output_tokens - 1))) for r in records()]
    paths = [
        report(tmp_path, "sampled", records(), kind="eagle3", temperature=1.0),
        report(tmp_path, "lookup", none, kind="lookup"),
        report(tmp_path, "medusa", records(), kind="medusa", trained_parameters=1_330_000, training_cpu_seconds=1234),
    ]
    scripts.compare.main([str(paths[0] / "report.json"), *map(str, paths[1:])])
    header, *found = rows(capsys.readouterr().out)
    assert header == list(scripts.compare.COLUMNS)
    by_name = {row[0]: dict(zip(header, row, strict=True)) for row in found}
    assert [row[4] for row in found] == ["0", "0", "1"]  # greedy first
    for name, path in zip(("EAGLE-3", "lookup", "Medusa"), paths, strict=True):
        summary = json.loads((path / "report.json").read_text())["summary"]
        row = by_name[name]
        assert row["acceptance length (95 %)"].startswith(f"{summary['acceptance']['tau']:.3f} (")
        assert row["accepted at position 1, 2, ..."] == ", ".join(f"{p['rate']:.2f}" for p in summary["positions"])
    taus = [float(row[6].split()[0]) for row in found[:2]]
    assert taus == sorted(taus, reverse=True)
    assert by_name["Medusa"]["trained parameters"] == "1.3 M" and by_name["Medusa"]["training, CPU s"] == "1,234"
    assert by_name["lookup"]["trained parameters"] == by_name["lookup"]["run"] == "-"
    assert by_name["Medusa"]["equal to the target's"] == "5 of 6" and by_name["EAGLE-3"]["equal to the target's"] == "-"


def test_the_page_around_the_table_stays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = report(tmp_path, "one", records(), kind="medusa")
    page = tmp_path / "results.md"
    page.write_text(f"# Results\n\nwords\n{START}\nold | table\n{END}\nmore\n")
    scripts.compare.main([str(one), "--markdown", str(page)])
    printed = capsys.readouterr().out
    assert page.read_text() == f"# Results\n\nwords\n{START}\n{printed}{END}\nmore\n"
    fresh = tmp_path / "fresh.md"
    scripts.compare.main([str(one), "--markdown", str(fresh)])
    assert fresh.read_text() == f"{START}\n{printed}{END}\n"


def test_what_does_not_compare_is_refused(tmp_path: Path) -> None:
    one = report(tmp_path, "one", records(), kind="medusa")
    fewer = report(tmp_path, "fewer", records()[:5], kind="medusa")
    longer = report(tmp_path, "longer", records(), kind="medusa", length=64)
    for other, word in ((fewer, "differ in prompts"), (longer, "differ in max_new_tokens")):
        with pytest.raises(UserError, match=word):
            scripts.compare.main([str(one), str(other)])
    (tmp_path / "broken.json").write_text('{"identity": ')
    (tmp_path / "other.json").write_text('{"identity": {"target": {}}}')
    for name in ("broken.json", "other.json", "missing.json"):
        with pytest.raises(UserError, match=f"{name} is not a report"):
            scripts.compare.main([str(tmp_path / name)])
    page = tmp_path / "diary.md"
    page.write_text("my only copy\n")
    with pytest.raises(UserError, match="holds no lines"):
        scripts.compare.main([str(one), "--markdown", str(page)])
    assert page.read_text() == "my only copy\n"
    with pytest.raises(UserError, match="is no directory"):
        scripts.compare.main([str(one), "--markdown", str(tmp_path / "no" / "results.md")])
