"""Which parameters of the optimizers train: those without a gradient in any step, those whose gradients some
ranks never exchange, and why."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.utils.checkpoint as torch_checkpoint
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from fsdpbench.script.observed.exchange import Exchange, Ranks
from fsdpbench.script.observed.syncs import Syncs, holds
from fsdpbench.script.observed.wrappers import Place, Wrapped, Wrappers

_LISTED = 4


@dataclass
class _Parameter:
    """One parameter of an optimizer. `late`: its last backward was never followed by a reduction."""

    held: weakref.ref[Any]
    name: str = ""
    made: Place = field(default_factory=dict)
    """Where its optimizer was made."""
    has_gradient: bool = False
    exchanged: bool = False
    late: bool = True
    ranks: int = 1
    cause: tuple[str, Place] | None = None


class Gradients:
    """Looks at every optimizer as it has stepped."""

    def __init__(self, place: Callable[[], Place], exchange: Exchange, wrappers: Wrappers) -> None:
        self._place, self._exchange, self._wrappers = place, exchange, wrappers
        self._syncs = Syncs(place, exchange)
        self._parameters: dict[int, _Parameter] = {}
        self._steps = 0
        self._stepped: Place = {}
        self.names: dict[int, str] = {}
        """Of parameters by their identity."""
        self._world = 1
        self._unheld: list[str] = []
        self._reentrant: list[tuple[weakref.ref[nn.Module] | None, Place]] = []
        """Modules that a reentrant checkpoint ran without an input that needs a gradient (None: unknown)."""
        self._held: set[int] = set()
        """Identities of the parameters of all optimizers, those that have not stepped included."""
        self._leading: Any = None
        self._around_groups()
        register_optimizer_step_pre_hook(self._before_step)
        register_optimizer_step_post_hook(self._after_step)
        self._around_reentrant()

    def _around_reentrant(self) -> None:
        kind: Any = torch_checkpoint.CheckpointFunction
        original = kind.forward

        @functools.wraps(original)
        def forward(context: Any, function: Any, preserve: bool, *inputs: Any) -> Any:
            if not any(isinstance(each, torch.Tensor) and each.requires_grad for each in inputs):
                module = _module_of(function)
                if all(known is None or known() is not module for known, _ in self._reentrant):
                    known_as = None if module is None else weakref.ref(module)
                    self._reentrant.append((known_as, self._place()))
            return original(context, function, preserve, *inputs)

        kind.forward = staticmethod(forward)

    # ------------------------------------------------------------------------------------------------ steps

    def _around_groups(self) -> None:
        kind: Any = torch.optim.Optimizer
        original = kind.add_param_group

        @functools.wraps(original)
        def add_param_group(optimizer: Any, group: dict[str, Any]) -> None:
            original(optimizer, group)
            self._held |= {id(each) for each in optimizer.param_groups[-1]["params"]}

        kind.add_param_group = add_param_group

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> Any:
        """A closure that the optimizer calls (forward and backward) does not belong to its own step."""
        exchange = self._exchange
        exchange.stepping = True
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            return None

        def outside() -> Any:
            exchange.stepping = False
            try:
                return closure()
            finally:
                exchange.stepping = True

        return (
            ((args[0], outside, *args[2:]), kwargs)
            if len(args) > 1
            else (args, {**kwargs, "closure": outside})
        )

    def _after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._exchange.stepping = False
        self._leading = self._leading or optimizer
        self._steps += optimizer is self._leading
        every = self._parameters.values()
        if not self._exchange.active and all(each.has_gradient for each in every):
            return
        self._stepped = self._place()
        self._wrappers.look(self._exchange.backwards)
        held = [each for group in optimizer.param_groups for each in group["params"]]
        trained = [each for each in held if each.requires_grad and each.numel()]
        inside = self._exchange.of_step(sum(each.numel() for each in trained))
        for each in trained:
            self._look_at(each, inside).made = optimizer._sim_made.place
        for seen in every:
            if seen.late or not (seen.exchanged and seen.has_gradient):
                self._find_cause(seen)
        if self._steps > 2 and not self._unheld:
            self._unheld = [*self._find_unheld()]
        if self._steps > 2 and all(each.exchanged and not each.late for each in every if each.has_gradient):
            self._exchange.stop()

    def _look_at(self, parameter: Any, inside: frozenset[Ranks]) -> _Parameter:
        seen = self._parameters.get(id(parameter))
        if seen is None:
            seen = self._parameters[id(parameter)] = _Parameter(weakref.ref(parameter))
        gradient = parameter.grad
        if gradient is None:
            return seen
        seen.has_gradient = True
        world = self._world = dist.get_world_size() if dist.is_initialized() else 1
        local = getattr(gradient, "_local_tensor", gradient)
        if world == 1 or local.is_cpu or parameter.numel() == 1 or not self._exchange.active:
            seen.exchanged, seen.late = True, False  # or it cannot be seen
            return seen
        reductions, when = self._exchange.of(gradient)
        wrapped = self._wrappers.of(parameter)
        seen.late &= when < self._exchange.backwards and self._syncs.off(parameter, wrapped) is not None
        reductions |= {*_model_parallel(parameter, wrapped), *inside}
        seen.exchanged |= self._exchange.covers(reductions, dist.get_rank(), world)
        seen.ranks = max(seen.ranks, *map(len, reductions)) if reductions else seen.ranks
        return seen

    def _find_cause(self, seen: _Parameter) -> None:
        parameter = seen.held()
        if parameter is None:
            return
        seen.name = self.names.get(id(parameter), "") or seen.name
        wrapped = self._wrappers.of(parameter)
        off = self._syncs.off(parameter, wrapped)
        if off is not None:
            seen.cause = "off", off
        elif not seen.has_gradient and wrapped is None and id(parameter) in self._wrappers.wrapped_at:
            at = self._wrappers.wrapped_at[id(parameter)]
            seen.cause = "replaced", {**seen.made, "wrapped_at": at["line"], "wrapped_span": at.get("span")}
        elif not seen.has_gradient:
            found = [place for known, place in self._reentrant if known is None or holds(known(), parameter)]
            seen.cause = ("reentrant", found[0]) if found else ("unused", self._stepped)
        elif wrapped is None:
            ignoring = self._wrappers.ignoring(parameter)
            place = self._stepped if ignoring is None else {**ignoring.place, "ignored": ignoring.ignored_by}
            seen.cause = "bare" if ignoring is None else "ignored", place
        elif wrapped.hook is not None:
            seen.cause = "hook", wrapped.hook
        else:
            has_mesh = wrapped.mesh is not None
            made_by = {**wrapped.place, "api": wrapped.api, "shape": wrapped.shape, "has_mesh": has_mesh}
            seen.cause = "group", made_by

    def _find_unheld(self) -> Iterator[str]:
        """Parameters of wrapped modules that have a gradient, and are in no optimizer, where optimizers hold
        nothing but parameters of these modules (and no copies in another dtype)."""
        own = {
            id(parameter): parameter
            for wrapped in self._wrappers.made
            for parameter, _ in wrapped.parameters()
        }
        for identity, parameter in own.items() if self._held <= own.keys() else ():
            if parameter.requires_grad and parameter.grad is not None and identity not in self._held:
                yield self.names.get(identity, "")

    # --------------------------------------------------------------------------------------------- findings

    def to_dict(self) -> dict[str, Any]:
        """`parameters` of the optimizers; `without` a gradient in any step; `findings`: those that share a
        cause, by `count`, first `names` and line."""
        every = list(self._parameters.values())
        found: dict[Any, list[_Parameter]] = {}
        for each in every:
            kind = _kind(each)
            if kind and each.cause is not None:
                cause, place = each.cause
                # Calls that wrap parts of one model have the same group.
                where = place["shape"] if cause == "group" else (place.get("file"), place.get("line"))
                found.setdefault((kind, cause, where), []).append(each)
        findings = [
            {
                "kind": kind,
                "cause": cause,
                "count": len(those),
                "names": [each.name for each in those[:_LISTED]],
                "ranks": max(each.ranks for each in those),
                **(those[0].cause or ("", {}))[1],
            }
            for (kind, cause, _), those in found.items()
        ]
        return {
            "parameters": len(every),
            "without": sum(not each.has_gradient for each in every),
            "findings": findings + ([_not_held(self._unheld)] if self._unheld else []),
            "world": self._world,
        }


def _not_held(names: list[str]) -> dict[str, Any]:
    where = {"file": "", "line": 0, "text": ""}
    return {"kind": "unheld", "cause": "", "count": len(names), "names": names[:_LISTED], "ranks": 0, **where}


def _kind(seen: _Parameter) -> str:
    if not seen.has_gradient:
        return "without"
    return "apart" if not seen.exchanged else "late" * seen.late


def _module_of(function: Any) -> nn.Module | None:
    """The module that a function runs: itself, its own, or one that it closes over."""
    while isinstance(function, functools.partial):
        function = function.func
    cells = [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]
    for each in (function, getattr(function, "__self__", None), *cells):
        if isinstance(each, nn.Module):
            return each
    return None


def _model_parallel(parameter: Any, wrapped: Wrapped | None) -> Iterator[tuple[int, ...]]:
    """Ranks over which a parameter is laid out by the script, not by `fully_shard`: of each dimension of its
    mesh."""
    if isinstance(parameter, DTensor):
        of_fsdp = wrapped.groups() if wrapped is not None and wrapped.api == "fully_shard" else ()
        for group in parameter.device_mesh.get_all_groups():
            ranks = tuple(dist.get_process_group_ranks(group))
            if ranks not in of_fsdp:
                yield ranks
