"""Explanation of an out-of-memory error from its message, or from a snapshot of the allocator."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsdpbench.base.errors import error_text
from fsdpbench.base.files.documents import rendered_beside
from fsdpbench.base.reading import read_rows
from fsdpbench.reports.analysis import snapshots
from fsdpbench.reports.analysis.records import Record
from fsdpbench.reports.readers import TraceError
from fsdpbench.reports.readers.oom_log import OomMessage, OomReport

_GIB = 1 << 30
_FRAGMENTED = 0.1
"""Share of the reserved memory above which unallocated reserved memory is reported."""
_MUCH_OUTSIDE = 0.1
UNKNOWN = "unknown"
_TABLE = Path(__file__).parents[1] / "oom_causes.csv"
_OF_OTHERS = {row["source"]: (row["headline"], row["finding"]) for row in read_rows(_TABLE)}
"""Headline and finding for errors that are not from torch's allocator on the GPU."""


def describe_report(report: OomReport) -> str:
    """Return several lines, for people (`oom_report.jinja`)."""
    message = report.message
    text = rendered_beside(
        __file__,
        "oom_report.jinja",
        report=report,
        message=message,
        headline=_headline(message),
        findings=findings(message)
        + [f"also in the text: {_OF_OTHERS[each][0]}" for each in report.also if each in _OF_OTHERS],
        due=message.source not in _OF_OTHERS,
        size_text=size_text,
        unknown=UNKNOWN,
    )
    return text.rstrip("\n")


def _headline(message: OomMessage) -> str:
    if message.source in _OF_OTHERS:
        return _OF_OTHERS[message.source][0]
    where = f"GPU {message.gpu}" if message.gpu is not None else "the device"
    asked, free = size_text(message.asked), size_text(message.free)
    return f"{message.source} out of memory on {where}: {asked} asked for, {free} free"


def findings(message: OomMessage) -> list[str]:
    """Return the conclusions from the figures alone, the most informative first."""
    if message.source in _OF_OTHERS:
        return [_OF_OTHERS[message.source][1]]
    found = [finding for part in (_limit, _others, _fragments, _outside) if (finding := part(message))]
    return found or ["cannot tell the cause: the message gives too few figures"]


def _others(message: OomMessage) -> str | None:
    if not message.others:
        return None
    what = "another process holds" if message.others_seen == 1 else f"{message.others_seen} others hold"
    held = f"{what} {size_text(message.others)} of this GPU"
    if message.short is not None and message.others < message.short:
        return f"{held}, less than what is missing: not the cause"
    return f"{held}: end it, or use another GPU (`nvidia-smi`)"


def _limit(message: OomMessage) -> str | None:
    held = message.reserved if message.reserved is not None else message.allocated
    if message.source == "MPS" and message.allowed is not None:
        return error_text("out_of_memory.mps_limit")
    if message.free is None or message.asked is None or message.free < message.asked:
        return None
    if message.allowed is None or (held is not None and held + message.asked < 0.95 * message.allowed):
        return error_text("out_of_memory.more_free")
    return "the GPU has room; `set_per_process_memory_fraction` is the limit"


def _fragments(message: OomMessage) -> str | None:
    unallocated, asked, free = message.unallocated, message.asked, message.free
    if free is not None and asked is not None and free >= asked:
        return None
    if message.reserved is None and message.allocated is not None and asked and message.total:
        return _too_much(message) if message.allocated + asked > message.total else None
    if unallocated is None or asked is None or not message.reserved:
        return None
    if unallocated >= asked and unallocated >= _FRAGMENTED * message.reserved:
        return error_text("out_of_memory.fragmentation", size_text(unallocated), _remedy(message))
    if free is None:
        return None
    if unallocated + free < asked:
        return error_text(
            "out_of_memory.too_little", size_text(unallocated + free), size_text(asked), _too_much(message)
        )
    return error_text("out_of_memory.pieces", size_text(unallocated), _remedy(message))


def _too_much(message: OomMessage) -> str:
    """Return who has to hold less: the program, unless others hold as much as is missing."""
    short, unknown = message.short or 0, 0 if message.process is not None else message.outside or 0
    if unknown > max(short, _MUCH_OUTSIDE * (message.total or 0)) or (message.others or 0) >= max(short, 1):
        return "what others hold would be enough for it"
    return "the program itself must hold less"


def _remedy(message: OomMessage) -> str:
    """Return the allocator setting against fragmentation that this backend and release have."""
    if message.old:
        name = "PYTORCH_HIP_ALLOC_CONF" if message.source == "HIP" else "PYTORCH_CUDA_ALLOC_CONF"
        return f"set {name}=max_split_size_mb:512 (torch before 2.1 has no expandable segments)"
    if message.variable or message.source in ("CUDA", "HIP"):
        return f"set {message.variable or f'PYTORCH_{message.source}_ALLOC_CONF'}=expandable_segments:True"
    return error_text("out_of_memory.recurring_sizes", message.source)


def _outside(message: OomMessage) -> str | None:
    outside, total = message.outside, message.total
    if outside is None or not total or outside <= _MUCH_OUTSIDE * total:
        return None
    if message.process is None:
        return error_text("out_of_memory.outside", size_text(outside))
    return error_text("out_of_memory.outside_own", size_text(outside))


