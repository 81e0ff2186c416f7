"""Eager and compiled configurations side by side, and what the verdict says of compiling."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from fsdpbench.reports.pages import findings, load_run
from fsdpbench.reports.pages.comparisons import fusion_table
from fsdpbench.reports.pages.ranking import rank, short_label, varying_settings


def update(path: Path, **more: Any) -> dict[str, Any]:
    """Overwrite fields of a JSON file, and return what it holds."""
    content: dict[str, Any] = json.loads(path.read_text()) | more
    path.write_text(json.dumps(content))
    return content


@pytest.fixture
def eager(synthetic: ModuleType, tmp_path: Path) -> Path:
    """Two eager configurations."""
    run: Path = synthetic.write_sweep(tmp_path / "run", traces=False, limit=2)
    for folder in (path.parent for path in run.glob("*/config.json")):
        settings = json.loads((folder / "config.json").read_text())["settings"]
        update(folder / "config.json", settings=settings | {"compile": False})
        update(folder / "result.json", work={"kernels": 800, "copies": 9}, memory_traffic={"bytes": 2**33})
    return run


def compile_first(run: Path) -> tuple[Path, Path]:
    """Put a compiled twin beside the first configuration; it takes four fifths of its time."""
    first = sorted(path.parent for path in run.glob("*/config.json"))[0]
    twin = Path(shutil.copytree(first, run / f"compiled-{'c' * 8}"))
    settings = json.loads((twin / "config.json").read_text())["settings"]
    update(twin / "config.json", name="compiled", settings=settings | {"compile": True})
    result = json.loads((twin / "result.json").read_text())
    update(
        twin / "result.json",
        step_time_s=result["step_time_s"] * 0.8,
        tokens_per_s_per_gpu=result["tokens_per_s_per_gpu"] / 0.8,
        work={"kernels": 500, "copies": 1},
        memory_traffic={"bytes": 2**32},
    )
    names = sorted(path.parent.name for path in run.glob("*/config.json"))
    (run / "sweep.toml").write_text(f'schema = 1\nmodel = "gpt-2.8b"\npoints = {json.dumps(names)}\n')
    return first, twin


def test_charts_name_eager_and_compiled(eager: Path) -> None:
    first, twin = compile_first(eager)
    rows = {row.folder.name: row for row in load_run(eager).configurations}
    labels = [short_label(rows[folder.name], ["wrap", "compile"]) for folder in (first, twin)]
    assert [label.split(" · ")[-1] for label in labels] == ["eager", "compiled"]
    assert short_label(rows[twin.name], ["wrap"]).endswith(" · compiled")


def test_an_eager_sweep_says_that_compiling_was_not_tried(eager: Path) -> None:
    view = load_run(eager)
    assert fusion_table(rank(view), ["wrap"], {}) is None


def test_a_pair_says_what_fusion_removed(eager: Path) -> None:
    first, twin = compile_first(eager)
    view = load_run(eager)
    ranked = rank(view)
    held = {
        first.name: {"before the trace": 2**31, "forward": 2**32},
        twin.name: {"before the trace": 2**31, "forward": 2**31},
    }
    table = fusion_table(ranked, varying_settings([entry.row for entry in ranked]), held)
    assert table is not None
    rows = {row[1]: row[2:] for row in table.rows}
    assert rows["kernels a step"] == ("800", "500", "−38 %")
    assert rows["read and written a step by kernels that memory limits, GiB"] == ("8.0", "4.0", "−50 %")
    assert rows["at the peak, held since forward, GiB"] == ("4.0", "2.0", "−50 %")
    assert rows["step time, ms"][2] == "−20 %"


def test_only_otherwise_equal_configurations_are_pairs(eager: Path) -> None:
    _, twin = compile_first(eager)
    settings = json.loads((twin / "config.json").read_text())["settings"]
    update(twin / "config.json", settings=settings | {"batch": 99})
    view = load_run(eager)
    assert fusion_table(rank(view), [], {}) is None
    told = [finding for finding in findings(view) if "cannot be believed" not in finding]  # made-up figures
    assert not [finding for finding in told if "ompil" in finding]
