"""Mapping of `init_process_group("nccl")` to the simulated process group.

Groups report the backend that the script asked for: `"nccl"` (or nothing at all) for the device's tensors,
`"gloo"` for the host's, `"cpu:gloo,cuda:nccl"` for both. Asynchronous checkpoints check that.
"""

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.multiprocessing

from fsdpbench.base.errors import error_text
from fsdpbench.base.torch_internals import patch, replace
from fsdpbench.script.cuda.refusals import Replacements
from fsdpbench.sim.torch_device.distributed.process_group import BACKEND, SimProcessGroup
from fsdpbench.sim.torch_device.patches.dynamo import passing_to

if TYPE_CHECKING:
    from fsdpbench.sim import Simulation

_NCCL = "nccl"
_CONFIGS = {"nccl": "cuda:nccl", "gloo": "cpu:gloo,cuda:gloo"}
"""Backends by device type, as torch derives them from a backend's name."""
_DEVICE_ALONE = ("nccl", "cuda:nccl")
_NCCL_VERSION = (2, 27, 3)


class _NcclGroup:
    """`ProcessGroupNCCL`, which CPU builds of torch lack. Its options are accepted and have no effect."""

    Options = functools.partial(SimpleNamespace, is_high_priority_stream=False, config=SimpleNamespace())


def map_nccl_class() -> None:
    """Let scripts create group options if torch has no NCCL."""
    if not hasattr(dist, "ProcessGroupNCCL"):
        dist.ProcessGroupNCCL = _NcclGroup  # type: ignore[assignment,misc]


def map_distributed(replacements: Replacements, simulation: "Simulation") -> None:
    """Map backends by name, and functions that start processes."""
    replacements.add(dist.init_process_group, _init_process_group(dist.init_process_group, simulation))
    replacements.wrap(dist, "new_group", passing_to(_without_backend))
    replacements.wrap(dist, "new_subgroups", passing_to(_without_backend))
    replacements.wrap(dist, "new_subgroups_by_enumeration", passing_to(_without_backend))
    replacements.wrap(dist, "batch_isend_irecv", passing_to(_batched))
    replacements.wrap(dist, "get_backend", passing_to(_called_as_asked))
    replacements.wrap(dist, "get_backend_config", passing_to(_configured_as_asked))
    replacements.wrap(dist, "monitored_barrier", lambda monitored: _barrier)
    replace(SimProcessGroup, monitored_barrier=_barrier)
    map_starters(replacements, simulation.rank)
    # TORCH_DIST_INIT_BARRIER=1 waits in a store for ranks that do not run.
    patch("barrier_after_init", lambda original: lambda: 0)
    # In torch.distributed only: where torch itself asks, it then uses the C++ class.
    replace(dist, is_nccl_available=lambda: True)
    map_nccl_class()
    replace(torch.cuda.nccl, version=lambda: _NCCL_VERSION, is_available=lambda tensors: True)


def _init_process_group(original: Callable[..., None], simulation: "Simulation") -> Callable[..., None]:
    @functools.wraps(original)
    def init_process_group(
        backend: str | None = None,
        init_method: str | None = None,
        timeout: Any = None,
        world_size: int = -1,
        rank: int = -1,
        store: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """Start the group that a script asks for; `world_size` and `rank` must be the simulation's."""
        if backend == BACKEND:  # the bench itself, with a store of its own
            return original(backend, store=store, rank=rank, world_size=world_size)
        for name, asked, is_so in (
            ("world_size", world_size, simulation.world_size),
            ("rank", rank, simulation.rank),
        ):
            if asked not in (-1, is_so):
                raise ValueError(error_text("distributed.other_group", name, asked, is_so))
        simulation.init_process_group()
        assert isinstance(dist.group.WORLD, SimProcessGroup)
        dist.group.WORLD.asked_backend = _NCCL if backend is None else str(backend).lower()
        dist.group.WORLD.takes_host = _takes_host(backend)
        return None

    return init_process_group


def _without_backend(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a constructor of groups. Groups of any backend are simulated, host tensors without device time."""
    asked = kwargs.get("backend")
    for name in ("backend", "pg_options", "device_id"):
        kwargs.pop(name, None)
    made = function(*args, **kwargs)
    if asked is not None and isinstance(made, SimProcessGroup):
        made.asked_backend = str(asked).lower()
        made.takes_host = _takes_host(asked)
    elif isinstance(made, SimProcessGroup) and isinstance(dist.group.WORLD, SimProcessGroup):
        made.asked_backend = dist.group.WORLD.asked_backend
        made.takes_host = dist.group.WORLD.takes_host
    return made


def _batched(function: Callable[..., Any], p2p_op_list: list[dist.P2POp]) -> list[Any]:
    """Call `batch_isend_irecv`, which torch batches only for groups in C++: batch it here."""
    group: Any = p2p_op_list[0].group
    group._start_coalescing(None)
    function(p2p_op_list)
    return [group._end_coalescing(None)]


def _called_as_asked(function: Callable[..., Any], group: Any = None, *args: Any, **kwargs: Any) -> str:
    """Call `get_backend`: return the backend that the script asked for, else nccl."""
    name = function(group, *args, **kwargs)
    return _asked_of(group) if name == BACKEND else name


def _configured_as_asked(function: Callable[..., Any], group: Any = None, *args: Any, **kwargs: Any) -> str:
    """Call `get_backend_config`: return a backend for each type of device."""
    config = function(group, *args, **kwargs)
    asked = _asked_of(group)
    return _CONFIGS.get(asked, asked) if BACKEND in config else config


def _takes_host(backend: str | None) -> bool:
    """Return whether a group takes host tensors: without a backend's name torch adds gloo to NCCL."""
    return backend is None or str(backend).lower() not in _DEVICE_ALONE


def _asked_of(group: Any) -> str:
    """Return the backend that a group was created with."""
    return getattr(group or dist.group.WORLD, "asked_backend", "") or _NCCL


def _barrier(group: Any = None, timeout: Any = None, wait_all_ranks: bool = False) -> None:
    """Wait for all ranks; replaces `monitored_barrier`."""
    dist.barrier(group)


def map_starters(replacements: Replacements, rank: int) -> None:
    """Make functions that start processes run the part of `rank`: this process is one of the started ones."""

    def spawn(
        fn: Callable[..., None],
        args: tuple[Any, ...] = (),
        nprocs: int = 1,
        join: bool = True,
        daemon: bool = False,
        start_method: str = "spawn",
    ) -> None:
        """Call `fn` as the process of this rank among `nprocs`."""
        fn(rank % nprocs, *args)

    for starter in (torch.multiprocessing.spawn, torch.multiprocessing.start_processes):
        replacements.add(starter, spawn)
