"""Collectives of Python objects, and the making of groups: written down, and the others get rank 0's objects.

The simulated process group never sees them: `sim/torch_device/patches/torch_patches.py` answers in Python.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from fsdpbench.script.rank_check.recording import Recorder, Seen
from fsdpbench.sim.torch_device.distributed.process_group import SimProcessGroup
from fsdpbench.torch_internals import expect, replace


def record_objects(recorder: Recorder) -> None:
    """Write down these calls too, from now on, in this process, for good."""
    wrappers: dict[str, Callable[[Recorder, Callable[..., Any]], Callable[..., Any]]] = {
        "broadcast_object_list": _broadcast,
        "scatter_object_list": _scatter,
        "gather_object": _gather,
        "all_gather_object": _all_gather,
        "new_group": _new_group,
    }
    for name, wrapper in wrappers.items():
        wrapped = wrapper(recorder, expect(dist, name))
        for module in (dist, dist.distributed_c10d, dist.device_mesh):
            if hasattr(module, name):
                replace(module, **{name: wrapped})


def _group_of(group: Any) -> SimProcessGroup | None:
    found = group or dist.group.WORLD
    return found if isinstance(found, SimProcessGroup) else None


def _root(group: SimProcessGroup, of_world: int | None, of_group: int | None) -> int:
    """The rank in `group` of the source or destination that a call names; 0 is what torch takes."""
    if of_group is not None:
        return of_group
    return 0 if of_world is None else list(group.ranks).index(of_world)


def _broadcast(recorder: Recorder, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def broadcast_object_list(
        object_list: list[Any],
        src: int | None = None,
        group: Any = None,
        device: Any = None,
        group_src: int | None = None,
    ) -> Any:
        found = _group_of(group)
        made = original(object_list, src, group)
        if found is not None:
            root = _root(found, src, group_src)
            call = recorder.note(found, Seen("broadcast_object_list", ()), None, root)
            object_list[:] = _exchanged(recorder, call, list(object_list))
        return made

    return broadcast_object_list


def _scatter(recorder: Recorder, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def scatter_object_list(
        scatter_object_output_list: list[Any],
        scatter_object_input_list: list[Any] | None = None,
        src: int | None = None,
        group: Any = None,
        group_src: int | None = None,
    ) -> Any:
        found = _group_of(group)
        made = original(scatter_object_output_list, scatter_object_input_list, src, group)
        if found is not None:
            root = _root(found, src, group_src)
            call = recorder.note(found, Seen("scatter_object_list", ()), None, root)
            given = _exchanged(recorder, call, scatter_object_input_list)
            if isinstance(given, list) and len(given) == found.size():
                scatter_object_output_list[0] = given[found.rank()]
        return made

    return scatter_object_list


def _gather(recorder: Recorder, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def gather_object(
        obj: Any,
        object_gather_list: list[Any] | None = None,
        dst: int | None = None,
        group: Any = None,
        group_dst: int | None = None,
    ) -> Any:
        found = _group_of(group)
        made = original(obj, object_gather_list, dst, group=group)
        if found is not None:
            recorder.note(found, Seen("gather_object", ()), None, _root(found, dst, group_dst))
        return made

    return gather_object


def _all_gather(recorder: Recorder, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def all_gather_object(object_list: list[Any], obj: Any, group: Any = None) -> Any:
        found = _group_of(group)
        made = original(object_list, obj, group)
        if found is not None:
            call = recorder.note(found, Seen("all_gather_object", ()), None)
            object_list[:] = _exchanged(recorder, call, list(object_list))
        return made

    return all_gather_object


def _exchanged(recorder: Recorder, call: tuple[Any, ...], own: Any) -> Any:
    """What this rank has after a call: what rank 0 had, where that is known."""
    if recorder.log.rank == 0:
        recorder.values.put(call, own)
        return own
    return next(iter(recorder.values.get(call)), own)


def _new_group(recorder: Recorder, original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def new_group(ranks: Any = None, *args: Any, **kwargs: Any) -> Any:
        world = dist.group.WORLD
        if isinstance(world, SimProcessGroup) and not kwargs.get("use_local_synchronization"):
            members = range(world.size()) if ranks is None else list(ranks)
            recorder.note_new_group(members, tuple(range(world.size())))
        return original(ranks, *args, **kwargs)

    return new_group
