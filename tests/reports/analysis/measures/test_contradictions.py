"""What a trace lacks or contradicts takes the trust away, and is said."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fsdpbench.reports.analysis import analyze
from fsdpbench.reports.analysis.text import describe
from fsdpbench.reports.readers import TraceError

Change = Callable[[dict[str, Any]], object]
KERNEL: dict[str, tuple[Change, str]] = {
    "no ph": (lambda event: event.pop("ph"), "not complete ones"),
    "begin": (lambda event: event.update(ph="B"), "not complete ones"),
    "no category": (lambda event: event.pop("cat"), "no category"),
    "no name": (lambda event: event.pop("name"), "no name"),
    "name of a wrong type": (lambda event: event.update(name=[1]), "could not be understood"),
    "no time": (lambda event: event.pop("ts"), "no time stamp"),
    "time beyond any": (lambda event: event.update(ts=1e300), "no time stamp"),
    "time in a week": (lambda event: event.update(ts=event["ts"] + 6e11), "days apart"),
    "no duration": (lambda event: event.pop("dur"), "no duration"),
    "duration below 0": (lambda event: event.update(dur=-1), "negative duration"),
    "stream of a wrong type": (
        lambda event: event["args"].update(stream=[]),
        "arguments that cannot be read",
    ),
    "collective of a wrong type": (
        lambda event: event["args"].update({"Collective name": 5}),
        "arguments that cannot be read",
    ),
}


@pytest.mark.parametrize("case", KERNEL)
def test_of_a_kernel(tmp_path: Path, fsdp_trace: Any, case: str) -> None:
    change, words = KERNEL[case]
    kernels = [event for event in fsdp_trace.events if event["cat"] == "kernel"]
    change(kernels[3])
    (rank,) = analyze([fsdp_trace.write(tmp_path / "rank0_trace.json")]).ranks
    assert not rank.trusted
    assert words in " / ".join(rank.warnings)


@pytest.mark.parametrize("literal", ["1" * 5000, "NaN", "-Infinity", "1e999", "[]", "null", '"x"'])
@pytest.mark.parametrize("key", ["ts", "dur"])
def test_numbers_that_are_none(tmp_path: Path, fsdp_trace: Any, key: str, literal: str) -> None:
    kernel = next(event for event in fsdp_trace.events if event["cat"] == "kernel")
    kernel[key] = "HERE"
    path = fsdp_trace.write(tmp_path / "rank0_trace.json")
    path.write_text(path.read_text().replace('"HERE"', literal))
    (rank,) = analyze([path]).ranks
    assert not rank.trusted


@pytest.mark.parametrize("literal", ["1" * 5000, "1e300", "18446744073709551616", "-1", "[[[]]]"])
def test_arguments_of_any_size(tmp_path: Path, fsdp_trace: Any, literal: str) -> None:
    """Sizes that cannot be are not known; the overlap does not depend on them."""
    text = json.dumps(fsdp_trace.document())
    path = tmp_path / "rank0_trace.json"
    for key in ("correlation", "stream", "In msg nelems", "Out msg nelems", "Group size"):
        at = text.index(f'"{key}": ') + len(key) + 4
        end = min(text.index(mark, at) for mark in ",}")
        path.write_text(text[:at] + literal + text[end:])
        analysis = analyze([path])
        assert analysis.ranks[0].overlap_fraction == 230 / 440
        json.dumps(analysis.to_dict(), allow_nan=False)


def cpu_trace(builder: Any) -> Any:
    built = builder(distributedInfo={"backend": "gloo", "rank": 0, "world_size": 2})
    built.step(0, 1_000_000, 2_000_000)
    built.event("user_annotation", "gloo:all_reduce", 1_100_000, 400_000, lane=(100, 9))
    built.op("aten::linear", 1_150_000, 1_350_000)
    built.op("aten::mm", 1_200_000, 1_300_000)
    return built


def test_a_cpu_trace_is_trusted(tmp_path: Path, trace_builder: Any) -> None:
    (rank,) = analyze([cpu_trace(trace_builder).write(tmp_path / "rank0_trace.json")]).ranks
    assert rank.trusted, rank.warnings
    assert rank.overlap_fraction == 0.5


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda events: events[1].pop("tid"), "name no process or thread"),
        (lambda events: events[3].update(dur=300), "end after the call around them"),
        (lambda events: events[2].update(dur=5000), "end after the call around them"),
        (lambda events: events[2].pop("ts"), "no time stamp"),
        (lambda events: events.append(None), "could not be understood"),
    ],
)
def test_of_a_cpu_trace(tmp_path: Path, trace_builder: Any, change: Any, words: str) -> None:
    built = cpu_trace(trace_builder)
    change(built.events)
    (rank,) = analyze([built.write(tmp_path / "rank0_trace.json")]).ranks
    assert not rank.trusted
    assert words in " / ".join(rank.warnings)


def test_steps_that_overlap(tmp_path: Path, fsdp_trace: Any) -> None:
    fsdp_trace.events[0]["dur"] += 100
    (rank,) = analyze([fsdp_trace.write(tmp_path / "rank0_trace.json")]).ranks
    assert not rank.trusted
    assert "1 of 2 steps begin before" in rank.warnings[0]


@pytest.mark.parametrize(
    "head", [{"rank": 8, "world_size": 8}, {"rank": -1}, {"rank": True}, {"rank": 2**70}, {"world_size": 0}]
)
def test_ranks_that_cannot_be(tmp_path: Path, fsdp_trace: Any, head: dict[str, Any]) -> None:
    fsdp_trace.head["distributedInfo"] = head
    (rank,) = analyze([fsdp_trace.write(tmp_path / "rank0_trace.json")]).ranks
    assert not rank.trusted
    assert "the file" in rank.warnings[0]


def test_ranks_of_several_jobs_are_no_job(tmp_path: Path, fsdp_trace: Any) -> None:
    for number, (rank, world_size) in enumerate([(0, 8), (1, 8), (1, 4)]):
        fsdp_trace.head["distributedInfo"] = {"rank": rank, "world_size": world_size}
        fsdp_trace.write(tmp_path / f"{number}_trace.json")
    analysis = analyze([tmp_path])
    across = analysis.to_dict()["across_ranks"]
    assert across["trusted"] is False
    assert across["warnings"][:2] == [
        "some ranks have more than one trace: 1",
        "the traces are of different jobs: their world sizes are 4, 8",
    ]
    assert all(rank.trusted for rank in analysis.ranks)


def test_two_lists_of_events_contradict(tmp_path: Path, fsdp_trace: Any) -> None:
    text = json.dumps(fsdp_trace.document())
    path = tmp_path / "rank0_trace.json"
    for wrong in (text[:-1] + ', "traceEvents": []}', '{"traceEvents": [],' + text[1:]):
        path.write_text(wrong)
        with pytest.raises(TraceError, match="holds 2 lists 'traceEvents'"):
            analyze([path])


def test_a_terminal_obeys_no_name(tmp_path: Path, fsdp_trace: Any) -> None:
    for event in fsdp_trace.events:
        event["name"] = event["name"].replace("blocks.0", "\x1b[31m\n\u202eblocks")
    told = describe(analyze([fsdp_trace.write(tmp_path / "rank0_trace.json")]))
    assert "\x1b" not in told
    assert "\\x1b[31m" in told
    assert "\u202e" not in told
