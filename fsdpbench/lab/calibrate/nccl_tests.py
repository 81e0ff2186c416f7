"""Reader of the output of NVIDIA's nccl-tests: `all_gather_perf` and its siblings, as text or JSON.

A file has one or more tables. The lines above a table give its ranks with their hosts, its columns, and
(newer versions) the collective:

    # Collective test starting: all_gather_perf
    #  Rank  0 Group  0 Pid  4711 on     node-0 device  0 [0x18] NVIDIA H100 80GB HBM3
    #       size         count      type   redop    root     time   algbw   busbw #wrong     time  ...
         1048576         32768     float    none      -1    78.35   13.38   12.55      0    77.89  ...

Older versions do not name the collective. It follows from bus bandwidth over algorithm bandwidth: 2(n-1)/n
for all-reduce, (n-1)/n for all-gather, reduce-scatter and all-to-all. Of these, only reduce-scatter has a
reduction, and only all-to-all has no in-place times.
"""

import itertools
import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from fsdpbench.base.errors import UsageError, error_text
from fsdpbench.base.files.documents import read_text
from fsdpbench.base.numbers import finite_number, whole_number
from fsdpbench.sim.model.allocator.caching import format_size

KINDS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")
_PROGRAMS = {f"{kind.replace('_to_', 'to')}_perf": kind for kind in KINDS}
_PROGRAM = re.compile(r"\b(\w+_perf)\b")
_RANK = re.compile(r"#\s+Rank\s+(\d+) (?:Group\s+(\d+) )?Pid\s+\d+ on\s+(\S+) device")
# Launchers prefix each line with the rank: `[1,0]<stdout>:`, `0: `.
_LAUNCHER = re.compile(r"^(?:\[\d+,\d+\]<std\w+>:|\s?\d+: )")
_MOST_POINTS = 100_000
_RATIO_IS_ROUNDED_BY = 0.03


@dataclass(frozen=True)
class Point:
    """One measured collective among `ranks` on `nodes`: the whole buffer's bytes, and the time in us."""

    kind: str
    nbytes: int
    us: float
    ranks: int
    nodes: int

    def __str__(self) -> str:
        return f"{self.kind} of {format_size(self.nbytes)} on {self.nodes} node{'s'[: self.nodes > 1]}"


@dataclass
class _Table:
    """A table while its lines are being read."""

    program: str = ""
    hosts: dict[int, str] = field(default_factory=dict)
    groups: set[str] = field(default_factory=set)
    columns: list[str] = field(default_factory=list)
    rows: "list[_Row]" = field(default_factory=list)


@dataclass(frozen=True)
class _Row:
    """A line of a table: bytes, reduction operation, time (us) and ratio of bus to algorithm bandwidth;
    `in_place`: it also has an in-place time."""

    nbytes: int
    reduction: str
    us: float
    ratio: float
    in_place: bool


