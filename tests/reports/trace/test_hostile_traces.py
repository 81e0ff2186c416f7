"""Whatever the bytes: a trace is analysed, or refused with `TraceError`, and nothing else happens."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fsdpbench.reports.analysis import analyze
from fsdpbench.reports.analysis.memory import memory_curve
from fsdpbench.reports.analysis.text import describe
from fsdpbench.reports.pages.timeline import stream_rows
from fsdpbench.reports.readers import TraceError, read_trace

relaxed = settings(
    max_examples=40,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    derandomize=True,
)

scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(allow_nan=False),
    st.sampled_from(["", "7", "0x0", "-1", "1e3", "nan", "kernel", "ProfilerStep#3", "FSDP::all_gather (x)"]),
    st.lists(st.integers(), max_size=2),
    st.just({}),
)
FIELDS = ("ph", "cat", "name", "pid", "tid", "ts", "dur", "args")
ARGUMENTS = (
    "stream",
    "correlation",
    "device",
    "Collective name",
    "In msg nelems",
    "Out msg nelems",
    "Group size",
    "dtype",
    "Input Dims",
    "Input type",
    "Total Allocated",
    "Bytes",
    "Addr",
    "Device Type",
)


def survive(path: Path) -> str:
    """Runs everything that reads traces; the outcome in a word."""
    try:
        analysis = analyze([path])
    except TraceError as error:
        return "refused" if "\n" not in str(error) else "refused in several lines"
    json.dumps(analysis.to_dict(), allow_nan=False)
    assert describe(analysis)
    trace = read_trace(path)
    for step in analysis.ranks[0].steps:
        assert step.time.total == step.duration
    stream_rows(trace, analysis.ranks[0].steps[0])
    memory_curve(trace)
    return "analysed"


@pytest.fixture
def document(fsdp_trace: Any) -> str:
    """A trace with one of everything, as text: each example begins with a copy of its own."""
    fsdp_trace.memory(1_100_000, 512, 512, 4096)
    fsdp_trace.retry(1_200_000, 512, 4096)
    fsdp_trace.annotation("gloo:all_reduce", 1_100_000, 1_200_000, lane=(100, 9))
    return json.dumps(fsdp_trace.document())


@relaxed
@given(data=st.data())
def test_fields_of_any_kind(tmp_path: Path, document: str, data: st.DataObject) -> None:
    trace = json.loads(document)
    events = trace["traceEvents"]
    for _ in range(data.draw(st.integers(1, 6))):
        event = events[data.draw(st.integers(0, len(events) - 1))]
        if data.draw(st.booleans()) and isinstance(event.get("args"), dict):
            event["args"][data.draw(st.sampled_from(ARGUMENTS))] = data.draw(scalars)
        else:
            event[data.draw(st.sampled_from(FIELDS))] = data.draw(scalars)
    path = tmp_path / "rank0_trace.json"
    path.write_text(json.dumps(trace))
    assert survive(path) == "analysed"


@relaxed
@given(data=st.data())
def test_heads_of_any_kind(tmp_path: Path, document: str, data: st.DataObject) -> None:
    trace = json.loads(document)
    head = data.draw(st.sampled_from(["distributedInfo", "deviceProperties", "fsdpbench", "schemaVersion"]))
    trace[head] = data.draw(
        st.one_of(scalars, st.dictionaries(st.sampled_from(["rank", "world_size", "backend"]), scalars))
    )
    path = tmp_path / "rank0_trace.json"
    path.write_text(json.dumps(trace))
    assert survive(path) == "analysed"


@relaxed
@given(
    position=st.floats(0, 1), junk=st.binary(min_size=1, max_size=12), cut=st.booleans(), packed=st.booleans()
)
def test_bytes_of_any_kind(
    tmp_path: Path, document: str, position: float, junk: bytes, cut: bool, packed: bool
) -> None:
    text = document.encode()
    text = gzip.compress(text) if packed else text
    at = int(position * len(text))
    path = tmp_path / "rank0_trace.json"
    path.write_bytes(text[:at] if cut else text[:at] + junk + text[at + len(junk) :])
    assert survive(path) in ("analysed", "refused")


@pytest.mark.parametrize(
    "name",
    [
        "",
        "x" * 100_000,
        "<script>alert(1)</script>",
        "\u0000\ud7ff",
        "FSDP::(",
        "FSDP:: (a) (b)",
        "ProfilerStep#x",
    ],
)
def test_names_of_any_kind(tmp_path: Path, fsdp_trace: Any, name: str) -> None:
    fsdp_trace.kernel(name, 1_200_000, 1_201_000)
    fsdp_trace.annotation(name, 1_000_000, 1_100_000)
    fsdp_trace.op(name, 1_000_000, 1_100_000)
    assert survive(fsdp_trace.write(tmp_path / "rank0_trace.json")) == "analysed"
