"""Lines below the figures of `fsdpbench run`: ranks, decisions, files, data races, buffers, a soak."""

import json
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

import msgspec

from fsdpbench.base.result_sections import PlaceholderDecision
from fsdpbench.reports.result import Access, RankComparison, Result

_MOST_SHOWN = 5
_GIB = 2**30
_SETTINGS = re.compile(r" \([a-z_]+=[^()]*\)")
_COSTS = {
    "exposed_communication": "communication that nothing hides",
    "idle": "an idle GPU",
}


def describe_script(result: Result) -> list[str]:
    """Return lines on a measured script: memory, MFU, its largest cost. Empty without figures."""
    if not result.script or not result.step_time_s:
        return []
    parts = []
    if result.reserved:
        capacity = result.machine.get("memory_bytes")
        of = f" of {capacity / _GIB:.1f}" if capacity else ""
        parts.append(f"{result.reserved / _GIB:.1f}{of} GiB reserved at the peak")
    if result.mfu:
        parts.append(f"MFU {result.mfu:.1%}")
    lines = [", ".join(parts)] if parts else []
    largest = _largest_cost(result)
    return [*lines, largest] if largest else lines


def _largest_cost(result: Result) -> str | None:
    """Return a sentence on the largest cost of a step beside computing; None without a trace."""
    if (parts := result.time_s) is None or not (total := sum(msgspec.structs.astuple(parts))):
        return None
    name = max(_COSTS, key=lambda each: float(getattr(parts, each)))
    seconds, computing = getattr(parts, name), (parts.compute_only + parts.overlapped) / total
    cost = f"{_COSTS[name]}, {seconds / total:.1%}"
    text = f"{computing:.0%} of a step computes; the largest cost beside it: {cost}"
    verdict = (result.verdict or {}).get("sentence")
    # Without the settings of the bench that it names: a script has none of them.
    return f"{text}. {_SETTINGS.sub('', verdict)}" if verdict else text


def script_notes(result: Result) -> list[str]:
    """Return notes on a script: comparison of ranks, decided values, redirected files."""
    return [
        *_ranks(result.rank_check, str(result.message), int((result.config or {})["gpus"])),
        *_decisions(result.placeholder_decisions or []),
        *_files(result),
    ]


def _ranks(check: RankComparison | None, cause: str, gpus: int) -> list[str]:
    """Return the result of comparing ranks: both stacks of a difference, the script's own lines first."""
    if check is None:
        return []
    difference = check.difference
    if difference is None:
        calls = check.collectives.calls
        counts = sorted(set(calls.values()))
        number = f"{counts[0]:,}" if len(counts) == 1 else f"{counts[0]:,} to {counts[-1]:,}"
        alike = ", and fail in the same way" if "ok" not in check.collectives.ended.values() else ""
        text = f"ranks {', '.join(calls)} call the same {number} collectives{alike}"
        rest = gpus - len(calls)
        left = "" if rest <= 0 else f"; the other {rest} were not run (--check-ranks {gpus} runs all)"
        return [text + left]
    lines = [] if difference.message in cause else [difference.message]  # the cause is shown as well
    sides = ((difference.rank, difference.stack), (difference.other_rank, difference.other_stack))
    for rank, stack in sides:
        if stack:
            lines.append(f"  rank {rank}, your lines first, innermost first:")
            lines += [f"    {each.file}:{each.line} in {each.function}" for each in stack]
    return lines


def _decisions(decisions: list[PlaceholderDecision]) -> list[str]:
    if not decisions:
        return []
    most = sorted(decisions, key=lambda each: -each.count)
    lines = [
        f"  {Path(each.file).name}:{each.line}: {each.operation} -> {json.dumps(each.answer)}, "
        f"{each.count} {'time' if each.count == 1 else 'times'}"
        for each in most[:_MOST_SHOWN]
    ]
    rest = f" (the most frequent of {len(most)}; all are in result.json)" if len(most) > _MOST_SHOWN else ""
    return [f"the script decided by values that simulated tensors do not have{rest}:", *lines]


