"""Accounting of the simulated device's memory by purpose.

    allocator ── each block and the place in the program that allocated it ───┐
    modules, optimizers ── the address of each storage ───────────────────────┼──> report(): bytes by category
    collectives ── the blocks that they read and write ───────────────────────┘

A block that holds a parameter, gradient or optimizer state has that category. Others have that of a
collective's buffer, or that of the place that allocated them (in forward: an activation of the module).
"""

import re
import weakref
from collections.abc import Callable, Iterable, Sequence
from enum import StrEnum
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from fsdpbench.base.result_sections import MemoryAccount, MemoryGrowth, MemoryHolder
from fsdpbench.base.torch_internals import set_is_profiler_enabled
from fsdpbench.sim.model.allocator.types import AllocatorAction, AllocatorEvent
from fsdpbench.sim.torch_device.accelerator import Accelerator
from fsdpbench.sim.torch_device.backward_streams import BackwardStreams
from fsdpbench.sim.torch_device.tensors import address as storage_address

_MOST_PLACES = 5
_SETTLED_STEP = 2
"""After step 2 the optimizer has its states, and the loop holds what it keeps of the previous step."""
_Where = tuple[str, str | None]


class Growth:
    """Bytes allocated at the end of each step, and the places whose bytes grew since step `_SETTLED_STEP`."""

    def __init__(self) -> None:
        self._at_ends: list[int] = []
        self._settled: dict[_Where, int] = {}
        self._last: dict[_Where, int] = {}

    def step_ended(self, live: "Iterable[tuple[int, Place]]") -> None:
        """End a step. `live`: size and place of every block in use."""
        sums: dict[_Where, int] = {}
        for size, place in live:
            where = (layers_as_one(place.module), place.line)
            sums[where] = sums.get(where, 0) + size
        self._at_ends.append(sum(sums.values()))
        if len(self._at_ends) == _SETTLED_STEP:
            self._settled = sums
        self._last = sums

    def report(self) -> MemoryGrowth:
        """Return the bytes after each step and, if every step adds some, how many and where."""
        steps = len(self._at_ends) - _SETTLED_STEP
        settled = self._at_ends[_SETTLED_STEP - 1 :]
        grows = steps > 0 and all(late > early for early, late in pairwise(settled))
        added = {where: size - self._settled.get(where, 0) for where, size in self._last.items()}
        ordered = sorted((item for item in added.items() if item[1] > 0), key=lambda item: -item[1])
        if not grows:
            return MemoryGrowth(self._at_ends)
        where = [MemoryHolder(module, size, line) for (module, line), size in ordered[:_MOST_PLACES]]
        return MemoryGrowth(self._at_ends, (settled[-1] - settled[0]) // steps, where)


_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.|$)")
_GATHERS = ("all_gather", "unshard")
_REDUCES = ("reduce", "post_backward")


class Category(StrEnum):
    """Categories of memory inside the allocator."""

    PARAMETERS = "parameters"
    GRADIENTS = "gradients"
    OPTIMIZER = "optimizer states"
    ACTIVATIONS = "activations"
    RECOMPUTED = "recomputed activations"
    BACKWARD = "gradients on their way"
    ALL_GATHER = "gathered parameters, all-gather buffers"
    REDUCE_SCATTER = "reduce-scatter buffers"
    OPTIMIZER_WORK = "optimizer's temporaries"
    OTHERS = "inputs and others"


def category_of(place: "Place", *, modules_known: bool) -> Category:
    """Return the category of a block without a known owner. `modules_known`: a forward has run."""
    span = place.span.lower()
    if place.phase is Phase.BUILDING:
        return Category.OTHERS if modules_known else Category.PARAMETERS
    if place.phase is Phase.OPTIMIZER:
        return Category.OPTIMIZER_WORK
    if any(word in span for word in _GATHERS):
        return Category.ALL_GATHER
    if place.phase is Phase.FORWARD:
        return Category.ACTIVATIONS
    if any(word in span for word in _REDUCES):
        return Category.REDUCE_SCATTER
    return Category.BACKWARD if place.module == OUTSIDE else Category.RECOMPUTED


def layers_as_one(module: str) -> str:
    """Return a module's path with layer numbers replaced: `blocks.*.attention`."""
    return _NUMBER.sub("*", module)


