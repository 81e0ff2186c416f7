"""What belongs to one wrapped module and to none inside it: modules, parameters with their places,
buffers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from ..collectives import comm
from ..runtime.presentation import ModulePlace, UnitParameter
from ..runtime.stage import stage_of
from ..shared.names import FLAT_NAME
from ..shared.torch_internals import is_traceable_wrapper_subclass
from .composable import is_replicated

_OWNER = "_fsdp_unit_of"
"""Attribute left on an original parameter: the unit that took it. A second unit that meets it holds a tied
weight.
"""


class Ignored:
    """Modules and parameters to leave alone."""

    def __init__(
        self,
        modules: Iterable[nn.Module] | None = None,
        states: Iterable[nn.Parameter] | Iterable[nn.Module] | None = None,
    ) -> None:
        modules = None if modules is None else list(modules)
        given: list[Any] = list(states or ())
        _check_ignored(modules, None if states is None else given)
        roots = (modules or []) + [s for s in given if isinstance(s, nn.Module)]
        self.modules: set[nn.Module] = {inner for root in roots for inner in root.modules()}
        self.parameters: set[nn.Parameter] = {s for s in given if isinstance(s, nn.Parameter)}
        self.parameters |= {p for root in roots for p in root.parameters()}


def _check_ignored(
    modules: Sequence[nn.Module] | None, states: Sequence[nn.Parameter | nn.Module] | None
) -> None:
    if modules is not None and states is not None:
        raise ValueError("give ignored_modules or ignored_states, not both: ignored_states takes modules too")
    for name, given, kinds in (
        ("ignored_modules", modules, (nn.Module,)),
        ("ignored_states", states, (nn.Parameter, nn.Module)),
    ):
        found = given or ()
        if found and not any(all(isinstance(each, kind) for each in found) for kind in kinds):
            types = ", ".join(sorted({type(each).__name__ for each in found}))
            wanted = " or all ".join(f"nn.{kind.__name__}" for kind in kinds)
            raise ValueError(f"{name} must be all {wanted}, not {types}")
        for each in found:
            if isinstance(each, nn.Module) and stage_of(each) is not None:
                raise ValueError(
                    f"{name} has a {type(each).__name__} that is wrapped already: it takes care of its own "
                    "parameters, so leave it out"
                )


class Owned:
    """The modules below ``roots`` that no stage inside took, and the parameters and buffers registered in
    them.

    ``modules`` maps each to its name; ``find_parameters`` fills ``places`` and ``fqns``.
    """

    def __init__(self, roots: Sequence[nn.Module], ignored: Ignored) -> None:
        self.title = " + ".join(type(root).__name__ for root in roots)
        self._ignored = ignored
        self.modules: dict[nn.Module, str] = {}
        self.places: dict[nn.Parameter, list[ModulePlace]] = {}
        self.fqns: dict[nn.Parameter, str] = {}
        for root in roots:
            self._visit(root, "")

    def _visit(self, module: nn.Module, name: str) -> None:
        if module in self.modules or module in self._ignored.modules:
            return
        if stage_of(module) is not None or is_replicated(module):
            return
        self.modules[module] = name
        for child_name, child in module.named_children():
            self._visit(child, f"{name}.{child_name}" if name else child_name)

    def find_parameters(self) -> None:
        """Record every parameter with its name and places, a tied one once.

        Raises:
            ValueError: a parameter that an earlier unit took (a weight tied across units).
        """
        for module, module_name in self.modules.items():
            for name, parameter in module._parameters.items():
                if parameter is None or parameter in self._ignored.parameters or name == FLAT_NAME:
                    continue  # a flat parameter stays with its wrapper, where this module stands twice
                fqn = f"{module_name}.{name}" if module_name else name
                if hasattr(parameter, _OWNER):
                    raise ValueError(
                        f"parameter '{fqn}' of {self.title} is tied to a parameter of a unit that was "
                        f"wrapped before ({getattr(parameter, _OWNER)}): tied weights must be in one unit. "
                        "Wrap their common parent instead of that module (one call of fully_shard can also "
                        "take both: fully_shard([a, b]))"
                    )
                self.places.setdefault(parameter, []).append(ModulePlace(module, name))
                self.fqns.setdefault(parameter, fqn)

    def describe(self, parameter: nn.Parameter) -> UnitParameter:
        """What a unit knows about ``parameter``."""
        return UnitParameter(self.fqns[parameter], tuple(self.places[parameter]), parameter.requires_grad)

    def take(self) -> None:
        """Mark the parameters as taken by this unit."""
        for parameter in self.places:
            setattr(parameter, _OWNER, self.title)

    def move(self, device: torch.device, *, parameters: bool = True) -> None:
        """Put parameters and buffers on ``device``; what is on the meta device stays there.

        Args:
            parameters: whether to move these too; those that are offloaded are cut where they are.
        """
        for parameter, fqn in self.fqns.items() if parameters else ():
            if parameter.device != device and parameter.device.type != "meta":
                if isinstance(parameter, DTensor):
                    raise ValueError(
                        f"parameter '{fqn}' is a DTensor on {parameter.device}; its mesh must be of the type "
                        f"of FSDP's, which is {device.type}"
                    )
                if is_traceable_wrapper_subclass(parameter):
                    with torch.no_grad():
                        moved = nn.Parameter(parameter.to(device), requires_grad=parameter.requires_grad)
                    torch.utils.swap_tensors(parameter, moved)
                    continue
                parameter.data = parameter.data.to(device)
        for module in self.modules:
            for name, buffer in module._buffers.items():
                if buffer is not None and buffer.device != device and buffer.device.type != "meta":
                    module._buffers[name] = buffer.to(device)

    @torch.no_grad()
    def broadcast(self, groups: comm.UnitGroups) -> None:
        """Give every rank the values of the first one."""
        buffers = [b for module in self.modules for b in module._buffers.values() if b is not None]
        for group in (groups.shard, groups.replicate):
            if group is not None:
                first = dist.get_process_group_ranks(group)[0]
                for tensor in (*self.places, *buffers):
                    dist.broadcast(tensor.detach(), src=first, group=group)

    def cast_buffers(self, dtype: torch.dtype | None) -> dict[nn.Module, dict[str, torch.dtype]]:
        """Hold floating point buffers in ``dtype``; returns the dtypes they had, by module and name."""
        before: dict[nn.Module, dict[str, torch.dtype]] = {}
        if dtype is None:
            return before
        for module in self.modules:
            for name, buffer in module._buffers.items():
                if buffer is not None and buffer.is_floating_point():
                    before.setdefault(module, {})[name] = buffer.dtype
                    module._buffers[name] = buffer.to(dtype)
        return before
