"""`torch.sim.memory`: snapshots and history of the allocator, with the interface of `torch.cuda.memory`.

    torch.cuda.memory._record_memory_history()       # in a script; torch.sim.memory elsewhere
    ...
    torch.cuda.memory._dump_snapshot("memory.pickle")   # opens on https://pytorch.org/memory_viz

The history holds the allocator's events, with Python stacks for allocations and frees. Blocks of a snapshot
have no stack: their ``frames`` are empty.
"""

import pickle
import sys
import traceback
import types
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypedDict

from fsdpbench.sim.model.allocator.caching import CachingAllocator
from fsdpbench.sim.model.allocator.conf import UNLIMITED
from fsdpbench.sim.model.allocator.types import AllocatorAction, AllocatorEvent, Block
from fsdpbench.sim.torch_device.accelerator import Accelerator

_WITH_STACK = (AllocatorAction.ALLOC, AllocatorAction.FREE)
_DEEPEST = 64
_DEFAULT_ENTRIES = sys.maxsize
_PICKLE_PROTOCOL = 4
_Frame = dict[str, str | int]
# An event that only this simulator has; the viewer does not know it.
_NOT_TORCHS = frozenset({AllocatorAction.RETRY})


class MemoryHistory:
    """The allocator's last `max_entries` events, with their stacks if `stacks` is set."""

    def __init__(self, max_entries: int, *, stacks: bool) -> None:
        self._stacks = stacks
        self.entries: deque[tuple[AllocatorEvent, list[_Frame]]] = deque(maxlen=min(max_entries, 1 << 40))

    def add(self, event: AllocatorEvent) -> None:
        """Append one event (called by the allocator)."""
        wanted = self._stacks and event.action in _WITH_STACK
        self.entries.append((event, _frames() if wanted else []))


def _frames() -> list[_Frame]:
    """Return the Python frames, innermost first, without those of the simulator."""
    found: list[_Frame] = []
    for frame, line in traceback.walk_stack(sys._getframe(1)):
        code = frame.f_code
        if "/fsdpbench/sim/" not in code.co_filename:
            found.append({"filename": code.co_filename, "line": line or 0, "name": code.co_name})
        if len(found) == _DEEPEST:
            break
    return found


class MemoryModule(types.ModuleType):
    """The module `torch.sim.memory`; names and arguments are those of `torch.cuda.memory`."""

    def __init__(self, accelerator: Accelerator) -> None:
        super().__init__("torch.sim.memory", "History and snapshots of the simulated allocator.")
        self._accelerator = accelerator
        self._history: MemoryHistory | None = None

    def _record_memory_history(
        self,
        enabled: str | bool | None = "all",
        context: str | None = "all",
        stacks: str = "python",
        max_entries: int = _DEFAULT_ENTRIES,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """Begin a history and discard an earlier one; `enabled=None` ends it.

        Like torch, `context=None` and `context="state"` omit the stacks of past events.
        """
        self._accelerator.require_started()
        if self._history is not None:
            self._accelerator.stop_listening(self._history.add)
            self._history = None
        if enabled:
            self._history = MemoryHistory(max_entries, stacks=context in ("all", "alloc"))
            self._accelerator.listen(self._history.add)

    def _snapshot(self, device: Any = None, *args: Any, **kwargs: Any) -> "Snapshot":
        """Return segments and blocks, and the history if one is recorded."""
        self._accelerator.require_started()
        entries = [] if self._history is None else list(self._history.entries)
        entries = [entry for entry in entries if entry[0].action is not AllocatorAction.RETRY]
        snapshot = take_snapshot(self._accelerator.allocator, [event for event, _ in entries])
        for written, (_, frames) in zip(snapshot["device_traces"][0], entries, strict=True):
            written["frames"] = frames
        return snapshot

    def _dump_snapshot(
        self, filename: str | Path = "dump_snapshot.pickle", *args: Any, **kwargs: Any
    ) -> None:
        """Write `_snapshot` to a file for PyTorch's memory viewer."""
        Path(filename).write_bytes(pickle.dumps(self._snapshot(), protocol=_PICKLE_PROTOCOL))

    def memory_snapshot(self, *args: Any, **kwargs: Any) -> list[dict[str, object]]:
        """Return the segments of `_snapshot`."""
        return self._snapshot()["segments"]


class Snapshot(TypedDict):
    """A snapshot in torch's format, with one trace per device."""

    segments: list[dict[str, object]]
    device_traces: list[list[dict[str, object]]]
    external_annotations: list[str]
    allocator_settings: dict[str, object]


def take_snapshot(allocator: CachingAllocator, events: Sequence[AllocatorEvent] = ()) -> "Snapshot":
    """Return the current segments and blocks, with `events` as the history."""
    return {
        "segments": [_segment(blocks) for blocks in _segments(allocator)],
        "device_traces": [[_entry(event) for event in events if event.action not in _NOT_TORCHS]],
        "external_annotations": [],
        "allocator_settings": _settings(allocator),
    }


def _segments(allocator: CachingAllocator) -> list[list[Block]]:
    """Return mapped blocks by segment; each gap-free range of an expandable segment counts as one."""
    free = [block for pool in (allocator.small_pool, allocator.large_pool) for block in pool.blocks()]
    blocks = sorted([*allocator.active_blocks.values(), *free], key=lambda block: block.address)
    segments: list[list[Block]] = []
    for block in blocks:
        if block.prev is None or not block.prev.mapped:
            segments.append([])
        segments[-1].append(block)
    return segments


def _segment(blocks: Sequence[Block]) -> dict[str, object]:
    first = blocks[0]
    return {
        "device": 0,
        "address": first.address,
        "total_size": sum(block.size for block in blocks),
        "allocated_size": sum(block.size for block in blocks if block.allocated),
        "active_size": sum(block.size for block in blocks if block.allocated or block.event_count),
        "requested_size": sum(block.requested for block in blocks if block.allocated or block.event_count),
        "stream": first.stream,
        "segment_type": "small" if first.pool.is_small else "large",
        "segment_pool_id": (0, 0),
        "is_expandable": first.expandable is not None,
        "frames": [],
        "blocks": [_block(block) for block in blocks],
    }


def _block(block: Block) -> dict[str, object]:
    state = (
        "active_allocated" if block.allocated else "active_pending_free" if block.event_count else "inactive"
    )
    return {
        "address": block.address,
        "size": block.size,
        "requested_size": block.requested if state != "inactive" else 0,
        "state": state,
        "frames": [],
    }


def _entry(event: AllocatorEvent) -> dict[str, object]:
    return {
        "action": event.action.value,
        "device_free" if event.action is AllocatorAction.OOM else "addr": event.address,
        "size": event.size,
        "stream": event.stream,
        "time_us": event.time_ns // 1000,
        "compile_context": "N/A",
        "user_metadata": "",
        "frames": [],
    }


def _settings(allocator: CachingAllocator) -> dict[str, object]:
    conf = allocator.conf
    return {
        "PYTORCH_CUDA_ALLOC_CONF": "",
        "max_split_size": -1 if conf.max_split_bytes == UNLIMITED else conf.max_split_bytes,
        "garbage_collection_threshold": conf.garbage_collection_threshold,
        "expandable_segments": conf.expandable_segments,
        "roundup_power2_divisions": {
            str(1 << index): divisions for index, divisions in enumerate(conf.roundup_power2_divisions)
        },
    }
