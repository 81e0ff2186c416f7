"""Mapping of "cuda" and "nccl" to the CPU and gloo in this process, with real numbers.

`script/cuda` does the same with the simulated device. Streams and events exist but do nothing, memory
statistics are 0, and batches are loaded in the rank's own process.
"""

import collections
import contextlib
import datetime
import functools
import inspect
import os
import re
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
import torch.cuda.memory
import torch.cuda.nccl
import torch.cuda.nvtx
import torch.distributed as dist
import torch.multiprocessing
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from fsdpbench.base.torch_internals import patch, replace
from fsdpbench.script.cuda.device_names import CUDA, map_amp, map_device_names
from fsdpbench.script.cuda.distributed import map_nccl_class, map_starters
from fsdpbench.script.cuda.profiling import map_profiler
from fsdpbench.script.cuda.refusals import Replacements
from fsdpbench.script.interposing import Arguments, around, around_imports, around_init
from fsdpbench.script.real_ranks.watching import NotComparedError
from fsdpbench.sim.torch_device.patches.dynamo import passing_to

LONGEST_WAIT = datetime.timedelta(seconds=30)
"""Longest time that a rank waits for other ranks in one collective."""
_HOST = "cpu"
_DROPOUTS = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")
_ALONE = (
    "num_workers", "prefetch_factor", "persistent_workers", "multiprocessing_context", "timeout",
    "pin_memory", "pin_memory_device",
)  # fmt: skip
_BACKENDS = ("backend", "pg_options", "device_id")
_DEVICES = ("device_ids", "output_device")
LIGHTNING = re.compile(r"(?:pytorch_)?lightning.*\.(?:\w*connector|model_parallel)")
_GIB = 1 << 30


def _nothing(*args: Any, **kwargs: Any) -> None:
    """Do nothing: all work is done when it is requested."""


class _Stream:
    """A stream or an event, which does nothing."""

    device, cuda_stream = torch.device("cpu"), 0
    __init__ = __exit__ = wait_stream = wait_event = wait = record = synchronize = _nothing

    def record_event(self, event: Any = None) -> Any:
        """Return the event."""
        return event or _Stream()

    def query(self) -> bool:
        """Return True: all work is done."""
        return True

    def elapsed_time(self, other: Any) -> float:
        """Return a time in milliseconds that is not 0, because scripts may divide by it."""
        return 1.0

    def __enter__(self) -> "_Stream":
        return self


class _Properties:
    """The properties of a GPU that scripts print."""

    name, major, minor, multi_processor_count, total_memory = "CPU rank of fsdpbench", 9, 0, 132, 80 * _GIB


def map_host(notes: set[str]) -> None:
    """Map "cuda" and "nccl" to the CPU and gloo, for good. Dropout drops nothing; `notes` then reports it."""
    torch.set_num_threads(1)
    replacements = Replacements()
    local_rank = int(os.environ["LOCAL_RANK"])
    map_device_names(replacements, local_rank, on_host=True)
    map_amp(replacements, _HOST)
    for name in ("layer_norm", "group_norm"):  # autocast computes them in float32 on GPUs only
        torch.library.register_autocast(f"aten::{name}", _HOST, torch.float32)
    map_gpus()
    torch.serialization.register_package(0, _nothing, _loaded_on_host)  # before those of devices
    map_profiler(replacements)  # recording takes longer than the steps
    _map_distributed(replacements)
    around_init(DataLoader, functools.partial(_without, _ALONE))
    around_init(DistributedDataParallel, functools.partial(_without, _DEVICES))
    around_init(FullyShardedDataParallel, lambda _, kwargs: kwargs.update(device_id=torch.device(_HOST)))
    patch("check_synced_states", lambda original: _nothing)
    patch("flex_validate_device", lambda original: _nothing)  # it refuses backward, which runs uncompiled
    patch("flat_prepare_gradient", passing_to(_without_offloaded))
    around(FSDPModule, "set_gradient_divide_factor", _summing)
    around(torch.amp.GradScaler, "__init__", _naming_host)
    around_imports(LIGHTNING, change_lightning)
    torch.compiler.set_stance("force_eager")  # a compiler for the CPU would take minutes
    torch.nn.SyncBatchNorm.convert_sync_batchnorm = functools.partial(_by_rank, notes)  # type: ignore[method-assign]
    for name in _DROPOUTS:
        around(torch.nn.functional, name, functools.partial(_without_dropout, notes, "p", 1))
    replacements.apply()
    attention = functools.partial(_without_dropout, notes, "dropout_p", 4)
    around(torch.nn.functional, "scaled_dot_product_attention", attention)


