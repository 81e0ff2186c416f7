"""The modules, parameters with their places, and buffers of one wrapped module and of none inside it."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ..shared import error_text
from ..shared.torch_internals import REGISTRY_KEY, RegistryItem, is_traceable_wrapper_subclass
from .hooks import stage_of
from .presentation import FLAT_NAME, ModulePlace, UnitParameter

# torch's record of the composable APIs that were applied to a module: ours and torch's see each other there.
#
# ``replicate`` leaves alone what ``fully_shard`` manages, and the other way round::
#
#     fully_shard(model.experts)   # sharded
#     replicate(model)             # the rest, by DDP


_NAME, _REPLICATE = "fully_shard", "replicate"


def check_not_applied(module: nn.Module) -> None:
    """Raise AssertionError if ``fully_shard``, ours or torch's, was applied to this very module before."""
    if _NAME in module.__dict__.get(REGISTRY_KEY, ()):
        raise AssertionError(error_text("ownership.check_not_applied", type(module).__name__))


def mark_applied(module: nn.Module) -> None:
    """Note that ``fully_shard`` was applied to ``module``."""
    registry: dict[str, Any] = module.__dict__.setdefault(REGISTRY_KEY, {})
    registry[_NAME] = RegistryItem()


def is_replicated(module: nn.Module) -> bool:
    """Return whether DDP manages ``module``, by torch's ``replicate``."""
    return _REPLICATE in module.__dict__.get(REGISTRY_KEY, ())


# Attribute left on an original parameter: the unit that took it. A second unit with it holds a tied weight.
_OWNER = "_fsdp_unit_of"


class Ignored:
    """Modules and parameters to leave alone."""

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
    """The modules below ``roots`` that no stage inside took, and the parameters and buffers in them.

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
                        error_text("ownership.find_parameters", fqn, self.title, getattr(parameter, _OWNER))
                    )
                self.places.setdefault(parameter, []).append(ModulePlace(module, name))
                self.fqns.setdefault(parameter, fqn)

    def describe(self, parameter: nn.Parameter) -> UnitParameter:
        """Return what a unit knows about ``parameter``."""
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
