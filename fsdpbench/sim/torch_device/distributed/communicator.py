"""Communicators, whose collectives take time on a stream and move no data.

They behave like NCCL's process group, with its stream semantics since torch 2.8:

- `async_op=False`: the kernel runs on the current stream. The CPU does not wait.
- `async_op=True`: it runs on the group's own stream, after the current stream's work. `Work.wait()` makes the
stream that is current then wait for it. Until then its tensors are held, so their memory is not reused. If a
work is dropped without `wait()`, its tensors are held until the device has completed it.
- Kernels of one communicator run one after another, on whatever streams.

Before 2.8 all kernels ran on the group's own stream, and `record_stream` protected their tensors:
`Accelerator.collectives_on_own_streams` (`collectives.own_streams` of a software profile).

Other ranks arrive at the same time, except those of other pipeline stages, which run themselves (`stages`).
"""

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import Work

from fsdpbench.sim.model.coupling import Arrival
from fsdpbench.sim.model.timeline import Marker, Meeting, Timeline
from fsdpbench.sim.model.timeline import Work as WorkKind
from fsdpbench.sim.model.trace_recorder import CollectiveRecord, KernelRecord
from fsdpbench.sim.torch_device.accelerator import DEVICE_TYPE, Accelerator
from fsdpbench.sim.torch_device.distributed.collective_work import CollectiveWork
from fsdpbench.sim.torch_device.distributed.stages import StageCalls
from fsdpbench.sim.torch_device.distributed.symmetric import gathers_by_copy_engines
from fsdpbench.sim.torch_device.operators.known_values import fill_on_host, follow_collective
from fsdpbench.sim.torch_device.operators.plans import inputs_text
from fsdpbench.sim.torch_device.strict.words import error_text, scalar_type
from fsdpbench.sim.torch_device.tensors import is_on_device, new_tensor, use_on_stream

if TYPE_CHECKING:

    class _ProcessGroup:
        def __init__(self, rank: int, size: int) -> None: ...

else:
    _ProcessGroup = dist.ProcessGroup

_MAIN_THREAD = threading.main_thread().ident
# The plain query, even with observers: the program does not make this query.
_has_passed = Timeline.has_passed
_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


class Membership(_ProcessGroup):
    """One communicator. `ranks`: the global ranks of its members."""

    supports_splitting = False
    supports_coalescing = True
    backend_name: str

    def __init__(self, rank: int, size: int, ranks: Sequence[int], name: str) -> None:
        super().__init__(rank, size)
        self._rank_in_group = rank
        self._group_size = size
        self._ranks = as_range(ranks)
        self._name = name
        self._description = "default_pg" if name == "0" else "undefined"

    def name(self) -> str:
        """Return the name of the backend."""
        return self.backend_name

    getBackendName = name  # noqa: N815 (torch's name)

    @property
    def group_name(self) -> str:
        """Return torch's name of the group."""
        return self._name

    pg_name = group_name

    @property
    def group_desc(self) -> str:
        """Return the purpose of the group."""
        return self._description

    @property
    def ranks(self) -> Sequence[int]:
        """Return the global ranks of the members."""
        return self._ranks

    def _get_backend(self, device: Any) -> "Membership":
        return self

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def _set_group_desc(self, description: str) -> None:
        self._description = description

    def _get_sequence_number_for_group(self) -> int:
        return 0

    def shutdown(self) -> None:
        """Do nothing, because nothing runs."""

    abort = shutdown


def total_bytes(*tensors: torch.Tensor) -> int:
    """Return the bytes of all elements."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def as_range(ranks: Sequence[int]) -> Sequence[int]:
    """Return evenly spaced ranks as a range, so later uses need not iterate over them."""
    if len(ranks) < 2:
        return range(ranks[0], ranks[0] + 1) if ranks else range(0)
    step = ranks[1] - ranks[0]
    candidate = range(ranks[0], ranks[-1] + (1 if step > 0 else -1), step or 1)
    return candidate if list(candidate) == list(ranks) else tuple(ranks)


@dataclass
class Lane:
    """An NCCL communicator of a group, or of two of its ranks: its stream, and the end of its last kernel."""

    stream: int | None = None
    last: Marker | None = None


class Collective(NamedTuple):
    """A collective, or `members` of them in one group; `nbytes` as in `Network.collective_ns`."""

    kind: str
    nbytes: int
    inputs: list[torch.Tensor]
    outputs: list[torch.Tensor]
    opts: Any = None
    members: int = 1
    parts: "Sequence[Collective]" = ()
    arrivals: Sequence[Arrival] = ()
    """Arrivals, if ranks of other stages take part."""
    ranks: Sequence[int] = ()
    """Ranks of a message; empty means all of the group."""
    lane: Lane | None = None

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Return the tensors of a message, in either direction."""
        return [*self.inputs, *self.outputs]


