"""One rank of a script's run: the environment that torchrun would set, the simulation, and the script.

Other ranks exist only as costs; with `check_ranks` some of them run too, each on its own. The script runs
unchanged, as `__main__` of this process.
"""

import functools
import gc
import multiprocessing
import os
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from statistics import mean, median
from typing import Any

import msgspec
import torch
from torch.nn import init

from fsdpbench.base.configuration.config import Config, WhatIf
from fsdpbench.base.configuration.script_source import ScriptSource, StepsBy
from fsdpbench.base.result_sections import HostMemory, SavedCheckpoint, ScriptReport

# The real one: scripts may need it, and it cannot be imported after cuda is mapped.
from fsdpbench.base.torch_internals import (
    dynamo,  # noqa: F401
    parse_to,
)
from fsdpbench.base.writing import write_whole
from fsdpbench.engine.devices.base import AllocatorReadings, Placement, StepMemory
from fsdpbench.engine.devices.sim import SimDevice
from fsdpbench.engine.results.records import STEPS_FILE, RankRecord, Status, trace_path, write_record
from fsdpbench.script.cuda import compile_notes, leave_cache_alone, map_cuda, wants_compiled
from fsdpbench.script.cuda.refusals import explained, name_cuda
from fsdpbench.script.decisions import Decisions
from fsdpbench.script.files import ScriptFiles
from fsdpbench.script.interposing import around
from fsdpbench.script.launchers import run_workers_here
from fsdpbench.script.observed import Observed
from fsdpbench.script.observed.waits import Waits
from fsdpbench.script.own_files import OwnFiles, ending_as_python, run_as_main, run_function
from fsdpbench.script.rank_check.calls import Ended
from fsdpbench.script.rank_check.recording import Recorder, start_recording
from fsdpbench.script.steps import MeasuredAllError, Optimizers, Steps
from fsdpbench.script.variations import NoEffectError, Varied
from fsdpbench.sim import Simulation
from fsdpbench.sim.model.coupling import Exchange as Exchange
from fsdpbench.sim.model.coupling import Link as Link
from fsdpbench.sim.model.coupling import Member as Member
from fsdpbench.sim.model.coupling import NeedsRanksError as NeedsRanksError
from fsdpbench.sim.model.coupling import StageError
from fsdpbench.sim.torch_device.accelerator import DEVICE_TYPE
from fsdpbench.sim.torch_device.flops import FlopCount

_ENDED = {Status.OK: Ended.OK, Status.OOM: Ended.OOM, Status.ERROR: Ended.RAISED}
_MASTER = ("127.0.0.1", "29500")


def run_script(
    config: Config,
    placement: Placement,
    folder: Path,
    rank_0: Path | None = None,
    *,
    link: Link | None = None,
    own: Path | None = None,
) -> Status:
    """Run the script of `config` as this rank, and write the record and trace to `folder`. Never raises the
    script's errors: the record has them, and the traceback is on stderr.

    With `check_ranks` it writes its collectives too; `rank_0`: the folder of rank 0, which ran before.
    `link`: to the ranks of other pipeline stages; `own`: the folder of everything else that this rank writes.
    Raises `NeedsRanksError` if other stages are needed and do not run."""
    _set_environment(config, placement)
    if link is not None:  # all stages end after the same step
        steps = config.measurement
        config = replace(config, measurement=replace(steps, most_timed_steps=steps.timed_steps))
    run = _Run(config, placement, (folder, rank_0 or folder, own or folder), link)
    status, cause = run.execute()
    return run.conclude(status, cause)


