"""A function that runs in place of a script's file, on a simulated rank or on real CPU ranks.

The process that asks and those that run it share the file of the function, not its memory: the function is
found by module and name, as pickle finds it.
"""

from __future__ import annotations

import contextlib
import datetime
import importlib.util
import linecache
import multiprocessing
import os
import pickle
import sys
import traceback
from pathlib import Path

import torch
import torch.distributed as dist

from fsdpbench.base.configuration.config import Config
from fsdpbench.base.configuration.script_source import ScriptSource
from fsdpbench.base.files.whole_files import write_whole
from fsdpbench.base.torch_internals import replace
from fsdpbench.engine.devices.base import Placement
from fsdpbench.engine.results.records import RankRecord, Status, write_record
from fsdpbench.script.cuda.refusals import explained
from fsdpbench.script.own_files import OwnFiles, Place


def run_function(source: ScriptSource) -> object:
    """Call the function of `source` with its arguments, and return its value. Raises what it raises."""
    asked = source.function
    assert asked is not None
    multiprocessing.set_start_method(None, force=True)  # as a fresh interpreter starts data loaders
    sys.argv = [source.path]
    _import(asked.module, source.path)
    function, (args, named) = pickle.loads(Path(asked.folder, "call.pickle").read_bytes())
    return function(*args, **named)


def _import(name: str, path: str) -> None:
    """Import the module `name` if it is the file at `path`, else the file under that name: pytest gives names
    that no import finds."""
    with contextlib.suppress(ImportError):
        if os.path.realpath(str(importlib.import_module(name).__file__)) == path:
            return
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)


def with_line(error: BaseException, place: Place) -> str:
    """Return an error in a line, and the line of the function's own that it passed last."""
    text = linecache.getline(place.file, place.line).strip()
    return f"{explained(error)}, at {place.short}: {text}" if place.file else explained(error)


def run_function_rank(config: Config, placement: Placement, folder: Path) -> Status:
    """Call the function of `config` as this rank of a gloo group on CPUs, one thread each, and leave its
    value. The group exists: that the function makes it again is let pass. Never raises for the function."""
    source = config.script
    assert source is not None
    assert source.function is not None
    torch.set_num_threads(1)
    if source.function.maps_cuda:
        from fsdpbench.script.real_ranks.host_cuda import map_host  # not for simulated ranks

        map_host(set())
    original, limit = dist.init_process_group, datetime.timedelta(seconds=config.measurement.timeout_s)
    original("gloo", timeout=limit)
    replace(
        dist, init_process_group=lambda *_, **__: dist.is_initialized() or original("gloo", timeout=limit)
    )
    record = RankRecord(placement.rank, placement.world_size, config.device)
    try:
        value = pickle.dumps(run_function(source))
        write_whole(Path(source.function.folder, f"value{placement.rank}.pickle"), value)
    except BaseException as error:
        traceback.print_exc()
        record.status, record.cause = Status.ERROR, with_line(error, OwnFiles(source).last_line(error))
    write_record(record, folder)
    if dist.is_initialized() and record.status is Status.OK:
        dist.barrier()  # the others may still need this rank's connections
    return record.status
