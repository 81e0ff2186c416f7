"""The worker: runs one rank of one configuration on any device.

    build, wrap, optimizer ─> settle ─> warm-up ─> timed steps (no profiler) ─> traced steps ─> record
                                                   one pass if tracing is free (`measuring/warmup.py`)

All that depends on the device is in `devices/`. `launch/` starts the worker, or torchrun does
(`torchrun ... -m fsdpbench.engine.worker CONFIG.json FOLDER`).
"""

import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

from fsdpbench.base.interruption import die_with_named_parent

if __name__ == "__main__":
    die_with_named_parent()  # before importing torch, because its agent may end during the import

import torch

from fsdpbench.base.configuration.config import Config, Degrees
from fsdpbench.base.errors import BenchError, error_text
from fsdpbench.base.files.documents import read_json_object
from fsdpbench.base.settings import SETTINGS, Settings
from fsdpbench.engine.devices import make_device
from fsdpbench.engine.devices.base import Device, Placement
from fsdpbench.engine.measuring import soak as soaking
from fsdpbench.engine.measuring.warmup import TimedSteps, time_and_trace, warm_up
from fsdpbench.engine.results.records import Status, trace_path, write_record
from fsdpbench.reports.rank_record import RankRecord, compiled_graphs
from fsdpbench.sim.torch_device.flops import compute_type
from fsdpbench.systems import BuildContext, System, get_system, software_of
from fsdpbench.systems.narrow import workload_of
from fsdpbench.systems.training import attention_as_asked
from fsdpbench.workloads import Workload
from fsdpbench.workloads.decoder.workload import HasBuffers
from fsdpbench.workloads.layers import DTYPES

_MOST_OF_MEMORY = 0.4
"""If parameters need more than this share of a GPU's memory, materialize them only after sharding."""


def run_rank(config: Config, placement: Placement, folder: Path) -> Status:
    """Run this rank and write its record (and trace) to `folder`. Raises what the configuration raised,
    except out of memory, which is a regular outcome that the record reports."""
    torch.autograd.set_multithreading_enabled(False)
    record = RankRecord(placement.rank, placement.world_size, config.device)
    device = make_device(config, placement)

    def out_of_memory(message: str) -> None:
        record.add_sanitizer(getattr(device, "sanitizer", None))
        record.status, record.cause = Status.OOM, _first_line(message)
        record.memory_account = record.memory_account or getattr(device, "memory_account", None)
        write_record(record, folder)

    device.on_out_of_memory(out_of_memory)
    try:
        device.open()
        with attention_as_asked(config):
            _measure(config, placement, device, record, folder)
    except torch.OutOfMemoryError as error:
        out_of_memory(str(error))
    except BaseException as error:
        record.add_sanitizer(getattr(device, "sanitizer", None))
        record.status, record.cause = Status.ERROR, f"{type(error).__name__}: {_first_line(str(error))}"
        write_record(record, folder)
        raise
    finally:
        device.close()
    if record.status is Status.OK:
        record.add_sanitizer(getattr(device, "sanitizer", None))
    write_record(record, folder)
    return record.status


def _measure(config: Config, placement: Placement, device: Device, record: RankRecord, folder: Path) -> None:
    workload = workload_of(config)
    _fill_constants(config, workload, device, record)
    losses: list[torch.Tensor] = []
    if config.soak is not None:
        _soak(config, placement, device, workload, record)
        return
    loop = _training_loop(config, placement, device, workload, losses.append)
    device.settle()

    def timed_step() -> float:
        return device.timed_step(loop.step)

    warming = TimedSteps(timed_step, device.take_memory)
    warm = warm_up(config.measurement, warming.run, device.has_settled, warming.retried)
    steps = TimedSteps(timed_step, device.take_memory, record.step_times_s)
    path = trace_path(folder, placement.rank)
    profiled_s = record.profiler_step_times_s
    warm = time_and_trace(config.measurement, warm, steps, device, loop.step, path, profiled_s)
    record.warmup_times_s, record.warmup_stable = warm.times_s, warm.stable
    if config.measurement.traced_steps:
        record.trace = path.relative_to(folder).as_posix()
        record.memory_traffic = device.memory_traffic(config.measurement.traced_steps)
    record.memory_per_step = [asdict(peaks) for peaks in steps.memory if peaks is not None] or None
    values = [device.loss_value(loss) for loss in losses]
    record.losses = [v for v in values if v is not None] or None
    _note_program(config, device, loop, record)
    record.graph = getattr(device, "graph", None)
    if hasattr(device, "step_work"):  # last, because it may run another step, which must not be measured
        record.step_work = device.step_work(loop.step)


