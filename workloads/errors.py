"""What a workload refuses."""

from __future__ import annotations

from collections.abc import Sequence


class WorkloadError(ValueError):
    """Something that the user asked of a workload cannot be had; the message says what to ask instead."""


class UnknownModelError(WorkloadError):
    """No model has this name. `nearest` holds the names that look like it."""

    def __init__(self, name: str, nearest: Sequence[str], known: Sequence[str]) -> None:
        hint = f"did you mean {' or '.join(nearest)}?" if nearest else f"known models: {', '.join(known)}"
        super().__init__(f"unknown model '{name}': {hint}")
        self.name = name
        self.nearest = tuple(nearest)


class ShapeError(WorkloadError):
    """A shape has an unknown, a missing or an impossible field."""


class PluginError(WorkloadError):
    """A package that offers a family of models cannot be loaded, or offers something else."""


class DataError(WorkloadError):
    """The file or folder given as input data cannot be used."""
