"""Memory snapshots: totals backwards from the end, fragmentation, holders at the peak; hostile files."""

from __future__ import annotations

import pickle
import random
from pathlib import Path
from typing import Any

import pytest

from fsdpbench.reports.analysis import analyze
from fsdpbench.reports.analysis.snapshots import BEFORE_HISTORY, read_snapshot
from fsdpbench.reports.analysis.text import describe
from fsdpbench.reports.readers import TraceError, TraceLimits

MIB = 2**20


def block(size: int, state: str, address: int, requested: int | None = None) -> dict[str, Any]:
    asked = size if requested is None else requested
    return {"size": size, "requested_size": asked, "address": address, "state": state, "frames": []}


def segment(address: int, blocks: list[dict[str, Any]], device: int = 0) -> dict[str, Any]:
    allocated = sum(each["size"] for each in blocks if each["state"] == "active_allocated")
    active = sum(each["size"] for each in blocks if each["state"] != "inactive")
    return {
        "device": device,
        "address": address,
        "total_size": sum(each["size"] for each in blocks),
        "stream": 0,
        "segment_type": "large",
        "allocated_size": allocated,
        "active_size": active,
        "blocks": blocks,
    }


def action(kind: str, size: int, address: int, time_us: int, line: int = 0) -> dict[str, Any]:
    frames = [
        {"filename": "/site-packages/torch/nn/modules/linear.py", "line": 1, "name": "forward"},
        {"filename": "/home/me/model.py", "line": line, "name": "block"},
    ]
    return {"action": kind, "addr": address, "size": size, "stream": 0, "time_us": time_us, "frames": frames}


def dump(path: Path, document: Any) -> Path:
    path.write_bytes(pickle.dumps(document))
    return path


def test_totals_peaks_and_holders(tmp_path: Path) -> None:
    """5 MiB before the history; +4 (line 10), +2 (line 20), -4, +1 (line 20): the peak is 11."""
    history = [
        action("segment_alloc", 20 * MIB, 1000, 1),
        action("alloc", 4 * MIB, 1, 2, line=10),
        action("alloc", 2 * MIB, 2, 3, line=20),
        action("free_requested", 4 * MIB, 1, 4),
        action("free_completed", 4 * MIB, 1, 5),
        action("alloc", 1 * MIB, 3, 6, line=20),
        {"action": "oom", "size": 99 * MIB, "time_us": 7, "stream": 0, "device_free": 5},
    ]
    segments = [
        segment(
            1000,
            [
                block(2 * MIB, "active_allocated", 2),
                block(MIB, "active_allocated", 3, MIB - 100),
                block(17 * MIB, "inactive", 4),
            ],
        ),
        segment(5000, [block(5 * MIB, "active_allocated", 9)]),
        segment(7000, [block(3 * MIB, "inactive", 8)]),
    ]
    (found,) = read_snapshot(dump(tmp_path / "s.pickle", {"segments": segments, "device_traces": [history]}))
    assert (found.allocated, found.active, found.reserved) == (8 * MIB, 8 * MIB, 28 * MIB)
    assert found.allocated_curve.tolist() == [each * MIB for each in (5, 9, 11, 7, 7, 8, 8)]
    assert (found.peak_allocated, found.peak_active, found.peak_reserved) == (
        11 * MIB,
        11 * MIB,
        28 * MIB,
    )
    assert (found.split, found.largest_free, found.rounding) == (17 * MIB, 17 * MIB, 100)
    assert found.ooms == (99 * MIB,)
    assert [(held.where, held.bytes, held.count) for held in found.holders] == [
        (BEFORE_HISTORY, 5 * MIB, 0),
        ("/home/me/model.py:10 block", 4 * MIB, 1),
        ("/home/me/model.py:20 block", 2 * MIB, 1),
    ]


