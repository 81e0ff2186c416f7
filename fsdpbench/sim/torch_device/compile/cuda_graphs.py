"""CUDA graphs (`mode="reduce-overhead"`): a captured graph costs the CPU one launch.

As in torch's "CUDA graph trees", the first call of a graph warms up, the second is captured, and later ones
are replayed. All captured graphs share one private memory pool; the outputs of a replay have the addresses of
the capture. Inputs are read at fixed addresses: parameters at other addresses need a new capture, and inputs
that no captured graph produced are first copied, each time.

    call 1, 2   CPU   |k1|k2|k3|..                 call 3   CPU   |graph|
                GPU      [k1][k2][k3]                       GPU         [copies of inputs][k1][k2][k3]
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from fsdpbench.base.torch_internals import (
    check_cudagraph_devices,
    check_cudagraph_mutation,
    first_node_not_for_cudagraphs,
    inductor_virtualized,
)
from fsdpbench.sim.model.timeline import Timeline, Work
from fsdpbench.sim.model.trace_recorder import KernelRecord
from fsdpbench.sim.torch_device.accelerator import ACCELERATOR
from fsdpbench.sim.torch_device.tensors import address, is_on_device, new_tensor, record_of

MOST_CAPTURES = 128
"""Maximum captures of one graph; torch runs others without (`triton.cudagraph_unexpected_rerecord_limit`).
"""
_WARM_UPS = 1


def why_not_captured(static: Sequence[int]) -> str:
    """Return torch's one-line reason not to capture the graph being lowered, or "" without one."""
    graph = inductor_virtualized.graph
    if graph.disable_cudagraphs_reason:
        return _one_line(graph.disable_cudagraphs_reason)
    node = first_node_not_for_cudagraphs(graph.module)
    if node is not None:
        return f"incompatible operator {node.target}"
    mutation = check_cudagraph_mutation(graph.module, graph.mutated_inputs, graph.mutated_input_idxs, static)
    return _one_line(mutation or check_cudagraph_devices(dict(graph.device_node_mapping)) or "")


def _one_line(reason: str) -> str:
    lines = reason.removeprefix("skipping cudagraphs due to ").splitlines()
    return lines[0].partition(". Found from")[0] if lines else ""


class CapturedGraph:
    """Captures of one compiled graph: one for each set of parameter addresses.

    `static`: positions of inputs with fixed addresses.
    """

    def __init__(self, static: Sequence[int]) -> None:
        self._static = frozenset(static)
        self._seen: dict[tuple[Any, ...], int] = {}
        self._buffers: dict[tuple[Any, ...], list[torch.Tensor]] = {}
        self._to_copy: list[torch.Tensor] = []
        self._key: tuple[Any, ...] = ()
        self.captures = self.replays = self.left_out = 0

    def take_inputs(self, args: Sequence[Any]) -> None:
        """Register the inputs of the next call."""
        pool = _pool()
        key: list[Any] = []
        self._to_copy = []
        for index, value in enumerate(args):
            outside = isinstance(value, torch.Tensor) and is_on_device(value) and not _is_of(pool, value)
            key.append((tuple(value.shape), value.stride()) if isinstance(value, torch.Tensor) else value)
            if outside and index in self._static:
                key.append((address(value.untyped_storage()), value.storage_offset()))
            elif outside:
                self._to_copy.append(value)
        self._key = tuple(key)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Run one call: warm up, capture or replay."""
        accelerator, key = ACCELERATOR, self._key
        seen = self._seen.get(key, 0)
        if not seen and len(self._seen) >= MOST_CAPTURES:
            self.left_out += 1
            yield
            return
        self._seen[key] = seen + 1
        replays = seen > _WARM_UPS
        self.captures += seen == _WARM_UPS
        self.replays += replays
        if replays:
            self._copy_inputs()
            accelerator.launch_graph()
        timeline, before = accelerator.timeline, accelerator.graph_pool
        accelerator.graph_pool = _pool()
        try:
            if seen == _WARM_UPS:
                self._buffers[key] = [
                    new_tensor(tuple(each.shape), None, each.dtype, each.numel() * each.element_size())
                    for each in self._to_copy
                ]
            if replays:
                accelerator.timeline = _Standing(timeline)  # type: ignore[assignment]
            yield
        finally:
            accelerator.timeline, accelerator.graph_pool = timeline, before
            self._to_copy = []

    def _copy_inputs(self) -> None:
        """Copy all inputs in one kernel, like `_foreach_copy_`."""
        nbytes = 2 * sum(value.numel() * value.element_size() for value in self._to_copy)
        if not nbytes:
            return
        accelerator = ACCELERATOR
        timeline, costs = accelerator.timeline, accelerator.cpu_costs
        start = timeline.cpu
        launched = start + costs.operator_ns
        timeline.cpu = launched + costs.launch_ns
        name = "_foreach_copy__kernel"
        payload = None if accelerator.trace is None else KernelRecord(name, launched, timeline.cpu)
        duration_ns = accelerator.kernel_costs.memory_bound_ns(nbytes, "copy")
        timeline.launch(accelerator.stream, Work.COMPUTE, duration_ns, payload)
        accelerator.operators_launched += 1
        if accelerator.trace is not None:
            accelerator.trace.cpu_op("aten::_foreach_copy_", start, timeline.cpu)


class _Standing:
    """Timeline during a replay: all kernels come with one launch, so the CPU's clock does not advance."""

    __slots__ = ("_timeline",)

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline

    @property
    def cpu(self) -> int:
        return self._timeline.cpu

    @cpu.setter
    def cpu(self, value: int) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return getattr(self._timeline, name)


_POOL: dict[int, int] = {}
"""The pool's stream, by the timeline's id: each simulation has one."""


def _pool() -> int:
    timeline: Any = ACCELERATOR.timeline
    pool = _POOL.get(id(timeline))
    if pool is None:
        _POOL.clear()
        pool = _POOL[id(timeline)] = timeline.add_stream()
        for blocks in (ACCELERATOR.allocator.small_pool, ACCELERATOR.allocator.large_pool):
            blocks.kept.add(pool)
    return pool


def _is_of(pool: int, tensor: torch.Tensor) -> bool:
    record = record_of(tensor.untyped_storage())
    return record is not None and getattr(record.block, "stream", None) == pool
