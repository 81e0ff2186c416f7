"""Software profiles: what belongs to the software of a time, not to a chip, read from one TOML file.

    SoftwareProfile ──> Simulation.start(..., software=...) ──> prices, collectives, mechanisms
                   └──> systems and worker: what is refused, how FSDP1 is called, what a trainer does

Software is named, as hardware is; ``current`` is the installed torch as it is.
"""

from __future__ import annotations

from pathlib import Path

from fsdpbench.sim.model.profile_files import ProfileFolder
from fsdpbench.sim.model.software_profile import CURRENT, SoftwareProfile

__all__ = ["CURRENT", "SoftwareProfile", "load_software", "parse_software", "software_names"]

_PROFILES = ProfileFolder("software", Path(__file__).parents[1] / "profiles" / "software", SoftwareProfile)


def software_names() -> list[str]:
    """Names of the profiles that come with the package, sorted."""
    return _PROFILES.names()


def load_software(name_or_path: str | Path) -> SoftwareProfile:
    """Read a profile by its name (`software_names`) or by the path of a TOML file.

    Raises `ProfileError` for an unknown name (nearest names are offered) and for a file that cannot be read,
    is not TOML, has an unknown key, holds a value of a wrong type or range, or names no source for one.
    """
    return _PROFILES.load(name_or_path)


def parse_software(content: str | bytes, origin: str) -> SoftwareProfile:
    """Make a profile from TOML text; ``origin`` (a file name) begins every error message."""
    return _PROFILES.parse(content, origin)
