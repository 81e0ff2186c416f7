"""The plan of one compiled graph (Inductor's fused kernels and the bytes of each launch); the plans' folder.

Inductor's cache holds pickles and Python files, so write access to it allows code execution. Its default has
a fixed name in the shared temporary folder, which another user may have created. Inductor replaces broken
pickles itself, but trusts existing Python files.
"""

import dataclasses
import functools
import hashlib
import os
import stat
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fsdpbench.base.torch_internals import assert_size_stride, inductor_default_cache_dir, patch, replaced
from fsdpbench.base.writing import write_whole
from fsdpbench.sim.model.allocator import CachingAllocator
from fsdpbench.sim.model.kernel_costs import KernelCosts, fused
from fsdpbench.sim.model.timeline import Timeline, TimelineClock, Work
from fsdpbench.sim.model.trace_recorder import KernelRecord
from fsdpbench.sim.torch_device.accelerator import ACCELERATOR, DEVICE_TYPE
from fsdpbench.sim.torch_device.compile import ASKED_FOLDER, CACHE_VARIABLE
from fsdpbench.sim.torch_device.compile.cuda_graphs import CapturedGraph
from fsdpbench.sim.torch_device.compile.refusals import REPORT
from fsdpbench.sim.torch_device.operators.plans import inputs_text
from fsdpbench.sim.torch_device.patches.dynamo import passing_to
from fsdpbench.sim.torch_device.tensors import contiguous_strides, forget, new_tensor, new_view, record_of

_REDUCTIONS = ("red", "per")
"""Inductor's names of reduction kernels: in a loop, or a whole row at a time (`triton_per_…`)."""


@contextmanager
def apart_from_the_run() -> Iterator[None]:
    """Keep the compiler's own work on the device (patterns, constants) out of the run's time and memory.

    Only compilations without a plan on disk do such work, and the run must not depend on that.
    """
    run, clock = ACCELERATOR.allocator, Timeline()
    for _ in range(ACCELERATOR.stream + 1):
        clock.add_stream()
    memory = CachingAllocator(run.device.capacity_bytes, TimelineClock(clock), run.conf, costs=run.costs)
    memory.total_bytes = run.total_bytes
    memory.device.reserve_addresses(1 << 43)  # no address occurs in the run
    apart = {"timeline": clock, "allocator": memory, "operators_launched": 0}
    unseen = dict.fromkeys(("trace", "sanitizer", "account", "flops"))
    with (
        replaced(ACCELERATOR, **apart, **unseen),
        replaced(ACCELERATOR.python, counting=False, thread=0, calls=0),
    ):
        yield


@dataclass(frozen=True)
class Launch:
    """One launch of a fused kernel.

    `category`: Inductor's (`poi`, `red`, `per`, …). `nbytes`: bytes read plus written. `writes`: positions of
    written arguments. `of_args`: if shapes vary, the bytes of its arguments at the planned shapes, by which
    `nbytes` is scaled to other shapes; otherwise 0.
    """

    name: str
    category: str
    nbytes: int
    writes: tuple[int, ...]
    of_args: int = 0

    def __post_init__(self) -> None:
        if self.nbytes < 0:
            raise ValueError(f"kernel {self.name}: {self.nbytes} bytes")

    @property
    def kind(self) -> str:
        """Return the kind of kernel in the hardware profile whose bandwidth it reaches."""
        return fused("reduction" if self.category in _REDUCTIONS else "pointwise")


