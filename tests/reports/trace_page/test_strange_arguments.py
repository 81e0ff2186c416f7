"""Whatever stands in the arguments of operators, kernels and devices: figures, and a drawing."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from trace_writing import TraceBuilder

from fsdpbench.reports.analysis import analyze_trace
from fsdpbench.reports.analysis.peaks import ANY_DEVICE, Chip
from fsdpbench.reports.pages.trace_page import draw_rank
from fsdpbench.reports.readers import TraceError, read_trace
from fsdpbench.reports.readers.trace_events import SHAPED

NUMBER = st.integers(-2, 2**50) | st.floats(allow_nan=False) | st.sampled_from([0, 1, 2**63, 10**400])
PLAIN = st.none() | st.booleans() | NUMBER | st.text(max_size=6)
VALUE = st.recursive(PLAIN, lambda inner: st.lists(inner, max_size=4), max_leaves=8)
DIMENSIONS = st.lists(st.lists(st.integers(0, 2**40), max_size=5) | VALUE, max_size=16) | VALUE
TYPES = st.lists(st.sampled_from(["float", "c10::BFloat16", "Scalar", ""]) | PLAIN, max_size=16) | VALUE
CALLS = st.fixed_dictionaries(
    {"name": st.sampled_from(sorted(SHAPED)), "Input Dims": DIMENSIONS},
    optional={
        "Input type": TYPES,
        "Concrete Inputs": st.lists(st.sampled_from(["True", "[1, 1]", "x", "[0]"]), max_size=16) | VALUE,
    },
)
CHIPS = {ANY_DEVICE: Chip("a chip", {"bf16": 1e15, "fp32": 1e13}, 1e12)}


@pytest.mark.campaign
@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    calls=st.lists(CALLS, max_size=5),
    device=VALUE,
    category=st.sampled_from(["kernel", "gpu_memcpy", "mtia_x"]),
)
def test_no_argument_breaks_the_tables(calls: list[dict[str, Any]], device: Any, category: str) -> None:
    built = TraceBuilder(deviceProperties=[{"name": device, "totalGlobalMem": device}])
    for number, call in enumerate(calls):
        start = 1_000_000 + number * 100_000
        name = call.pop("name")
        built.op(name, start, start + 10_000, **call)
        built.kernel(
            "gemm", start + 20_000, start + 30_000, launch=start + 1000, category=category, device=device
        )
    built.kernel("last", 3_000_000, 3_100_000)
    with tempfile.TemporaryDirectory() as folder:
        path = built.write(Path(folder) / "rank0_trace.json")
        try:
            trace = read_trace(path)
        except TraceError:
            return  # refused in one line
    rank = analyze_trace(trace, chips=CHIPS)
    told = json.loads(json.dumps(rank.to_dict(), allow_nan=False))
    json.dumps(draw_rank(trace, rank, traces=1), allow_nan=False)
    shares = [each["share"] for each in told["kernels"]]
    assert abs(sum(shares) - 1) < 1e-9
    assert all(each["count"] > 0 and each["time_s"] >= 0 for each in told["operators"])