def size_text(size: int | None) -> str:
    """Return bytes as text for people."""
    if size is None:
        return UNKNOWN
    for unit, name in ((_GIB, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if size >= unit:
            return f"{size / unit:,.2f} {name}"
    return f"{size} B"


# A snapshot at its out-of-memory error: held bytes, classified by the frames that allocated them.

OPTIMIZER = "optimizer states and temporaries"
GATHERED = "gathered parameters, all-gather buffers"
REDUCED = "reduce-scatter buffers, reduced gradients"
BACKWARD = "allocated in backward (gradients, recomputed activations)"
FORWARD = "activations and others of forward"
OTHER = "others (parameters, inputs)"
BEFORE = "allocated before the history began"
_FILES = {OPTIMIZER: "/torch/optim/", BACKWARD: "/torch/autograd/__init__", FORWARD: "/torch/nn/modules/"}
_FUNCTIONS = (
    (GATHERED, ("all_gather", "unshard", "allgather")),
    (REDUCED, ("reduce_scatter", "post_backward", "reduce_grad")),
)
_PHASES = {OPTIMIZER: "optimizer", BACKWARD: "backward", FORWARD: "forward"}
_MOST = 12


_BYTES = {name: f"{name}_bytes" for name in ("allocated", "reserved", "split", "held")}


@dataclass(frozen=True)
class SnapshotOom(Record, **_BYTES, growth="alive_by_age_bytes"):
    """The last out-of-memory error of a snapshot, in bytes. None or empty: the history does not say.

    held: by category. lines: by the user's line that allocated, largest first. growth: bytes alive by the
    tenth of the history in which they were allocated, oldest first.
    """

    device: int
    asked: int | None
    free: int | None
    phase: str | None
    line: str | None
    allocated: int
    reserved: int
    split: int
    held: dict[str, int]
    lines: tuple[snapshots.Holder, ...]
    growth: tuple[int, ...]

    def to_dict(self) -> dict[str, object]:
        lines = [{"line": each.where, "bytes": each.bytes, "count": each.count} for each in self.lines]
        return super().to_dict() | {"lines": lines}


def read_oom_snapshot(path: Path) -> list[SnapshotOom]:
    """Return one result for each device that has memory or history. Raises `TraceError` for other files."""
    totals = snapshots.read_snapshot(path)
    histories = list(snapshots.load_snapshot(path).get("device_traces") or [])
    found = []
    for each in totals:
        history = histories[each.device] if 0 <= each.device < len(histories) else []
        try:
            found.append(_at_oom(each, history))
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise TraceError(
                path, f"is a damaged memory snapshot ({type(error).__name__}: {error})"
            ) from None
    return found


def _at_oom(totals: snapshots.SnapshotAnalysis, history: Sequence[Mapping[str, Any]]) -> SnapshotOom:
    ooms = [index for index, entry in enumerate(history) if entry["action"] == "oom"]
    end = ooms[-1] if ooms else len(history)
    failed = history[end] if ooms else None
    alive = snapshots.alive_after(history[:end])
    allocated = int(totals.allocated_curve[end]) if ooms else totals.peak_allocated
    held: dict[str, int] = {}
    ages = [0] * 10
    for index, entry in alive:
        size, category = int(entry["size"]), _category(entry.get("frames") or ())
        held[category] = held.get(category, 0) + size
        ages[index * 10 // max(end, 1)] += size
    before = allocated - sum(held.values())
    if before > 0:
        held[BEFORE] = before
    frames = () if failed is None else failed.get("frames") or ()
    return SnapshotOom(
        device=totals.device,
        asked=None if failed is None else int(failed["size"]),
        free=None if failed is None else _free(failed),
        phase=_PHASES.get(_category(frames)) if frames else None,
        line=snapshots.own_line(frames) if frames else None,
        allocated=allocated,
        reserved=totals.reserved,
        split=totals.split,
        held=dict(sorted(held.items(), key=lambda item: -item[1])),
        lines=tuple(snapshots.holders_of(alive)[:_MOST]),
        growth=tuple(ages) if alive else (),
    )


def _free(entry: Mapping[str, Any]) -> int | None:
    """Return the device's free bytes of an `oom` entry: `addr` in older torch, `device_free` in newer."""
    free = entry.get("device_free", entry.get("addr"))
    return None if free is None else int(free)


def _category(frames: Sequence[Mapping[str, Any]]) -> str:
    """Return the category from the frames: function names first, then files, optimizer before autograd."""
    names = [(str(frame.get("filename", "")), str(frame.get("name", ""))) for frame in frames]
    for category, words in _FUNCTIONS:
        if any(word in name for _, name in names for word in words):
            return category
    for category, part in _FILES.items():
        if any(part in file for file, _ in names):
            return category
    return FORWARD if any(name == "forward" for _, name in names) else OTHER


def describe_snapshot(found: SnapshotOom) -> str:
    """Return several lines, for people (`oom_snapshot.jinja`)."""
    grows = bool(found.growth) and min(found.growth[2:]) > 0.05 * max(sum(found.growth), 1)
    text = rendered_beside(__file__, "oom_snapshot.jinja", found=found, grows=grows, size_text=size_text)
    return text.rstrip("\n")
