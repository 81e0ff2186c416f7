"""Which ranks take part in the reduction of a gradient, whoever reduces it: FSDP, DDP, a hook, the script.

A collective marks the memory that it writes with its ranks, and operators hand marks on from what they read
to what they write. So the memory of a gradient says, as an optimizer steps, over which ranks it was reduced.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

import fsdpbench
from fsdpbench.sim import Simulation
from fsdpbench.sim.torch_device.distributed.process_group import SimProcessGroup
from fsdpbench.sim.torch_device.operators import kernels
from fsdpbench.sim.torch_device.operators.known_values import written
from fsdpbench.sim.torch_device.tensors import tensors_in
from fsdpbench.torch_internals import current_graph_task_id, replace

Ranks = Sequence[int]
_RANKS, _WHEN = "_sim_reduced_over", "_sim_reduced_in"
_NO_RANKS: frozenset[Ranks] = frozenset()
_LARGE = 4096
"""Elements from which a tensor that is reduced in forward is an activation, not a statistic."""
_FSDP = ("/torch/distributed/fsdp/", "/torch/distributed/_composable/", f"{fsdpbench.__path__[0]}/impl/")
_FORWARD, _COMPILED = ("/torch/nn/modules/module.py",), (f"{fsdpbench.__path__[0]}/sim/compile/",)


class Exchange:
    """Marks memory until `stop`. ``stepping``: whether an optimizer steps. ``backwards``: how often backward
    was called. ``everywhere``: ranks that exchange activations, and so share out the model or its input."""

    def __init__(self, simulation: Simulation) -> None:
        self.stepping = False
        self.backwards = 0
        self.everywhere: set[Ranks] = set()
        self._in_step: Counter[Ranks] = Counter()
        """Elements that were reduced while the optimizer stepped."""
        self.active = True
        self._accelerator = simulation.accelerator
        self._accelerator.known_values += 1  # so that kernels call `follow`
        replace(SimProcessGroup, run=self._around_collective(SimProcessGroup.run))
        replace(kernels, follow=self._around_operator(kernels.follow))

    def stop(self) -> None:
        """Follow no further operator."""
        self._accelerator.known_values -= self.active
        self.active = False

    def of(self, gradient: torch.Tensor) -> tuple[frozenset[Ranks], int]:
        """The ranks of each reduction that a gradient went through, and in which call of backward the last
        one was."""
        memory = _memory(gradient)
        return getattr(memory, _RANKS, _NO_RANKS), getattr(memory, _WHEN, 0)

    def of_step(self, elements: int) -> frozenset[Ranks]:
        """The ranks over which the optimizer itself has just reduced gradients of so many elements."""
        found = frozenset(ranks for ranks, count in self._in_step.items() if 2 * count >= elements)
        self._in_step.clear()
        return found

    def covers(self, reductions: Iterable[Ranks], rank: int, world: int) -> bool:
        """Whether reductions over these groups of `rank` one after another, and over like groups of the other
        ranks, are one over all."""
        reached = {rank}
        for ranks in {*reductions, *self.everywhere}:
            if len(ranks) >= world:
                return True
            reached = {each + other - rank for each in reached for other in ranks}
        return len(reached & set(range(world))) >= world

    def _around_collective(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def run(
            group: SimProcessGroup,
            kind: str,
            nbytes: int,
            inputs: Any,
            outputs: Any,
            *more: Any,
            **named: Any,
        ) -> Any:
            made = original(group, kind, nbytes, inputs, outputs, *more, **named)
            if self.active and len(group.ranks) > 1 and not torch.compiler.is_compiling():
                self._mark_collective(kind, group.ranks, inputs, outputs)
            return made

        return run

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

    def _around_operator(self, original: Callable[..., None]) -> Callable[..., None]:
        def follow(operator: Any, args: Any, kwargs: Any, result: Any) -> None:
            if self._accelerator.known_values > self.active:  # one of them is ours
                original(operator, args, kwargs, result)
            if self.active and not self.stepping:
                self._hand_on(operator, args, kwargs, result)

        return follow

    def _hand_on(self, operator: Any, args: Any, kwargs: Any, result: Any) -> None:
        name = operator._schema.name
        changed = written(operator, args, kwargs) or tensors_in((result,), {})
        if "_foreach_" in name:  # each tensor of a list to the same place of the others
            lists = [each for each in (*args, *kwargs.values()) if isinstance(each, list | tuple)]
            for place, tensor in enumerate(changed[: len(lists[0])]):
                _hand([each[place] for each in lists if place < len(each)], [tensor])
        elif not (name.endswith("_like") or "::new_" in name):
            taken = tensors_in(args, kwargs)
            if torch.Tag.pointwise in operator.tags or "batch_norm" in name:  # not a factor, as of clipping
                most = max((tensor.numel() for tensor in taken), default=0)
                taken = [tensor for tensor in taken if tensor.numel() == most]
            _hand(taken, changed)


def _hand(sources: Sequence[Any], targets: Sequence[torch.Tensor]) -> None:
    # Not of one element: a norm, a count of tokens, a scale.
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
    return getattr(tensor, "elem", tensor).untyped_storage()  # of one that a collective still writes


def _runs_in(places: tuple[str, ...]) -> bool:
    """Whether code of a file with one of these in its name runs."""
    frame = sys._getframe(1)
    while frame is not None:
        if any(place in frame.f_code.co_filename for place in places):
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False
