"""The systems under test by name: our own, and those of other packages, which are loaded when they are asked
for. A plugin that cannot be loaded is named, and takes nothing else with it."""

from __future__ import annotations

from dataclasses import dataclass

from fsdpbench.base.errors import UsageError, unknown
from fsdpbench.base.plugins import offered_by, plugins
from fsdpbench.systems.base import System
from fsdpbench.systems.deepspeed_zero3 import DeepSpeedZero3
from fsdpbench.systems.fsdp1 import ImplFsdp1, TorchFsdp1
from fsdpbench.systems.fsdp2 import ImplFsdp2, TorchFsdp2
from fsdpbench.systems.megatron_fsdp import MegatronFsdp
from fsdpbench.systems.unsharded import Single, TorchDdp


class TorchFsdp1Of2022(TorchFsdp1):
    """Torch 1.13's FSDP1, in which the FSDP paper's runs were made (simulated only).

    Training runs the installed torch; the software profile adds the differences in time and memory
    (`fsdpbench/sim/profiles/software`).
    """

    name = "torch-fsdp1-1.13"
    summary = "PyTorch's FSDP1 as torch 1.13 had it: collectives, gradient copy, rate limiter, checkpointing"
    devices = frozenset({"sim"})
    software = "fsdp1-2022"


class LlmFoundry01(TorchFsdp1):
    """Composer's trainer and metrics around torch 1.13's FSDP1."""

    name = "llm-foundry-0.1"
    summary = "llm-foundry 0.1 (Composer 0.14, torch 1.13's FSDP1, attention in Triton)"
    devices = frozenset({"sim"})
    software = "composer-2023-spring"


class LlmFoundry04(TorchFsdp1):
    """Composer's trainer and metrics around torch 2.1's FSDP1, collectives on streams of their own."""

    name = "llm-foundry-0.4"
    summary = "llm-foundry 0.4 (Composer 0.17, torch 2.1's FSDP1, flash attention 2 with unpadding)"
    devices = frozenset({"sim"})
    software = "composer-2023-autumn"


_OWN: dict[str, System] = {
    system.name: system
    for system in (
        ImplFsdp2(),
        ImplFsdp1(),
        TorchFsdp2(),
        TorchFsdp1(),
        TorchFsdp1Of2022(),
        LlmFoundry01(),
        LlmFoundry04(),
        TorchDdp(),
        Single(),
        DeepSpeedZero3(),
        MegatronFsdp(),
    )
}
_LOADED: dict[str, System] = {}


@dataclass(frozen=True)
class Offer:
    """One name that can be chosen. `system` None: its plugin cannot be loaded, and `problem` says why."""

    name: str
    origin: str
    system: System | None
    problem: str | None = None


def get_system(name: str) -> System:
    """Return the system of that name. Raise `UsageError` with the nearest names, or with a plugin's
    problem."""
    if name in _OWN:
        return _OWN[name]
    if name not in plugins():
        raise unknown("system", name, [*_OWN, *plugins()], "fsdpbench list systems")
    if name not in _LOADED:
        _LOADED[name] = _load(name)
    return _LOADED[name]


def offers() -> list[Offer]:
    """Return all systems that can be chosen, our own first."""
    found = [Offer(name, "fsdpbench", system) for name, system in _OWN.items()]
    for name, entry in plugins().items():
        origin = offered_by(entry)
        if name in _OWN:
            found.append(Offer(name, origin, None, "its name is one of fsdpbench's own systems"))
            continue
        try:
            found.append(Offer(name, origin, get_system(name)))
        except UsageError as error:
            found.append(Offer(name, origin, None, str(error)))
    return found


def forget_loaded() -> None:
    """Load plugins again when they are asked for next."""
    _LOADED.clear()


def _load(name: str) -> System:
    entry = plugins()[name]
    where = f"system {name!r} of {offered_by(entry)} ({entry.value})"
    try:
        loaded = entry.load()
        system = loaded() if isinstance(loaded, type) else loaded
    except Exception as error:  # whatever a foreign module does while it is imported
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        raise UsageError(f"{where} cannot be loaded: {reason}") from error
    if not isinstance(system, System):
        raise UsageError(f"{where} is {type(system).__name__}, no fsdpbench.systems.System")
    if getattr(system, "name", None) != name:
        raise UsageError(f"{where} calls itself {getattr(system, 'name', None)!r}: both names must be equal")
    return system
