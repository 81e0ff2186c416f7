"""One configuration's part of the page: units, memory, phases and the verdict come from its trace."""

from __future__ import annotations

import gzip
import json
import re
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
import pytest

from fsdpbench.reports.analysis import RankAnalysis, analyze_trace
from fsdpbench.reports.analysis.lateness import LateCause
from fsdpbench.reports.analysis.model import Finding, Outcome, Suggestion, Verdict
from fsdpbench.reports.analysis.processes import kept, pack, part_of, unpack
from fsdpbench.reports.pages import load_run
from fsdpbench.reports.pages.details import Detail, build_details
from fsdpbench.reports.pages.memory_charts import memory_chart
from fsdpbench.reports.pages.ranking import rank, varying_settings
from fsdpbench.reports.pages.trace_parts import CAUSES, held_by_unit, held_table, ranks_table, units_chart
from fsdpbench.reports.readers import Trace, read_trace


def traced(sweep: Path, name: str) -> tuple[Trace, RankAnalysis]:
    (path,) = sweep.glob(f"{name}-????????/trace/rank0_trace.json.gz")
    trace = read_trace(path)
    return trace, analyze_trace(trace)


def valid(figure: dict[str, Any]) -> None:
    plain = json.loads(re.sub(r"var\(--[a-z-]+\)", "#123456", json.dumps(figure, allow_nan=False)))
    go.Figure(data=plain["data"], layout=plain["layout"])


@pytest.fixture(scope="module")
def details(sweep: Path) -> list[Detail]:
    ranked = rank(load_run(sweep))
    return build_details(ranked, varying_settings([entry.row for entry in ranked]), lambda row: [])


def test_the_units_bars_sum_to_the_units_communication(sweep: Path) -> None:
    _, analysis = traced(sweep, "impl-fsdp1-block-none-bf16-2")
    chart = units_chart(analysis)
    assert chart is not None
    valid(chart.figure())
    for place, unit in enumerate(analysis.units):
        drawn = sum(bars["y"][place] for bars in chart.figure()["data"])
        told = sum(figures.time for figures in unit.communication.values())
        assert drawn == pytest.approx(told / len(analysis.steps) / 1e6, abs=1e-3)
    assert [line[0] for line in chart.table.rows] == [unit.unit for unit in analysis.units]
    assert all(len(line) == len(chart.table.columns) for line in chart.table.rows)


def test_the_memory_chart_holds_the_peaks_and_marks_each_retry(sweep: Path) -> None:
    trace, analysis = traced(sweep, "impl-fsdp1-block-pre-bf16-off")
    chart = memory_chart(trace, analysis, 80 * 2**30, 50)
    assert chart is not None
    valid(chart.figure())
    allocated, reserved, retries = chart.figure()["data"]
    assert max(allocated["y"]) == pytest.approx(int(trace.memory.allocated.max()) / 2**30, abs=1e-3)
    assert max(reserved["y"]) == pytest.approx(int(trace.memory.reserved.max()) / 2**30, abs=1e-3)
    assert len(retries["x"]) == len(trace.retries) == 2
    assert retries["customdata"] == ["asked for 1.00 GiB, freed 3.00 GiB"] * 2


def test_what_is_held_at_the_peak_sums_to_the_peak(sweep: Path) -> None:
    _, analysis = traced(sweep, "impl-fsdp1-block-pre-bf16-2")
    table = held_table(analysis.memory)
    assert table is not None
    peak = sum(float(line[3]) for line in table.rows if line[4])
    assert peak == pytest.approx((analysis.memory.peak_allocated or 0) / 2**30, abs=0.2)


def test_every_configuration_has_its_part(details: list[Detail]) -> None:
    assert len(details) == 30
    best, last = details[0].content, details[-1].content
    assert best["timeline"]["rows"]
    assert best["verdict"]
    assert [line[0] for line in best["phases"]["rows"]][:3] == ["forward", "backward", "optimizer"]
    assert ["backward_prefetch", "pre"] in best["settings"]
    assert last["timeline"] is None
    assert "out of memory" in last["problem"]
    json.dumps([detail.content for detail in details], allow_nan=False)


def test_retries_of_the_shown_step_are_marked_inside_it(details: list[Detail]) -> None:
    with_retries = [detail.content for detail in details if detail.content["retries"]]
    assert len(with_retries) == 6
    for content in with_retries:
        assert all(0 <= at < content["timeline"]["duration"] for at in content["retries"])


def test_advice_is_what_the_trace_says() -> None:
    suggestions = (Suggestion("backward_prefetch", "none"), Suggestion("batch", "more"))
    finding = Finding("no_prefetch", 0.2, 0.2, "A fifth of the step waits.", suggestions)
    assert Verdict(Outcome.FOUND, finding.text, (finding,)).texts == [finding.text]
    assert Verdict(Outcome.FINE, "Nothing to gain.").texts == ["Nothing to gain."]