def _loaded_on_host(storage: Any, location: str) -> Any:
    return storage if location.startswith("cuda") else None


def map_gpus() -> None:
    """Make the functions of `torch.cuda` answer for one GPU of the node; those of memory return 0."""
    local_rank = int(os.environ["LOCAL_RANK"])
    answers = {
        "is_available": True, "is_initialized": True, "is_bf16_supported": True,
        "is_current_stream_capturing": False, "device_count": int(os.environ["LOCAL_WORLD_SIZE"]),
        "current_device": local_rank, "current_stream": _Stream(), "default_stream": _Stream(),
        "stream": contextlib.nullcontext(), "get_rng_state": torch.empty(0, dtype=torch.uint8),
        "get_rng_state_all": [], "get_device_name": _Properties.name, "get_device_capability": (9, 0),
        "get_device_properties": _Properties(),
        "mem_get_info": (_Properties.total_memory, _Properties.total_memory),
        "memory_stats": collections.defaultdict(int), "memory_summary": "",
    }  # fmt: skip
    for module, private in ((torch.cuda, "_"), (torch.cuda.memory, "__")):
        for name, function in vars(module).copy().items():
            if inspect.isfunction(function) and not name.startswith(private):
                replace(module, **{name: _answering(answers.get(name, 0))})
    replace(torch.cuda, Stream=_Stream, Event=_Stream, device=_answering(contextlib.nullcontext()))
    replace(torch.cuda, make_graphed_callables=lambda callables, *args, **kwargs: callables)
    for name in ("range_push", "range_pop", "mark"):
        replace(torch.cuda.nvtx, **{name: _nothing})
    replace(torch.cuda.nvtx, range=_answering(contextlib.nullcontext()))
    hide_accelerator()
    replace(
        torch.accelerator, current_device_index=torch.cuda.current_device, set_device_index=_nothing,
        device_count=torch.cuda.device_count, is_available=torch.cuda.is_available, synchronize=_nothing,
        current_accelerator=_answering(torch.device(_HOST)), current_stream=torch.cuda.current_stream,
    )  # fmt: skip
    replace(torch.version, cuda=torch.version.cuda or "12.8")
    replace(
        torch.cpu, Stream=_Stream, Event=_Stream, current_stream=torch.cuda.current_stream,
        device_count=torch.cuda.device_count,  # FSDP1 takes the ranks of a node from it
    )  # fmt: skip
    replace(dist, is_nccl_available=torch.cuda.is_available)
    map_nccl_class()
    replace(torch.cuda.nccl, version=_answering((2, 27, 3)), is_available=torch.cuda.is_available)
    replace(torch.Tensor, pin_memory=lambda tensor, device=None: tensor, record_stream=_nothing)


def hide_accelerator() -> None:
    """Hide the accelerator from torch: the simulated one is imported here, but does not run."""
    patch("get_accelerator", lambda original: _answering(torch.device(_HOST)))
    none = {"current_accelerator": None, "is_available": False, "device_count": 0}
    replace(torch.accelerator, **{name: _answering(answer) for name, answer in none.items()})


def _answering(answer: object) -> Callable[..., Any]:
    return lambda *args, **kwargs: answer