def test_random_histories_against_replaying_them(tmp_path: Path) -> None:
    rng = random.Random(3)
    for _ in range(20):
        alive, history, totals = {0: 512}, [], []
        for number in range(1, 60):
            if len(alive) > 1 and rng.random() < 0.45:
                address = rng.choice([each for each in alive if each])
                history.append(action("free_requested", alive.pop(address), address, number))
            else:
                alive[number] = 512 * rng.randrange(1, 9)
                history.append(action("alloc", alive[number], number, number))
            totals.append(sum(alive.values()))
        blocks = [block(size, "active_allocated", address) for address, size in alive.items()]
        document = {"segments": [segment(0, blocks)], "device_traces": [history]}
        (found,) = read_snapshot(dump(tmp_path / "s.pickle", document))
        assert found.allocated_curve.tolist() == totals
        assert found.peak_allocated == max(totals)
        assert sum(held.bytes for held in found.holders) == max(totals)


def test_devices_apart_and_no_history(tmp_path: Path) -> None:
    segments = [segment(0, [block(512, "active_allocated", 0)], device) for device in (0, 2)]
    found = read_snapshot(dump(tmp_path / "s.pickle", {"segments": segments, "device_traces": [[], [], []]}))
    assert [(each.device, each.peak_allocated, each.holders) for each in found] == [
        (0, 512, ()),
        (2, 512, ()),
    ]


def test_beside_traces_in_a_folder(tmp_path: Path, fsdp_trace: Any) -> None:
    fsdp_trace.write(tmp_path / "rank0_trace.json")
    dump(tmp_path / "memory.pickle", {"segments": [segment(0, [block(512, "active_allocated", 0)])]})
    analysis = analyze([tmp_path])
    assert len(analysis.ranks) == 1
    (printed,) = analysis.to_dict()["memory_snapshots"]
    assert printed["end_bytes"] == {"allocated": 512, "active": 512, "reserved": 512}
    assert "memory snapshot, device 0" in describe(analysis)
    alone = analyze([tmp_path / "memory.pickle"])
    assert (alone.ranks, len(alone.snapshots)) == ((), 1)


class Harmful:
    """Unpickled naively it would run a program."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def test_a_pickle_can_run_no_code(tmp_path: Path) -> None:
    target = tmp_path / "touched"
    path = dump(tmp_path / "s.pickle", {"segments": [Harmful(target)]})
    with pytest.raises(TraceError, match="plain values only"):
        read_snapshot(path)
    assert not target.exists()


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "is empty"),
        (pickle.dumps({"segments": [1] * 100})[:-20], "truncated|not a memory snapshot"),
        (b"hello", "not a memory snapshot"),
        (pickle.dumps([1, 2]), "no list 'segments'"),
        (pickle.dumps({"segments": [{"device": 0}]}), "damaged"),
        # Six bytes that ask for room for 2^31 objects; an array of 2^40 bytes.
        (b"\x80\x04}r\xff\xff\xff\x7f.", "more memory than its size explains"),
        (b"\x80\x05\x96" + (1 << 40).to_bytes(8, "little") + b".", "not a memory snapshot"),
        (b"\x80\x04" + b"]" * 10**5 + b"a" * 10**5 + b".", "no list 'segments'|not a memory snapshot"),
    ],
)
def test_refused_with_one_line(tmp_path: Path, content: bytes, reason: str) -> None:
    path = tmp_path / "s.pickle"
    path.write_bytes(content)
    with pytest.raises(TraceError, match=reason):
        read_snapshot(path)


@pytest.mark.parametrize("size", [-1, 2**60, 10**400, float("nan"), float("inf"), None, "x", []])
@pytest.mark.parametrize("key", ["allocated_size", "total_size"])
def test_sizes_that_cannot_be(tmp_path: Path, key: str, size: Any) -> None:
    whole = segment(0, [block(512, "active_allocated", 0)])
    path = dump(tmp_path / "s.pickle", {"segments": [whole | {key: size}]})
    with pytest.raises(TraceError, match="is a damaged memory snapshot") as caught:
        read_snapshot(path)
    assert len(str(caught.value)) < 500


def test_limits_hold_for_snapshots(tmp_path: Path) -> None:
    path = dump(tmp_path / "s.pickle", {"segments": [segment(0, [block(512, "active_allocated", 0)])]})
    with pytest.raises(TraceError, match="the limit `unpacked` is 9 bytes"):
        read_snapshot(path, TraceLimits(unpacked=9))
