"""A function that runs in place of a script's file, on a simulated rank or on real CPU ranks.

The process that asks and those that run it share the file of the function, not its memory: the function is
found by module and name, as pickle finds it.
"""

from __future__ import annotations

import datetime
import importlib.util
import linecache
import multiprocessing
import os
import pickle
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from fsdpbench.base.configuration.config import Config
from fsdpbench.base.configuration.script_source import FunctionFailure, FunctionSource, ScriptSource
from fsdpbench.base.files.whole_files import write_whole
from fsdpbench.base.torch_internals import replace
from fsdpbench.engine.devices.base import Placement
from fsdpbench.engine.results.records import RankRecord, Status, write_record
from fsdpbench.script.cuda.refusals import explained, name_cuda
from fsdpbench.script.own_files import OwnFiles


def run_function(source: ScriptSource, own_files: OwnFiles) -> object:
    """Call the function of `source` with its arguments and return its value; None if it ends the process
    well. An exception is written down for the process that asked, and raised."""
    function = source.function
    assert function is not None
    multiprocessing.set_start_method(None, force=True)  # as a fresh interpreter starts data loaders
    sys.argv = [source.path]
    try:
        found: Any = _module(function.module, source.path)
        for name in function.name.split("."):
            found = getattr(found, name)
        arguments, named = pickle.loads(Path(function.call).read_bytes())
        return found(*arguments, **named)
    except BaseException as error:
        if isinstance(error, SystemExit) and error.code in (None, 0):
            return None
        if isinstance(error, Exception | SystemExit):
            _leave(error, own_files, function)
        raise


def _module(name: str, path: str) -> ModuleType:
    """Import the module `name` if it is the file at `path`, else the file under that name: pytest gives names
    that no import finds."""
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        spec = None
    if spec is not None and spec.origin is not None and os.path.realpath(spec.origin) == path:
        return importlib.import_module(name)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _leave(error: BaseException, own_files: OwnFiles, function: FunctionSource) -> None:
    name_cuda(error)
    place = own_files.last_line(error)
    kind, message = type(error).__name__, str(error)
    if "\n" not in message:
        message = explained(error).removeprefix(kind).removeprefix(": ")
    text = linecache.getline(place.file, place.line).strip()
    failure = FunctionFailure(kind, message, place.file, place.line, text)
    write_whole(function.failure_path(int(os.environ["RANK"])), msgspec.json.encode(failure))


def run_function_rank(config: Config, placement: Placement, folder: Path) -> Status:
    """Call the function of `config` as this rank of a gloo group on CPUs, one thread each, and leave its
    value. The group exists: that the function makes it again is let pass. Never raises for the function."""
    source = config.script
    assert source is not None
    function = source.function
    assert function is not None
    torch.set_num_threads(1)
    if function.maps_cuda:
        from fsdpbench.script.real_ranks.host_cuda import map_host  # not for simulated ranks

        map_host(set())
    original = dist.init_process_group
    limit = datetime.timedelta(seconds=config.measurement.timeout_s)

    def init_process_group(*args: Any, **kwargs: Any) -> None:
        if not dist.is_initialized():
            original("gloo", timeout=limit)

    replace(dist, init_process_group=init_process_group)
    init_process_group()
    record = RankRecord(placement.rank, placement.world_size, config.device)
    own_files = OwnFiles(source)
    try:
        value = run_function(source, own_files)
        _keep(value, function, placement.rank)
    except BaseException as error:
        traceback.print_exc()
        if not function.failure_path(placement.rank).exists():
            _leave(error, own_files, function)
        record.status, record.cause = Status.ERROR, explained(error)
    write_record(record, folder)
    if dist.is_initialized() and record.status is Status.OK:
        dist.barrier()  # the others may still need this rank's connections
    return record.status


def _keep(value: object, function: FunctionSource, rank: int) -> None:
    """Write what the function returned. Raises `TypeError` for what no other process can read."""
    try:
        content = pickle.dumps(value)
    except Exception as error:
        raise TypeError(
            f"{function.name} returned {type(value).__name__}, which cannot be handed to the test ({error}); "
            "return numbers, or tensors as full_tensor() and to_local() give them"
        ) from None
    write_whole(function.value_path(rank), content)
