"""One configuration of one side: how it ended, and its figures, run by run.

A simulated configuration has one run, which is exact. A measured one has as many as were repeated; the run is
the replicate, since steps of one run share what that run happened to get.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fsdpbench.check.metrics import METRICS, figures_of
from fsdpbench.records import Status

Figures = Mapping[str, float | None]


@dataclass(frozen=True)
class Entry:
    """`runs`: the figures of each run that succeeded, by metric; of the only one where none did."""

    status: Status
    device: str
    runs: tuple[Figures, ...]

    @property
    def is_exact(self) -> bool:
        return self.device == "sim"

    def values(self, metric: str) -> list[float]:
        """The figure in every run that knows it."""
        return [value for run in self.runs if (value := run.get(metric)) is not None]

    def to_dict(self) -> dict[str, Any]:
        """For a baseline's file; figures that are not known are left out."""
        runs = [{name: value for name, value in run.items() if value is not None} for run in self.runs]
        return {"status": self.status.value, "device": self.device, "runs": runs}

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> Entry:
        """Raises `KeyError`, `TypeError` or `ValueError` on what `to_dict` did not write."""
        runs = tuple({name: run.get(name) for name in METRICS} for run in record["runs"])
        return cls(Status(record["status"]), str(record["device"]), runs)


def entry_of(results: Sequence[Mapping[str, Any]]) -> Entry:
    """From the results of all runs of a configuration, the first one first."""
    first = results[0]
    succeeded = [figures_of(_own(result)) for result in results if Status(result["status"]) is Status.OK]
    return Entry(Status(first["status"]), first["device"], tuple(succeeded) or (figures_of(first),))


def _own(result: Mapping[str, Any]) -> Mapping[str, Any]:
    """The result with the step time of its own run: that of a repeated first run is the median over all."""
    repeats = result.get("repeats")
    return {**result, "step_time_s": repeats["step_time_s"][0]} if repeats else result
