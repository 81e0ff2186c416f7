"""Decoding: every form of file that profilers write, and those that only look like one."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fsdpbench.reports.readers import Category, TraceError, read_trace


def write(path: Path, text: str | bytes) -> Path:
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def kernel(**changes: Any) -> dict[str, Any]:
    event = {"ph": "X", "cat": "kernel", "name": "k", "pid": 0, "tid": 7, "ts": 5.5, "dur": 2.25}
    return event | {"args": {"stream": 7, "device": 0, "correlation": 3}} | changes


def document(*events: Any, **head: Any) -> str:
    return json.dumps({**head, "traceEvents": list(events)})


def test_columns_of_a_file(tmp_path: Path, fsdp_trace: Any) -> None:
    trace = read_trace(fsdp_trace.write(tmp_path / "rank0_trace.json.gz"))
    assert (trace.rank, trace.world_size, trace.backend) == (0, 8, "nccl")
    kernels = trace.rows(Category.KERNEL)
    assert len(kernels) == 18
    first = kernels[0]
    assert trace.name_of(first).startswith("ncclDevKernel_AllGather")
    assert (trace.events.start[first], trace.events.duration[first]) == (1_010_000, 90_000)
    assert (trace.events.stream[first], trace.events.device[first]) == (20, 0)
    assert trace.lanes[trace.events.lane[first]] == (0, 20)
    info = trace.collectives[int(first)]
    assert (info.name, info.out_elements, info.dtype, info.group_size) == (
        "_allgather_base",
        8_000_000,
        "BFloat16",
        8,
    )
    assert trace.problems == ()


def test_the_content_decides_about_gzip_not_the_name(tmp_path: Path) -> None:
    packed = gzip.compress(document(kernel()).encode())
    assert len(read_trace(write(tmp_path / "t.json", packed)).events) == 1
    assert len(read_trace(write(tmp_path / "u.json.gz", document(kernel()))).events) == 1


def test_gzip_members_are_joined(tmp_path: Path) -> None:
    text = document(kernel(), kernel(ts=9)).encode()
    packed = gzip.compress(text[:40]) + gzip.compress(text[40:])
    assert len(read_trace(write(tmp_path / "t.json.gz", packed)).events) == 2


@pytest.mark.parametrize("block", [64, 333, 4096])
def test_blocks_of_any_size_give_the_same(
    tmp_path: Path, fsdp_trace: Any, monkeypatch: pytest.MonkeyPatch, block: int
) -> None:
    # A name that looks like the boundary between two events.
    fsdp_trace.kernel('evil },{"ph": "X" }, {"ph":', 1_000_000, 1_000_500)
    plain = fsdp_trace.write(tmp_path / "t.json")
    packed = fsdp_trace.write(tmp_path / "t.json.gz")
    whole = read_trace(plain)
    monkeypatch.setattr("fsdpbench.reports.readers.trace_text.BLOCK_BYTES", block)
    for path in (plain, packed):
        pieces = read_trace(path)
        for ours, other in zip(pieces.events.columns(), whole.events.columns(), strict=True):
            assert np.array_equal(ours, other)
        assert pieces.names == whole.names
        assert pieces.collectives == whole.collectives
        assert pieces.rank == 0


def test_events_nested_in_arguments_are_not_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fsdpbench.reports.readers.trace_text.BLOCK_BYTES", 64)
    nested = kernel(args={"stream": 7, "correlation": 1, "inner": [{"ph": "X"}, {"ph": "X"}, {"ph": "X"}]})
    trace = read_trace(write(tmp_path / "t.json", document(nested, nested, kernel())))
    assert len(trace.events) == 3


@pytest.mark.parametrize(
    ("ts", "expected"),
    [
        ("1712195495519689.047", 1712195495519689047),
        ("1712195495519689", 1712195495519689000),
        ("4315644670623.342", 4315644670623342),
        ("8700000000000.001", 8700000000000001),
        ("0.001", 1),
        ("12", 12000),
    ],
)
def test_times_are_exact_to_the_nanosecond(tmp_path: Path, ts: str, expected: int) -> None:
    text = document(kernel(), kernel()).replace("5.5", ts).replace("2.25", "0.003")
    trace = read_trace(write(tmp_path / "t.json", text))
    assert trace.events.start.tolist() == [expected] * 2
    assert trace.events.duration.tolist() == [3] * 2


def test_exact_times_in_every_chunk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fsdpbench.reports.readers.trace_text.BLOCK_BYTES", 128)
    times = [f"17121954955196{i:02d}.{i:03d}" for i in range(10, 40)]
    events = ", ".join(json.dumps(kernel(ts="T")).replace('"T"', ts) for ts in times)
    trace = read_trace(write(tmp_path / "t.json", '{"traceEvents": [' + events + "]}"))
    assert trace.events.start.tolist() == [int(ts.replace(".", "")) for ts in times]


def test_numbers_as_strings_are_read(tmp_path: Path) -> None:
    odd = kernel(ts="5.5", dur="2.25", args={"stream": "7", "device": "0", "correlation": "3"})
    trace = read_trace(write(tmp_path / "t.json", document(odd, kernel())))
    for column in trace.events.columns():
        assert column[0] == column[1]


def test_one_broken_argument_costs_only_itself(tmp_path: Path) -> None:
    odd = kernel(args={"stream": [1, 2], "correlation": 3})
    trace = read_trace(
        write(tmp_path / "t.json", document(odd, kernel(), kernel(args=[1, 2]), kernel(args=None)))
    )
    assert trace.events.stream.tolist() == [-1, 7, -1, -1]
    assert trace.events.correlation.tolist() == [3, 3, -1, -1]


@pytest.mark.parametrize(
    ("written", "read"),
    [
        (b"a\x01b\x1f\tc", "a b  c"),
        (b"C:\\windows\\x", "C:\\windows\\x"),
        (b"caf\xe9", "caf\ufffd"),
        (rb"quote \" slash \\ u \u00e9", 'quote " slash \\ u é'),
    ],
)
def test_damaged_names_are_mended(tmp_path: Path, written: bytes, read: str) -> None:
    text = document(kernel(name="NAME"), kernel()).encode().replace(b"NAME", written)
    trace = read_trace(write(tmp_path / "t.json", text))
    assert trace.name_of(0) == read
    assert len(trace.events) == 2


@pytest.mark.parametrize("number", ["NaN", "inf", "-Infinity", "nan"])
def test_not_a_number_is_no_end(tmp_path: Path, number: str) -> None:
    odd = kernel(args={"stream": 7, "correlation": 3, "memory bandwidth (GB/s)": "?"})
    text = document(odd, kernel()).replace('"?"', number)
    trace = read_trace(write(tmp_path / "t.json", text))
    assert trace.events.stream.tolist() == [7, 7]
    assert "not valid JSON" in trace.remarks[0]


def test_a_bare_list_of_events_is_a_trace(tmp_path: Path) -> None:
    assert len(read_trace(write(tmp_path / "t.json", json.dumps([kernel(), kernel()]))).events) == 2


def test_unusable_events_are_counted_and_left_out(tmp_path: Path, fsdp_trace: Any) -> None:
    base = 4_000_000_000_000
    good = [kernel(ts=base / 1000 + i) for i in range(3)]
    odd = [
        kernel(ts=0),
        kernel(ts=base / 1000, dur=-1),
        kernel(ts=None),
        kernel(ts=base / 1000, dur=None),
        7,
        kernel(name=3),
    ]
    described = kernel(ts=base / 1000 + 9, args={"stream": 1, "Collective name": "allreduce"})
    trace = read_trace(write(tmp_path / "t.json", document(*odd, *good, described)))
    assert len(trace.events) == 4
    assert trace.collectives[3].name == "allreduce"
    told = " / ".join(trace.problems)
    for reason in (
        "time stamp 0",
        "negative duration",
        "no time stamp",
        "no duration",
        "2 events could not",
        "4 device",
    ):
        assert reason in told


def test_a_trace_may_begin_at_zero(tmp_path: Path) -> None:
    trace = read_trace(write(tmp_path / "t.json", document(kernel(ts=0), kernel(ts=3), kernel(ts=1e6))))
    assert len(trace.events) == 3
    assert trace.problems == ()


def test_unknown_keys_and_categories_do_no_harm(tmp_path: Path) -> None:
    odd = kernel(cat="python_function", extra={"a": [1]})
    trace = read_trace(
        write(tmp_path / "t.json", document(odd, kernel(zzz=1), {"ph": "M"}, more=[1], other=None))
    )
    assert len(trace.events) == 1


def test_stream_numbers_beyond_int32_are_no_streams(tmp_path: Path) -> None:
    odd = kernel(args={"stream": 4294967295, "correlation": 1})
    assert read_trace(write(tmp_path / "t.json", document(odd, odd))).events.stream.tolist() == [-1, -1]


def test_rank_from_the_file_name(tmp_path: Path) -> None:
    assert read_trace(write(tmp_path / "rank12_trace.json", document(kernel(), kernel()))).rank == 12
    assert read_trace(write(tmp_path / "job.json", document(kernel(), kernel()))).rank is None


def test_memory_events_and_retries(tmp_path: Path, trace_builder: Any) -> None:
    built = trace_builder()
    built.step(1, 1_000_000, 2_000_000)
    built.memory(1_500_000, 512, 1536, 2048)
    built.memory(1_100_000, 1024, 1024, 2048)
    built.retry(1_400_000, 512, 4096)
    trace = read_trace(built.write(tmp_path / "t.json"))
    assert trace.memory.time.tolist() == [1_100_000, 1_500_000]
    assert trace.memory.allocated.tolist() == [1024, 1536]
    assert trace.memory.device_type.tolist() == [1, 1]
    assert (trace.retries.time.tolist(), trace.retries.freed.tolist()) == ([1_400_000], [4096])


GOOD = document(*[kernel(ts=i) for i in range(50)], traceName="x").encode()
PACKED = gzip.compress(GOOD)
REFUSED = {
    "empty": (b"", "empty"),
    "white": (b"  \n", "empty"),
    "text": (b"hello there", "not JSON"),
    "truncated": (GOOD[:-40], "truncated"),
    "truncated_head": (b'{"schemaVersion": 1, "trace', "truncated"),
    "truncated_gzip": (PACKED[:-30], "truncated"),
    "gzip_of_nothing": (gzip.compress(b""), "empty"),
    "damaged_gzip": (PACKED[:40] + bytes(40) + PACKED[80:], "damaged"),
    "foreign": (b'{"name": "package", "version": 1}', "not a trace"),
    "foreign_list": (b'["a", "b"]', "no usable event"),
    "not_a_list": (b'{"traceEvents": 3}', "not a trace"),
    "number": (b"3", "not JSON"),
    "no_events": (b'{"traceEvents": []}', "no events"),
    "only_metadata": (b'{"traceEvents": [{"ph": "M", "name": "process_name"}]}', "no usable event"),
    "garbage_after": (GOOD + b"}}}", "not JSON"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_with_one_clear_line(tmp_path: Path, case: str) -> None:
    content, reason = REFUSED[case]
    path = write(tmp_path / "rank0_trace.json", content)
    with pytest.raises(TraceError) as caught:
        read_trace(path)
    assert reason in caught.value.reason
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_missing_file_and_folder(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="No such file"):
        read_trace(tmp_path / "none.json")
    with pytest.raises(TraceError, match="folder"):
        read_trace(tmp_path)


@pytest.mark.parametrize(
    ("sizes", "is_doubted"),
    [([[4]] * 65, False), ([], False), (None, False), (5, True), ({"a": 1}, True), ("[4]", True)],
)
def test_sizes_of_another_kind_are_doubted_and_many_inputs_are_not(
    tmp_path: Path, sizes: Any, is_doubted: bool
) -> None:
    arguments = {"Input Dims": sizes, "Input type": ["float"] * 65}
    stack = kernel(cat="cpu_op", name="aten::add", args=arguments)
    trace = read_trace(write(tmp_path / "rank0_trace.json", document(kernel(), stack)))
    assert any("cannot be read" in problem for problem in trace.problems) is is_doubted
    assert not len(trace.calls.rows)
