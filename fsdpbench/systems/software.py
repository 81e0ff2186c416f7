"""Which software a configuration is simulated with, and what that software cannot do."""

from __future__ import annotations

import functools

from fsdpbench.configuration.config import Config
from fsdpbench.sim.software import CURRENT, SoftwareProfile, load_software
from fsdpbench.systems.adapted import workload_of
from fsdpbench.workloads.families import gpt, llama


def software_of(config: Config) -> SoftwareProfile:
    """The software profile of `config`; that of the installed software where it names none."""
    return _load(config.software or CURRENT)


def chosen_software(given: str | None, own: str, device: str) -> str | None:
    """What a configuration names: what was `given`, else its system's `own`. The installed software is named
    only in another's place."""
    if device != "sim":
        return given
    chosen = given or own
    return None if chosen == own == CURRENT else chosen


def refused_by_software(config: Config) -> dict[str, str]:
    """Values that the software of `config` does not have: setting -> reason."""
    if config.software is None:
        return {}
    software, refused = software_of(config), {}
    if software.of_gpts and workload_of(config).family != gpt.FAMILY:
        told = ", ".join(software.of_gpts)
        refused["model"] = f"software {software.name} ({told}) is of GPTs, not of {config.model}"
    family = workload_of(config).family
    if (software.of_llamas or software.operators.fused_rotary) and family != llama.FAMILY:
        refused["model"] = f"software {software.name} is of Llamas, not of {config.model}"
    by_operator = str(config.settings.activation_checkpointing).startswith("op")
    if by_operator and not software.checkpointing.by_operator:
        refused["activation_checkpointing"] = (
            f"checkpointing by operator came with torch 2.4, after software {software.name}"
        )
    if config.settings.compile and not software.compiles_as_installed:
        refused["compile"] = f"the compiler is the installed one, not that of software {software.name}"
    return refused


_load = functools.cache(load_software)