def _note_program(config: Config, device: Device, loop: soaking.TrainingLoop, record: RankRecord) -> None:
    """Add to `record` what the run showed about the program: operators of unknown cost, compiled graphs (a
    simulated device knows more about them than Dynamo), settings that nothing read."""
    record.unknown_operators = dict(getattr(device, "unknown_operators", {}))
    record.network_share = getattr(device, "network_share", None)
    record.unread_settings = unread_settings(loop.system, loop.config) or None
    if config.settings.compile:
        # Importing the compiler takes seconds.
        from fsdpbench.sim.torch_device.compile.refusals import of_dynamo

        record.compilation = getattr(device, "compilation", None) or of_dynamo()
    require_compiled(config, record)


def require_compiled(config: Config, record: RankRecord) -> None:
    """Raise `BenchError` if nothing was compiled although requested: the run's name would be wrong."""
    found = record.compilation
    asked = 2 if config.settings.compile_loss else 1  # graphs: the units' and the loss's
    if not config.settings.compile or found is None or (compiled_graphs(found) and found["traced"] >= asked):
        return
    breaks = ", ".join(f"{reason} ({count}x)" for reason, count in found["graph_breaks"].items())
    loss, why = " or none of the loss" * (asked > 1), f": {breaks}" if breaks else ""
    raise BenchError(error_text("worker.no_graph", loss, config.settings.wrap, why))


def _soak(
    config: Config, placement: Placement, device: Device, workload: Workload, record: RankRecord
) -> None:
    """Run all steps of a soak, each timed, instead of warm-up, timed and traced steps."""
    assert config.soak is not None
    settings, shapes = config.settings, soaking.shapes_of(config)
    in_full = software_of(config).checkpointing.reentrant
    model, hardware = soaking.mean_flops(workload, shapes, settings.recomputed, in_full)
    group, tokens = Degrees.of(config).group, soaking.mean_tokens(shapes)
    record.flops_per_step = {"model": model / group, "hardware": hardware / group}
    record.tokens_per_step = None if tokens is None else _share(tokens, group)
    losses: list[float] = []

    def note_loss(loss: torch.Tensor) -> None:
        value = device.loss_value(loss)
        if value is not None:
            losses.append(value)

    loop = _training_loop(config, placement, device, workload, note_loss)
    batches = soaking.ShapedBatches(_maker_of_batches(config, placement, device, workload), settings.seed)
    loop.batches = batches
    device.settle()
    soak = soaking.Soak(config.soak, shapes)
    record.soak = soak.record
    if config.soak.lengths is not None:
        record.buffer_rows = None  # differs from step to step
    record.step_times_s = soak.run(device, loop, batches)
    record.memory_per_step = soak.memory_per_step()
    record.losses = losses or None
    _note_program(config, device, loop, record)


def _maker_of_batches(
    config: Config, placement: Placement, device: Device, workload: Workload
) -> Callable[[int, int | None, int], Iterator[soaking.Batch]]:
    """Return a function (rows, tokens, seed) that yields batches of this size forever."""
    data = Path(config.data) if config.data else None
    where, degrees = device.torch_device, Degrees.of(config)
    rank, world = degrees.data_rank(placement.rank), degrees.data

    def make(rows: int, tokens: int | None, seed: int) -> Iterator[soaking.Batch]:
        return workload.batches(rows, tokens, seed, rank, where, data=data, world_size=world)

    return make


def _fill_constants(config: Config, workload: Workload, device: Device, record: RankRecord) -> None:
    settings, group = config.settings, Degrees.of(config).group
    record.parameters = workload.parameters
    seq = workload.resolve_seq(settings.seq)
    in_full = software_of(config).checkpointing.reentrant
    flops = workload.flops_per_step(settings.batch, seq, settings.recomputed, in_full)
    record.flops_per_step = {
        # As floats: a large batch has more than 2^63 FLOPs, and readers reject such integers.
        "model": float(flops.model * settings.grad_accum) / group,
        "hardware": float(flops.hardware * settings.grad_accum) / group,
    }
    most = settings.batch * (seq or 0) // group
    rows = workload.buffer_rows(most) if isinstance(workload, HasBuffers) else None
    if rows is not None:  # rows that expert capacity drops, and padding rows that are computed
        record.buffer_rows = {name: settings.grad_accum * n for name, n in rows._asdict().items()}
    record.samples_per_step = _share(settings.batch * settings.grad_accum, group)
    tokens = workload.tokens(settings.batch, seq)
    record.tokens_per_step = None if tokens is None else _share(tokens * settings.grad_accum, group)
    arithmetic = compute_type(DTYPES[settings.param_dtype], convolution=workload.is_convolutional)
    record.peak_flops = device.peak_flops(arithmetic)
    record.hardware = device.describe()


