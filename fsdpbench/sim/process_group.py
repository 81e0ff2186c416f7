"""The backend "sim" of torch.distributed: collectives that take time on a stream and move nothing.

What NCCL's process group does, with its stream semantics since torch 2.8:

* ``async_op=False``: the kernel goes on the current stream. The CPU does not wait.
* ``async_op=True``: it goes on the group's own stream, behind what the current stream holds. `Work.wait()`
  makes the stream that is current then wait for it; until then the work holds its tensors, so that their
  memory is not reused.
* Kernels of one communicator run one after another, whatever streams they are on.

Only the own rank is simulated; the others are taken to arrive at the same time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from fsdpbench.sim.accelerator import ACCELERATOR, DEVICE_TYPE
from fsdpbench.sim.collective_work import CollectiveRecord, CollectiveWork
from fsdpbench.sim.tensors import is_on_device, new_tensor
from fsdpbench.sim.timeline import Marker, Work
from fsdpbench.sim.trace_records import KernelRecord

BACKEND = "sim"


if TYPE_CHECKING:
    # torch's stubs overload the collectives in ways that no Python class can repeat.
    class _ProcessGroup:
        def __init__(self, rank: int, size: int) -> None: ...

else:
    _ProcessGroup = dist.ProcessGroup


class SimProcessGroup(_ProcessGroup):
    """One communicator. ``ranks`` are the global ranks of its members."""

    supports_splitting = False
    supports_coalescing = True

    def __init__(self, rank: int, size: int, ranks: Sequence[int], name: str) -> None:
        super().__init__(rank, size)
        self._rank_in_group = rank
        self._group_size = size
        self._ranks = _as_range(ranks)
        self._name = name
        self._description = "default_pg" if name == "0" else "undefined"
        self._own_stream: int | None = None
        self._last: Marker | None = None
        self._coalesced: list[tuple[str, int, list[torch.Tensor], list[torch.Tensor]]] | None = None
        ACCELERATOR.process_groups.append(self)

    # ------------------------------------------------------------- what torch asks of a process group

    def rank(self) -> int:
        """Rank in this group."""
        return self._rank_in_group

    def size(self) -> int:
        """Number of members."""
        return self._group_size

    def getBackendName(self) -> str:  # noqa: N802 (torch's name)
        """Name of the backend."""
        return BACKEND

    def name(self) -> str:
        """Name of the backend."""
        return BACKEND

    @property
    def pg_name(self) -> str:
        """The name that torch gave the group."""
        return self._name

    @property
    def group_name(self) -> str:
        """The name that torch gave the group."""
        return self._name

    @property
    def group_desc(self) -> str:
        """What the group is for."""
        return self._description

    @property
    def ranks(self) -> Sequence[int]:
        """Global ranks of the members."""
        return self._ranks

    def _get_backend(self, device: Any) -> SimProcessGroup:
        return self

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def _set_group_desc(self, description: str) -> None:
        self._description = description

    def _get_sequence_number_for_group(self) -> int:
        return 0

    def shutdown(self) -> None:
        """Nothing to end."""

    def abort(self) -> None:
        """Nothing to end."""

    # -------------------------------------------------------------------------------------- collectives

    def all_gather_single(
        self, output: torch.Tensor, input: torch.Tensor, opts: Any = None
    ) -> CollectiveWork:
        """Gather equal shards into one tensor."""
        return self._run("all_gather", _bytes(output), [input], [output], opts)

    def reduce_scatter_single(
        self, output: torch.Tensor, input: torch.Tensor, opts: Any = None
    ) -> CollectiveWork:
        """Reduce a tensor and keep one shard."""
        return self._run("reduce_scatter", _bytes(input), [input], [output], opts)

    # Names of torch before 2.13.
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> CollectiveWork:
        """Reduce tensors in place."""
        return self._run("all_reduce", _bytes(*tensors), tensors, tensors, opts)

    def broadcast(self, tensors: list[torch.Tensor], opts: Any = None) -> CollectiveWork:
        """Copy tensors from one rank to all."""
        return self._run("broadcast", _bytes(*tensors), tensors, tensors, opts)

    def reduce(self, tensors: list[torch.Tensor], opts: Any = None) -> CollectiveWork:
        """Reduce to one rank: half of an all-reduce."""
        return self._run("reduce_scatter", _bytes(*tensors), tensors, tensors, opts)

    def allgather(
        self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any = None
    ) -> CollectiveWork:
        """Gather into a list: through one flat buffer where sizes are equal, and a copy out of it."""
        flat = [tensor for tensor_list in outputs for tensor in tensor_list]
        return self._run_list("all_gather", inputs, flat, flat, opts)

    def reduce_scatter(
        self, outputs: list[torch.Tensor], inputs: list[list[torch.Tensor]], opts: Any = None
    ) -> CollectiveWork:
        """Reduce a list and keep one of it: a copy into one flat buffer first where sizes are equal."""
        flat = [tensor for tensor_list in inputs for tensor in tensor_list]
        return self._run_list("reduce_scatter", flat, outputs, flat, opts)

    def alltoall_base(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: list[int],
        input_split_sizes: list[int],
        opts: Any = None,
    ) -> CollectiveWork:
        """Every rank sends a part to every rank."""
        return self._run("all_to_all", _bytes(input), [input], [output], opts)

    all_to_all_single = alltoall_base

    def alltoall(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> CollectiveWork:
        """Every rank sends a tensor to every rank."""
        return self._run("all_to_all", _bytes(*inputs), inputs, outputs, opts)

    def gather(
        self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any = None
    ) -> CollectiveWork:
        """Gather to one rank: it receives as much as in an all-gather."""
        return self._run("all_gather", _bytes(*inputs) * self._group_size, inputs, inputs, opts)

    def scatter(
        self, outputs: list[torch.Tensor], inputs: list[list[torch.Tensor]], opts: Any = None
    ) -> CollectiveWork:
        """Scatter from one rank: it sends as much as in a broadcast."""
        return self._run("broadcast", _bytes(*outputs) * self._group_size, outputs, outputs, opts)

    def barrier(self, opts: Any = None) -> CollectiveWork:
        """Wait for all ranks; the CPU waits too."""
        work = self._run("barrier", 0, [], [], opts)
        return CollectiveWork(work.marker, (), blocks_cpu=True)

    def allreduce_coalesced(self, tensors: list[torch.Tensor], opts: Any = None) -> CollectiveWork:
        """Reduce tensors in place, in one group of kernels."""
        return self._run("all_reduce", _bytes(*tensors), tensors, tensors, opts)

    def all_gather_single_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> CollectiveWork:
        """Several all-gathers in one group of kernels."""
        return self._run("all_gather", _bytes(*outputs), inputs, outputs, opts)

    def reduce_scatter_single_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> CollectiveWork:
        """Several reduce-scatters in one group of kernels."""
        return self._run("reduce_scatter", _bytes(*inputs), inputs, outputs, opts)

    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def send(self, tensors: list[torch.Tensor], rank: int, tag: int = 0) -> CollectiveWork:
        """Not simulated: the other rank is not there."""
        raise NotImplementedError(
            "send and recv are not simulated: only one rank runs, and point-to-point needs its partner"
        )

    recv = send

    def _start_coalescing(self, device: Any) -> None:
        self._coalesced = []

    def _end_coalescing(self, device: Any) -> CollectiveWork | None:
        calls, self._coalesced = self._coalesced or [], None
        if not calls:
            return None
        ins = [tensor for call in calls for tensor in call[2]]
        outs = [tensor for call in calls for tensor in call[3]]
        return self._run(calls[0][0], sum(call[1] for call in calls), ins, outs, None)

    # ------------------------------------------------------------------------------------ how they run

    def _run(
        self, kind: str, nbytes: int, inputs: list[torch.Tensor], outputs: list[torch.Tensor], opts: Any
    ) -> CollectiveWork:
        """Queue one collective; ``nbytes`` as `Network.collective_ns` counts them."""
        if self._coalesced is not None:
            self._coalesced.append((kind, nbytes, inputs, outputs))
            return CollectiveWork(None, outputs)
        timeline = ACCELERATOR.timeline
        start = timeline.cpu
        timeline.cpu += ACCELERATOR.cpu_costs.collective_ns
        if any(not is_on_device(tensor) for tensor in outputs):
            return CollectiveWork(None, outputs)  # of the host's memory, as through gloo: no device time
        asynchronous = opts is None or getattr(opts, "asyncOp", True)
        stream = self._stream_behind_current() if asynchronous else ACCELERATOR.stream
        self._queue(stream, kind, nbytes, inputs, outputs, opts, start)
        return CollectiveWork(self._last, [*outputs, *inputs] if asynchronous else outputs)

    def _stream_behind_current(self) -> int:
        """The group's own stream, made to wait for what the current stream holds."""
        timeline = ACCELERATOR.timeline
        if self._own_stream is None:
            self._own_stream = timeline.add_stream()
        timeline.make_wait(self._own_stream, timeline.record(ACCELERATOR.stream))
        return self._own_stream

    def _queue(
        self,
        stream: int,
        kind: str,
        nbytes: int,
        inputs: list[torch.Tensor],
        outputs: list[torch.Tensor],
        opts: Any,
        start: int,
    ) -> None:
        accelerator = ACCELERATOR
        timeline = accelerator.timeline
        if self._last is not None:
            timeline.make_wait(stream, self._last)
        duration = accelerator.network.collective_ns(kind, nbytes, self._ranks)
        payload = None
        if accelerator.trace is not None:
            launched = timeline.cpu
            payload = CollectiveRecord(
                self, kind, inputs, outputs, launched - accelerator.cpu_costs.launch_ns, launched
            )
            accelerator.trace.cpu_op(_CPU_OPS.get(kind, f"c10d::{kind}_"), start, launched)
        timeline.launch(stream, Work.COLLECTIVE, duration, payload)
        self._last = timeline.record(stream)

    def _run_list(
        self,
        kind: str,
        inputs: list[torch.Tensor],
        outputs: list[torch.Tensor],
        listed: list[torch.Tensor],
        opts: Any,
    ) -> CollectiveWork:
        """List forms: equal sizes go through a flat buffer with a copy, others as they are."""
        nbytes = _bytes(*listed)
        if len({tensor.numel() for tensor in listed}) > 1 or not all(map(is_on_device, listed)):
            return self._run(kind, nbytes, inputs, outputs, opts)
        accelerator = ACCELERATOR
        flat = new_tensor((sum(tensor.numel() for tensor in listed),), None, listed[0].dtype, nbytes)
        if kind == "reduce_scatter":
            _launch_copy(accelerator.stream, nbytes)
        work = self._run(kind, nbytes, inputs, outputs, opts)
        if kind == "all_gather" and self._coalesced is None:
            asynchronous = opts is None or getattr(opts, "asyncOp", True)
            stream = self._own_stream if asynchronous and self._own_stream is not None else accelerator.stream
            _launch_copy(stream, nbytes)
            work.marker = self._last = accelerator.timeline.record(stream)
        work.tensors = [*work.tensors, flat]
        return work


