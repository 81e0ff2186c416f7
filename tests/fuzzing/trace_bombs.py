"""Files that are small and ask for much: of size, depth, length of an event, number of events or of files."""

from __future__ import annotations

import gzip
import json
import os
import pickle
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

EVENT = b'{"ph":"X","cat":"kernel","name":"k","ts":5,"dur":1}'
BEGIN = b'{"traceEvents": ['
PART = 64 << 20


@dataclass(frozen=True)
class Bomb:
    """`write` makes files in a folder and says what to analyse. `words`: what the refusal names, or nothing
    where it is no refusal but an answer."""

    name: str
    write: Callable[[Path], Path]
    words: str
    options: tuple[str, ...] = field(default=())


def bombs() -> Iterator[Bomb]:
    yield from _of_size()
    yield from _of_depth()
    yield from _of_events()
    yield from _of_files()
    yield from _of_snapshots()


# What a file holds is made where it is written: the names of all are read wherever tests are collected.
def _file(name: str, content: Callable[[], bytes]) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        (folder / name).write_bytes(content())
        return folder / name

    return write


def _repeated(first: bytes, part: bytes, count: int, times: int) -> Callable[[Path], Path]:
    """A gzip file of members: `first`, then `count` of `part` over and over."""
    return _file("rank0_trace.json.gz", lambda: gzip.compress(first) + gzip.compress(part * count, 9) * times)


def _of_size() -> Iterator[Bomb]:
    for name, first, part, words in (
        ("zeros", b"", b"\0", "not JSON"),
        ("white space", b"", b" ", "`event`"),
        ("white space in the list", BEGIN + EVENT, b"\n", "`event`"),
        ("a name", BEGIN + b'{"name":"', b"x", "`event`"),
        ("a number", BEGIN + b'{"ts":', b"1", "`event`"),
        ("escapes", BEGIN + b'{"ph":"', b"\\", "`event`"),
        ("arguments", BEGIN + b'{"ph":"X","args":[', b"0,", "`event`"),
        ("before the events", b'{"a":"', b"x", "`event`"),
        ("after the events", BEGIN + EVENT + b'],"a":"', b"x", "`event`"),
    ):
        often = PART // len(part)
        yield Bomb(f"10 GB: {name}", _repeated(first, part, often, 160), words)
        limit = ("--limit", "unpacked=100MB")
        yield Bomb(f"1 GB, limited: {name}", _repeated(first, part, often, 16), "", limit)
    yield Bomb("a hole of 9 GB", _hole, "`unpacked`")
    yield Bomb("gzip in gzip", _file("t.json.gz", lambda: gzip.compress(gzip.compress(EVENT))), "gzip inside")
    whole = BEGIN + EVENT + b"]}"
    yield Bomb("empty members", _file("t.json.gz", lambda: gzip.compress(b"") * 100_000), "empty")
    one_by_one = _file("rank0.json.gz", lambda: b"".join(gzip.compress(bytes([byte]), 1) for byte in whole))
    yield Bomb("a member a byte", one_by_one, "")


def _hole(folder: Path) -> Path:
    path = folder / "t.json"
    with path.open("wb") as file:
        file.write(BEGIN)
        file.truncate(9_000_000_000)
    return path


