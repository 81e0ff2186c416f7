"""The ranks over which a gradient is reduced, whether by FSDP, DDP, a hook or the script.

A collective marks the memory that it writes with its ranks, and operators pass marks on from their inputs to
their outputs. So when an optimizer steps, a gradient's memory shows over which ranks it was reduced.
"""

import contextlib
import functools
import sys
import traceback
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed.fsdp as fsdp
from torch import nn

import fsdpbench
from fsdpbench.base.result_sections import Place
from fsdpbench.base.torch_internals import current_graph_task_id, replace
from fsdpbench.script.interposing import around
from fsdpbench.script.observed.calls import Wrapped
from fsdpbench.sim import Simulation
from fsdpbench.sim.torch_device.distributed.communicator import Collective
from fsdpbench.sim.torch_device.distributed.process_group import SimProcessGroup
from fsdpbench.sim.torch_device.operators import kernels
from fsdpbench.sim.torch_device.operators.known_values import written
from fsdpbench.sim.torch_device.patches.dynamo import passing_to
from fsdpbench.sim.torch_device.tensors import tensors_in

Ranks = Sequence[int]
_RANKS, _WHEN = "_sim_reduced_over", "_sim_reduced_in"
_NO_RANKS: frozenset[Ranks] = frozenset()
_LARGE = 4096
"""Elements from which a tensor reduced in forward counts as an activation, not as a statistic."""
_FSDP = ("/torch/distributed/fsdp/", "/torch/distributed/_composable/", f"{fsdpbench.__path__[0]}/impl/")
_FORWARD, _COMPILED = ("/torch/nn/modules/module.py",), (f"{fsdpbench.__path__[0]}/sim/compile/",)


class Exchange:
    """An observer that marks memory with ranks until `stop`.

    Attributes: `stepping`: whether an optimizer is stepping; `backwards`: the calls of backward so far;
    `everywhere`: groups of ranks that exchange activations, and so split the model or its input.
    """

    def __init__(self, simulation: Simulation) -> None:
        self.stepping = False
        self.backwards = 0
        self.everywhere: set[Ranks] = set()
        self._in_step: Counter[Ranks] = Counter()
        """Elements that were reduced while the optimizer stepped."""
        self.active = True
        self._accelerator = simulation.accelerator
        self._accelerator.known_values += 1  # so that kernels call `follow`
        replace(SimProcessGroup, run=passing_to(self._around_collective)(SimProcessGroup.run))
        replace(kernels, follow=passing_to(self._around_operator)(kernels.follow))

    def stop(self) -> None:
        """Stop following operators."""
        self._accelerator.known_values -= self.active
        self.active = False

    def of(self, gradient: torch.Tensor) -> tuple[frozenset[Ranks], int]:
        """Return the ranks of each reduction of a gradient, and the index of the last one's backward call."""
        memory = _memory(gradient)
        return getattr(memory, _RANKS, _NO_RANKS), getattr(memory, _WHEN, 0)

    def of_step(self, elements: int) -> frozenset[Ranks]:
        """Return the groups over which the optimizer itself has just reduced `elements` of gradients."""
        found = frozenset(ranks for ranks, count in self._in_step.items() if 2 * count >= elements)
        self._in_step.clear()
        return found

    def covers(self, reductions: Iterable[Ranks], rank: int, world: int) -> bool:
        """Return whether reductions over these groups of `rank` in sequence, and over the corresponding
        groups of the other ranks, together reduce over all `world` ranks, or all of one pipeline stage."""
        link = self._accelerator.link
        stage = {each for each in range(world) if link is None or link.represents(each) == rank}
        reached = {rank}
        for ranks in {*reductions, *self.everywhere}:
            if len(ranks) >= world:
                return True
            reached = {each + other - rank for each in reached for other in ranks}
        return stage <= reached

    def _around_collective(
        self, original: Callable[..., Any], group: SimProcessGroup, what: Collective
    ) -> Any:
        made = original(group, what)
        if self.active and len(group.ranks) > 1 and not what.arrivals and not torch.compiler.is_compiling():
            self._mark_collective(what.kind, group.ranks, what.inputs, what.outputs)
        return made

    def _mark_collective(
        self, kind: str, ranks: Ranks, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]
    ) -> None:
        moves = kind not in ("broadcast", "barrier") and not (kind == "all_gather" and _runs_in(_FSDP))
        marks = frozenset({ranks} if moves else ()).union(*(self.of(tensor)[0] for tensor in inputs))
        if moves and kind != "all_gather":
            elements = sum(tensor.numel() for tensor in inputs)
            if self.stepping:
                self._in_step[ranks] += elements
            in_forward = elements >= _LARGE and current_graph_task_id() == -1 and _runs_in(_FORWARD)
            if _runs_in(_COMPILED) or (in_forward and not self.stepping):
                self.everywhere.add(ranks)
        for tensor in (*outputs, *(inputs if kind == "reduce_scatter" else ())):
            _mark(tensor, marks, self.backwards)

    def _around_operator(
        self, original: Callable[..., Any], operator: Any, args: Any, kwargs: Any, result: Any
    ) -> None:
        if self._accelerator.known_values > self.active:  # this observer counts as one
            original(operator, args, kwargs, result)
        if self.active and not self.stepping:
            self._hand_on(operator, args, kwargs, result)

    def _hand_on(self, operator: Any, args: Any, kwargs: Any, result: Any) -> None:
        name = operator._schema.name
        changed = written(operator, args, kwargs) or tensors_in((result,), {})
        if "_foreach_" in name:  # from each tensor of a list to the same position in others
            lists = [each for each in (*args, *kwargs.values()) if isinstance(each, list | tuple)]
            for place, tensor in enumerate(changed[: len(lists[0])]):
                _hand([each[place] for each in lists if place < len(each)], [tensor])
        elif not (name.endswith("_like") or "::new_" in name):
            taken = tensors_in(args, kwargs)
            if torch.Tag.pointwise in operator.tags or "batch_norm" in name:  # no factors, such as clipping's
                most = max((tensor.numel() for tensor in taken), default=0)
                taken = [tensor for tensor in taken if tensor.numel() == most]
            _hand(taken, changed)