def _launch_copy(stream: int, nbytes: int) -> None:
    """The kernel that copies between a list and a flat buffer."""
    accelerator = ACCELERATOR
    timeline = accelerator.timeline
    start = timeline.cpu
    timeline.cpu += accelerator.cpu_costs.launch_ns
    payload = None if accelerator.trace is None else KernelRecord("copy_kernel", start, timeline.cpu)
    duration = accelerator.kernel_costs.memory_bound_ns(2 * nbytes, "copy")
    timeline.launch(stream, Work.COMPUTE, duration, payload)


_CPU_OPS = {
    "all_gather": "c10d::_allgather_base_",
    "reduce_scatter": "c10d::_reduce_scatter_base_",
    "all_reduce": "c10d::allreduce_",
    "broadcast": "c10d::broadcast_",
    "all_to_all": "c10d::alltoall_base_",
    "barrier": "c10d::barrier",
}


def register_backend() -> None:
    """Make ``dist.init_process_group("sim")`` known."""
    if BACKEND.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(BACKEND, _create, extended_api=True, devices=[DEVICE_TYPE, "cpu"])


def _create(options: Any, backend_options: Any) -> SimProcessGroup:
    ranks = list(options.global_ranks_in_group) or range(options.group_size)
    return SimProcessGroup(options.group_rank, options.group_size, ranks, options.group_id)


def _bytes(*tensors: torch.Tensor) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _as_range(ranks: Sequence[int]) -> Sequence[int]:
    """Evenly spaced ranks as a range, so that nothing walks through them again."""
    if len(ranks) < 2:
        return range(ranks[0], ranks[0] + 1) if ranks else range(0)
    step = ranks[1] - ranks[0]
    candidate = range(ranks[0], ranks[-1] + (1 if step > 0 else -1), step or 1)
    return candidate if list(candidate) == list(ranks) else tuple(ranks)