class _Run:
    """A script's process. Created before the script starts, it installs all that the script will meet."""

    def __init__(
        self, config: Config, placement: Placement, folders: tuple[Path, Path, Path], link: Link | None
    ) -> None:
        folder, rank_0, own = folders
        assert config.script is not None
        self.source = config.script
        self.folder = folder
        self.record = RankRecord(placement.rank, placement.world_size, config.device)
        self.device = SimDevice(config, placement)
        self.simulation = self.device.start()
        self.simulation.accelerator.flops = FlopCount()
        alone = Link(placement.rank, [placement.rank]) if may_have_stages(config) else None
        self.simulation.couple(link or alone)
        self.peaks = peaks = Peaks(self.simulation)
        self.requests = map_cuda(self.simulation)
        self.own_files = OwnFiles(self.source)
        self.device.line = self.own_files.line
        map_clock(self.simulation, self.own_files)
        self.decisions = Decisions(self.own_files)
        self.decisions.follow(self.simulation)
        skip_large_fills()
        self.recorder: Recorder | None = None
        if self.source.check_ranks:
            self.recorder = start_recording(self.simulation, folder, rank_0, self.own_files)
        trace, to_the_end = trace_path(folder, placement.rank), self.source.to_the_end
        self.steps = Steps(self.simulation, config.measurement, trace, peaks.take, to_the_end=to_the_end)
        self.steps.slows_link &= not self.source.check_ranks and link is None  # no extra step there
        self._ends: list[float] = []
        self.simulation.accelerator.on_out_of_memory = self._out_of_memory
        self.optimizers = Optimizers(self.own_files)
        counted = self.optimizers if self.source.steps_by is StepsBy.OPTIMIZER else self.requests
        counted.on_step = self._step_ended
        self.optimizers.on_made = self.steps.begin
        keeps_all = self.source.keeps_files or placement.rank != 0  # ranks do not see each other's files
        self.files = ScriptFiles(own, self.simulation.accelerator, keeps_all=keeps_all)
        self.files.overlay.exempt(str(folder))
        self.files.install()
        self.host = HostPeak(self.steps)
        self.saves = Saves(self.steps)
        self.files.checkpoints.on_save = self._saving
        self.files.checkpoints.on_storage = self.saves.add
        run_workers_here()
        leave_cache_alone(self.files.overlay.exempt)
        if self.recorder is not None:
            self.recorder.follow_files(self.files.overlay, rank_0 / "files")
        waits = Waits(self.own_files, self.simulation)
        waits.step = lambda: self.steps.count
        variation = config.what_if.variation if config.what_if is not None else None
        self.varied = Varied(variation, waits, self.simulation) if variation else None
        self.observed = Observed(self.own_files, waits, own, self.simulation)

    def _step_ended(self) -> None:
        """End a step, and report progress to processes that wait for the script."""
        self._ends.append(time.monotonic())
        self.host.look("in training")
        done = len(self._ends)
        pace = f", {(self._ends[-1] - self._ends[0]) / (done - 1):.1f} s each" if done > 1 else ""
        if self.record.rank == 0 or self.recorder is not None:
            write_whole(self.folder / STEPS_FILE, f"{done} of {self.steps.wanted} steps{pace}")
        self.steps.ended()

    def _saving(self, is_sharded: bool) -> None:
        self.host.look("in saving")
        self.saves.begin(is_sharded)

    def _out_of_memory(self, message: str) -> None:
        record = self.record
        record.add_sanitizer(self.device.sanitizer)
        record.status, record.cause = Status.OOM, message.splitlines()[0]
        record.memory_account = record.memory_account or self.device.memory_account
        write_record(record, self.folder)
        if self.recorder is not None:
            self.recorder.finish(self.folder, Ended.OOM, record.cause)

    def execute(self) -> tuple[Status, str | None]:
        """Run the script; return its status, and the cause if it ended with an error."""
        status, cause = _execute(self.source, self.own_files, self.decisions, self.recorder)
        if self.varied is not None and status is Status.OK and not self.varied.count:
            status, cause = Status.ERROR, str(NoEffectError(self.varied.variation))
        if self.recorder is not None:
            refused = status is Status.ERROR and " not simulated" in (cause or "")
            self.recorder.finish(self.folder, Ended.REFUSED if refused else _ENDED[status], cause)
        for child in multiprocessing.active_children():  # data loaders of a script that was stopped
            child.terminate()
        return status, cause

    def conclude(self, status: Status, cause: str | None) -> Status:
        """Write the record of a script that ended with `status`; return the final status."""
        record, device, steps = self.record, self.device, self.steps
        (self.folder / STEPS_FILE).unlink(missing_ok=True)
        record.status, record.cause = status, cause
        record.redirected_files = self.files.settle()
        try:
            steps.finish()
        except StageError as error:  # the device never finishes, so no time is known
            if status is Status.OK:
                record.status, record.cause = Status.ERROR, explained(error)
            write_record(record, self.folder)
            return record.status
        record.hardware = device.describe()
        record.unknown_operators = device.unknown_operators
        record.placeholder_decisions = self.decisions.reported()
        record.compilation = device.compilation if wants_compiled() else None
        record.compiled = bool(record.compilation and record.compilation["graphs"])
        record.add_sanitizer(device.sanitizer)
        record.memory_account = record.memory_account or device.memory_account
        if steps.step_times_s:
            _fill_figures(record, steps, device)
            assert record.script is not None
            record.loader = self.observed.loaders.to_dict(steps.count)
            kind = steps.flops[-1].main_type if steps.flops else None
            step_ns = 1e9 * median(steps.step_times_s) * max(1, steps.count)
            unknown = self.simulation.accelerator.unknown_ns
            record.script = msgspec.structs.replace(
                record.script,
                unknown_share={name: ns / step_ns for name, ns in sorted(unknown.items())},
                observed=self.observed.reported(steps.count, kind),
                numbers_read=self.decisions.reads(),
                peaks=self.peaks.of_phases(steps.count),
                host_peak=HostMemory(self.host.bytes, self.host.when, *self.observed.loaders.held_ahead()),
                saved=self.saves.largest(),
            )
            if steps.traced_times_s:
                record.trace = f"{steps.trace_path.parent.name}/{steps.trace_path.name}"
                self.requests.copy(steps.trace_path)  # to where the script's profilers export
        elif record.status is Status.OK:
            too_few = _too_few(steps, self.source, self.optimizers, self.decisions)
            record.status, record.cause = Status.ERROR, too_few
        write_record(record, self.folder)
        return record.status


