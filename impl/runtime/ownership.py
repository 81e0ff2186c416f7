"""Find the modules, parameters and buffers of a wrapped module that no wrapped module inside it owns."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ..shared import error_text
from ..shared.torch_internals import REGISTRY_KEY, RegistryItem, is_traceable_wrapper_subclass
from .hooks import stage_of
from .presentation import FLAT_NAME, ModulePlace, UnitParameter

# torch's registry of the composable APIs applied to a module. Our ``fully_shard`` and torch's share it.
#
# ``replicate`` ignores modules that ``fully_shard`` manages, and vice versa::
#
#     fully_shard(model.experts)   # sharded
#     replicate(model)             # the rest, by DDP


_NAME, _REPLICATE = "fully_shard", "replicate"


def check_not_applied(module: nn.Module) -> None:
    """Raise AssertionError if ``fully_shard``, ours or torch's, was already applied to this module."""
    if _NAME in module.__dict__.get(REGISTRY_KEY, ()):
        raise AssertionError(error_text("ownership.check_not_applied", type(module).__name__))


def mark_applied(module: nn.Module) -> None:
    """Record that ``fully_shard`` was applied to ``module``."""
    registry: dict[str, Any] = module.__dict__.setdefault(REGISTRY_KEY, {})
    registry[_NAME] = RegistryItem()


def is_replicated(module: nn.Module) -> bool:
    """Return whether torch's ``replicate`` (DDP) was applied to ``module``."""
    return _REPLICATE in module.__dict__.get(REGISTRY_KEY, ())


# Attribute of an original parameter: the unit that took it. If a second unit finds it, the weight is tied.
_OWNER = "_fsdp_unit_of"


class Ignored:
    """Modules and parameters that FSDP ignores."""

    def __init__(
        self,
        modules: Iterable[nn.Module] = (),
        states: Iterable[nn.Parameter] | Iterable[nn.Module] | None = None,
    ) -> None:
        given: list[Any] = list(states or ())
        if wrong := [each for each in given if not isinstance(each, nn.Module | torch.Tensor)]:
            raise ValueError(f"ignored_params holds parameters, not {wrong[0]!r}")
        roots = [*modules, *(s for s in given if isinstance(s, nn.Module))]
        self.modules: set[nn.Module] = {inner for root in roots for inner in root.modules()}
        self.parameters: set[nn.Parameter] = {s for s in given if isinstance(s, nn.Parameter)}
        self.parameters |= {p for root in roots for p in root.parameters()}


class Owned:
    """The modules of ``roots`` that belong to no wrapped module inside, with their parameters and buffers.

    ``modules`` maps each module to its name; ``find_parameters`` fills ``places`` and ``fqns``.
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
        """Record every parameter with its name and places. A tied parameter is recorded once.

        Raises:
            ValueError: an earlier unit took one of the parameters (a weight tied across units).
        """
        for module, module_name in self.modules.items():
            for name, parameter in module._parameters.items():
                if parameter is None or parameter in self._ignored.parameters or name == FLAT_NAME:
                    continue  # a flat parameter belongs to its wrapper, even if this module occurs twice
                fqn = f"{module_name}.{name}" if module_name else name
                if hasattr(parameter, _OWNER):
                    raise ValueError(
                        error_text("ownership.find_parameters", fqn, self.title, getattr(parameter, _OWNER))
                    )
                self.places.setdefault(parameter, []).append(ModulePlace(module, name))
                self.fqns.setdefault(parameter, fqn)

    def describe(self, parameter: nn.Parameter) -> UnitParameter:
        """Return the ``UnitParameter`` that describes ``parameter``."""
        return UnitParameter(self.fqns[parameter], tuple(self.places[parameter]), parameter.requires_grad)

    def take(self) -> None:
        """Mark the parameters as taken by this unit."""
        for parameter in self.places:
            setattr(parameter, _OWNER, self.title)

    def move(self, device: torch.device, *, parameters: bool = True) -> None:
        """Move parameters and buffers to ``device``, except those on the meta device.

        Args:
            parameters: whether to move parameters; offloaded ones are sharded where they are.
        """
        for parameter, fqn in self.fqns.items() if parameters else ():
            if parameter.device != device and parameter.device.type != "meta":
                if isinstance(parameter, DTensor):
                    raise ValueError(error_text("ownership.move", fqn, parameter.device, device.type))
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
