"""The simulated accelerator of a process: clock, memory, costs and trace for its kernels.

torch calls the device's kernels without an argument for the device. They find it here, in the only global
state: `ACCELERATOR` is empty on import, and `Simulation.start` equips it. So a process can register kernels
before it forks.
"""

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from fsdpbench.sim.model.allocator.stats import HostStats
from fsdpbench.sim.model.observed import Observer, forget, observe
from fsdpbench.sim.model.timeline import DEFAULT_STREAM, Timeline, Work
from fsdpbench.sim.model.trace_recorder import MemcpyRecord, trace_stream
from fsdpbench.sim.torch_device.backward_streams import BackwardStreams
from fsdpbench.sim.torch_device.followed import HolderFollower, Lateness, MemoryFollower
from fsdpbench.sim.torch_device.python_calls import PythonCalls

if TYPE_CHECKING:
    from torch import Tensor

    from fsdpbench.sim.model.allocator import CachingAllocator
    from fsdpbench.sim.model.allocator.types import AllocatorEvent, AllocatorListener
    from fsdpbench.sim.model.coupling import Link
    from fsdpbench.sim.model.kernel_costs import CpuCosts, KernelCosts
    from fsdpbench.sim.model.network import Network
    from fsdpbench.sim.model.trace_recorder import TraceRecorder
    from fsdpbench.sim.torch_device.flops import FlopCount
import hashlib
import pickle

from fsdpbench.base.files.shared_log import add_record, records

DEVICE_TYPE = "sim"


class SimulationNotStartedError(RuntimeError):
    """The simulated device was used before `Simulation.start`."""


