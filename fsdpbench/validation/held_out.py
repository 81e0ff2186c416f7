"""Each chip predicted with what was fitted to the other's runs.

A few keys of a profile were found from published training runs of that chip (the table of
docs/simulator.md). What stands for hardware in general must do on another chip too; what was fitted to
rows does not. So every run is simulated again with the fitted keys of a chip whose runs it has no part
in:

    runs on    a100-40gb, a100-80gb (one chip, fitted together)      h100-80gb
    keys from  h100-80gb                                             a100-80gb

The rest of what was fitted belongs to the runs' software (`systems/composer.py`).
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsdpbench.sim.hardware import HardwareProfile, load_profile
from fsdpbench.toml_text import to_toml
from fsdpbench.validation.case import Case
from fsdpbench.validation.predict import Prediction

_KEYS_FROM = {"a100-40gb": "h100-80gb", "a100-80gb": "h100-80gb", "h100-80gb": "a100-80gb"}


@dataclass(frozen=True)
class HeldOut:
    """Step-time errors of one hardware's runs, with its own fitted keys and with another chip's."""

    hardware: str
    keys_from: str
    own: tuple[float, ...]
    foreign: tuple[float, ...]

    @property
    def own_mean(self) -> float:
        return statistics.fmean(map(abs, self.own))

    @property
    def foreign_mean(self) -> float:
        return statistics.fmean(map(abs, self.foreign))

    @property
    def foreign_bias(self) -> float:
        return statistics.fmean(self.foreign)


def held_out_cases(cases: Sequence[Case], folder: Path) -> list[Case]:
    """The cases on hardware with fitted keys, each on a profile with another chip's (written to `folder`)."""
    profiles = {
        hardware: _write(folder, hardware, _KEYS_FROM[hardware])
        for hardware in dict.fromkeys(case.hardware for case in cases if case.hardware in _KEYS_FROM)
    }
    return [
        dataclasses.replace(case, hardware=str(profiles[case.hardware]))
        for case in cases
        if case.hardware in profiles
    ]


def compare_held_out(own: Sequence[Prediction], foreign: Sequence[Prediction]) -> list[HeldOut]:
    """Both errors by hardware; runs that did not finish with either set of keys count in neither."""
    by_name = {(p.case.group, p.case.name): p for p in foreign}
    pairs: dict[str, list[tuple[float, float]]] = {}
    for prediction in own:
        other = by_name.get((prediction.case.group, prediction.case.name))
        if other is None or prediction.step_time_error is None or other.step_time_error is None:
            continue
        errors = pairs.setdefault(prediction.case.hardware, [])
        errors.append((prediction.step_time_error, other.step_time_error))
    return [
        HeldOut(hardware, _KEYS_FROM[hardware], *zip(*errors, strict=True))
        for hardware, errors in pairs.items()
    ]


def fitted_keys(profile: HardwareProfile) -> dict[str, dict[str, Any]]:
    """What was fitted to published runs on this hardware, by section."""
    return {
        "gemm": {"under_load": profile.gemm.under_load, "weight_grad": profile.gemm.weight_grad},
        "attention": {"under_load": profile.attention.under_load},
        "bandwidth": {"efficiency": dict(profile.bandwidth.efficiency)},
        "contention": {"compute_slowdown": profile.contention.compute_slowdown},
        "cpu": {"cuda_free_us_per_gib": profile.cpu.cuda_free_us_per_gib},
    }


def _write(folder: Path, hardware: str, keys_from: str) -> Path:
    keys = fitted_keys(load_profile(keys_from))
    head = {"base": hardware, "name": f"{hardware}-keys-of-{keys_from}"}
    folder.mkdir(parents=True, exist_ok=True)
    path = (folder / f"{head['name']}.toml").resolve()
    path.write_text(to_toml({**head, **keys}))
    return path
