"""Programs that start a script's processes: torchrun, accelerate launch, deepspeed and others.

    fsdpbench run --module accelerate.commands.launch --gpus 8 -- --config_file fsdp.yaml train.py

The launcher runs unchanged: it reads its options and files, and sets the environment. Where it would start
processes, the program of this rank runs in the launcher's process instead, as `__main__`.
"""

import os
import re
import runpy
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.launcher.api import elastic_launch

from fsdpbench.base.errors import PicklableError, error_text
from fsdpbench.script.interposing import around

_STARTERS = ("accelerate.commands.launch", "deepspeed.launcher.", "composer.cli.launcher", "llamafactory.")
"""Modules, also run as `__main__`, that start workers with `subprocess.Popen`."""
_PROGRAMS = ("python", "torchrun")
_MODULES = {"torchrun": "torch.distributed.run", "accelerate": "accelerate.commands.accelerate_cli"}
_LAUNCH = r"(?>\S*/)?(torchrun|accelerate launch|python\S*+ (-\S+ )*-m (torch|accelerate)\S+\.(run|launch)) "
"""Command lines that start the workers of a job, whatever program runs them."""
_COUNTS = (
    "nproc", "nnodes", "num_processes", "num_machines", "num_gpus", "num_nodes", "config_file", "devices",
)  # fmt: skip


class OtherWorldError(PicklableError, ValueError):
    """Raised if a launcher is asked for another number of processes than is simulated."""

    def __init__(self, nodes: int, processes: int) -> None:
        local, world = int(os.environ["LOCAL_WORLD_SIZE"]), int(os.environ["WORLD_SIZE"])
        more = f" --gpus-used-per-node {processes}" if nodes > 1 and processes != local else ""
        there = world // local, local, f"{nodes * processes}{more}"
        super().__init__(error_text("launchers.other_world", nodes, processes, *there))


def run_workers_here() -> None:
    """Make launchers run their worker's program in this process from now on."""
    around(elastic_launch, "__call__", _launching)
    around(subprocess.Popen, "__init__", _starting)
    for name in ("execvp", "execvpe"):
        around(os, name, _executing)


def _executing(original: Callable[..., Any], file: Any, args: Any, *env: Mapping[str, str]) -> None:
    """Replace `os.execvpe`, with which a launcher becomes another one."""
    if not _is_worker(args):
        original(file, args, *env)
    os.environ.update(*env)
    run_program([os.fsdecode(word) for word in args])
    sys.exit()


def _launching(original: Callable[..., Any], launcher: Any, *arguments: Any) -> dict[int, Any]:
    """Replace the launch by torchrun, accelerate and Lightning's command line: run only this rank, here."""
    config, entry = launcher._config, launcher._entrypoint
    _check(config.max_nodes, config.nproc_per_node)
    if callable(entry):
        return {int(os.environ["RANK"]): entry(*arguments)}
    rank = os.environ["LOCAL_RANK"]
    run_program([str(word).replace("${local_rank}", rank) for word in (entry, *arguments)])
    return {}


def _check(nodes: int, processes: int) -> None:
    """Compare a launcher's processes with the simulated ones. Raises `OtherWorldError`."""
    asked = any(word in argument for argument in sys.argv for word in _COUNTS)
    is_default = not asked and nodes == 1 and processes in (1, torch.cuda.device_count())
    if is_default or torch.device("cuda").type == "cpu":  # real ranks represent any number
        return
    local, world = int(os.environ["LOCAL_WORLD_SIZE"]), int(os.environ["WORLD_SIZE"])
    if (nodes * processes, processes) != (world, local):
        raise OtherWorldError(nodes, processes)


def _starting(original: Callable[..., Any], process: Any, args: Any, *others: Any, **options: Any) -> None:
    """Replace `subprocess.Popen.__init__`, with which other launchers start a process for each rank."""
    if not _is_worker(args):
        return original(process, args, *others, **options)
    environment: Mapping[str, str] = options.get("env") or os.environ
    process.args, process.pid, process.returncode = args, os.getpid(), 0
    process.stdin = process.stdout = process.stderr = None
    process._communication_started = False
    world = environment.get("WORLD_SIZE", os.environ["WORLD_SIZE"])
    if world != os.environ["WORLD_SIZE"]:
        raise OtherWorldError(1, int(world))
    if environment.get("RANK", os.environ["RANK"]) == os.environ["RANK"]:
        os.environ.update(environment)
        run_program([os.fsdecode(word) for word in args])
    return None


def _is_worker(words: Any) -> bool:
    """Return whether a launcher starts a Python program, or another launcher, with this command line."""
    if isinstance(words, (str, bytes)) or not words:
        return False
    if not dist.is_initialized() and re.match(_LAUNCH, " ".join([*map(os.fsdecode, words), ""])):
        return True
    frame: FrameType | None = sys._getframe(3)
    while frame is not None and frame.f_code.co_filename == subprocess.__file__:
        frame = frame.f_back
    caller = {} if frame is None else frame.f_globals
    spec = caller.get("__spec__")
    name = str(caller.get("__name__")) if spec is None else spec.name
    return name.startswith(_STARTERS) and os.path.basename(os.fsdecode(words[0])).startswith(_PROGRAMS)


def run_program(words: Sequence[str]) -> None:
    """Run a command line in this process: `[python, -u, train.py, ...]`, `[python, -m, package.train, ...]`
    or `[train.py, ...]`."""
    rest, name = list(words), os.path.basename(words[0])
    if name in _MODULES:
        rest = ["-m", _MODULES[name], *rest[1:]]
    elif name.startswith("python"):
        rest = rest[1:]
    while rest and rest[0].startswith("-") and rest[0] != "-m":
        rest = rest[1:]
    if rest[:1] == ["-m"]:
        sys.argv = rest[1:]
        runpy.run_module(rest[1], run_name="__main__", alter_sys=True)
        return
    sys.argv = rest
    sys.path.insert(0, os.path.dirname(os.path.abspath(rest[0])))
    runpy.run_path(rest[0], run_name="__main__")