class Communicator(Membership):
    """A communicator of the simulated device, which runs collectives singly or coalesced."""

    _coalesced: list[Collective] | None = None
    asked_backend = ""
    """The backend that a script requested, if not NCCL."""
    takes_host = True
    """Whether host tensors may take part; False if the script requested only NCCL."""

    def __init__(
        self, accelerator: Accelerator, rank: int, size: int, ranks: Sequence[int], name: str
    ) -> None:
        super().__init__(rank, size, ranks, name)
        self._accelerator = accelerator
        self._lane = Lane()
        self._lanes_of_pairs: defaultdict[int, Lane] = defaultdict(Lane)
        self.stages = StageCalls(accelerator, self._ranks, self._key)
        # Tensors of works that the program may drop without waiting.
        self._shelves: deque[tuple[Marker, list[torch.Tensor]]] = deque()
        self._accelerator.process_groups.append(self)

    @property
    def _device_types(self) -> list[torch.device]:
        """Return the devices of a group's tensors; torch's own answer covers only C++ backends."""
        host, device = torch.device("cpu"), torch.device(DEVICE_TYPE)
        if self.asked_backend == "gloo":
            return [host]
        return [host, device] if "cpu:" in self.asked_backend else [device]

    def refuse(self, tensors: Sequence[torch.Tensor]) -> None:
        """Raise NCCL's errors for tensors that it does not accept. Gloo handles host tensors."""
        on_host = any(tensor.is_cpu for tensor in tensors)
        if on_host and not self.takes_host:
            raise RuntimeError("No backend type associated with device type cpu")
        if not on_host:
            refuse_strided(tensors)

    def _start_coalescing(self, device: Any) -> None:
        self._coalesced = []

    def _end_coalescing(self, device: Any) -> Work | None:
        calls, self._coalesced = self._coalesced or [], None
        if not calls:
            return None
        inputs = [tensor for call in calls for tensor in call.inputs]
        outputs = [tensor for call in calls for tensor in call.outputs]
        nbytes = sum(call.nbytes for call in calls)
        kind, members = calls[0].kind, len(calls)
        if kind in ("send", "recv"):
            sent, received = (
                [(call.opts, call.nbytes) for call in calls if call.kind == each] for each in ("send", "recv")
            )
            peers = {self._ranks[call.opts] for call in calls}
            unlike = not are_like_neighbours(sent, received, self._rank_in_group, self._group_size)
            if unlike or peers.intersection(self.stages.members):
                self.stages.need(sorted(peers))
                return self.exchange(calls)
            kind, members, nbytes = "send_recv", len(sent), nbytes // 2
        return self.call(Collective(kind, nbytes, inputs, outputs, members=members, parts=calls))

    def call(self, what: Collective) -> Work:
        """Run a collective, or only collect it while the program coalesces."""
        self.refuse(what.inputs if what.inputs is what.outputs else (*what.inputs, *what.outputs))
        if self._coalesced is not None:
            self._coalesced.append(what)
            return _Queued()
        return self.run(what)

    def exchange(self, calls: Sequence[Collective], peer: int | None = None, tag: int = 0) -> Work:
        """Run messages with ranks of other stages: a batch, or a single one with `peer` (host tensors also
        have a `tag`)."""
        stages, network = self.stages, self._accelerator.network
        inputs = [tensor for call in calls for tensor in call.inputs]
        outputs = [tensor for call in calls for tensor in call.outputs]
        if any(tensor.is_cpu for tensor in (*inputs, *outputs)):
            return stages.on_host_between([(call.kind, call.opts, call.tensors[0]) for call in calls], tag)
        lane, name = (self._lane, "batch") if peer is None else (self._lanes_of_pairs[peer], "pair")
        arrivals = [stages.message(call.kind, call.tensors, call.opts, name) for call in calls]
        nbytes = max(sum(call.nbytes for call in calls if call.kind == way) for way in ("send", "recv"))
        pairs = [(self._ranks[self._rank_in_group], self._ranks[call.opts]) for call in calls]
        slowest = max(pairs, key=lambda pair: network.collective_ns("send_recv", nbytes, pair))
        made = self.run(
            Collective("send_recv", nbytes, inputs, outputs, None, len(calls), (), arrivals, slowest, lane)
        )
        for call, arrival in zip(calls, arrivals, strict=True):
            stages.show(arrival, call.inputs, call.outputs)
        received = [(arrival, call.outputs) for call, arrival in zip(calls, arrivals, strict=True)]
        made.before_wait = partial(stages.receive, [each for each in received if each[1]])
        return made

    def run(self, what: Collective) -> CollectiveWork:
        """Queue a collective on a stream; a barrier also blocks the CPU."""
        kind, _, inputs, outputs, opts, members = what[:6]
        lane = what.lane or self._lane
        accelerator = self._accelerator
        timeline = accelerator.timeline
        if accelerator.backward.is_active:
            accelerator.backward.arrive()
        if threading.get_ident() != _MAIN_THREAD and not any(map(is_on_device, outputs)):
            return CollectiveWork(accelerator, None, outputs)  # a checkpoint thread, concurrent with training
        accelerator.python.before(kind)
        start = timeline.cpu
        timeline.cpu += accelerator.cpu_costs.collective_ns + (members - 1) * MEMBER_CPU_NS
        if any(not is_on_device(tensor) for tensor in outputs):  # gloo: takes no device time
            if not self.stages.on_host(what):
                self._follow(what, fill_on_host)
            return CollectiveWork(accelerator, None, outputs)
        shared = None if what.arrivals else self.stages.collective(kind, inputs)
        own, asynchronous = accelerator.collectives_on_own_streams, _is_asynchronous(opts)
        stream = self._stream_behind_current(lane) if own or asynchronous else accelerator.stream
        if accelerator.sanitizer is not None:
            awaited = own or asynchronous
            accelerator.sanitizer.collective(stream, kind, inputs, outputs, awaited=awaited, group=self._name)
        if accelerator.account is not None:
            accelerator.account.collective(kind, inputs, outputs)
        text = "" if accelerator.trace is None else _inputs_of(kind, inputs, outputs, opts)
        self._queue(stream, what if shared is None else what._replace(arrivals=[shared]), start, text, lane)
        if accelerator.known_values and not what.arrivals and shared is None:
            self._follow(what, follow_collective)
        if own:
            for tensor in (*inputs, *outputs):
                use_on_stream(tensor, stream)
        shelved = asynchronous and not own
        held = [*outputs, *inputs] if shelved else outputs
        work = CollectiveWork(accelerator, lane.last, held, blocks_cpu=kind == "barrier")
        if shared is not None and inputs:
            self.stages.show(shared, inputs, outputs)
            work.before_wait = partial(self.stages.share, shared, what)
        if shelved:
            self._shelve(work)
        return work

    def _follow(self, what: Collective, follow: Callable[[Any, int, int], None]) -> None:
        """Compute the known values of each part of a collective with `follow`."""
        for part in what.parts or (what,):
            follow(part, self._group_size, self._rank_in_group)

    def _shelve(self, work: CollectiveWork) -> None:
        """Hold a work's tensors until it is waited for, or is complete when another work is queued."""
        shelves, timeline = self._shelves, self._accelerator.timeline
        while shelves and (not shelves[0][1] or _has_passed(timeline, shelves[0][0])):
            marker, tensors = shelves.popleft()
            if tensors and self._accelerator.sanitizer is not None:
                self._accelerator.sanitizer.collective_passed(tensors, marker)
            tensors.clear()
        if work.marker is not None:
            shelves.append((work.marker, work.held))

    def _stream_behind_current(self, lane: Lane) -> int:
        """Return the lane's own stream, after making it wait for the current stream's work."""
        accelerator, timeline = self._accelerator, self._accelerator.timeline
        if lane.stream is None:
            lane.stream = timeline.add_stream()
            if accelerator.sanitizer is not None:
                accelerator.sanitizer.stream_made(lane.stream, f"of collectives, group {self._name}")
        timeline.make_wait(lane.stream, timeline.record(accelerator.stream))
        return lane.stream

    def _key(self) -> tuple[object, ...]:
        """Return a key that all ranks of the group share, because they create groups in the same order."""
        alike = [each for each in self._accelerator.process_groups if each.ranks == self._ranks]
        return repr(self._ranks), alike.index(self)

    def _queue(self, stream: int, what: Collective, start: int, text: str, lane: Lane) -> None:
        kind, nbytes, inputs, outputs, _, members = what[:6]
        accelerator, ranks = self._accelerator, what.ranks or self._ranks
        timeline = accelerator.timeline
        if lane.last is not None:
            timeline.take_turns(stream, lane.last)
        uneven = not what.ranks and _is_uneven(inputs, outputs)
        duration = accelerator.network.collective_ns(kind, nbytes, ranks, uneven=uneven)
        duration += (members - 1) * MEMBER_NS
        if accelerator.jitter is not None:
            duration += accelerator.jitter.lateness_ns(self._group_size)
        if accelerator.network.nodes_of(ranks) > 1 or accelerator.network.profile.has_pcie_links:
            accelerator.between_nodes_ns += duration
            accelerator.between_nodes_since = accelerator.between_nodes_since or start
        payload, meeting = None, Meeting(what.arrivals) if what.arrivals else None
        if accelerator.trace is not None:
            launched = timeline.cpu
            dtype = scalar_type(outputs[0]) if outputs else "Float"
            taken, made = (sum(tensor.numel() for tensor in tensors) for tensors in (inputs, outputs))
            group = self._name, self._description, ranks
            launching = launched - accelerator.cpu_costs.launch_ns
            payload = CollectiveRecord(kind, dtype, taken, made, *group, launching, launched, meeting)
            accelerator.trace.cpu_op(_CPU_OPS.get(kind, f"c10d::{kind}_"), start, launched, text)
        traffic = accelerator.network.traffic_permille(kind, nbytes, ranks, uneven=uneven)
        by_copy_engines = gathers_by_copy_engines(kind, outputs, ranks, accelerator.network)
        work = WorkKind.COPY if by_copy_engines else WorkKind.COLLECTIVE
        if meeting is not None:
            Timeline.make_wait(timeline, stream, meeting)
        timeline.launch(stream, work, duration, payload, traffic)
        lane.last = timeline.record(stream)

    def run_list(
        self,
        kind: str,
        inputs: list[torch.Tensor],
        outputs: list[torch.Tensor],
        listed: list[torch.Tensor],
        opts: Any,
    ) -> Work:
        """Run a list form: via a flat buffer if sizes in `listed` are equal, otherwise rank by rank."""
        nbytes = total_bytes(*listed)
        if len({tensor.numel() for tensor in listed}) > 1 or not all(map(is_on_device, listed)):
            return self.call(Collective(kind, nbytes, inputs, outputs, opts))
        accelerator = self._accelerator
        flat = new_tensor((len(listed), *listed[0].shape), None, listed[0].dtype, nbytes)
        if kind == "reduce_scatter":
            _launch_copy(accelerator, accelerator.stream, nbytes)
        work = self.call(Collective(kind, nbytes, inputs, outputs, opts))
        if not isinstance(work, CollectiveWork):
            return work
        if kind == "all_gather":
            own = accelerator.collectives_on_own_streams or _is_asynchronous(opts)
            stream = self._lane.stream if own and self._lane.stream is not None else accelerator.stream
            _launch_copy(accelerator, stream, nbytes)
            work.marker = self._lane.last = accelerator.timeline.record(stream)
            work.results = [flat]  # as in NCCL's future
        work.held.append(flat)
        return work