class Plan:
    """The launches of one graph, in the order of its wrapper, which calls this object while it runs."""

    def __init__(self) -> None:
        self.launches: Sequence[Launch] = ()
        self.extern_bytes = 0
        self.fallbacks: Sequence[str] = ()
        self.captured: CapturedGraph | None = None
        self.not_captured = ""
        self._costs: KernelCosts | None = None
        ACCELERATOR.python.leave()  # discard the compiler's calls
        self._durations_ns: list[int] = []

    def complete(self, launches: Sequence[Launch], extern_bytes: int, fallbacks: Sequence[str]) -> None:
        """Set the graph's launches; `extern_bytes`: those of products, attention and other operators."""
        self.launches, self.extern_bytes = tuple(launches), extern_bytes
        self.fallbacks = tuple(fallbacks)
        REPORT.plans.append(self)

    def capture(self, static: Sequence[int], why_not: str) -> None:
        """Make it a CUDA graph. `static`: inputs with fixed addresses; `why_not`: a reason not to."""
        self.not_captured = why_not
        self.captured = None if why_not else CapturedGraph(static)

    def take_inputs(self, args: Sequence[Any]) -> None:
        """Register the inputs of the next call, in case it is a CUDA graph's."""
        if self.captured is not None:
            self.captured.take_inputs(args)

    @property
    def nbytes(self) -> int:
        """Return the bytes that all kernels read and write, by Inductor's count."""
        return self.extern_bytes + sum(launch.nbytes for launch in self.launches)

    def kernel(self, name: str) -> "FusedKernel":
        """Return the kernel that the wrapper calls as `name`."""
        return FusedKernel(self)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Run one call of the graph. All kernels of a backward are one autograd node."""
        accelerator = ACCELERATOR
        costs = accelerator.cpu_costs
        start = accelerator.timeline.cpu
        accelerator.timeline.cpu += costs.module_call_ns + costs.autograd_node_ns
        # Operators that a compiled graph calls create no autograd nodes.
        accelerator.cpu_costs = dataclasses.replace(costs, autograd_node_ns=0)
        REPORT.calls += 1
        try:
            with nullcontext() if self.captured is None else self.captured.running():
                yield
        finally:
            accelerator.cpu_costs = costs
            if accelerator.trace is not None:
                accelerator.trace.cpu_op("CompiledFxGraph", start, accelerator.timeline.cpu)

    def nbytes_of(self, index: int, args: Sequence[Any]) -> int:
        """Return the bytes that a launch with these arguments moves."""
        launch = self.launches[index]
        if not launch.of_args:
            return launch.nbytes
        sizes = (a.numel() * a.element_size() for a in args if isinstance(a, torch.Tensor))
        return round(launch.nbytes * sum(sizes) / launch.of_args)

    def duration_ns(self, index: int, nbytes: int) -> int:
        """Return the duration of a launch on the current hardware."""
        costs, launch = ACCELERATOR.kernel_costs, self.launches[index]
        if launch.of_args:
            return costs.memory_bound_ns(nbytes, launch.kind)
        if self._costs is not costs:
            self._costs = costs
            self._durations_ns = [costs.memory_bound_ns(each.nbytes, each.kind) for each in self.launches]
        return self._durations_ns[index]


class FusedKernel:
    """A kernel of Inductor, launched like Triton's."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan

    def run(self, index: int, *args: Any, stream: Any = None) -> None:
        """Launch the kernel. `index`: the launch's position in the plan; `args`: the kernel's arguments."""
        accelerator = ACCELERATOR
        if accelerator.backward.is_active:
            accelerator.backward.arrive(args)
        launch, nbytes = self._plan.launches[index], self._plan.nbytes_of(index, args)
        duration_ns = self._plan.duration_ns(index, nbytes)
        if accelerator.known_values:
            for place in launch.writes:
                forget(record_of(args[place].untyped_storage()))
        timeline, costs = accelerator.timeline, accelerator.cpu_costs
        start = timeline.cpu
        launched = start + costs.operator_ns
        timeline.cpu = launched + costs.launch_ns
        trace = accelerator.trace
        payload = None
        if trace is not None:
            payload = KernelRecord(launch.name, launched, timeline.cpu)
            accelerator.bytes_traced += nbytes
        timeline.launch(accelerator.stream, Work.COMPUTE, duration_ns, payload)
        accelerator.operators_launched += 1
        if trace is not None:
            text = f'"kernel_backend":"triton","kernel_num_gb":{nbytes / 1e9:.9f},{inputs_text(args)}'
            trace.cpu_op(launch.name, start, timeline.cpu, text)


