"""Published runs of one chip predicted with the keys that were fitted to another chip's.

A few keys of a profile were found from published training runs of that chip (the table of
docs/simulator.md). What describes hardware in general holds on another chip too; what was fitted to
rows does not. So every run is simulated again with the fitted keys of a chip whose runs it has no part
in:

    runs on    a100-40gb, a100-80gb (one chip, fitted together)      h100-80gb
    keys from  h100-80gb                                             a100-80gb

Shares of a peak are taken as they are; the rate of attention's backward, which is of the software of the
runs (`attention.backward_rate` of its profile), as its ratio to the forward's. The efficiency of
memory-bound kernels was fitted to all runs together, and is held out from none.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fsdpbench.base.files.documents import to_toml
from fsdpbench.base.writing import write_whole
from fsdpbench.lab.validation.paper_network import Prediction
from fsdpbench.lab.validation.runs import runs_file
from fsdpbench.lab.validation.runs.case import Case
from fsdpbench.sim.model.profile import HardwareProfile, load_profile
from fsdpbench.sim.model.software import load_software
from fsdpbench.sweep.planning import own_software

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
    chips = {case.hardware: case.profile for case in cases}
    profiles = {
        hardware: _write(folder, hardware, chip) for hardware, chip in chips.items() if chip in _KEYS_FROM
    }
    return [
        dataclasses.replace(case, hardware=str(profiles[case.hardware]), chip=case.profile)
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


def with_keys_of(profile: HardwareProfile, other: HardwareProfile) -> dict[str, dict[str, object]]:
    """Return the keys fitted to runs on `other` as they apply to `profile`, by section.

    The runs are of older kernels: where `profile` has newer ones too, the keys are those of its older ones.
    """
    other, older = other.with_older_kernels(), profile.with_older_kernels()
    backward = other.attention.backward_tflops / other.attention.forward_tflops * _software_share(other)
    rate = round(older.attention.forward_tflops * backward / _software_share(profile), 1)
    gemm: dict[str, object] = {"weight_grad": other.gemm.weight_grad}
    load: dict[str, object] = {"under_load": other.gemm.under_load}
    attention: dict[str, object] = {"under_load": other.attention.under_load, "backward_tflops": rate}
    contention: dict[str, object] = {"compute_slowdown": other.contention.compute_slowdown}
    if profile.older is None:
        return {"gemm": gemm | load, "attention": attention, "contention": contention}
    return {"gemm": load, "older": {"gemm": gemm, "attention": attention}, "contention": contention}


def _software_share(profile: HardwareProfile) -> float:
    """Attention's rate backward under the runs' software over that of the profile."""
    software = load_software(own_software(runs_file.system_of(profile.name)))
    return software.attention.backward_rate


def _write(folder: Path, hardware: str, chip: str) -> Path:
    """A profile of `chip` with the network of `hardware` and the fitted keys of another chip."""
    keys_from, own = _KEYS_FROM[chip], load_profile(hardware)
    keys = with_keys_of(load_profile(chip), load_profile(keys_from))
    keys["nic"] = {"gb_s_per_node": own.nic.gb_s_per_node}
    head = {"base": chip, "name": f"{own.name}-keys-of-{keys_from}", "gpus_per_node": own.gpus_per_node}
    folder.mkdir(parents=True, exist_ok=True)
    path = (folder / f"{head['name']}.toml").resolve()
    write_whole(path, to_toml({**head, **keys}))
    return path