def test_ranks_stand_side_by_side_and_the_straggler_is_named(sweep: Path, tmp_path: Path) -> None:
    (first,) = sweep.glob("impl-fsdp1-block-pre-bf16-2-????????/trace/rank0_trace.json.gz")
    content = json.loads(gzip.decompress(first.read_bytes()))
    # The second rank is the last at every collective: its own take a tenth of the time.
    for event in content["traceEvents"]:
        if event["name"].startswith("nccl"):
            event["dur"] /= 10
    content["distributedInfo"]["rank"] = 1
    second = tmp_path / "rank1_trace.json.gz"
    second.write_bytes(gzip.compress(json.dumps(content).encode()))
    broken = tmp_path / "rank2_trace.json.gz"
    broken.write_bytes(b"")
    ranks = ranks_table(analyze_trace(read_trace(first)), [second, broken])
    assert ranks is not None
    lead, table = ranks
    assert lead == "Rank 1 causes 100 % of all waiting for ranks. 1 traces could not be read."
    assert [line[0] for line in table.rows] == ["0", "1"]
    assert [line[-1] for line in table.rows] == ["0 %", "100 %"]
    waited = float(table.rows[0][-2])
    assert waited == pytest.approx(0.9 * 12 * (2 * 0.9 + 1.35), rel=0.01)


def test_one_rank_has_no_table_of_ranks(sweep: Path) -> None:
    _, analysis = traced(sweep, "impl-fsdp1-block-pre-bf16-2")
    assert ranks_table(analysis, []) is None


def test_every_cause_of_lateness_has_words() -> None:
    assert set(CAUSES) == set(LateCause)


def test_what_each_unit_holds_sums_to_the_peak(sweep: Path) -> None:
    _, analysis = traced(sweep, "impl-fsdp1-block-pre-bf16-2")
    table = held_by_unit(analysis.memory)
    assert table is not None
    total = sum(holding.bytes for holding in analysis.memory.at_peak) / 2**30
    assert sum(float(row[-2]) for row in table.rows) == pytest.approx(total, abs=0.06 * len(table.rows))
    for row in table.rows:
        assert sum(map(float, row[1:-2])) == pytest.approx(float(row[-2]), abs=0.2)


def test_idle_causes_and_retries_are_told(details: list[Detail]) -> None:
    contents = [detail.content for detail in details if detail.content["idle"]]
    assert contents
    for content in contents:
        assert content["idle"]["columns"][0] == "idle because of"
    retried = [d.content["memory_table"] for d in details if d.content["retries"]]
    assert retried
    for table in retried:
        rows = [row for row in table["rows"] if row[0].startswith("retry")]
        assert rows
        assert all("backward" in row[3] for row in rows)


def test_other_workers_draw_the_same(
    sweep: Path, details: list[Detail], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where one breaks before the end."""
    drew: list[int] = []

    @contextmanager
    def workers(processes: int) -> Iterator[ThreadPoolExecutor]:
        drew.append(processes)
        with ThreadPoolExecutor(processes) as pool:
            yield pool
        raise BrokenProcessPool

    monkeypatch.setattr("fsdpbench.reports.pages.details.suitable_processes", lambda files: 2)
    ranked = rank(load_run(sweep))
    varying = varying_settings([entry.row for entry in ranked])
    assert build_details(ranked, varying, lambda row: [], workers=workers) == details
    assert drew == [2]


def test_traces_that_were_analysed_are_not_read_again(
    sweep: Path, details: list[Detail], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor where their folder was moved meanwhile; what is drawn is the same."""
    moved = tmp_path / "moved"
    shutil.copytree(sweep, tmp_path / "here")
    here = sorted(tmp_path.glob("here/*/trace/rank0_trace.json.gz"))
    packed = kept(pack(*read_and_analyse(path)) for path in here)
    (tmp_path / "here").rename(moved)
    ranked = rank(load_run(moved))
    varying = varying_settings([entry.row for entry in ranked])

    def refuse(path: Path) -> Trace:
        raise AssertionError(f"{path} was read again")

    monkeypatch.setattr("fsdpbench.reports.pages.details.read_trace", refuse)
    assert build_details(ranked, varying, lambda row: [], kept=packed) == details


def test_a_trace_that_has_changed_is_read_again(sweep: Path, tmp_path: Path) -> None:
    (first, *_) = sorted(sweep.glob("*/trace/rank0_trace.json.gz"))
    path = Path(shutil.copy(first, tmp_path / "rank0_trace.json.gz"))
    packed = kept([pack(*read_and_analyse(path))])
    assert unpack(path, packed) is not None
    assert unpack(path, part_of(path, packed)) is not None
    assert unpack(first, packed) is None
    path.write_bytes(first.read_bytes())
    assert unpack(path, packed) is None
    path.unlink()
    assert unpack(path, packed) is None
    assert part_of(path, packed) == {}


def read_and_analyse(path: Path) -> tuple[Trace, RankAnalysis]:
    trace = read_trace(path)
    return trace, analyze_trace(trace, configuration="of its folder")
