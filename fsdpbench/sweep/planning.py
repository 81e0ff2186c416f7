"""The target that a sweep's configurations share, and their creation, checked against model and system."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from fsdpbench.base.configuration.config import DEFAULT_HARDWARE, Config, Measurement, ShapeValue, check_world
from fsdpbench.base.errors import UsageError, error_text, unknown
from fsdpbench.base.files.documents import is_there
from fsdpbench.base.settings import SETTINGS, Settings, Value
from fsdpbench.sim.model.profile import HardwareProfile, ProfileError, load_profile, stated_machine
from fsdpbench.sim.model.software import CALLS, CURRENT, load_software, software_names
from fsdpbench.systems import chosen_software, get_system
from fsdpbench.systems.narrow import adapted
from fsdpbench.workloads import Workload, get_workload


@dataclass(frozen=True)
class Target:
    """The model of a whole sweep, and the machine to run it on."""

    model: str
    shape: Mapping[str, ShapeValue]
    device: str
    hardware: str | None
    gpus: int
    gpus_per_node: int
    data: str | None
    measurement: Measurement
    sanitize: bool = False
    software: str | None = None
    """The software profile of all its systems; `None`: each system's own."""
    gpus_used_per_node: int | None = None
    """As in a `Config`."""

    def workload(self) -> Workload:
        return get_workload(self.model, shape=dict(self.shape) or None)

    @property
    def profile(self) -> HardwareProfile:
        """Return the hardware profile of the simulated GPUs."""
        return load_profile(self.hardware or "")


def make_target(
    *,
    model: str,
    gpus: int,
    hardware: str | None = None,
    device: str = "sim",
    shape: Mapping[str, ShapeValue] = MappingProxyType({}),
    gpus_per_node: int | None = None,
    data: str | None = None,
    measurement: Measurement | None = None,
    sanitize: bool = False,
    software: str | None = None,
    gpus_used_per_node: int | None = None,
    nic_gb_s: float | None = None,
) -> Target:
    """Check and complete a target; `device` must not be `auto`. Raises `UsageError`.

    Options about simulated nodes become part of `hardware`.
    """
    simulated = device == "sim"
    per_node, used = gpus_per_node or max(gpus, 1), None
    if simulated:
        hardware = hardware or DEFAULT_HARDWARE
        stated = (gpus_per_node, gpus_used_per_node, nic_gb_s)
        hardware, per_node, used = simulated_nodes(hardware, gpus, *stated)
    elif gpus_used_per_node is not None or nic_gb_s is not None:
        raise UsageError(error_text("planning.simulated_only", device))
    per_node = min(per_node, max(gpus, 1))
    check_world(gpus, per_node, used)
    if data is not None and not is_there(Path(data)):
        raise UsageError(f"--data {data}: no such file or folder")
    target = Target(
        model=model,
        shape=shape,
        device=device,
        hardware=hardware if simulated else None,
        sanitize=sanitize,
        software=None if software is None else check_software(software, device),
        gpus=gpus,
        gpus_per_node=per_node,
        data=str(Path(data).resolve()) if data else None,
        measurement=measurement or Measurement.default_for(device),
        gpus_used_per_node=used,
    )
    target.workload()
    return target


def simulated_nodes(
    hardware: str, gpus: int, per_node: int | None, used: int | None, nic_gb_s: float | None
) -> tuple[str, int, int | None]:
    """Return the machine's name including its nodes, GPUs per node, and used ones. Raises `UsageError`."""
    try:
        hardware = stated_machine(hardware, per_node, nic_gb_s)
        whole = load_profile(hardware).gpus_per_node
    except ProfileError as error:
        raise UsageError(f"{error} (`fsdpbench list hardware` lists them all)") from None
    if used is not None:
        check_world(used, whole, used)
    return hardware, whole, used if used is not None and used < min(whole, gpus) else None


