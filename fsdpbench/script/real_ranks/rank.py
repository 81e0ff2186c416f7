"""One real CPU rank of a script: torchrun's environment, the watch, and the script as `__main__`."""

from __future__ import annotations

import os
import traceback
from enum import StrEnum
from pathlib import Path

import msgspec
import torch.distributed as dist

from fsdpbench.base.configuration.config import Config
from fsdpbench.base.configuration.script_source import ScriptSource
from fsdpbench.base.files.whole_files import write_whole
from fsdpbench.engine.devices.base import Placement
from fsdpbench.engine.results.records import RankRecord, Status, write_record
from fsdpbench.script.files import ScriptFiles
from fsdpbench.script.own_files import PACKAGE, OwnFiles, run_as_main
from fsdpbench.script.real_ranks.checkpoints import CheckpointWatch
from fsdpbench.script.real_ranks.host_cuda import map_host
from fsdpbench.script.real_ranks.shrinking import Shrinking
from fsdpbench.script.real_ranks.unsharded import Reference, leave_out_wrappers
from fsdpbench.script.real_ranks.watching import ShardedWatch, Watch
from fsdpbench.script.steps import MeasuredAllError

_TASK, _ENDED = "task.json", "ended.json"


class Way(StrEnum):
    """How a script runs: as it is, without its wrappers, until it saved, or from what it saved."""

    SHARDED = "sharded"
    UNSHARDED = "unsharded"
    SAVES = "saves"
    RESUMES = "resumes"


class Task(msgspec.Struct, frozen=True):
    """The task of the ranks of a run. `weights`: the folder of the sharded run's weights, for its reference;
    `scale`: of the sum of gradients there; `casts_buffers`: as FSDP1 does; `per_node`: ranks that the
    script takes for a node's."""

    way: Way
    steps: int = 2
    weights: str = ""
    casts_buffers: bool = False
    scale: float = 1.0
    per_node: int = 1

    def write(self, folder: Path) -> None:
        """Write the task into the folder of its run."""
        write_whole(folder / _TASK, msgspec.json.encode(self))


class Ended(msgspec.Struct, frozen=True):
    """How a rank's script ended: remarks, and the error with its line."""

    notes: list[str]
    cause: str = ""
    place: str = ""

    @classmethod
    def read(cls, folder: Path, rank: int) -> Ended | None:
        """Return what a rank left, None if it left nothing."""
        path = folder / f"rank{rank}_{_ENDED}"
        return msgspec.json.decode(path.read_bytes(), type=cls) if path.exists() else None


def run_real_rank(config: Config, placement: Placement, folder: Path) -> Status:
    """Run the script of `config` as this rank, as the task in `folder` says. Never raises for the script."""
    assert config.script is not None
    task = msgspec.json.decode((folder / _TASK).read_bytes(), type=Task)
    os.environ |= {
        "LOCAL_WORLD_SIZE": str(task.per_node),
        "LOCAL_RANK": str(placement.rank % task.per_node),
        "GROUP_RANK": str(placement.rank // task.per_node),
        "GROUP_WORLD_SIZE": str(placement.world_size // task.per_node),
        "HF_HUB_OFFLINE": "1",
    }
    notes: set[str] = set()
    own_files = OwnFiles(config.script)
    map_host(notes)
    Shrinking(notes)
    watch: Watch
    files = ScriptFiles(folder, None, keeps_all=True)
    files.install()
    if task.way in (Way.SAVES, Way.RESUMES):
        watch = CheckpointWatch(
            own_files, folder, placement.rank, task.steps, resumes=task.way is Way.RESUMES
        )
    elif task.way is Way.UNSHARDED:
        leave_out_wrappers(task.casts_buffers)
        watch = Reference(own_files, folder, placement.rank, task.steps, Path(task.weights), task.scale)
    else:
        watch = ShardedWatch(own_files, folder, placement.rank, task.steps)
    cause, place = _execute(config.script, own_files, watch)
    files.settle()
    ended = Ended(sorted(notes), cause, place)
    write_whole(folder / f"rank{placement.rank}_{_ENDED}", msgspec.json.encode(ended))
    record = RankRecord(placement.rank, placement.world_size, config.device)
    record.status, record.cause = (Status.ERROR if cause else Status.OK), cause or None
    write_record(record, folder)
    if dist.is_initialized() and not cause:
        dist.barrier()  # the others may still need this rank's connections
    return record.status


def _execute(source: ScriptSource, own_files: OwnFiles, watch: Watch) -> tuple[str, str]:
    """Run the script; return the error that ended it and the script's line, both empty for none."""
    try:
        cause = run_as_main(source)
        if not cause:
            watch.finish()
        return cause, ""
    except MeasuredAllError:
        return "", ""
    except BaseException as error:
        traceback.print_exc()
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        is_ours = traceback.extract_tb(error.__traceback__)[-1].filename.startswith(PACKAGE)
        place = "" if is_ours else own_files.last_line(error).short
        return f"{type(error).__name__}: {lines[0] if lines else ''}", place