def empty_strided(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return a buffer of the graph; strides in elements. Raises `torch.OutOfMemoryError`."""
    accelerator = ACCELERATOR
    if accelerator.backward.is_active:
        accelerator.backward.arrive()
    accelerator.timeline.cpu += accelerator.cpu_costs.view_ns
    shape, strides = tuple(size), tuple(stride)
    elements = 0 if 0 in shape else 1 + sum((n - 1) * step for n, step in zip(shape, strides, strict=True))
    laid_out = None if strides == contiguous_strides(shape) else strides
    return new_tensor(shape, laid_out, dtype, elements * dtype.itemsize)


def reinterpret(
    base: torch.Tensor, size: Sequence[int], stride: Sequence[int], offset: int = 0
) -> torch.Tensor:
    """Return a view of a buffer with another geometry; `offset` in elements, relative to the buffer's."""
    return new_view(base, size, stride, int(base.storage_offset()) + offset, base.dtype)


def device(*args: Any, **kwargs: Any) -> torch.device:
    """Return `torch.device`, but the simulated device where the graph says "cuda"."""
    made = torch.device(*args, **kwargs)
    return made if made.type == "cpu" else torch.device(DEVICE_TYPE, made.index or 0)


def raw_stream(index: int) -> int:
    """Return the current stream (launches look it up themselves)."""
    return ACCELERATOR.stream


def check_sizes(tensor: torch.Tensor, size: Sequence[int], stride: Sequence[int], name: str = "") -> None:
    """Check the shape of an operator's result. `stride` is ignored for convolutions: the library chooses it,
    and a compiler in a build without CUDA does not know it."""
    if "convolution" not in name:
        assert_size_stride(tensor, size, stride, name)
    elif tuple(tensor.shape) != tuple(size):
        raise AssertionError(f"{name}: {tuple(tensor.shape)} instead of {tuple(size)}")


def aligned(*args: Any) -> Any:
    """Return the tensor: the allocator aligns every block to 512 bytes."""
    return args[0]


@functools.cache
def of_compiler() -> str:
    """Return a digest of the sources that make plans, computed once per process or fork server."""
    found = hashlib.sha256()
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        found.update(path.read_bytes())
    return found.hexdigest()[:16]


def choose_folder(asked: str | None = ASKED_FOLDER) -> Path:
    """Create and return the cache folder for this process and its children: `asked`, or in the user's cache.

    If others can write into that folder, or it cannot be created, warn and return a new folder that no other
    process shares.
    """
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser())
    if asked and Path(asked) == Path(inductor_default_cache_dir()):
        asked = None  # not the user's choice: torch sets the variable when its compiler is imported
    folder = Path(asked) if asked else home / "fsdpbench" / "compiled"
    problem = _problem(folder)
    if problem:
        named = f"{CACHE_VARIABLE}={asked}" if asked else str(folder)
        warnings.warn(
            f"{named}: {problem}; compiled plans are not kept. Name a folder of your own in {CACHE_VARIABLE}",
            stacklevel=2,
        )
        folder = Path(tempfile.mkdtemp(prefix="fsdpbench-compiled-"))
    os.environ[CACHE_VARIABLE] = str(folder.absolute())
    return folder


def _problem(folder: Path) -> str:
    """Return the reason why the folder must not be used, or ""."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        found = folder.stat()
    except OSError as error:
        return f"it cannot be used ({error.strerror})"
    if found.st_uid != os.getuid():
        return "it belongs to another user"
    if stat.S_IMODE(found.st_mode) & (stat.S_IWGRP | stat.S_IWOTH):
        return "others can write into it"
    return "" if os.access(folder, os.W_OK | os.X_OK) else "it cannot be written"


def check_code_on_disk() -> None:
    """Rewrite each Python file in the cache that differs from its intended contents before it is imported."""

    def of_code(original: Callable[..., tuple[str, str]]) -> Any:
        def write(source_code: str, *args: Any, **options: Any) -> tuple[str, str]:
            key, path = original(source_code, *args, **options)
            _mend(path, source_code)
            return key, path

        return staticmethod(write)

    def write_to_disk(original: Callable[[Any], str], graph: Any) -> str:
        path = original(graph)
        _mend(path, graph.source_code)
        return path

    patch("compiled_code_to_disk", of_code)
    patch("compiled_graph_to_disk", passing_to(write_to_disk))


def _mend(path: str, source: str) -> None:
    if Path(path).read_bytes() != source.encode():
        write_whole(Path(path), source)


# Names that the generated wrapper uses.
__all__ = ["Launch", "Plan", "aligned", "check_sizes", "device", "empty_strided", "raw_stream", "reinterpret"]