def _share(number: int, ranks: int) -> float:
    """Return each rank's share of a group's amount, as an integer if it divides evenly."""
    return number // ranks if number % ranks == 0 else number / ranks


def _training_loop(
    config: Config,
    placement: Placement,
    device: Device,
    workload: Workload,
    on_loss: Callable[[torch.Tensor], None],
) -> soaking.TrainingLoop:
    system, settings = get_system(config.system), config.settings
    asked = watched(config)
    context = BuildContext(asked, workload, device.torch_device, _deferred(config, workload, device))
    model = system.wrap(context)
    seq = workload.resolve_seq(settings.seq)
    batches = _maker_of_batches(config, placement, device, workload)(settings.batch, seq, settings.seed)
    optimizer = system.make_optimizer(model, asked)
    loop = soaking.TrainingLoop(asked, system, model, optimizer, batches, device.torch_device, on_loss)
    loop.around_microbatch = device.trainer(model)
    device.capture(loop)
    return loop


def _deferred(config: Config, workload: Workload, device: Device) -> bool:
    """Return whether to build the model on the meta device and materialize it shard by shard."""
    if not get_system(config.system).shards or config.device == "cpu":
        return False
    if config.device == "sim":
        return True
    memory = torch.cuda.get_device_properties(device.torch_device).total_memory
    return 4 * workload.parameters > _MOST_OF_MEMORY * memory


def _first_line(text: str) -> str:
    return next((line.strip() for line in text.splitlines() if line.strip()), "no message")


def main(arguments: list[str]) -> int:
    """Run one rank for torchrun. Arguments: CONFIG.json and the output folder."""
    if len(arguments) != 2:
        print("usage: torchrun ... -m fsdpbench.engine.worker CONFIG.json FOLDER", file=sys.stderr)
        return 2
    config = Config.from_dict(read_json_object(Path(arguments[0])))
    placement = Placement(*(int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")))
    status = run_rank(config, placement, Path(arguments[1]))
    return 0 if status in (Status.OK, Status.OOM) else 1


# Systems of other packages do not list settings that are newer than they are as `absent`. A sweep over such a
# setting would show equal configurations under different names.
_OF_THE_BENCH = frozenset(
    {"batch", "graph", "grad_accum", "implementation", "lora", "lora_base", "lora_targets", "seed", "seq"}
    | {"attention", "clip", "linear_dtype", "norm", "rotary", "loss", "tp", "cp", "ep", "zero_grad"}
)
"""Settings that the bench implements for every system, or refuses for a system that cannot have them."""


class WatchedSettings(Settings):
    """Settings that record which of them are read."""

    def __init__(self, settings: Settings) -> None:
        super().__init__(**{each.name: getattr(settings, each.name) for each in fields(settings)})
        object.__setattr__(self, "asked_for", set())

    def __getattribute__(self, name: str) -> Any:
        if name in SETTINGS:
            asked_for = object.__getattribute__(self, "__dict__").get("asked_for")
            if asked_for is not None:
                asked_for.add(name)
        return object.__getattribute__(self, name)


def watched(config: Config) -> Config:
    """Return `config` with settings that record reads."""
    return replace(config, settings=WatchedSettings(config.settings))


def unread_settings(system: System, config: Config) -> list[str]:
    """Return the settings of a `watched` configuration that nothing in the system read.

    Settings at their default or `absent` do not count, because they need no effect.
    """
    settings = config.settings
    assert isinstance(settings, WatchedSettings)
    asked_for = frozenset(object.__getattribute__(settings, "asked_for"))
    given = {name: settings.__dict__[name] for name in SETTINGS}
    expected = {
        name for name, value in given.items() if value is not None and value != SETTINGS[name].default
    }
    unread = expected - asked_for - _OF_THE_BENCH - system.absent_settings(config).keys()
    if "grad_sync" in expected and config.gpus > 1 and type(system).microbatch is System.microbatch:
        unread.add("grad_sync")  # the loop reads it, but the system does not delay the reduction
    return sorted(unread)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