_MOST_HOLDERS = 12
_OF_COLLECTIVES = {
    ("all_gather", False): Category.ALL_GATHER,
    ("all_gather", True): Category.ALL_GATHER,
    ("reduce_scatter", True): Category.REDUCE_SCATTER,
}
"""(collective, whether the buffer is an input) -> the buffer's category."""


class Account:
    """Account of a simulation's memory from `begin` on; call `report` at any time afterwards."""

    def __init__(self, accelerator: Accelerator, line: "Lines | None" = None) -> None:
        self._accelerator = accelerator
        self._live: dict[int, tuple[int, Place]] = {}
        self._buffers: dict[int, Category] = {}
        self._shards: set[int] = set()
        self._places = Places(accelerator.backward, line)
        # At the first call of a root module its parameters are shards; gathered ones replace them later.
        self._places.on_root = lambda root: self._shards.update(_addresses(root.parameters()))
        self.enter, self.leave = self._places.enter, self._places.leave
        self._growth = Growth()
        self._places.on_step = lambda: self._growth.step_ended(self._live.values())

    def begin(self) -> None:
        """Start following the accelerator."""
        self._accelerator.account = self
        self._accelerator.listen(self._on_event)
        set_is_profiler_enabled(True)  # otherwise there are no spans

    def end(self) -> None:
        """Stop following."""
        self._places.close()
        self._accelerator.stop_listening(self._on_event)
        self._accelerator.account = None

    def collective(self, kind: str, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> None:
        """Record the buffers of a collective that is about to be queued."""
        for is_input, tensors in ((True, inputs), (False, outputs)):
            category = _OF_COLLECTIVES.get((kind, is_input))
            if category is not None:
                self._buffers |= dict.fromkeys(_addresses(tensors), category)

    def _on_event(self, event: AllocatorEvent) -> None:
        if event.action is AllocatorAction.ALLOC:
            self._live[event.address] = (event.size, self._places.now())
        elif event.action is AllocatorAction.FREE:
            self._live.pop(event.address, None)
            self._buffers.pop(event.address, None)
            self._shards.discard(event.address)

    def report(self) -> MemoryAccount:
        """Return the current memory by holder, and the place that the program has reached."""
        here = self._places.now()
        owned, known = self._owned(), bool(self._places.roots)
        sums: dict[str, int] = dict.fromkeys((category.value for category in Category), 0)
        holders: dict[tuple[str, str, str | None], list[int]] = {}
        for start, (size, place) in self._live.items():
            category = owned.get(start) or self._buffers.get(start)
            if category is None and start in self._shards:
                category = Category.PARAMETERS
            category = category or category_of(place, modules_known=known)
            if category is Category.PARAMETERS and place.phase is not Phase.BUILDING:
                category = Category.ALL_GATHER
            sums[category.value] += size
            key = (category.value, layers_as_one(place.module), place.line)
            found = holders.setdefault(key, [0, 0])
            found[0] += size
            found[1] += 1
        stats, allocator = self._accelerator.allocator.stats, self._accelerator.allocator
        return MemoryAccount(
            step=here.step,
            phase=here.phase.value,
            module=here.module,
            line=here.line,
            held_bytes={name: size for name, size in sums.items() if size},
            waiting_bytes=stats.active_bytes - stats.allocated_bytes,
            unused_bytes=stats.reserved_bytes - stats.active_bytes,
            outside_bytes=allocator.total_bytes - allocator.device.capacity_bytes,
            free_bytes=allocator.device.free_bytes,
            total_bytes=allocator.total_bytes,
            holders=_largest(holders),
            growth=self._growth.report(),
        )

    def _owned(self) -> dict[int, Category]:
        """Return the addresses of storages that modules and optimizers own."""
        found: dict[int, Category] = {}
        parameters = [p for root in self._places.roots for p in root.parameters()]
        buffers = [b for root in self._places.roots for b in root.buffers()]
        optimizers = list(self._places.optimizers)
        of_groups = [p for each in optimizers for group in each.param_groups for p in group["params"]]
        of_each = [state for each in optimizers for state in each.state.values() if isinstance(state, dict)]
        states = [value for state in of_each for value in state.values() if isinstance(value, torch.Tensor)]
        for category, tensors in (
            (Category.OPTIMIZER, states),
            (Category.PARAMETERS, (*parameters, *of_groups, *buffers)),
            (Category.GRADIENTS, [p.grad for p in (*parameters, *of_groups) if p.grad is not None]),
        ):
            for start in _addresses(tensors):
                # FSDP1's flat parameters are temporarily views of the gathered parameters.
                if start not in found and start not in self._buffers:
                    found[start] = category
        return found


@torch.no_grad()
def _addresses(tensors: Iterable[torch.Tensor]) -> list[int]:
    found = []
    for tensor in tensors:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        start = storage_address(local.untyped_storage())
        if start:
            found.append(start)
    return found


def _largest(holders: dict[tuple[str, str, str | None], list[int]]) -> list[MemoryHolder]:
    ordered = sorted(holders.items(), key=lambda item: (-item[1][0], str(item[0])))[:_MOST_HOLDERS]
    return [
        MemoryHolder(module, size, line, category, count)
        for (category, module, line), (size, count) in ordered
    ]


Lines = Callable[[], str | None]
"""Returns the line of the user's program that is running ("train.py:12"), if any."""

_WRAPPERS = re.compile(
    r"(?:^|(?<=\.))(?:_fsdp_wrapped_module|_checkpoint_wrapped_module|_orig_mod|module)\.?"
)
OUTSIDE = "outside of modules"


class Phase(StrEnum):
    """Parts of a training step."""

    BUILDING = "building"
    FORWARD = "forward"
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"


class Place(NamedTuple):
    """Origin of an allocation. `module`: the module's path; `span`: the innermost profiler span."""

    step: int
    phase: Phase
    module: str
    span: str
    line: str | None


class Places:
    """Tracker of a program's place, by hooks on all modules and optimizers until `close`.

    A step ends when the first optimizer that ever stepped steps. `backward`: reports whether backward runs.
    """

    def __init__(self, backward: BackwardStreams, line: "Lines | None") -> None:
        self._backward = backward
        self.roots: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self.optimizers: weakref.WeakSet[Any] = weakref.WeakSet()
        self.on_step: Callable[[], None] | None = None
        self.on_root: Callable[[nn.Module], None] | None = None
        self.step = 1
        self._line = line or (lambda: None)
        self._names: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
        self._modules: list[str] = []
        self._spans: list[str] = []
        self._leading: Any = None
        self._in_optimizer = False
        self._hooks: list[RemovableHandle] = [
            register_module_forward_pre_hook(self._enter_module),
            register_module_forward_hook(self._leave_module, always_call=True),
            register_optimizer_step_pre_hook(self._enter_optimizer),
            register_optimizer_step_post_hook(self._leave_optimizer),
        ]

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()

    def now(self) -> "Place":
        """Return the current place of the program."""
        module = self._modules[-1] if self._modules else OUTSIDE
        return Place(self.step, self.phase, module, self._spans[-1] if self._spans else "", self._line())

    @property
    def phase(self) -> Phase:
        """Return the part of the step that is running."""
        if self._backward.is_active:
            return Phase.BACKWARD
        if self._in_optimizer:
            return Phase.OPTIMIZER
        return Phase.FORWARD if self.roots else Phase.BUILDING

    def enter(self, span: str) -> None:
        """Enter a profiler span."""
        self._spans.append(span)

    def leave(self, span: str) -> None:
        """Leave a profiler span."""
        if span in self._spans:
            del self._spans[len(self._spans) - 1 - self._spans[::-1].index(span) :]

    def _enter_module(self, module: nn.Module, args: Any) -> None:
        name = self._names.get(module)
        if name is None:
            name = self._learn(module)
        self._modules.append(name)

    def _learn(self, root: nn.Module) -> str:
        self.roots.add(root)
        if self.on_root is not None:
            self.on_root(root)
        for path, module in root.named_modules():
            self._names[module] = _WRAPPERS.sub("", path).strip(".") or type(root).__name__
        return self._names[root]

    def _leave_module(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._modules:
            self._modules.pop()

    def _enter_optimizer(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self.optimizers.add(optimizer)
        self._in_optimizer = True

    def _leave_optimizer(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._in_optimizer = False
        self._leading = self._leading or optimizer
        if self._leading is optimizer:
            if self.on_step is not None:
                self.on_step()
            self.step += 1
