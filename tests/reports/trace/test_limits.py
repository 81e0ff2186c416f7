"""Limits: what goes beyond one is refused by its name, before it takes the memory."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path

import pytest

from fsdpbench.reports.readers import TraceError, TraceLimits, read_trace
from fsdpbench.reports.readers.trace import VARIABLE, bytes_text
from fsdpbench.reports.readers.trace_text import BracketFinder, nesting

EVENT = b'{"ph": "X", "cat": "kernel", "name": "k", "ts": 5, "dur": 1}'
BEGIN = b'{"traceEvents": ['


def refused(path: Path, content: bytes, limits: TraceLimits | None = None) -> str:
    path.write_bytes(content)
    with pytest.raises(TraceError) as caught:
        read_trace(path, limits)
    assert "\n" not in str(caught.value)
    return caught.value.reason


def test_unpacked_bytes(tmp_path: Path) -> None:
    text = BEGIN + b",".join([EVENT] * 1000) + b"]}"
    limits = TraceLimits(unpacked=len(text) - 1)
    told = refused(tmp_path / "t.json.gz", gzip.compress(text), limits)
    assert "bytes to more than 61.0 kB, and the limit `unpacked` is 61.0 kB" in told
    assert "--limit unpacked=..." in told
    assert VARIABLE in told
    assert "has 61.0 kB" in refused(tmp_path / "t.json", text, limits)
    assert len(read_trace(tmp_path / "t.json", TraceLimits(unpacked=len(text))).events) == 1000


@pytest.mark.parametrize("place", ["arguments", "field", "last event", "beside", "list"])
@pytest.mark.parametrize("brackets", ["[]", '{"a":}'])
def test_depth(tmp_path: Path, place: str, brackets: str) -> None:
    def text(depth: int) -> bytes:
        opening, closing = brackets[:-1], brackets[-1]
        inner = (opening * depth + '"]}"' + closing * depth).encode()
        if place == "beside":
            return b'{"a": ' + inner + b', "traceEvents": [' + EVENT + b"]}"
        deep = EVENT[:-1] + (b', "a": ' + inner if place == "field" else b', "args": {"a": ' + inner + b"}")
        if place == "list":
            return b"[" + deep + b"}]"
        # The last event is decoded with what follows it, the others as a list of their own.
        events = [EVENT, deep + b"}"] if place == "last event" else [deep + b"}", EVENT]
        return BEGIN + b",".join(events) + b"]}"

    around = {"arguments": 4, "field": 3, "last event": 4, "beside": 1, "list": 3}[place]
    told = refused(tmp_path / "t.json", text(2000))
    assert f"nests {2000 + around:,} levels deep, and the limit `depth` is 200" in told
    limits = TraceLimits(depth=50 + around)
    assert "`depth`" in refused(tmp_path / "t.json", text(51), limits)
    (tmp_path / "t.json").write_bytes(text(50))
    assert len(read_trace(tmp_path / "t.json", limits).events) == (1 if place in ("beside", "list") else 2)


def test_depth_that_python_cannot_decode(tmp_path: Path) -> None:
    text = BEGIN + b'{"a": ' + b"[" * 200_000 + b"]" * 200_000 + b"}]}"
    told = refused(tmp_path / "t.json", text, TraceLimits(depth=10**6))
    assert told == "nests deeper than Python can decode, whatever the limit `depth`"


@pytest.mark.parametrize(
    ("first", "part"),
    [
        (BEGIN + b'{"name": "', b"x"),
        (BEGIN + EVENT, b" "),
        (b'{"a": "', b"x"),
        (BEGIN + EVENT + b'], "a": "', b"x"),
        (b"", b" "),
    ],
    ids=["name", "white space", "before", "after", "nothing"],
)
def test_length_of_an_event_and_of_what_is_beside(tmp_path: Path, first: bytes, part: bytes) -> None:
    content = gzip.compress(first) + gzip.compress(part * (9 << 20), 1)
    told = refused(tmp_path / "t.json.gz", content, TraceLimits(event=4 << 20))
    assert "the limit `event` is 4 MiB" in told


def test_number_of_events(tmp_path: Path) -> None:
    for text in (BEGIN + b",".join([EVENT] * 6) + b"]}", b"[" + b",".join([EVENT] * 6) + b"]"):
        assert "more than 5 events" in refused(tmp_path / "t.json", text, TraceLimits(events=5))
        assert len(read_trace(tmp_path / "t.json", TraceLimits(events=6)).events) == 6


def test_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = BEGIN + b",".join([EVENT] * 6) + b"]}"
    monkeypatch.setenv(VARIABLE, "events=5, unpacked=2GiB")
    assert TraceLimits.from_environment() == TraceLimits(events=5, unpacked=2 << 30)
    assert "`events` is 5" in refused(tmp_path / "t.json", text)
    monkeypatch.setenv(VARIABLE, "evnets=5")
    assert VARIABLE in refused(tmp_path / "t.json", text)


@pytest.mark.parametrize(
    ("text", "value"), [("16GB", 16 * 10**9), ("16 gib", 16 << 30), ("7", 7), ("3TiB", 3 << 40), ("9b", 9)]
)
def test_units(text: str, value: int) -> None:
    assert TraceLimits().with_texts([f"unpacked={text}"]).unpacked == value


@pytest.mark.parametrize(
    "text",
    [
        *("unpacked", "unpacked=", "=5", "unpacked=-5", "unpacked=1.5GB", "unpacked=nan", "unpacked=5iB"),
        *("depth=3", "unpacked=0", "event=1KiB", "unpacked=" + "9" * 5000, "unpacked=9999999999TiB"),
        "unpacked=٣",
    ],
)
def test_wrong_limits_are_named(text: str) -> None:
    with pytest.raises(ValueError, match="limit") as caught:
        TraceLimits().with_texts([text])
    assert len(str(caught.value)) < 250


def test_bytes_in_words() -> None:
    assert [bytes_text(count) for count in (5, 4 << 20, 4 << 30, 43_100_000, 2 * 10**13)] == [
        *("5 bytes", "4 MiB", "4 GiB", "43.1 MB", "20.0 TB")
    ]


def test_no_regular_file_is_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "t.json")
    for path, kind in (
        (tmp_path / "t.json", "a pipe"),
        (Path("/dev/zero"), "a device"),
        (tmp_path, "a folder"),
    ):
        with pytest.raises(TraceError, match=f"is {kind}"):
            read_trace(path)


@pytest.mark.parametrize(
    "text",
    ['{"a": [1, "]]]", {"b": {}}]}', r'{"\\": "\"[[[[", "a\\": [[]]}', "[]", '"[[["', '{"a": "\\n[\\\\"}'],
)
def test_brackets_are_followed_through_any_blocks(text: str) -> None:
    def depth(value: object) -> int:
        if isinstance(value, dict | list):
            return 1 + max(map(depth, value.values() if isinstance(value, dict) else value), default=0)
        return 0

    assert nesting(text.encode()) == depth(json.loads(text))
    for size in range(1, len(text)):
        finder = BracketFinder()
        deepest, joined = 0, b""
        for at in range(0, len(text), size):
            block, brackets = finder.take(text[at : at + size].encode())
            deepest = max(deepest, int(brackets.depth.max(initial=0)))
            joined += block
        assert (deepest, joined.decode()) == (depth(json.loads(text)), text)
        assert (finder.depth, finder.in_string) == (0, False)