class Accelerator:
    """State of the simulated device; plain attributes, because every operator reads some of them.

    `stream` is the number of the current stream. `unknown_operators` counts launches of operators without a
    cost model (priced by bytes). `flops` counts matrix products and `jitter` delays collectives; both are
    None unless requested. `collectives_on_own_streams`: as before torch 2.8. `bytes_traced`: bytes that
    memory-bound kernels moved in the last trace. `between_nodes_ns`: duration, as if alone, of all
    collectives between nodes or over PCIe; `between_nodes_since`: when the first of them was queued.
    `undo_software` reverts the patches of the software profile.

    `known_values`: number of storages with known values. `follows_numbers`: whether values from the host are
    kept. `on_value(operation, answer, is_true)` observes values that Python reads. `copied_to_host`: whether
    host tensors hold data copied from the device, which has no values. `host_kind`: the tensor type by which
    a script follows these. `trusts_windows`: inside `istft`, which checks the overlap of its windows.

    `graph_pool`: while a captured graph runs, the stream whose memory is its private pool. `shared_plans`:
    plans of other processes; they outlive a run. `link`: connection to the ranks of other pipeline stages;
    None if these cannot run. `sanitizer` follows every use of memory, `account` who holds memory; both are
    None unless requested.
    """

    def __init__(self) -> None:
        self.started = False
        self.timeline = Timeline()
        self.stream = DEFAULT_STREAM
        self.allocator: CachingAllocator = None  # type: ignore[assignment]
        self.kernel_costs: KernelCosts = None  # type: ignore[assignment]
        self.cpu_costs: CpuCosts = None  # type: ignore[assignment]
        self.network: Network = None  # type: ignore[assignment]
        self.trace: TraceRecorder | None = None
        self.host_ns_per_byte = 0.0
        self.host_optimizer_ns = 0
        self.host = HostStats()
        self.host_link_ns: Callable[[int], int] = lambda nbytes: 0
        self.on_out_of_memory: Callable[[str], None] | None = None
        self.device_count = 1
        self.streams: dict[int, Any] = {}
        self.process_groups: list[Any] = []
        self.collectives_on_own_streams = False
        self.undo_software: Callable[[], None] = lambda: None
        self.operators_launched = 0
        self.events_traced = 0
        self.bytes_traced = 0
        self.between_nodes_ns = 0
        self.between_nodes_since: int | None = None
        self.unknown_operators: dict[str, int] = {}
        self.unknown_ns: dict[str, int] = {}
        self.flops: FlopCount | None = None
        self.jitter: Lateness | None = None
        self.link: Link | None = None
        self.known_values = 0
        self.follows_numbers = False
        self.trusts_windows = False
        self.copied_to_host = False
        self.host_kind: type[Tensor] | None = None
        self.on_value: Callable[[str, Any, bool], None] | None = None
        self.shared_plans: SharedPlans | None = None
        self.sanitizer: MemoryFollower | None = None
        self.account: HolderFollower | None = None
        self.graph_pool: int | None = None
        self.backward = BackwardStreams(self)
        self.python = PythonCalls(self)
        self._listeners: dict[AllocatorListener, bool] = {}

    def forget_run(self) -> None:
        """Reset the state of the previous simulation."""
        self.stream = DEFAULT_STREAM
        self.streams, self.process_groups, self.unknown_operators = {}, [], {}
        self.unknown_ns = {}
        self.trace = self.graph_pool = self.flops = None
        self.on_out_of_memory = self.on_value = self.link = None
        self.follows_numbers = False
        self.trusts_windows = False
        self.operators_launched = self.bytes_traced = self.between_nodes_ns = 0
        self.between_nodes_since = None
        self.python.forget()
        self.stop_listening()

    def require_started(self) -> None:
        """Raise `SimulationNotStartedError` unless `Simulation.start` was called."""
        if not self.started:
            text = "the device 'sim' has not been started: call fsdpbench.sim.Simulation.start(...) first"
            raise SimulationNotStartedError(text)

    def guess(self, operation: str, answer: object) -> None:
        """Report an answer to the program that depends on data, which tensors lack."""
        if self.on_value is not None:
            self.on_value(operation, answer, False)

    def follow(self, observer: Observer) -> None:
        """Report calls to clock and allocator to `observer`."""
        observe(self.timeline, observer)
        observe(self.allocator, observer)

    def stop_following(self, observer: Observer) -> None:
        """Stop reporting calls to `observer`."""
        forget(self.timeline, observer)
        forget(self.allocator, observer)

    def listen(self, listener: "AllocatorListener", completions: bool = True) -> None:
        """Report the allocator's events to `listener` too; with `completions` also completed frees."""
        self._listeners[listener] = completions
        self._inform_listeners()

    def stop_listening(self, listener: "AllocatorListener | None" = None) -> None:
        """Stop reporting to `listener` (None: to all listeners)."""
        if listener is None:
            self._listeners.clear()
        else:
            self._listeners.pop(listener, None)
        self._inform_listeners()

    def _inform_listeners(self) -> None:
        """Set the allocator's single listener; without one, events cost nothing."""
        listeners = tuple(self._listeners)

        def tell_all(event: "AllocatorEvent") -> None:
            for listener in listeners:
                listener(event)

        if self.allocator is not None:
            self.allocator.listener = tell_all if len(listeners) > 1 else next(iter(listeners), None)
            self.allocator.tells_completion = any(self._listeners.values())

    def copy_over_host_link(
        self, kind: str, nbytes: int, *, blocking: bool, device: Any = None, host: Any = None
    ) -> None:
        """Copy between host and device (`kind`: `HtoD` or `DtoH`) on the current stream.

        `blocking` copies (of pageable memory, or of results that Python needs) block the CPU until they end.
        `device` and `host` are the copied tensors, if any; the sanitizer follows them.
        """
        if self.sanitizer is not None:
            self.sanitizer.host_copy(self.stream, kind, device, host, blocking=blocking)
        timeline = self.timeline
        start = timeline.cpu
        timeline.cpu += self.cpu_costs.launch_ns
        payload = None if self.trace is None else MemcpyRecord(kind, nbytes, start, timeline.cpu)
        timeline.launch(self.stream, Work.COPY, self.host_link_ns(nbytes), payload)
        if blocking:
            timeline.wait_for_stream(self.stream)

    def launch_graph(self) -> None:
        """Launch a CUDA graph: one launch by the CPU for all its kernels."""
        start = self.timeline.cpu
        self.timeline.cpu = start + self.cpu_costs.launch_ns
        if self.trace is not None:
            self.trace.cpu_op("cudaGraphLaunch", start, self.timeline.cpu)

    def report_finished(self, stream: int, payload: Any, start_ns: int, end_ns: int) -> None:
        """Write completed device work, described by `payload`, to the trace. Called by the timeline."""
        if self.trace is not None:
            payload.write(self.trace, trace_stream(stream), start_ns, end_ns)