def _set_environment(config: Config, placement: Placement) -> None:
    """Set the environment variables that torchrun sets."""
    nodes = -(-config.gpus // config.ranks_per_node)
    os.environ |= {
        "RANK": str(placement.rank),
        "LOCAL_RANK": str(placement.local_rank),
        "WORLD_SIZE": str(config.gpus),
        "LOCAL_WORLD_SIZE": str(config.ranks_per_node),
        "GROUP_RANK": str(placement.rank // config.ranks_per_node),
        "GROUP_WORLD_SIZE": str(nodes),
        "ROLE_RANK": str(placement.rank),
        "ROLE_WORLD_SIZE": str(config.gpus),
        "ROLE_NAME": "default",
        "MASTER_ADDR": _MASTER[0],
        "MASTER_PORT": _MASTER[1],
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_RUN_ID": "fsdpbench",
    }


def _execute(
    source: ScriptSource, own_files: OwnFiles, decisions: Decisions, recorder: Recorder | None
) -> tuple[Status, str | None]:
    """Run the script as `__main__`; return its status, and the cause if it ended with an error."""
    try:
        if source.function is not None:
            run_function(source)
            return Status.OK, None
        with ending_as_python():
            cause = run_as_main(source)
        return (Status.ERROR, cause) if cause else (Status.OK, None)
    except MeasuredAllError:
        return Status.OK, None
    except NeedsRanksError:
        raise
    except torch.OutOfMemoryError as error:
        traceback.print_exc()
        return Status.OOM, own_files.with_line(str(error).splitlines()[0], error)
    except BaseException as error:
        name_cuda(error)
        traceback.print_exc()
        if recorder is not None:
            recorder.log.stood = recorder.stacks.of_traceback(error.__traceback__)
        place = own_files.last_line(error)
        said = decisions.in_words((place.file, place.line))
        return Status.ERROR, "; ".join([own_files.with_line(explained(error), error), *said])


def _too_few(steps: Steps, source: ScriptSource, optimizers: Optimizers, decisions: Decisions) -> str:
    """Return why a script that ended without an error was not measured."""
    reasons = [f"the script ended after {steps.count} steps (counted by its {source.steps_by.value})"]
    if source.steps_by is StepsBy.OPTIMIZER:
        reasons += optimizers.without_steps()
    reasons += decisions.in_words()
    return f"{'; '.join(reasons)}; at least 1 is needed, better 7. --steps-by names another way to count them"


def may_have_stages(config: Config) -> bool:
    """Return whether other ranks may run beside rank 0 if its script sends to them."""
    assert config.script is not None
    checked = config.sanitize or config.script.check_ranks or config.jitter is not None
    return not checked and (config.what_if is None or config.what_if == WhatIf())


def _fill_figures(record: RankRecord, steps: Steps, device: SimDevice) -> None:
    record.step_times_s = steps.step_times_s
    record.warmup_times_s = steps.warmup_times_s
    record.network_share, record.step_work = device.network_share, steps.work
    record.warmup_stable = bool(steps.memory) and not steps.retried
    record.profiler_step_times_s = steps.traced_times_s
    record.memory_per_step = [asdict(memory) for memory in steps.memory] or None
    record.samples_per_step = None
    if steps.flops:
        model = float(mean(flops.model for flops in steps.flops))
        record.flops_per_step = {
            "model": model,
            "hardware": model + mean(flops.recomputed for flops in steps.flops),
        }
        kind = steps.flops[-1].main_type
        record.peak_flops = None if kind is None else device.peak_flops(kind)
    record.script = ScriptReport(
        steps=steps.count - ("slow_link_step" in steps.work),
        flops="matrix products, attention and convolutions, counted as they were launched",
        notes=steps.notes + compile_notes(record.compilation or {}),
    )


def map_clock(simulation: Simulation, own_files: OwnFiles) -> None:
    """Make clocks show simulated time from now on, so that tokens per second printed by a script are right.

    `time.perf_counter()` is the simulated CPU's time for all code. Libraries also measure wall time and
    deadlines with `time.time()` and `time.sleep()`, so these change only for the script's own files: `time()`
    starts at the real time and continues with the simulated time; `sleep()` sleeps and advances simulated
    time.
    """
    real_time, real_sleep = time.time, time.sleep
    start = real_time()

    def asked_by_script() -> bool:
        """Return whether one of the script's own files called the clock."""
        return own_files.has(sys._getframe(2).f_code.co_filename)

    def sleep(seconds: float) -> None:
        real_sleep(seconds)
        if asked_by_script():
            simulation.accelerator.timeline.cpu += round(seconds * 1e9)

    replacements: dict[str, Callable[..., object]] = {
        "perf_counter": lambda: simulation.cpu_ns() / 1e9,
        "perf_counter_ns": lambda: simulation.cpu_ns(),
        "time": lambda: start + simulation.cpu_ns() / 1e9 if asked_by_script() else real_time(),
        "sleep": sleep,
    }
    for name, replacement in replacements.items():
        setattr(time, name, replacement)


class HostPeak:
    """The most bytes of tensors seen on the host by `look`, which looks once per step and moment."""

    def __init__(self, steps: Steps) -> None:
        self.bytes, self.when = 0, ""
        self._steps, self._seen = steps, set[tuple[int, str]]()

    def look(self, when: str) -> None:
        """Add up the memory of all host tensors."""
        if (self._steps.count, when) in self._seen:
            return
        self._seen.add((self._steps.count, when))
        tensors = (each for each in gc.get_objects() if issubclass(type(each), torch.Tensor))
        on_host = (each for each in tensors if each.device.type == "cpu")
        local = [part for each in on_host for part in _local_parts(each)]
        memory = {each.untyped_storage()._cdata: each.untyped_storage().nbytes() for each in local}
        if sum(memory.values()) > self.bytes:
            self.bytes, self.when = sum(memory.values()), when


def _local_parts(tensor: Any) -> list[torch.Tensor]:
    """Return this rank's parts of a tensor, which may be a `DTensor` or FSDP1's `ShardedTensor`."""
    if hasattr(tensor, "local_shards"):
        return [shard.tensor for shard in tensor.local_shards()]
    return [getattr(tensor, "_local_tensor", tensor)]


class Saves:
    """Tensors that this rank writes to checkpoints, by the number of steps before."""

    def __init__(self, steps: Steps) -> None:
        self._steps = steps
        self._bytes, self._tensors = Counter[int](), Counter[int]()
        self._sharded: set[int] = set()

    def begin(self, is_sharded: bool) -> None:
        """Note a call of `torch.save`; `is_sharded`: from torch's distributed checkpoints."""
        if is_sharded:
            self._sharded.add(self._steps.count)

    def add(self, nbytes: int) -> None:
        """Count a storage that is written."""
        self._bytes[self._steps.count] += nbytes
        self._tensors[self._steps.count] += 1

    def largest(self) -> SavedCheckpoint | None:
        """Return the checkpoint of the step after which most bytes were written; None without checkpoints."""
        if not self._bytes:
            return None
        step = max(self._bytes, key=self._bytes.__getitem__)
        return SavedCheckpoint(self._bytes[step], self._tensors[step], step in self._sharded)


class Peaks:
    """Memory peaks for two readers: the script, which may reset them at any time, and the bench, which reads
    them after each step.

    The allocator has one set of peaks. A reader that resets it first saves the peaks for the other reader,
    which keeps them until it resets them itself.
    Created after the simulation has started and before `torch.cuda` is mapped.
    """

    def __init__(self, simulation: Simulation) -> None:
        self._allocator = simulation.accelerator.allocator
        self._script, self._bench = Counter[str](), Counter[str]()
        self._readings = AllocatorReadings()
        self._seen: list[int] = []
        module: Any = torch.get_device_module(DEVICE_TYPE)
        module.memory_stats = lambda device=None: self._read(self._script)
        module.reset_peak_memory_stats = lambda device=None: self._reset(self._script, self._bench)

    def take(self) -> StepMemory:
        """Return the bench's peaks and counts since the last call."""
        stats = self._read(self._bench)
        self._reset(self._bench, self._script)
        found = self._readings.since_last(stats)
        self._seen.append(found.reserved)
        return found

    def of_phases(self, steps: int) -> dict[str, int]:
        """Return the peak of reserved bytes until the last of `steps`, and after it."""
        self.take()
        return {"in training": max(self._seen[:-1], default=0), f"after step {steps}": self._seen[-1]}

    def _read(self, held: Counter[str]) -> dict[str, int]:
        return {name: max(value, held[name]) for name, value in self._allocator.memory_stats().items()}

    def _reset(self, reader: Counter[str], other: Counter[str]) -> None:
        now = self._allocator.memory_stats()
        other |= Counter({name: value for name, value in now.items() if name.endswith(".peak")})
        reader.clear()
        self._allocator.reset_peak_memory_stats()


_LARGE = 1 << 20
"""Number of elements from which a host tensor stays untouched."""
_FILLS = ("normal_", "uniform_", "log_normal_", "exponential_", "cauchy_")
_CONVERSIONS = ("bfloat16", "half", "float", "double")
"""Methods with the names of their dtypes."""


def skip_large_fills() -> None:
    """Leave large host tensors unfilled and unconverted from now on, which the device does not notice.
    Only for a process that runs a simulated script.

    A script that builds a model of billions of parameters on the host would spend a minute on their initial
    values, and as many bytes; here their memory stays untouched (zeros) until something else writes to it."""
    kind: Any = torch.Tensor
    for name in _FILLS:
        around(kind, name, _not_filling)
    for name in ("trunc_normal_", "_no_grad_trunc_normal_"):
        if hasattr(init, name):
            around(init, name, _not_filling)
    for name in _CONVERSIONS:
        around(kind, name, functools.partial(_not_converting, lambda *_, name=name: getattr(torch, name)))
    around(kind, "to", functools.partial(_not_converting, _dtype_of))


def _not_filling(original: Callable[..., Any], tensor: Any, *args: Any, **kwargs: Any) -> Any:
    if not _is_large(tensor) or kwargs.get("generator") is not None:
        return original(tensor, *args, **kwargs)
    _mark(tensor)
    return tensor


def _not_converting(
    dtype_of: Callable[..., Any], original: Callable[..., Any], tensor: Any, *args: Any, **kwargs: Any
) -> Any:
    untouched = _is_large(tensor) and hasattr(tensor.untyped_storage(), "_sim_untouched")
    if untouched and not (torch.is_grad_enabled() and tensor.requires_grad):
        dtype = dtype_of(args, kwargs)
        if dtype is not None and dtype != tensor.dtype:
            made = torch.empty_like(tensor, dtype=dtype)
            _mark(made)
            return made
    return original(tensor, *args, **kwargs)


def _dtype_of(args: Any, kwargs: Any) -> torch.dtype | None:
    """Return the dtype requested from `Tensor.to`, if the tensor stays on the host; None otherwise."""
    try:
        device, dtype, _, _ = parse_to(*args, **kwargs)
    except (TypeError, RuntimeError):
        return None
    found: torch.dtype | None = dtype if device is None or device.type == "cpu" else None
    return found


def _mark(tensor: torch.Tensor) -> None:
    storage: Any = tensor.untyped_storage()
    storage._sim_untouched = True


def _is_large(tensor: Any) -> bool:
    return type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.is_cpu and tensor.numel() >= _LARGE
