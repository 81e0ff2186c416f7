"""`analyze` over files and folders, and the JSON that `fsdpbench analyze --json` prints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fsdpbench.reports.analysis import analyze
from fsdpbench.reports.analysis.text import describe
from fsdpbench.reports.readers import TraceError


def test_the_contract(tmp_path: Path, fsdp_trace: Any) -> None:
    path = fsdp_trace.write(tmp_path / "rank0_trace.json.gz")
    printed = json.loads(json.dumps(analyze([path]).to_dict(), allow_nan=False))
    assert printed["schema"] == 1
    (rank,) = printed["ranks"]
    assert rank["rank"] == 0
    assert rank["trusted"] is True
    assert rank["warnings"] == []
    parts = {"compute_only", "overlapped", "exposed_communication", "idle"}
    steps = rank["steps"]
    assert [step["step"] for step in steps] == [0, 1]
    for figures in (rank, *steps):
        assert set(figures["time_s"]) == parts
        assert sum(figures["time_s"].values()) == pytest.approx(figures["duration_s"], rel=1e-12)
        assert figures["overlap_fraction"] == 230 / 440
        assert {"all_gather", "reduce_scatter", "all_reduce"} == set(figures["communication"])
        for each in figures["communication"].values():
            assert {"count", "bytes", "time_s", "exposed_s", "bus_bandwidth_bytes_per_s"} <= set(each)
    assert rank["communication"]["all_reduce"]["count"] == 0
    assert [unit["unit"] for unit in rank["units"]] == ["blocks.0", "blocks.1"]
    assert rank["units"][0]["all_gather"]["count"] == 2
    assert printed["across_ranks"]["slowest_rank"] == 0
    assert printed["across_ranks"]["step_time_s"] == {
        "mean": 0.001,
        "min": 0.001,
        "max": 0.001,
        "max_rank": 0,
    }


def make_run(folder: Path, fsdp_trace: Any, names: list[str], ranks: int = 1) -> Path:
    for name in names:
        configuration = folder / name
        configuration.mkdir(parents=True)
        (configuration / "config.json").write_text("{}")
        (configuration / "result.json").write_text("{}")
        for rank in range(ranks):
            fsdp_trace.head["distributedInfo"]["rank"] = rank
            fsdp_trace.write(configuration / "trace" / f"rank{rank}_trace.json.gz")
            (configuration / "trace" / f"rank{rank}_record.json").write_text("{}")
    return folder


def test_a_configurations_folder(tmp_path: Path, fsdp_trace: Any) -> None:
    run = make_run(tmp_path / "run", fsdp_trace, ["fast-1"], ranks=2)
    for path in (run, run / "fast-1", run / "fast-1" / "trace"):
        analysis = analyze([path])
        assert [(rank.rank, rank.configuration) for rank in analysis.ranks] == [(0, "fast-1"), (1, "fast-1")]
        summary = analysis.across_ranks
        assert summary is not None
        assert summary.missing_ranks == 6
        assert "2 of 8 ranks" in summary.warnings[0]


def test_a_run_of_several_configurations_is_summed_up_by_configuration(
    tmp_path: Path, fsdp_trace: Any
) -> None:
    analysis = analyze([make_run(tmp_path / "run", fsdp_trace, ["a-1", "b-2"])])
    assert analysis.across_ranks is None
    assert set(analysis.to_dict()["across_ranks"]["configurations"]) == {"a-1", "b-2"}
    assert "a-1" in describe(analysis)


def test_a_broken_file_among_others_is_told(tmp_path: Path, fsdp_trace: Any) -> None:
    run = make_run(tmp_path / "run", fsdp_trace, ["a-1"])
    broken = run / "a-1" / "trace" / "rank1_trace.json.gz"
    broken.write_bytes((run / "a-1" / "trace" / "rank0_trace.json.gz").read_bytes()[:-50])
    analysis = analyze([run])
    assert [rank.rank for rank in analysis.ranks] == [0]
    assert [(problem.path, "truncated" in problem.reason) for problem in analysis.problems] == [
        (broken, True)
    ]
    assert "truncated" in describe(analysis)
    assert "truncated" in analysis.to_dict()["problems"][0]["reason"]
    with pytest.raises(TraceError, match="truncated"):
        analyze([run, broken])


def test_several_processes_give_the_same(tmp_path: Path, fsdp_trace: Any) -> None:
    run = make_run(tmp_path / "run", fsdp_trace, ["a-1"], ranks=3)
    (run / "a-1" / "trace" / "rank9_trace.json.gz").write_bytes(b"junk")
    assert analyze([run], processes=2).to_dict() == analyze([run]).to_dict()
    with pytest.raises(TraceError, match="not JSON"):
        analyze([run, run / "a-1" / "trace" / "rank9_trace.json.gz"], processes=2)


def test_other_json_files_beside_traces_are_left_alone(tmp_path: Path, fsdp_trace: Any) -> None:
    run = make_run(tmp_path / "run", fsdp_trace, ["a-1"])
    (run / "a-1" / "trace" / "notes.json").write_text("[1, 2]")
    (run / "sweep.json").write_text("[1, 2]")
    analysis = analyze([run / "a-1"])
    assert len(analysis.ranks) == 1
    assert analysis.problems == ()


def test_paths_that_hold_no_trace(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="does not exist"):
        analyze([tmp_path / "nothing"])
    with pytest.raises(TraceError, match="holds no traces"):
        analyze([tmp_path])
    (tmp_path / "a.json").write_text("{}")
    with pytest.raises(TraceError, match="not a trace"):
        analyze([tmp_path])


def test_a_file_given_twice_counts_once(tmp_path: Path, fsdp_trace: Any) -> None:
    path = fsdp_trace.write(tmp_path / "rank0_trace.json")
    assert len(analyze([path, tmp_path, path]).ranks) == 1


def test_simulated_traces_say_so(tmp_path: Path, trace_builder: Any) -> None:
    built = trace_builder(fsdpbench={"device": "sim", "simulated": True, "hardware": {"name": "a100-80gb"}})
    built.step(0, 1_000_000, 1_100_000)
    built.kernel("a", 1_010_000, 1_020_000)
    analysis = analyze([built.write(tmp_path / "rank0_trace.json")])
    assert analysis.ranks[0].to_dict()["simulated"]["hardware"] == {"name": "a100-80gb"}
    assert "simulated" in describe(analysis)
    # One simulated rank stands for all.
    assert analysis.across_ranks is not None
    assert analysis.across_ranks.warnings == ()


def test_the_text_names_the_figures(tmp_path: Path, fsdp_trace: Any) -> None:
    text = describe(analyze([fsdp_trace.write(tmp_path / "rank0_trace.json")]))
    for expected in (
        "trusted",
        "52.27 %",
        "1.000 ms = 0.440 compute only + 0.230 overlapped + 0.210 exposed communication + 0.120 idle",
        "all_gather",
        "blocks.0",
    ):
        assert expected in text