def make_config(target: Target, system: str, settings: Settings, workload: Workload) -> Config:
    """Return one configuration on `target`. Raises `UsageError` if the system is not installed."""
    get_system(system).require()
    seq = adapted(workload, settings).resolve_seq(settings.seq)
    _check_units(workload, settings.wrap)
    return Config(
        model=target.model,
        shape=dict(workload.shape),
        shape_given=dict(target.shape),
        system=system,
        device=target.device,
        hardware=target.hardware,
        gpus=target.gpus,
        gpus_per_node=target.gpus_per_node,
        gpus_used_per_node=target.gpus_used_per_node,
        settings=settings.changed(seq=seq),
        measurement=target.measurement,
        data=target.data,
        sanitize=target.sanitize,
        software=chosen_software(target.software, get_system(system).software, target.device),
    )


def _check_units(workload: Workload, wrap: str) -> None:
    """Raise `UsageError` if `wrap` names classes or modules that the model lacks, before anything runs."""
    if wrap not in ("root", "block") and not wrap.startswith(("every-", "size:")):
        from fsdpbench.systems.wrapping import check_names  # imports torch and builds the model

        check_names(workload, wrap)


def configured(target: Target, system: str, **settings: Any) -> Config:
    """Return one configuration with these settings (texts or typed values), others at their defaults.
    Settings that the system lacks are null. Raises `UsageError`."""
    return without_absent(make_config(target, system, Settings.of(**settings), target.workload()))


def workload_named(config: Config) -> Workload:
    """Return the workload that `config` names, independent of its settings."""
    return get_workload(config.model, shape=dict(config.shape_given) or None)


def not_applicable(config: Config, given: Iterable[str] = (), before: Config | None = None) -> dict[str, str]:
    """Return why `config` cannot run, by setting: settings in `given` that its system lacks, and refused
    values. If `config` is a change of `before`, use the system of `before`."""
    before = before or config
    system = get_system(before.system)
    absent = system.absent_settings(before)
    reasons = {name: absent[name] for name in given if name in absent}
    return reasons | system.not_applicable(config)


def without_absent(config: Config) -> Config:
    """Return `config` with the settings that its system lacks set to `None`."""
    absent = get_system(config.system).absent_settings(config)
    nulls: dict[str, Value] = {name: None for name in absent if name in SETTINGS}
    keep = {name: SETTINGS[name].default for name in nulls if SETTINGS[name].never_null}
    return dataclasses.replace(config, settings=config.settings.changed(**{**nulls, **keep}))


def shards(config: Config) -> bool:
    """Return whether the system of `config` shards the model."""
    return get_system(config.system).shards


def own_software(system: str) -> str:
    """Return the default software profile of a system. Raises `UsageError`."""
    return get_system(system).software


def check_systems(names: Sequence[str], *, installed: bool = True) -> list[str]:
    """Return the names if all systems exist and, with `installed`, are installed. Raises `UsageError`."""
    for name in names:
        system = get_system(name)
        if installed:
            system.require()
    return list(names)


def check_software(name: str, device: str) -> str:
    """Return the name or path of a readable software profile. Raises `UsageError`, also on real devices."""
    if device != "sim":
        raise UsageError(f"--software {name} is for simulated GPUs; leave it out with --device {device}")
    try:
        load_software(name)
    except ProfileError as error:
        raise UsageError(f"{error} (`fsdpbench list software` lists them all)") from None
    return name.lower() if name.lower() in software_names() else name


def software_of_script(given: str | None) -> tuple[str | None, str]:
    """Return the software profile of a script, None for the current one, and a note on the keys that do not
    apply because the script decides them itself. Raises `UsageError`."""
    name = CURRENT if given is None else check_software(given, "sim")
    profile = load_software(name)
    if profile.of_the_bench:
        raise UsageError(error_text("planning.software", given, ", ".join(profile.of_the_bench)))
    kept = ", ".join(profile.changed(CALLS))
    note = f"note: {kept} of software {profile.name}: as the script has them" if kept else ""
    return None if name == CURRENT else name, note


def check_device(name: str) -> str:
    """Return the name of a device unchanged. Raises `UsageError` if it is unknown."""
    if name not in ("auto", "cuda", "cpu", "sim"):
        raise unknown("device", name, ("auto", "cuda", "cpu", "sim"), "fsdpbench sweep --help")
    return name