def points_of_files(paths: Sequence[Path]) -> list[Point]:
    """Return the points of all tables in the files.

    Raises:
        UsageError: a file cannot be read, has no table, or does not name its ranks; the message names the
            file and what is missing.
    """
    found = [point for path in paths for point in _points_of_file(path)]
    if len(found) > _MOST_POINTS:
        raise UsageError(f"--nccl-tests: {len(found):,} sizes; at most {_MOST_POINTS:,} are fitted")
    shapes = {(point.nodes, point.ranks // point.nodes) for point in found}
    per_node = {gpus for nodes, gpus in shapes if nodes > 1}
    if len(per_node) > 1:
        given = ", ".join(map(str, sorted(per_node)))
        raise UsageError(f"--nccl-tests: nodes of {given} GPUs; give files of one kind of node")
    return found


def _points_of_file(path: Path) -> Iterator[Point]:
    text = read_text(path)
    tables = list(_of_json(path, text) if text.lstrip().startswith("{") else _of_text(text))
    if not any(table.rows for table in tables):
        raise UsageError(error_text("nccl_tests.no_table", path))
    for table in tables:
        if table.rows:
            yield from _points(path, table)


def _points(path: Path, table: _Table) -> Iterator[Point]:
    ranks = len(table.hosts)
    if not ranks:
        raise UsageError(error_text("nccl_tests.no_ranks", path))
    if len(table.groups) > 1:
        raise UsageError(error_text("nccl_tests.group_sizes", path, len(table.groups)))
    a_node = Counter(table.hosts.values())
    if len(set(a_node.values())) > 1:
        given = ", ".join(f"{host}: {count}" for host, count in itertools.islice(a_node.items(), 4))
        raise UsageError(f"--nccl-tests {path}: nodes with different numbers of ranks ({given})")
    kind = _kind(path, table, ranks)
    for row in table.rows:
        if row.us > 0 and kind is not None:
            yield Point(kind, row.nbytes, row.us, ranks, len(a_node))


def _kind(path: Path, table: _Table, ranks: int) -> str | None:
    """Return the collective of a table; None if training with FSDP does not use it."""
    rows = [row for row in table.rows if not math.isnan(row.ratio)]
    ratio = rows[-1].ratio if rows else math.nan
    once = (ranks - 1) / ranks
    if table.program:
        kind = _PROGRAMS.get(table.program)
        expected = 2 * once if kind == "all_reduce" else once
        if kind and not math.isnan(ratio) and abs(ratio - expected) > _RATIO_IS_ROUNDED_BY:
            raise UsageError(error_text("nccl_tests.bandwidths", path, table.program, ranks, expected, ratio))
        return kind
    reduction = table.rows[-1].reduction
    if reduction not in ("", "none"):
        if abs(ratio - 2 * once) <= _RATIO_IS_ROUNDED_BY:
            return "all_reduce"
        return "reduce_scatter" if abs(ratio - once) <= _RATIO_IS_ROUNDED_BY else None
    if abs(ratio - once) > _RATIO_IS_ROUNDED_BY:
        return None
    return "all_gather" if table.rows[-1].in_place else "all_to_all"


def _of_text(text: str) -> Iterator[_Table]:
    table = _Table()
    for line in (_LAUNCHER.sub("", line, count=1) for line in text.splitlines()):
        if row := _row(line, table.columns):
            table.rows.append(row)
            continue
        rank, program = _RANK.search(line), _PROGRAM.search(line)
        if table.rows and (rank or program):
            yield table
            table = _Table()
        if rank:
            table.hosts[int(rank[1])] = rank[3]
            table.groups.add(rank[2] or "0")
        elif program:
            table.program = program[1]
        elif line.startswith("#") and {"size", "time", "busbw"} <= set(words := line.strip("# \n").split()):
            table.columns = words
    yield table


def _row(line: str, columns: Sequence[str]) -> "_Row | None":
    """Return the row that the line contains; None if it is not a row."""
    words = line.split()
    if not columns or len(words) < len(columns) or not words[0].isdecimal():
        return None
    times = [at for at, name in enumerate(columns) if name == "time"]
    values = [_triple(words[at : at + 3]) for at in times]
    found = next((value for value in values if value is not None), None)
    if found is None:
        return None
    us, algorithm, bus = found
    reduction = words[columns.index("redop")] if "redop" in columns else ""
    in_place = len(values) > 1 and values[-1] is not None
    try:
        return _Row(
            whole_number(words[0]), reduction, us, bus / algorithm if algorithm else math.nan, in_place
        )
    except ValueError:
        return None


def _triple(words: Sequence[str]) -> tuple[float, float, float] | None:
    """Return time, algorithm and bus bandwidth; None for `N/A`."""
    try:
        us, algorithm, bus = map(finite_number, words)
    except ValueError:
        return None
    return us, algorithm, bus


class _Timing(msgspec.Struct):
    time: float
    alg_bw: float = 0.0
    bus_bw: float = 0.0


class _JsonRow(msgspec.Struct):
    size: int
    redop: str = ""
    out_of_place: _Timing | None = None
    in_place: _Timing | None = None


class _Device(msgspec.Struct):
    rank: int
    hostname: str = ""
    host: str = ""
    group: int = 0


class _Report(msgspec.Struct):
    """The file that nccl-tests write with `-J FILE`; other keys are ignored."""

    results: list[_JsonRow]
    devices: list[_Device] = []
    ranks: list[_Device] = []
    args: list[str] | str = ""


def _of_json(path: Path, text: str) -> Iterator[_Table]:
    try:
        report = msgspec.json.decode(text, type=_Report)
    except msgspec.DecodeError as error:
        raise UsageError(f"--nccl-tests {path}: is not a report of nccl-tests ({error})") from None
    table = _Table()
    words = report.args if isinstance(report.args, str) else " ".join(report.args)
    program = _PROGRAM.search(f"{words} {path.name}")
    table.program = program[1] if program else ""
    for device in report.devices or report.ranks:
        table.hosts[device.rank] = device.hostname or device.host
        table.groups.add(str(device.group))
    for row in report.results:
        timing = row.out_of_place or row.in_place
        if timing is not None and row.size > 0 and math.isfinite(timing.time):
            ratio = timing.bus_bw / timing.alg_bw if timing.alg_bw else math.nan
            table.rows.append(_Row(row.size, row.redop, timing.time, ratio, row.in_place is not None))
    yield table