def _hand(sources: Sequence[Any], targets: Sequence[torch.Tensor]) -> None:
    # Skip tensors of one element: a norm, a count of tokens, a scale.
    known = [_memory(each) for each in sources if isinstance(each, torch.Tensor) and each.numel() > 1]
    marks = _NO_RANKS.union(*(getattr(memory, _RANKS, _NO_RANKS) for memory in known))
    for tensor in targets if marks else ():
        _mark(tensor, marks, max(getattr(memory, _WHEN, 0) for memory in known))


def _mark(tensor: torch.Tensor, marks: frozenset[Ranks], when: int) -> None:
    memory = _memory(tensor)
    setattr(memory, _RANKS, getattr(memory, _RANKS, _NO_RANKS) | marks)
    setattr(memory, _WHEN, max(getattr(memory, _WHEN, 0), when if marks else 0))


def _memory(tensor: torch.Tensor) -> torch.UntypedStorage:
    tensor = getattr(tensor, "_local_tensor", tensor)  # of a DTensor
    return getattr(tensor, "elem", tensor).untyped_storage()  # of an `AsyncCollectiveTensor`


def _runs_in(places: tuple[str, ...]) -> bool:
    """Return whether code is running from a file with one of these in its name."""
    files = (frame.f_code.co_filename for frame, _ in traceback.walk_stack(sys._getframe(1)))
    return any(place in file for file in files for place in places)


_SWITCHES = ("set_requires_gradient_sync", "set_requires_all_reduce")
_Off = dict[tuple[str, int], tuple[weakref.ref[nn.Module], Place]]


class Syncs:
    """The switches that turn off the reduction of gradients.

    `place()` returns the place of the script's line that is running; `exchange` counts calls of backward.
    """

    def __init__(self, place: Callable[[], Place], exchange: Exchange) -> None:
        self._place, self._exchange = place, exchange
        self._off: _Off = {}
        self.last_off: _Off = {}
        """Switches that were off in the last call of backward: by switch and module, with their lines."""
        for name in _SWITCHES:
            around(fsdp.FSDPModule, name, functools.partial(self._switch, name))
        for kind in (fsdp.FullyShardedDataParallel, nn.parallel.DistributedDataParallel):
            around(kind, "no_sync", self._no_sync)
        around(torch.autograd, "backward", self._backward)

    def off(self, parameter: Any, wrapped: Wrapped | None) -> tuple[Place, str] | None:
        """Return the place and the switch that turned off the reduction of a parameter's gradient in the last
        call of backward."""
        module = None if wrapped is None else wrapped.module()
        for (name, _), (switched, place) in self.last_off.items():
            found = switched()
            if found is not None and (found is module or (name == "no_sync" and holds(found, parameter))):
                return place, name
        return None

    def _switch(
        self, name: str, original: Any, module: Any, *args: Any, recurse: bool = True, **kwargs: Any
    ) -> None:
        kind: Any = fsdp.FSDPModule
        original(module, *args, recurse=recurse, **kwargs)
        wanted = args[0] if args else kwargs[name.removeprefix("set_")]
        for each in module.modules() if recurse else [module]:
            self._off.pop((name, id(each)), None)
            if not wanted and isinstance(each, kind):
                self._off[name, id(each)] = weakref.ref(each), self._place()

    def _no_sync(self, original: Callable[..., Any], model: Any) -> contextlib.AbstractContextManager[None]:
        return self._without_sync(original(model), model, self._place())

    @contextlib.contextmanager
    def _without_sync(self, context: Any, model: Any, place: Place) -> Iterator[None]:
        key = "no_sync", id(model)
        before = self._off.get(key)
        self._off[key] = weakref.ref(model), place
        try:
            with context:
                yield
        finally:
            self._off.pop(key)
            if before is not None:
                self._off[key] = before

    def _backward(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._exchange.backwards += 1
        self.last_off = dict(self._off)
        with torch.profiler.record_function("backward"):
            return original(*args, **kwargs)


def holds(module: nn.Module | None, parameter: Any) -> bool:
    """Return whether a parameter belongs to a module."""
    return module is not None and any(each is parameter for each in module.parameters())
