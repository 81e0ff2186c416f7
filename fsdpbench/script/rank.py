"""One rank of a script's run: the environment that torchrun would make, the simulation, and the script.

The other ranks exist as costs alone; with `check_ranks` some of them run too, each by itself. The script runs
as `__main__` of this process, unchanged.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import sys
import traceback
from dataclasses import asdict
from pathlib import Path
from statistics import mean

import torch

from fsdpbench.configuration.config import Config
from fsdpbench.configuration.script_source import ScriptSource, StepsBy
from fsdpbench.devices.base import Placement
from fsdpbench.devices.sim import SimDevice
from fsdpbench.results.records import RankRecord, Status, trace_path
from fsdpbench.script.clock import map_clock
from fsdpbench.script.cuda import ProfilerRequests, compile_notes, has_compiled, leave_cache_alone, map_cuda
from fsdpbench.script.decisions import Decisions
from fsdpbench.script.explain import explained, name_cuda
from fsdpbench.script.files import ScriptFiles
from fsdpbench.script.host_fills import skip_large_fills
from fsdpbench.script.observed import Observed
from fsdpbench.script.observed.waits import Waits
from fsdpbench.script.optimizers import Optimizers
from fsdpbench.script.own_files import OwnFiles
from fsdpbench.script.peaks import Peaks
from fsdpbench.script.rank_check.calls import Ended
from fsdpbench.script.rank_check.recording import Recorder
from fsdpbench.script.rank_check.start import start_recording
from fsdpbench.script.steps import MeasuredAllError, Steps
from fsdpbench.script.variations import NoEffectError, Varied
from fsdpbench.sim.accelerator import ACCELERATOR
from fsdpbench.sim.costs.flops import FlopCount

# The real one: scripts may need it, and where cuda is mapped it cannot be imported.
from fsdpbench.torch_internals import dynamo  # noqa: F401

_ENDED = {Status.OK: Ended.OK, Status.OOM: Ended.OOM, Status.ERROR: Ended.RAISED}
_MASTER = ("127.0.0.1", "29500")


def run_script(config: Config, placement: Placement, folder: Path, rank_0: Path | None = None) -> Status:
    """Run the script of `config` as this rank; leaves record and trace in `folder`. Never raises what the
    script raised: the record says it, and the traceback is on stderr.

    With `check_ranks` it leaves its collectives too; `rank_0`: the folder of rank 0, which ran before."""
    source = config.script
    assert source is not None
    _set_environment(config, placement)
    device = SimDevice(config, placement)
    record = RankRecord(placement.rank, placement.world_size, config.device)
    simulation = device.start()
    ACCELERATOR.flops = FlopCount()
    peaks = Peaks()
    requests = map_cuda(simulation)
    own_files = OwnFiles(source)
    device.line = own_files.line
    map_clock(simulation, own_files)
    decisions = Decisions(own_files)
    decisions.follow()
    skip_large_fills()
    recorder = None
    if source.check_ranks:
        recorder = start_recording(placement.rank, folder, rank_0 or folder, own_files)
    steps = Steps(
        simulation,
        config.measurement,
        trace_path(folder, placement.rank),
        peaks.take,
        to_the_end=source.to_the_end,
    )

    def out_of_memory(message: str) -> None:
        record.add_sanitizer(device.sanitizer)
        record.status, record.cause = Status.OOM, message.splitlines()[0]
        record.memory_account = record.memory_account or device.memory_account
        record.write(folder)
        if recorder is not None:
            recorder.finish(folder, Ended.OOM, record.cause)

    device.on_out_of_memory(out_of_memory)
    optimizers = Optimizers(own_files)
    if source.steps_by is StepsBy.OPTIMIZER:
        optimizers.on_step = steps.ended
    else:
        requests.on_step = steps.ended
    files = ScriptFiles(folder)
    files.install()
    leave_cache_alone(files.overlay.exempt)
    if recorder is not None:
        recorder.follow_files(files.overlay, (rank_0 or folder) / "files")
    what_if = config.what_if
    waits = Waits(own_files)
    waits.step = lambda: steps.count
    varied = Varied(what_if.variation, waits) if what_if is not None and what_if.variation else None
    observed = Observed(own_files, waits, folder)
    status, cause = _execute(source, own_files, decisions, recorder)
    if varied is not None and status is Status.OK and not varied.count:
        status, cause = Status.ERROR, str(NoEffectError(varied.variation))
    if recorder is not None:
        recorder.finish(folder, _ENDED[status], cause)
    for child in multiprocessing.active_children():  # data loaders of a script that was ended
        child.terminate()
    record.status, record.cause = status, cause
    record.redirected_files = files.settle()
    steps.finish()
    record.hardware = device.describe()
    record.unknown_operators = device.unknown_operators
    record.placeholder_decisions = decisions.to_list()
    record.compiled = has_compiled()
    if record.compiled:
        record.compilation = device.compilation
    record.add_sanitizer(device.sanitizer)
    record.memory_account = record.memory_account or device.memory_account
    if steps.step_times_s:
        _fill_figures(record, steps, device)
        assert record.script is not None
        record.loader = observed.loaders.to_dict(steps.count)
        kind = steps.flops[-1].main_type if steps.flops else None
        record.script |= {"observed": {**observed.to_dict(steps.count), "computes_in": kind}}
        _export(requests, steps, record)
    elif record.status is Status.OK:
        record.status, record.cause = Status.ERROR, _too_few(steps, source, optimizers, decisions)
    record.write(folder)
    return record.status


def _set_environment(config: Config, placement: Placement) -> None:
    """What torchrun sets."""
    nodes = -(-config.gpus // config.gpus_per_node)
    os.environ |= {
        "RANK": str(placement.rank),
        "LOCAL_RANK": str(placement.local_rank),
        "WORLD_SIZE": str(config.gpus),
        "LOCAL_WORLD_SIZE": str(config.gpus_per_node),
        "GROUP_RANK": str(placement.rank // config.gpus_per_node),
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
    """Run the script as `__main__`; how it ended."""
    path = Path(source.path)
    multiprocessing.set_start_method(None, force=True)  # as a fresh interpreter starts data loaders
    sys.argv = [source.path, *source.arguments]
    sys.path.insert(0, os.getcwd() if source.module else str(path.parent.absolute()))
    try:
        if source.module:
            runpy.run_module(source.module, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(source.path, run_name="__main__")
    except MeasuredAllError:
        pass
    except SystemExit as stop:
        if stop.code not in (None, 0):
            return Status.ERROR, f"the script ended itself with exit code {stop.code}"
    except torch.OutOfMemoryError as error:
        traceback.print_exc()
        return Status.OOM, str(error).splitlines()[0]
    except BaseException as error:
        name_cuda(error)
        traceback.print_exc()
        if recorder is not None:
            recorder.log.stood = recorder.stacks.of_traceback(error.__traceback__)
        frames = [
            frame for frame in traceback.extract_tb(error.__traceback__) if own_files.has(frame.filename)
        ]
        line = (frames[-1].filename, frames[-1].lineno or 0) if frames else ("", 0)
        return Status.ERROR, "; ".join([explained(error), *decisions.told(line)])
    return Status.OK, None


def _too_few(steps: Steps, source: ScriptSource, optimizers: Optimizers, decisions: Decisions) -> str:
    """Why nothing was measured, of a script that ended well."""
    told = [f"the script ended after {steps.count} steps (counted by its {source.steps_by.value})"]
    if source.steps_by is StepsBy.OPTIMIZER:
        told += optimizers.without_steps()
    told += decisions.told()
    return f"{'; '.join(told)}; at least 2 are needed, better 7. --steps-by names another way to count them"


def _fill_figures(record: RankRecord, steps: Steps, device: SimDevice) -> None:
    record.step_times_s = steps.step_times_s
    record.warmup_times_s = steps.warmup_times_s
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
    record.script = {
        "steps": steps.count,
        "flops": "matrix products, attention and convolutions, counted as they were launched",
        "notes": steps.notes + compile_notes(),
    }


def _export(requests: ProfilerRequests, steps: Steps, record: RankRecord) -> None:
    """Copy the trace to where the script's profilers export."""
    if not steps.traced_times_s:
        return
    record.trace = f"{steps.trace_path.parent.name}/{steps.trace_path.name}"
    requests.copy(steps.trace_path)