class _ByThread(Accelerator):
    """Accelerator of a program whose own threads switch streams: as in CUDA, each has its own current stream.

    Threads of autograd's engine share that of the main thread.
    """

    main: int
    own: threading.local

    @property
    def stream(self) -> int:
        """Return the number of the calling thread's current stream."""
        return int(getattr(self.own, "stream", self.main))

    @stream.setter
    def stream(self, number: int) -> None:
        if hasattr(self.own, "stream"):
            self.own.stream = number
        else:
            self.main = number


def separate_threads() -> None:
    """Give the calling thread, unless it is the main one, its own current stream, before it switches."""
    thread = threading.current_thread()
    if thread is threading.main_thread() or thread.name.startswith("Dummy-"):  # "Dummy-": autograd's threads
        return
    if not isinstance(ACCELERATOR, _ByThread):
        vars(ACCELERATOR).update(main=vars(ACCELERATOR).pop("stream"), own=threading.local())
        ACCELERATOR.__class__ = _ByThread
    own = vars(ACCELERATOR)["own"]
    own.stream = getattr(own, "stream", DEFAULT_STREAM)


ACCELERATOR = Accelerator()


class SharedPlans:
    """Plans in the log at `path` that the runs of a sweep share, and new plans of this process.

    A plan depends only on the operator, its call and the surroundings (hardware, software, number of ranks).
    Reading one takes a tenth of the time of computing it with torch's meta kernels.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._surroundings: str | None = None
        self._known: dict[bytes, bytes] = {}
        self._made: dict[bytes, bytes] = {}

    def begin(self, surroundings: str | None) -> None:
        """Start a simulation. `surroundings`: all that plans depend on besides calls; None: share nothing."""
        self._known, self._made = {}, {}
        self._surroundings = surroundings
        if surroundings is None:
            return
        for record in records(self._path):
            where, plans = pickle.loads(record)
            if where == surroundings:
                self._known |= plans

    def find(self, operator: Any, call: tuple[Any, ...]) -> Any:
        """Return the plan of a call (a kernel's key), or None if the log has none."""
        found = self._known.get(_name(operator, call)) if self._known else None
        return None if found is None else pickle.loads(found)

    def add(self, operator: Any, call: tuple[Any, ...], plan: Any) -> None:
        """Keep a plan for other processes if it can be pickled."""
        if self._surroundings is None:
            return
        try:
            self._made[_name(operator, call)] = pickle.dumps(plan, pickle.HIGHEST_PROTOCOL)
        except (pickle.PicklingError, TypeError, AttributeError):
            return

    def leave(self) -> None:
        """Write this process's new plans to the log."""
        if self._made:
            add_record(self._path, pickle.dumps((self._surroundings, self._made), pickle.HIGHEST_PROTOCOL))
            self._made = {}


def _name(operator: Any, call: tuple[Any, ...]) -> bytes:
    """Return a digest that identifies a call. If the text contains an address, it never matches again."""
    return hashlib.blake2b(f"{operator} {call!r}".encode(), digest_size=16).digest()
