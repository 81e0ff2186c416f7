"""The points of a plan as Optuna sees them: one categorical parameter for each field in which they differ.

The space stays what `fsdpbench plan` lists: conditions and what is not applicable are decided there, and a
suggestion that is not a point of it becomes the nearest one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from fsdpbench.answers.tune.front import Candidate
from fsdpbench.base.configuration.config import Config
from fsdpbench.base.errors import UsageError
from fsdpbench.base.settings import Value

UNFIT = (0.0, 1e15)
"""Speed and memory of what did not run, or not within the limit: beaten by everything that did."""


class PointSpace:
    """`points` with their places in Optuna's parameters. Raises `UsageError` if optuna is not installed."""

    def __init__(self, points: Sequence[Config]) -> None:
        self.optuna = _optuna()
        self.points = points
        self._fields: list[dict[str, Value]] = [
            {"system": config.system, "gpus": config.gpus, **config.settings.to_dict()} for config in points
        ]
        values = {
            name: [*{_typed(fields[name]): fields[name] for fields in self._fields}.values()]
            for name in self._fields[0]
        }
        self._values = {name: found for name, found in values.items() if len(found) > 1}
        self.distributions = {
            name: self.optuna.distributions.CategoricalDistribution(range(len(found)))
            for name, found in self._values.items()
        }

    def parameters(self, index: int) -> dict[str, int]:
        """Return a point as Optuna's parameters."""
        fields = self._fields[index]
        return {
            name: [*map(_typed, found)].index(_typed(fields[name])) for name, found in self._values.items()
        }

    def one_hot(self, index: int) -> np.ndarray:
        """Return a point as zeros and ones, one for each value of each field that varies."""
        places = self.parameters(index)
        parts = [np.eye(len(found))[places[name]] for name, found in self._values.items()]
        row: np.ndarray = np.concatenate(parts) if parts else np.zeros(1)
        return row

    def nearest(
        self,
        parameters: Mapping[str, int],
        among: Iterable[int],
        promise: Callable[[int], float] = lambda index: 0.0,
    ) -> int:
        """Return the point of `among` that differs in the fewest fields; of equals the most promising."""
        wanted = {name: self._values[name][parameters[name]] for name in self._values}
        return min(among, key=lambda index: (_distance(self._fields[index], wanted), -promise(index), index))


def objectives(candidate: Candidate) -> tuple[float, float]:
    """Return speed and memory, the objectives of Optuna."""
    return (candidate.speed, float(candidate.memory or 0)) if candidate.feasible else UNFIT


def _distance(fields: Mapping[str, Value], wanted: Mapping[str, Value]) -> int:
    return sum(_typed(fields[name]) != _typed(value) for name, value in wanted.items())


def _typed(value: Value) -> tuple[type, Value]:
    """Return a setting's value with its type: `True` is not 1."""
    return type(value), value


def _optuna() -> Any:
    try:
        import optuna
    except ImportError:
        raise UsageError(
            "the space has more points than are to be tried, and searching it needs optuna: "
            "pip install 'fsdpbench[tune]'. Without it, --trials (--real-runs on a real device) must be as "
            "many as the points, which are then all tried"
        ) from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna
