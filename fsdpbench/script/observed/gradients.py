"""Gradients of optimizers' parameters: missing in every step, or never reduced over some ranks, and why."""

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

from fsdpbench.base.result_sections import GradientCause, GradientFinding, GradientReport, Place
from fsdpbench.script.interposing import around
from fsdpbench.script.observed.calls import Wrapped, Wrappers
from fsdpbench.script.observed.exchange import Exchange, Ranks, Syncs, holds
from fsdpbench.script.steps import MADE
from fsdpbench.sim.torch_device.patches.dynamo import passing_to

_LISTED = 4


@dataclass
class _Parameter:
    """One parameter of an optimizer. `late`: no reduction ever followed its last backward."""

    held: weakref.ref[Any]
    name: str = ""
    made: Place = field(default_factory=Place)
    """The place where its optimizer was created."""
    has_gradient: bool = False
    exchanged: bool = False
    late: bool = True
    ranks: int = 1
    cause: GradientCause | None = None


class Gradients:
    """An observer of every optimizer after its step.

    `place()` returns the place of the script's line that is running.
    """

    def __init__(self, place: Callable[[], Place], exchange: Exchange, wrappers: Wrappers) -> None:
        self._place, self._exchange, self._wrappers = place, exchange, wrappers
        self._syncs = Syncs(place, exchange)
        self._parameters: dict[int, _Parameter] = {}
        self._steps = 0
        self._stepped = Place()
        self.names: dict[int, str] = {}
        """Names of parameters by `id`."""
        self._world = 1
        self._unheld: list[str] = []
        self._reentrant: list[tuple[weakref.ref[nn.Module] | None, Place]] = []
        """Modules that a reentrant checkpoint ran without an input that requires grad (None: unknown)."""
        self._held: set[int] = set()
        """The `id`s of the parameters of all optimizers, including those that have not stepped."""
        self._leading: Any = None
        around(torch.optim.Optimizer, "add_param_group", self._adding_group)
        register_optimizer_step_pre_hook(self._before_step)
        register_optimizer_step_post_hook(self._after_step)
        kind: Any = torch_checkpoint.CheckpointFunction
        kind.forward = staticmethod(passing_to(self._reentrant_forward)(kind.forward))

    def _reentrant_forward(
        self, original: Callable[..., Any], ctx: Any, run_function: Any, preserve_rng_state: bool, *args: Any
    ) -> Any:
        if not any(isinstance(each, torch.Tensor) and each.requires_grad for each in args):
            module = _module_of(run_function)
            if all(known is None or known() is not module for known, _ in self._reentrant):
                known_as = None if module is None else weakref.ref(module)
                self._reentrant.append((known_as, self._place()))
        return original(ctx, run_function, preserve_rng_state, *args)

    def _adding_group(
        self, original: Callable[..., Any], optimizer: Any, param_group: dict[str, object]
    ) -> None:
        original(optimizer, param_group)
        self._held |= {id(each) for each in optimizer.param_groups[-1]["params"]}

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> Any:
        """Exclude a closure that the optimizer calls (forward and backward) from its own step."""
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
            self._look_at(each, inside).made = getattr(optimizer, MADE).place
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
            seen.exchanged, seen.late = True, False  # or it cannot be observed
            return seen
        reductions, when = self._exchange.of(gradient)
        wrapped = self._wrappers.of(id(parameter))
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
        wrapped = self._wrappers.of(id(parameter))
        off = self._syncs.off(parameter, wrapped)
        if off is not None:
            seen.cause = GradientCause.at(off[0], cause="off", switch=off[1])
        elif not seen.has_gradient and wrapped is None and id(parameter) in self._wrappers.wrapped_at:
            at = self._wrappers.wrapped_at[id(parameter)]
            wrapped_at = {"wrapped_at": at.line, "wrapped_span": at.span}
            seen.cause = GradientCause.at(seen.made, cause="replaced", **wrapped_at)
        elif not seen.has_gradient:
            found = [place for known, place in self._reentrant if known is None or holds(known(), parameter)]
            cause, place = ("reentrant", found[0]) if found else ("unused", self._stepped)
            seen.cause = GradientCause.at(place, cause=cause)
        elif wrapped is None:
            ignoring = self._wrappers.ignoring(id(parameter))
            if ignoring is None:
                seen.cause = GradientCause.at(self._stepped, cause="bare")
            else:
                by = ignoring.ignored_by
                seen.cause = GradientCause.at(ignoring.place, cause="ignored", ignored=by)
        elif wrapped.hook is not None:
            seen.cause = GradientCause.at(wrapped.hook, cause="hook")
        else:
            group = {"api": wrapped.api, "shape": wrapped.shape, "has_mesh": wrapped.mesh is not None}
            seen.cause = GradientCause.at(wrapped.place, cause="group", **group)

    def _find_unheld(self) -> Iterator[str]:
        """Yield the parameters of wrapped modules that have a gradient but are in no optimizer, if
        optimizers hold only parameters of these modules (and no copies in another dtype)."""
        own = {
            id(parameter): parameter
            for wrapped in self._wrappers.made
            for parameter, _ in wrapped.parameters()
        }
        for identity, parameter in own.items() if self._held <= own.keys() else ():
            if parameter.requires_grad and parameter.grad is not None and identity not in self._held:
                yield self.names.get(identity, "")

    def reported(self) -> GradientReport:
        """Return the findings, each about parameters that share a cause."""
        every = list(self._parameters.values())
        found: dict[Any, tuple[GradientCause, list[_Parameter]]] = {}
        for each in every:
            kind, cause = _kind(each), each.cause
            if kind and cause is not None:
                # Calls that wrap parts of one model have the same group.
                where = cause.shape if cause.cause == "group" else (cause.file, cause.line)
                found.setdefault((kind, cause.cause, where), (cause, []))[1].append(each)
        findings = [
            GradientFinding(
                **cause.as_words(),
                kind=kind,
                count=len(alike),
                names=[each.name for each in alike[:_LISTED]],
                ranks=max(each.ranks for each in alike),
            )
            for (kind, _, _), (cause, alike) in found.items()
        ]
        if self._unheld:
            names = self._unheld[:_LISTED]
            findings.append(GradientFinding(kind="unheld", count=len(self._unheld), names=names))
        without = sum(not each.has_gradient for each in every)
        return GradientReport(len(every), without, findings, self._world)


def _kind(seen: _Parameter) -> str:
    if not seen.has_gradient:
        return "without"
    return "apart" if not seen.exchanged else "late" * seen.late


def _module_of(function: Any) -> nn.Module | None:
    """Return the module that a function runs: the function, its bound object, or one in its closure."""
    while isinstance(function, functools.partial):
        function = function.func
    cells = [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]
    for each in (function, getattr(function, "__self__", None), *cells):
        if isinstance(each, nn.Module):
            return each
    return None


def _model_parallel(parameter: Any, wrapped: Wrapped | None) -> Iterator[tuple[int, ...]]:
    """Yield the ranks, for each dimension of its mesh, over which the script itself lays out a parameter."""
    if isinstance(parameter, DTensor):
        of_fsdp = wrapped.groups() if wrapped is not None and wrapped.api == "fully_shard" else ()
        for group in parameter.device_mesh.get_all_groups():
            ranks = tuple(dist.get_process_group_ranks(group))
            if ranks not in of_fsdp:
                yield ranks