def _files(result: Result) -> list[str]:
    files = result.redirected_files
    if not isinstance(files, dict) or not files:
        return []
    lines = []
    if files["count"]:
        shown = ", ".join(files["files"][:_MOST_SHOWN]) + (", ..." if files["count"] > _MOST_SHOWN else "")
        where = Path(result.folder or "") / files["folder"]
        what = "1 file" if files["count"] == 1 else f"{files['count']} files"
        lines.append(f"{what} of simulated tensors ({files['bytes'] / 1e6:,.1f} MB) went to {where}: {shown}")
    if files["left_in_place"]:
        shown = ", ".join(files["left_in_place"][:_MOST_SHOWN])
        lines.append(f"removed or replaced for the script alone, still there: {shown}")
    return lines


def buffer_notes(result: Result) -> list[str]:
    """Return a line about dropped rows and empty places; none without a capacity."""
    rows = result.buffer_rows
    if not rows:
        return []
    sent, dropped, empty = rows["sent"], rows["dropped"], rows["empty"]
    return [
        f"note: the experts' capacity drops {dropped / max(sent, 1):.1%} of their rows ({dropped:,.0f} of "
        f"{sent:,.0f} a step), and {empty / max(sent - dropped + empty, 1):.1%} of what they compute are "
        "empty places, which MFU does not count"
    ]


def sanitizer_notes(result: Result, width: int | None = None) -> list[str]:
    """Return the sanitizer's findings, folded at `width` columns; none where it did not run."""
    found = result.sanitizer
    if found is None:
        return []
    findings = sorted(found.findings, key=lambda each: -each.count)
    count = len(findings)
    if count:
        lines = [f"sanitizer: {count} {'finding' if count == 1 else 'findings'}, the most frequent first"]
    else:
        lines = [f"sanitizer: no race in {found.accesses:,} uses of memory"]
    for finding in findings[:_MOST_SHOWN]:
        kind = finding.kind.replace("_", " ")
        times = "once" if finding.count == 1 else f"{finding.count:,} times"
        lines.append(f"  {kind}, {times}, {finding.bytes:,} bytes ({finding.role}):")
        lines += [f"    {_access_line(side)}" for side in (finding.first, finding.second)]
        lines.append(f"    {finding.hint}")
    if count > _MOST_SHOWN:
        lines.append(f"  {count - _MOST_SHOWN} more in result.json and in the report")
    for hint in found.hints[:_MOST_SHOWN]:
        times = "once" if hint.count == 1 else f"{hint.count:,} times"
        where = hint.stack[0].split(" ")[0] if hint.stack else "unknown"
        lines.append(f"  hint, {times}, at {where}: {hint.hint}")
    return [part for line in lines for part in _folded(line, width)]


def _access_line(access: Access) -> str:
    """Return one access in a line."""
    where = access.line
    if access.forward_line:
        where += f", backward of {access.forward_line}"
    unit = f", {access.unit}" if access.unit else ""
    return f"{access.access:5} {access.operation} at {where}; {access.stream}, {access.phase}{unit}"


def _folded(line: str, width: int | None) -> list[str]:
    if width is None or len(line) <= width:
        return [line]
    indent = " " * (len(line) - len(line.lstrip()) + 6)
    return textwrap.wrap(
        line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def soak_notes(result: Result) -> Iterator[str]:
    """Yield lines on a soak: steps, retries, memory. None without a soak."""
    soak = result.soak
    if soak is None:
        return
    done, over = soak.steps_done, soak.over_steps
    yield f"soak: {done} of {soak.steps} steps, {soak.distinct_shapes} different shapes"
    if soak.out_of_memory_step is not None:
        yield f"soak: out of memory in step {soak.out_of_memory_step}"
    if soak.retries:
        yield f"soak: {soak.retries} allocator retries, the first in step {soak.first_retry_step}"
    reserved = [value for value in over.reserved if value is not None]
    if reserved:
        fragments = max(value or 0 for value in over.inactive_split)
        yield (
            f"soak: the last cudaMalloc in step {soak.last_device_alloc_step}; reserved at most "
            f"{max(reserved) / 2**30:.1f} GiB; up to {fragments / 2**30:.1f} GiB was free in fragments"
        )
