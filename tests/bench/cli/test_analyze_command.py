"""`fsdpbench analyze`: a trace, what changed since another, HTA's opinion, and what is refused."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fsdpbench.cli import main

Call = Callable[..., tuple[int, str, str]]


@pytest.fixture
def analyze(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Call:
    def call(*words: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["fsdpbench", "analyze", *map(str, words)])
        code = 0
        try:
            main()
        except SystemExit as stop:
            code = int(stop.code or 0)
        output = capsys.readouterr()
        return code, output.out, output.err

    return call


def trace(path: Path, gemm_us: int, device: str = "NVIDIA A100-SXM4-80GB") -> Path:
    """Two steps of a gemm and an all-gather of 16 MB behind it."""
    events: list[dict[str, Any]] = []

    def event(category: str, name: str, start: float, duration: float, tid: int, **args: Any) -> None:
        more = {"pid": 1 if category == "user_annotation" else 0, "tid": tid, "args": args}
        events.append({"ph": "X", "cat": category, "name": name, "ts": start, "dur": duration, **more})

    for step in range(2):
        now = 1000.0 + step * 1000
        event("user_annotation", f"ProfilerStep#{step}", now, 1000, 1)
        sizes = {
            "In msg nelems": 1_000_000,
            "Out msg nelems": 8_000_000,
            "Group size": 8,
            "dtype": "BFloat16",
        }
        for name, start, length, stream, more in (
            ("gemm", now + 20, gemm_us, 7, {}),
            ("ncclDevKernel_AllGather", now + 600, 100, 20, {"Collective name": "_allgather_base", **sizes}),
        ):
            correlation = len(events)
            event("cuda_runtime", "cudaLaunchKernel", start - 10, 2, 1, correlation=correlation)
            event("kernel", name, start, length, stream, stream=stream, correlation=correlation, **more)
    head = {
        "distributedInfo": {"backend": "nccl", "rank": 0, "world_size": 8},
        "deviceProperties": [{"id": 0, "name": device}],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**head, "traceEvents": events}))
    return path


def test_the_roof_is_that_of_the_device_s_profile(
    tmp_path: Path, analyze: Call, matches_schema: Callable[[str, Any], None]
) -> None:
    path = trace(tmp_path / "rank0_trace.json", 500)
    code, out, _ = analyze(path)
    assert code == 0
    matches_schema("analysis", json.loads(analyze(path, "--json")[1]))
    assert "140.00 GB/s bus bandwidth, best 140.00, 58 % of a100-80gb's 240" in out
    assert "% of h100-80gb's" in analyze(path, "--hardware", "h100-80gb")[1]
    unknown = trace(tmp_path / "other" / "rank0_trace.json", 500, device="Some Other GPU")
    assert "the peak of this hardware is not known" in analyze(unknown)[1]


def test_what_changed_since_another_trace(tmp_path: Path, analyze: Call) -> None:
    before = trace(tmp_path / "a" / "rank0_trace.json", 400)
    after = trace(tmp_path / "b" / "rank0_trace.json", 500)
    code, out, _ = analyze(after, "--against", before)
    assert code == 0
    assert "+0.100 ms  1 -> 1  gemm" in out
    content = json.loads(analyze(after, "--against", before, "--json")[1])
    assert content["ranks"][0]["time_s"]["compute_only"] == {"before": 400e-6, "after": 500e-6}


def test_hta_s_opinion_stands_beside_ours(tmp_path: Path, analyze: Call) -> None:
    before = trace(tmp_path / "a" / "rank0_trace.json", 400)
    after = trace(tmp_path / "b" / "rank0_trace.json", 500)
    content = json.loads(analyze(after, "--against", before, "--hta", "--json")[1])["hta"]
    assert content["ranks"][0]["overlap_fraction"] == 0
    assert set(content["ranks"][0]["queue_length"]) == {"7", "20"}
    assert content["diff"]["kernels"]["gemm"]["time_after_s"] == pytest.approx(1e-3)
    assert "HolisticTraceAnalysis, trace diff" in analyze(after, "--against", before, "--hta")[1]


def test_without_the_extra_hta_is_refused_with_the_way_out(
    tmp_path: Path, analyze: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fsdpbench.reports.readers.hta.hta_available", lambda: False)
    code, _, err = analyze(trace(tmp_path / "rank0_trace.json", 500), "--hta")
    assert code == 2
    assert "pip install 'fsdpbench[hta]'" in err


def test_what_cannot_be_compared_is_refused(tmp_path: Path, analyze: Call) -> None:
    path = trace(tmp_path / "rank0_trace.json", 500)
    assert analyze(path, "--against", tmp_path / "nothing")[0] == 2
    code, _, err = analyze(path, "--hardware", "a1000")
    assert code == 2
    assert "a1000" in err


def test_flight_recorder_dumps_are_known_by_their_content(analyze: Call, tmp_path: Path) -> None:
    for rank, calls in ((0, 2), (1, 1)):
        entries = [
            {
                "process_group": ["0", "default_pg"],
                "collective_seq_id": number + 1,
                "profiling_name": "nccl:all_reduce",
                "input_sizes": [[4]],
                "input_dtypes": ["Float"],
                "state": "scheduled",
            }
            for number in range(calls)
        ]
        content = {"pg_config": {}, "version": "2.10", "entries": entries}
        (tmp_path / f"nccl_trace_rank_{rank}").write_text(json.dumps(content))
    code, output, _ = analyze(tmp_path)
    assert code == 0
    assert "culprit: rank 1 never joined all_reduce(4 Float)" in output
    code, output, _ = analyze(tmp_path, "--json")
    assert json.loads(output)["flight_recorder"]["problems"][0]["ranks"] == [1]
    code, _, errors = analyze(tmp_path, "--hta")
    assert (code, errors.count("\n")) == (2, 1)
    (tmp_path / "nccl_trace_rank_1").write_text('{"pg_config": {}, "entries": 1}')
    code, _, errors = analyze(tmp_path)
    assert (code, errors.count("\n")) == (2, 1)
    assert "has no list of entries" in errors