def _map_distributed(replacements: Replacements) -> None:
    there = {name: os.environ[name] for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
    replacements.wrap(dist, "init_process_group", passing_to(functools.partial(start_group, there)))
    replacements.wrap(dist, "new_group", passing_to(_on_gloo))
    around(dist.Work, "get_future", _future)
    map_starters(replacements, int(os.environ["RANK"]))
    around(DeviceMesh, "__init__", _naming_host)


def start_group(there: dict[str, str], original: Callable[..., Any], /, *args: Any, **kwargs: Any) -> None:
    """Call `init_process_group` for the existing ranks, `there`. Raises `OneNodeError` for one node's."""
    asked = str(dict(zip(("world_size", "rank"), args[3:5], strict=False), **kwargs).get("world_size", -1))
    asked = os.environ["WORLD_SIZE"] if asked == "-1" else asked
    if asked != there["WORLD_SIZE"]:
        if asked == str(torch.cuda.device_count()):
            raise OneNodeError
        raise NotComparedError(f"a script of {asked} ranks among {there['WORLD_SIZE']} (see --ranks)")
    os.environ |= there
    original("gloo", timeout=LONGEST_WAIT)


class OneNodeError(BaseException):
    """Raised by a script that starts as many processes as it finds GPUs: all ranks must be on one node."""


def _future(original: Callable[..., Any], work: dist.Work) -> Any:
    """Return the future of a work; gloo has none for some works: wait for these."""
    try:
        return original(work)
    except RuntimeError:
        work.wait()
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(None)
        return future


def _on_gloo(original: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Call a constructor of groups: they use gloo, and wait for at most `LONGEST_WAIT`."""
    kept = {name: value for name, value in kwargs.items() if name not in _BACKENDS}
    return original(*args[:1], **kept | {"timeout": LONGEST_WAIT})


def _without(names: tuple[str, ...], first: Any, kwargs: Arguments) -> None:
    """Remove arguments of a constructor."""
    for name in names:
        kwargs.pop(name, None)


def _summing(original: Callable[..., Any], module: FSDPModule, factor: float) -> None:
    """Make FSDP2 divide by itself: gloo has no reduction that multiplies first."""
    original(module, factor)
    module.set_force_sum_reduction_for_comms(True)


def _without_offloaded(original: Callable[..., Any], handle: Any) -> None:
    """Keep FSDP1 from accumulating gradients on the host, which it does not do for a GPU's."""
    original(handle)
    if handle._offload_params and hasattr(handle.flat_param, "_saved_grad_shard"):
        del handle.flat_param._saved_grad_shard


def _naming_host(original: Callable[..., Any], made: Any, *args: Any, **kwargs: Any) -> None:
    """Call a constructor whose first argument is a device type, by default "cuda"."""
    first = list(inspect.signature(original).parameters)[1]
    device = args[0] if args else kwargs.pop(first, CUDA)
    original(made, _HOST if device == CUDA else device, *args[1:], **kwargs)


def _by_rank(notes: set[str], module: torch.nn.Module, process_group: Any = None) -> torch.nn.Module:
    """Leave batch norms as they are: torch does not synchronize them on the CPU."""
    notes.add("batch norms by rank")
    return module


def _without_dropout(notes: set[str], name: str, place: int, original: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a function with the share to drop, its argument `name` or at `place`, set to 0."""
    trains = kwargs.get("training", args[2] if len(args) > 2 else True)
    if trains is not False and (args[place] if len(args) > place else kwargs.get(name, 0.0)):
        notes.add("without dropout")
    if len(args) > place:
        return original(*args[:place], 0.0, *args[place + 1 :], **kwargs)
    return original(*args, **kwargs | {name: 0.0})


def change_lightning(execute: Callable[[ModuleType], None], module: ModuleType) -> None:
    """Make Lightning's Trainer and Fabric, when they are imported, use the existing ranks."""
    execute(module)
    for kind in [each for each in vars(module).values() if isinstance(each, type)]:
        if hasattr(kind, "_check_device_config_and_set_final_flags"):
            around(kind, "_check_device_config_and_set_final_flags", _with_ranks)
        elif kind.__name__ == "CUDAAccelerator":
            around(kind, "setup_device", lambda original, accelerator, device: None)
        elif kind.__name__ == "ModelParallelStrategy":
            around(kind, "__init__", _with_sizes)


def _with_ranks(original: Callable[..., Any], connector: Any, devices: Any, num_nodes: Any) -> None:
    """Use the existing nodes and devices, if more than one is requested."""
    if (str(devices), str(num_nodes)) != ("1", "1"):
        devices = local = int(os.environ["LOCAL_WORLD_SIZE"])
        num_nodes = int(os.environ["WORLD_SIZE"]) // local
    original(connector, devices=devices, num_nodes=num_nodes)


def _with_sizes(original: Callable[..., Any], made: Any, *args: Any, **kwargs: Any) -> None:
    """Give data parallelism the ranks that tensor parallelism of a given size leaves."""
    kwargs |= dict(zip(("data_parallel_size", "tensor_parallel_size"), args, strict=False))
    if {int} == {type(kwargs.get(name)) for name in ("data_parallel_size", "tensor_parallel_size")}:
        kwargs["data_parallel_size"] = int(os.environ["WORLD_SIZE"]) // kwargs["tensor_parallel_size"]
    original(made, **kwargs)
