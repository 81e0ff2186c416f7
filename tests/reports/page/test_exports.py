"""Markdown, JSON and CSV of the ranked table."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from types import ModuleType

import pytest

from fsdpbench.reports.pages import RunFolderError, load_run, write_csv, write_json, write_markdown
from fsdpbench.reports.pages.ranking import rank


def test_json_has_every_row_in_order_with_raw_figures(sweep: Path) -> None:
    content = json.loads(write_json(sweep))
    assert content["schema"] == 1
    assert content["simulated"] is True
    assert content["metric"] == "tokens_per_s_per_gpu"
    names = [entry.row.name for entry in rank(load_run(sweep))]
    assert [record["name"] for record in content["configurations"]] == names
    best = content["configurations"][0]
    result = json.loads((sweep / best["folder"] / "result.json").read_text())
    assert best["step_time_s"] == result["step_time_s"]
    assert best["peak_reserved_bytes"] == result["peak_memory_bytes"]["reserved"]
    assert best["compute_only_s"] == result["time_s"]["compute_only"]
    assert content["configurations"][-1]["step_time_s"] is None


def test_csv_reads_back_as_the_same_table(sweep: Path) -> None:
    rows = list(csv.DictReader(io.StringIO(write_csv(sweep))))
    records = json.loads(write_json(sweep))["configurations"]
    assert [row["name"] for row in rows] == [record["name"] for record in records]
    assert float(rows[0]["tokens_per_s_per_gpu"]) == records[0]["tokens_per_s_per_gpu"]
    assert rows[0]["backward_prefetch"] == "pre"
    assert rows[-1]["status"] == "oom"
    assert "out of memory" in rows[-1]["problem"]


def test_markdown_is_one_table_below_the_recommendation(sweep: Path) -> None:
    lines = write_markdown(sweep).splitlines()
    assert lines[0].startswith("# gpt-2.8b")
    assert any(line.startswith("**Run impl-fsdp") for line in lines)
    table = [line for line in lines if line.startswith("| ")]
    assert len(table) == 32
    assert len({line.count("|") for line in table}) == 1


def test_hostile_names_stay_text(synthetic: ModuleType, tmp_path: Path) -> None:
    point = next(synthetic.space())
    folder = synthetic.write_point(tmp_path, point, 1, trace=False)
    config = json.loads((folder / "config.json").read_text())
    config |= {"name": "=HYPERLINK(1)|`x`<script>\n", "system": "a|b"}
    (folder / "config.json").write_text(json.dumps(config))
    other = synthetic.write_point(tmp_path, point, 2, trace=False)
    assert other.is_dir()
    (row, _) = csv.DictReader(io.StringIO(write_csv(tmp_path)))
    assert row["name"].startswith("'=HYPERLINK")
    table = [line for line in write_markdown(tmp_path).splitlines() if line.startswith("| ")]
    assert len(table) == 4
    assert all("<script>" not in line for line in table)
    assert any("a\\|b" in line for line in table)


@pytest.mark.parametrize("export", [write_markdown, write_json, write_csv])
def test_a_foreign_folder_is_refused(export: object, tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match="not a run folder"):
        export(tmp_path)  # type: ignore[operator]
