"""A *stage*: one wrapped module, or several wrapped as one, with the units that it gathers together.

This file has its state in an iteration; ``hooks.py`` has the hooks by which modules and autograd drive it.
"""

from collections.abc import Sequence
from enum import Enum, auto

import torch
from torch import nn

from ..shared import error_text
from ..shared.settings import ScheduleSettings
from .context import Context
from .gradient_state import any_gradient
from .streams import Streams
from .unit import GATHERED, OUTPUTS_NEEDED, Unit, UnitState


class StageState(Enum):
    """The state of a stage in an iteration."""

    IDLE = auto()
    FORWARD = auto()
    BACKWARD = auto()
    REDUCED = auto()


class Stage:
    """One wrapped module's part in the tree.

    Args:
        modules: the modules wrapped as one, usually a single one.
        units: the units that it gathers together, one for each dtype of its parameters; none if stages inside
            own all parameters.
        settings: settings of the whole tree if this stage becomes its root.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        units: Sequence[Unit],
        device: torch.device,
        settings: ScheduleSettings,
    ) -> None:
        self.modules = tuple(modules)
        self.units = tuple(units)
        self.device = device
        self.settings = settings
        self.state = StageState.IDLE
        # Whether this stage already belongs to a tree.
        self.in_tree = False
        # Whether this stage is the root of its tree; False until that is known.
        self.is_root = False
        # Streams that this stage shares with other roots, if it is a root.
        self.streams: Streams | None = None
        # Stages to prefetch after this one, set by the user; they replace the recorded order.
        self.forward_targets: Sequence[Stage] = ()
        self.backward_targets: Sequence[Stage] = ()
        # Whether the user unsharded the parameters for the next forward.
        self.unsharded_by_hand = False
        # Positions of this stage in the recorded order, one for each call.
        self.forward_positions: list[int] = []
        self.backward_position = -1
        # The error to raise if this stage ran as a root before it became part of a larger tree.
        self.error_of_second_root: type[Exception] = RuntimeError
        # Modules wrapped as one whose forward has not run yet.
        self.to_run: set[nn.Module] = set()
        # In forward: inputs, the outputs of the boundary for them, and the versions of these outputs.
        self.entered: tuple[list[torch.Tensor], tuple[torch.Tensor, ...], list[int]] | None = None
        # Units whose ``reshard_after_forward`` was None and got its value from ``is_root``.
        self._decided: list[Unit] = []

    @property
    def root_module(self) -> nn.Module:
        """Return the module of this stage. Raises RuntimeError for several: a root must be one module."""
        if len(self.modules) != 1:
            kinds = ", ".join(type(module).__name__ for module in self.modules)
            raise RuntimeError(error_text("stage.root_module", kinds))
        return self.modules[0]

    def join(self, context: Context, name: str, *, is_root: bool) -> None:
        """Join a tree, perhaps as its root; ``name`` is the FQN of the module in the root."""
        self.in_tree = True
        self.is_root = is_root
        for unit in self.units:
            unit.readopt()
            unit.join(context, name)
            _check_memory(unit)
            if unit.reshard_after_forward is None:
                # Backward needs the root's parameters first, so freeing them would not help.
                unit.reshard_after_forward = not is_root
                self._decided.append(unit)

    def leave(self) -> None:
        """Leave a tree that never ran; see ``Runtime.disband``."""
        self.in_tree = False
        self.is_root = False
        for unit in self._decided:
            unit.reshard_after_forward = None
        self._decided.clear()
        for unit in self.units:
            unit.leave()

    # -- in an iteration -------------------------------------------------------------------------------------

    def check_idle(self, what: str, error: type[Exception] = RuntimeError) -> None:
        """Raise ``error`` if this stage is in forward or backward, where ``what`` must not be called."""
        if self.state is not StageState.IDLE:
            raise error(f"{what} was called inside the {self.state.name.lower()} of unit '{self.name}'")

    @property
    def name(self) -> str:
        """Return the name of this stage in errors."""
        return self.units[0].name if self.units else type(self.modules[0]).__name__

    def check_entered(self, *, only_late: bool = False) -> None:
        """Raise RuntimeError if backward came here (``only_late``: left gradients) during an all-gather."""
        for unit in self.units:
            late = any_gradient(unit.unsharded) and not unit.gradients.held_back
            if unit.state is UnitState.GATHERING and (late or not only_late):
                raise RuntimeError(error_text("stage.check_entered", unit.name, OUTPUTS_NEEDED))

    def check_freed(self, returned: torch.Tensor) -> None:
        """Raise RuntimeError if ``returned``, a leaf, is a parameter whose memory has been freed."""
        for unit in self.units:
            freed = unit.gather.owns_memory and unit.state not in GATHERED
            if freed and any(parameter is returned for parameter in unit.unsharded):
                raise RuntimeError(error_text("stage.check_freed", unit.name, tuple(returned.shape)))

    def drop_unused_gather(self) -> None:
        """Reshard parameters that were gathered ahead and not used."""
        self.unsharded_by_hand = False
        for unit in self.units:
            if unit.state is UnitState.GATHERING:
                unit.reshard()

    def drop_without_grad(self) -> None:
        """Free parameters that a forward without grad left unsharded, unless the user asked to keep them."""
        for unit in self.units:
            if unit.state in GATHERED and (unit.presentation.drops_without_grad or unit in self._decided):
                unit.reshard()

    @property
    def in_backward(self) -> bool:
        """Return whether a running backward has reached this stage."""
        return self.state in (StageState.BACKWARD, StageState.REDUCED)

    def reset(self, *, keep: bool) -> None:
        """Reshard after a failed iteration, and drop its gradients.

        Args:
            keep: whether to keep unreduced gradients of earlier passes, unless backward reached this stage.
        """
        for unit in self.units:
            unit.reshard()
            if not keep or self.in_backward:
                unit.gradients.drop(unit.unsharded)
        self.forward_positions.clear()
        self.end_backward()

    def end_backward(self) -> None:
        """Clear the state of the backward that has ended."""
        self.backward_position = -1
        self.to_run.clear()
        self.entered = None  # set if an exception or checkpointing ended the forward early
        self.state = StageState.IDLE


def _check_memory(unit: Unit) -> None:
    """Raise RuntimeError if a unit's parameters are on the meta device, or offloaded but not on the host."""
    device = unit.shard.device
    names = ", ".join(f"'{parameter.fqn}'" for parameter in unit.parameters[:3])
    if device.type == "meta":
        raise RuntimeError(error_text("stage.on_meta", unit.name, names))
    if unit.offload is not None and device.type != "cpu":
        raise RuntimeError(error_text("stage.not_on_host", unit.name, names, device))