class _Queued(Work):
    """Part of a coalesced collective, which runs with the other parts."""

    def wait(self, timeout: Any = None) -> bool:
        return True


def _is_asynchronous(opts: Any) -> bool:
    """Return whether a collective was called with `async_op=True`, torch's default without options."""
    return opts is None or bool(getattr(opts, "asyncOp", True))


def _is_uneven(inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> bool:
    """Return whether a list of different sizes is gathered into, or reduced from."""
    listed = max(inputs, outputs, key=len)
    one_sided = min(len(inputs), len(outputs)) == 1 < len(listed)
    return one_sided and len({tensor.numel() for tensor in listed}) > 1


def _launch_copy(accelerator: Accelerator, stream: int, nbytes: int) -> None:
    """Launch the kernel that copies between a list and a flat buffer."""
    timeline = accelerator.timeline
    start = timeline.cpu
    timeline.cpu += accelerator.cpu_costs.launch_ns
    payload = None if accelerator.trace is None else KernelRecord("copy_kernel", start, timeline.cpu)
    duration = accelerator.kernel_costs.memory_bound_ns(2 * nbytes, "copy")
    timeline.launch(stream, WorkKind.COMPUTE, duration, payload)


_CPU_OPS = {
    "all_gather": "c10d::_allgather_base_", "reduce_scatter": "c10d::_reduce_scatter_base_",
    "all_reduce": "c10d::allreduce_", "broadcast": "c10d::broadcast_", "all_to_all": "c10d::alltoall_base_",
    "barrier": "c10d::barrier",
}  # fmt: skip


def _inputs_of(kind: str, inputs: list[torch.Tensor], outputs: list[torch.Tensor], opts: Any) -> str:
    """Return a collective's inputs for the trace, which has no text for groups and reductions."""
    source, target = (each[0] if len(each) == 1 else each for each in (inputs, outputs))
    by_kind: dict[str, tuple[Any, ...]] = {
        "all_gather": (target, source, None),
        "reduce_scatter": (target, source, None, None),
        "all_to_all": (target, source, None, [], []),
        "broadcast": (outputs, None, getattr(opts, "rootRank", 0), 0),
        "barrier": (None, None, []),
    }
    arguments = by_kind.get(kind, (outputs, None, None, None))
    return inputs_text((*arguments, _is_asynchronous(opts), -1))


# Cost of each further member of a coalesced collective, compared with one collective of as many bytes. NCCL
# runs the members of `ncclGroupStart/End` on one communicator as work of one kernel, with separate checks,
# plan and record on the host. Estimated, not measured: half a kernel launch on the host, a small copy kernel
# on the device. `ci/measured/zero_copy.txt` compares results that depend on this with both doubled.
MEMBER_CPU_NS = 2_000
"""Host time of a further member, ns."""

MEMBER_NS = 2_000
"""Device time of a further member, ns."""


def refuse_strided(tensors: Iterable[torch.Tensor]) -> None:
    """Raise an error unless all tensors are dense and contiguous, or channels-last."""
    for tensor in tensors:
        if tensor.is_sparse:
            raise ValueError("Tensors must be CUDA and dense")
        if tensor.is_contiguous():
            continue
        order = _CHANNELS_LAST.get(tensor.dim())
        if order is None or not tensor.is_contiguous(memory_format=order):
            raise ValueError("Tensors must be contiguous")


def refuse_gather(output: torch.Tensor, input: torch.Tensor, ranks: int) -> None:
    """Raise an error unless an all-gather's output fits its input."""
    if output.dtype is not input.dtype:
        raise TypeError("output tensor must have the same type as input tensor")
    if output.numel() != input.numel() * ranks:
        raise ValueError("output tensor size must be equal to world_size times input tensor size")


def refuse_reduce_scatter(output: torch.Tensor, input: torch.Tensor, ranks: int) -> None:
    """Raise an error unless a reduce-scatter's input fits its output."""
    if output.dtype is not input.dtype:
        raise TypeError("input tensor must be the same type as the output tensor.")
    if input.numel() != output.numel() * ranks:
        raise ValueError("input tensor must be the same size as output size times world size")


def refuse_splits(sizes: Sequence[int] | None, tensor: torch.Tensor, ranks: int) -> None:
    """Raise an error unless the split sizes have one part per rank and sum to the rows of the tensor."""
    if not sizes:
        return
    if len(sizes) != ranks:
        raise RuntimeError("Number of tensor splits not equal to group size")
    if sum(sizes) != tensor.shape[0]:
        raise RuntimeError("Split sizes doesn't match total dim 0 size")


def refuse_list(tensors: Sequence[torch.Tensor], ranks: int) -> None:
    """Raise an error unless there is one tensor per rank."""
    if len(tensors) != ranks:
        raise ValueError(error_text("scatter.ranks", len(tensors), ranks))


def refuse_sizes(tensors: Sequence[torch.Tensor], own: torch.Tensor, name: str) -> None:
    """Raise an error unless all tensors in a list of `gather` or `scatter` have the size of `own`."""
    for index, tensor in enumerate(tensors):
        if tensor.shape != own.shape:
            raise ValueError(error_text("nccl.size", name, index, tuple(own.shape), tuple(tensor.shape)))


def refuse_count(tensors: Sequence[torch.Tensor], ranks: int, name: str, side: str) -> None:
    """Raise an error unless the root of `gather` or `scatter` has as many `tensors` as `ranks`."""
    if len(tensors) != ranks:
        raise ValueError(error_text("nccl.list", name, side, len(tensors), side.capitalize(), ranks))


def are_like_neighbours(
    sent: Sequence[tuple[int, int]], received: Sequence[tuple[int, int]], rank: int, ranks: int
) -> bool:
    """Return whether all ranks can make these calls: what this rank sends k ranks ahead, it receives from k
    ranks behind, or it exchanges equal bytes with each peer. Messages are pairs (other rank, bytes)."""
    ahead = sorted(((other - rank) % ranks, nbytes) for other, nbytes in sent)
    behind = sorted(((rank - other) % ranks, nbytes) for other, nbytes in received)
    return ahead == behind or sorted(sent) == sorted(received)


def refuse_root(opts: Any, ranks: int, name: str) -> None:
    """Raise an error unless the root is a member of the group."""
    root = getattr(opts, "rootRank", 0)
    if not 0 <= root < ranks:
        raise dist.DistBackendError(error_text("communicator.root", name, root, ranks))