def _of_depth() -> Iterator[Bomb]:
    for depth in (10, 190, 300, 1000, 2000, 100_000, 1_000_000):
        words = "`depth`" if depth > 200 else ""
        for opening, closing in (("[", "]"), ('{"a":', "}")):
            within = _file("t.json", partial(_nested, opening, closing, depth, within=True))
            beside = _file("t.json", partial(_nested, opening, closing, depth, within=False))
            yield Bomb(f"{depth} levels of {opening} in an event", within, words)
            yield Bomb(f"{depth} levels of {opening} beside", beside, words)
    raised = '{"traceEvents": [{"a": ' + "[" * 5000 + "]" * 5000 + "}]}"
    yield Bomb(
        "depth raised", _file("t.json", raised.encode), "deeper than Python", ("--limit", "depth=9999")
    )
    yield Bomb("nothing but brackets", _repeated(b"", b"[", PART, 3), "`depth`")
    yield Bomb("nothing but objects", _repeated(b"", b'{"a":', PART // 5, 3), "`depth`")


def _nested(opening: str, closing: str, depth: int, *, within: bool) -> bytes:
    """Brackets in the arguments of two events, or beside the list of one."""
    inner = opening * depth + "1" + closing * depth
    event = EVENT.decode()
    if not within:
        return f'{{"a": {inner}, "traceEvents": [{event}]}}'.encode()
    event = event[:-1] + ', "args": {"a": ' + inner + "}}"
    return f'{{"traceEvents": [{event}, {event}]}}'.encode()


def _of_events() -> Iterator[Bomb]:
    options = ("--limit", "events=500000")
    for name, event in (
        ("kernels", EVENT),
        ("metadata", b'{"ph":"M"}'),
        ("empty events", b"{}"),
        ("no events", b"[0]"),
        ("allocations", b'{"ph":"i","name":"[memory]","ts":1,"args":{"Bytes":1}}'),
        ("collectives", EVENT[:-1] + b',"args":{"Collective name":"c","Group size":1000000}}'),
        ("broken arguments", EVENT[:-1] + b',"args":{"stream":[]}}'),
        ("strings for numbers", EVENT.replace(b"5", b'"5"')),
    ):
        yield Bomb(f"many {name}", _repeated(BEGIN, event + b",", 100_000, 40), "`events`", options)
    yield Bomb("as many names", _file("rank0.json", _many_names), "", options)
    yield Bomb("a name of 12 MiB", _file("rank0.json", _long_name), "")
    yield Bomb("arguments of lists", _file("rank0.json", _lists), "")
    ranks = EVENT[:-1] + b',"args":{"Collective name":"allreduce","In msg nelems":1e300,"Group size":1e300,'
    ranks += b'"dtype":"Float","Process Group Ranks":"[0, 1, 2, ..., 99999999999999]"}}'
    yield Bomb("ranks without end", _file("rank0.json", lambda: BEGIN + ranks + b"]}"), "")


def _many_names() -> bytes:
    names = b",".join(EVENT.replace(b'"k"', b'"k%d"' % number) for number in range(300_000))
    return BEGIN + names + b"]}"


def _long_name() -> bytes:
    long = EVENT.replace(b'"k"', b'"' + b"x" * (12 << 20) + b'"')
    return BEGIN + long + b"," + EVENT + b"]}"


def _lists() -> bytes:
    return BEGIN + EVENT[:-1] + b',"args":{"stream":[' + b"[]," * (4 << 20) + b"0]}}" + b"]}"


def _of_files() -> Iterator[Bomb]:
    def many(content: bytes) -> Callable[[Path], Path]:
        def write(folder: Path) -> Path:
            for number in range(1500):
                (folder / f"rank{number}_trace.json").write_bytes(content)
            return folder

        return write

    yield Bomb("1500 traces", many(BEGIN + EVENT + b"]}"), "")
    yield Bomb("1500 broken traces", many(BEGIN + EVENT), "truncated")

    def odd(folder: Path) -> Path:
        os.mkfifo(folder / "pipe_trace.json")
        (folder / "loop").symlink_to(folder, target_is_directory=True)
        (folder / "nowhere_trace.json").symlink_to(folder / "nothing")
        (folder / "itself_trace.json").symlink_to(folder / "itself_trace.json")
        (folder / "folder_trace.json").mkdir()
        (folder / "rank0_trace.json").write_bytes(BEGIN + EVENT + b"]}")
        return folder

    def pipe(folder: Path) -> Path:
        os.mkfifo(folder / "t.json")
        return folder / "t.json"

    yield Bomb("pipes and loops in a folder", odd, "")
    yield Bomb("a pipe", pipe, "is a pipe")
    for device in ("zero", "full", "null", "random", "tty"):
        yield Bomb(f"/dev/{device}", lambda folder, name=device: Path("/dev", name), "is a device")
    yield Bomb("a folder without traces", lambda folder: folder, "holds no traces")
    yield Bomb("nothing", lambda folder: folder / "t.json", "does not exist")
    yield Bomb("a long name", lambda folder: folder / ("x" * 3000), "File name too long")
    for name, content in {
        "zip": b"PK\x03\x04" + bytes(60), "zstd": b"\x28\xb5\x2f\xfd" + bytes(60), "xz": b"\xfd7zXZ\x00",
        "bzip2": b"BZh91AY", "lz4": b"\x04\x22\x4d\x18", "UTF-16": '{"traceEvents": []}'.encode("utf-16"),
        "UTF-16 text": '{"traceEvents": []}'.encode("utf-16-le"), "SQLite": b"SQLite format 3\x00",
    }.items():  # fmt: skip
        yield Bomb(name, _file("t.json.gz", lambda content=content: content), name)


def _of_snapshots() -> Iterator[Bomb]:
    memo = b"\x80\x04}r" + struct.pack("<I", 0x7FFFFFFF) + b"."
    yield Bomb("a pickle of a large memo", _file("s.pickle", lambda: memo), "more memory")
    counted = b"\x80\x05\x96" + struct.pack("<Q", 1 << 40) + b"."
    yield Bomb("a pickle of a large array", _file("s.pickle", lambda: counted), "not a memory snapshot")
    yield Bomb(
        "a deep pickle",
        _file("s.pickle", lambda: b"\x80\x04" + b"]" * 10**6 + b"a" * 10**6 + b"."),
        "snapshot",
    )
    size = {"device": 0, "allocated_size": 1, "active_size": 1, "total_size": 10**400, "blocks": []}
    for wrong in (10**400, -1, "x", None, [], float("nan"), float("inf")):
        content = pickle.dumps({"segments": [{**size, "total_size": wrong}]})
        yield Bomb(
            f"a segment of {wrong!r:.20}", _file("s.pickle", lambda content=content: content), "damaged"
        )


def told(bomb: Bomb) -> str:
    return json.dumps([bomb.name, *bomb.options])
