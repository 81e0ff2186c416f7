"""One real CPU rank of a script: torchrun's environment, the watch, and the script as `__main__`."""

import datetime
import functools
import os
import pickle
import time
import traceback
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import torch
import torch.distributed as dist

from fsdpbench.base.configuration.config import Config
from fsdpbench.base.configuration.script_source import FunctionSource, ScriptSource
from fsdpbench.base.torch_internals import replace
from fsdpbench.base.writing import write_whole
from fsdpbench.engine.devices.base import Placement
from fsdpbench.engine.results.records import RankRecord, Status, write_record
from fsdpbench.script.files import ScriptFiles
from fsdpbench.script.launchers import run_workers_here
from fsdpbench.script.own_files import PACKAGE, OwnFiles, in_a_line, run_as_main, run_function
from fsdpbench.script.real_ranks.checkpoints import CheckpointWatch
from fsdpbench.script.real_ranks.host_cuda import OneNodeError, hide_accelerator, map_gpus, map_host
from fsdpbench.script.real_ranks.pieces import keep
from fsdpbench.script.real_ranks.shrinking import Shrinking
from fsdpbench.script.real_ranks.unsharded import Reference, leave_out_wrappers
from fsdpbench.script.real_ranks.watching import ShardedWatch, Watch
from fsdpbench.script.steps import MeasuredAllError

_TASK, _ENDED = "task.pt", "rank{}_ended.pt"


class Way(StrEnum):
    """How a script runs: unchanged, without its wrappers, until it has saved, or from its checkpoint."""

    SHARDED = "sharded"
    UNSHARDED = "unsharded"
    SAVES = "saves"
    RESUMES = "resumes"


@dataclass(frozen=True)
class Task:
    """The task of the ranks of a run. `weights`: the folder of the sharded run's weights, for its reference;
    `scale`: the factor of the sum of gradients there; `casts_buffers`: like FSDP1; `moves`: as in
    `Reference`; `plain`: with torch's reductions instead of the script's own hooks; `seeds`: of the sharded
    run's ranks; `follows`, `silent`, `shared`, `prefixed` and `epochs`: as in the watch;
    `whole`: as in `Shrinking`."""

    way: Way
    steps: int = 2
    weights: Path = Path()
    casts_buffers: bool = False
    scale: float = 1.0
    moves: float = 0.0
    plain: bool = False
    seeds: tuple[int, ...] = ()
    follows: bool = False
    silent: frozenset[str] = frozenset()
    shared: frozenset[str] = frozenset()
    prefixed: bool = False
    epochs: Path | None = None
    whole: bool = False

    def write(self, folder: Path) -> None:
        """Write the task into the run's folder."""
        keep(self, folder / _TASK)


@dataclass(frozen=True)
class Ended:
    """How a rank's script ended: remarks, and the error with its line."""

    notes: list[str]
    cause: str = ""
    place: str = ""

    @staticmethod
    def read(folder: Path, rank: int) -> "Ended | None":
        """Return what a rank wrote, None if it wrote nothing."""
        path = folder / _ENDED.format(rank)
        return torch.load(path, weights_only=False) if path.exists() else None


def run_real_rank(config: Config, placement: Placement, folder: Path) -> Status:
    """Run the script or function of `config` as this rank, by the task in `folder`. Never raises."""
    assert config.script is not None
    own_files = OwnFiles(config.script)
    if config.script.function is not None:
        cause = _call(config, config.script.function, own_files, placement.rank)
    else:
        cause = _watched(config.script, own_files, placement, folder)
    record = RankRecord(placement.rank, placement.world_size, config.device)
    record.status, record.cause = (Status.ERROR if cause else Status.OK), cause or None
    write_record(record, folder)
    if dist.is_initialized() and not cause and config.script.function is None:
        dist.barrier()  # other ranks may still need this rank's connections
    return record.status


def _call(config: Config, function: FunctionSource, own_files: OwnFiles, rank: int) -> str:
    """Call a function as this rank of a gloo group on CPUs, and write its value; return the error that ended
    it. The group is created before the call; the function may create it again, without effect."""
    assert config.script is not None
    torch.set_num_threads(1)
    map_host(set()) if function.maps_cuda else hide_accelerator()
    limit = datetime.timedelta(seconds=config.measurement.timeout_s)
    init = functools.partial(dist.init_process_group, "gloo", timeout=limit)
    init()
    replace(dist, init_process_group=lambda *_, **__: dist.is_initialized() or init())
    try:
        values = [Path(function.folder, f"value{each}.pickle") for each in range(config.gpus)]
        write_whole(values[rank], pickle.dumps(run_function(config.script)))
        while not all(path.exists() for path in values):  # the others may still need this rank
            time.sleep(0.01)
    except BaseException as error:
        traceback.print_exc()
        return own_files.with_line(in_a_line(error), error)
    return ""


def _watched(source: ScriptSource, own_files: OwnFiles, placement: Placement, folder: Path) -> str:
    """Run a script by its task; return the error that ended it."""
    task: Task = torch.load(folder / _TASK, weights_only=False)
    rank, notes = placement.rank, set[str]()
    _set_environment(placement)
    map_host(notes)
    run_workers_here()
    Shrinking(notes, task.way in (Way.SAVES, Way.RESUMES), task.whole)
    files = ScriptFiles(folder, None, keeps_all=True)
    files.install()
    watch: Watch
    if task.way is Way.SHARDED:
        watch = ShardedWatch(own_files, folder, rank, task.steps, task.plain)
    elif task.way is Way.UNSHARDED:
        leave_out_wrappers(task.casts_buffers)
        watch = Reference(own_files, folder, rank, task.steps, task.weights, task.scale)
        watch.moves, watch.follows, watch.epochs = task.moves, task.follows, task.epochs
        watch.prefixed, watch.silent, watch.shared = task.prefixed, task.silent, task.shared
        watch.seed = task.seeds[rank] if task.seeds else 0
    else:
        watch = CheckpointWatch(own_files, folder, rank, task.steps, resumes=task.way is Way.RESUMES)
    cause, place = _execute(source, own_files, watch)
    files.settle()
    keep(Ended(sorted(notes), cause, place), folder / _ENDED.format(rank))
    return cause


def _set_environment(placement: Placement) -> None:
    """Split the ranks into two nodes, for scripts that shard within a node."""
    per_node = max(1, placement.world_size // 2)
    os.environ |= {
        "LOCAL_WORLD_SIZE": str(per_node),
        "LOCAL_RANK": str(placement.rank % per_node),
        "GROUP_RANK": str(placement.rank // per_node),
        "GROUP_WORLD_SIZE": str(placement.world_size // per_node),
        "HF_HUB_OFFLINE": "1",
    }


def _execute(source: ScriptSource, own_files: OwnFiles, watch: Watch) -> tuple[str, str]:
    """Run the script; return the error that ended it and the script's line, both "" if none did."""
    try:
        cause = run_as_main(source)
        if not cause:
            watch.finish()
        return cause, ""
    except MeasuredAllError:
        return "", ""
    except OneNodeError:
        os.environ |= {"LOCAL_WORLD_SIZE": os.environ["WORLD_SIZE"], "LOCAL_RANK": os.environ["RANK"]}
        map_gpus()
        return _execute(source, own_files, watch)
    except BaseException as error:
        traceback.print_exc()
        is_ours = traceback.extract_tb(error.__traceback__)[-1].filename.startswith(PACKAGE)
        place = "" if is_ours else own_files.last_line(error).short
        return in_a_line(error), place
