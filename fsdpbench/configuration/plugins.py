"""Systems of other packages, by entry point: who offers one, without importing it.

    [project.entry-points."fsdpbench.systems"]
    my-fsdp = "my_package.bench:MyFsdp"

Only names are read here; `systems.registry` loads a system when it is chosen. What a plugin computes is part
of a result's key: the hash of its package's sources stands for it.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import importlib.util
from pathlib import Path

GROUP = "fsdpbench.systems"
_PACKAGES = {"deepspeed-zero3": "deepspeed", "megatron-fsdp": "megatron-fsdp"}
"""Our own systems that run what an optional package brings: system -> distribution."""


@functools.cache
def plugins() -> dict[str, importlib.metadata.EntryPoint]:
    """The entry points of the group by name; of two with one name the first on the path."""
    found: dict[str, importlib.metadata.EntryPoint] = {}
    for entry in importlib.metadata.entry_points(group=GROUP):
        found.setdefault(entry.name, entry)
    return found


def offered_by(entry: importlib.metadata.EntryPoint) -> str:
    """The distribution that an entry point comes from, as people know it."""
    return f"{entry.dist.name} {entry.dist.version}" if entry.dist is not None else entry.module


@functools.cache
def foreign_identity(system: str) -> dict[str, str] | None:
    """What identifies a system that is not all our own, for a result's key: the distribution it comes from,
    and for a plugin the hash of its sources. None for our own."""
    if system in _PACKAGES:
        try:
            return {"from": f"{_PACKAGES[system]} {importlib.metadata.version(_PACKAGES[system])}"}
        except importlib.metadata.PackageNotFoundError:
            return None
    entry = plugins().get(system)
    if entry is None:
        return None
    digest = hashlib.sha256()
    for path in _sources(entry.module.partition(".")[0]):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return {"from": offered_by(entry), "source": digest.hexdigest()[:16]}


def _sources(package: str) -> list[Path]:
    """The Python files of a top-level module or package, which is not imported for it."""
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return []
    if spec is None:
        return []
    if spec.submodule_search_locations:
        return sorted(path for place in spec.submodule_search_locations for path in Path(place).rglob("*.py"))
    return [Path(spec.origin)] if spec.origin and Path(spec.origin).is_file() else []
