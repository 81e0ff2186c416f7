"""What a script wraps its model in: which modules, over which ranks, with which communication hook."""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
import torch.distributed.fsdp as fsdp
from torch import nn
from torch.distributed.tensor import DTensor

Place = dict[str, Any]
_IGNORED = ("ignored_modules", "ignored_states", "ignored_params")


@dataclass
class Wrapped:
    """A module that `fully_shard`, FSDP1 or DDP wraps. `shape`: of its mesh, or the size of its group.
    `ignored`: identities of parameters that FSDP1 leaves alone."""

    module: weakref.ref[nn.Module]
    api: str
    place: Place
    shape: tuple[int, ...]
    mesh: Any
    ignored: frozenset[int]
    ignored_by: str = ""
    """The argument that says what is ignored."""
    hook: Place | None = None

    def groups(self) -> set[tuple[int, ...]]:
        """The ranks of each dimension of its mesh."""
        groups = [None] if self.mesh is None else self.mesh.get_all_groups()
        return {tuple(dist.get_process_group_ranks(group)) for group in groups}

    def parameters(self) -> Iterator[tuple[Any, bool]]:
        """Those of its module, and whether it takes care of each."""
        module: Any = self.module()
        names = getattr(getattr(module, "module", None), "_ddp_params_and_buffers_to_ignore", ())
        for name, each in () if module is None else module.named_parameters():
            ignores = name.removeprefix("module.") in names or id(each) in self.ignored
            yield each, not ignores and (self.api != "fully_shard" or isinstance(each, DTensor))


class Wrappers:
    """Notes them. `place` is of the script's line that runs."""

    def __init__(self, place: Callable[[], Place]) -> None:
        self.made: list[Wrapped] = []
        self.wrapped_at: dict[int, Place] = {}
        """Where a parameter, by its identity then, was wrapped."""
        self._looked = -1, 0
        self._place = place
        self._owners: dict[int, Wrapped] = {}
        self._ignoring: dict[int, Wrapped] = {}
        for kind, name in (
            (fsdp.FullyShardedDataParallel, "register_comm_hook"),
            (nn.parallel.DistributedDataParallel, "register_comm_hook"),
            (fsdp.FSDPModule, "set_custom_reduce_scatter"),
        ):
            self._around_hook(kind, name)
        self._around_ddp()

    def note(self, api: str, module: Any, arguments: dict[str, Any], place: Place) -> Wrapped:
        """`module` (or several) is about to be wrapped with these arguments; the last one's record."""
        mesh, group = arguments.get("mesh", arguments.get("device_mesh")), arguments.get("process_group")
        if mesh is None and isinstance(group, tuple):
            shape = tuple(dist.get_world_size(each) for each in reversed(group))
        else:
            shape = tuple(mesh.shape) if mesh is not None else (_size(group),)
        by = next((name for name in _IGNORED if arguments.get(name)), "")
        ignored = frozenset(map(id, _parameters(arguments.get(by))))
        for each in module if isinstance(module, list | tuple) else [module]:
            self.made.append(Wrapped(weakref.ref(each), api, place, shape, mesh, ignored, by))
            self.wrapped_at |= {id(parameter): place for parameter in each.parameters()}
        return self.made[-1]

    def look(self, when: int) -> None:
        """Find which wrapper takes care of which parameter, the innermost one: once for each `when`."""
        if (when, len(self.made)) == self._looked:
            return
        self._looked = when, len(self.made)
        self._owners.clear()
        self._ignoring.clear()
        sized = [[*wrapped.parameters()] for wrapped in self.made]
        for wrapped, held in sorted(zip(self.made, sized, strict=True), key=lambda each: -len(each[1])):
            for parameter, owned in held:
                (self._owners if owned else self._ignoring)[id(parameter)] = wrapped

    def of(self, parameter: Any) -> Wrapped | None:
        """The wrapper that takes care of a parameter."""
        return self._owners.get(id(parameter))

    def ignoring(self, parameter: Any) -> Wrapped | None:
        """The wrapper around a parameter that leaves it alone."""
        return self._ignoring.get(id(parameter))

    def _around_hook(self, kind: Any, name: str) -> None:
        original = getattr(kind, name, None)
        if original is None:
            return

        @functools.wraps(original)
        def register(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            inside = {id(each) for each in module.modules()}
            for wrapped in self.made:
                if id(wrapped.module()) in inside:
                    wrapped.hook = self._place()
            return original(module, *args, **kwargs)

        setattr(kind, name, register)

    def _around_ddp(self) -> None:
        kind: Any = nn.parallel.DistributedDataParallel
        original = kind.__init__
        names = list(inspect.signature(original).parameters)[2:]

        @functools.wraps(original)
        def init(made: nn.Module, module: nn.Module, *args: Any, **kwargs: Any) -> None:
            original(made, module, *args, **kwargs)
            self.note(kind.__name__, made, kwargs | dict(zip(names, args, strict=False)), self._place())

        kind.__init__ = init


def _size(group: Any) -> int:
    return dist.get_world_size(group) if dist.is_initialized() else 1


def _parameters(ignored: Any) -> Iterator[Any]:
    for each in ignored or ():
        yield from each.parameters() if isinstance(each, nn.Module) else [each]
