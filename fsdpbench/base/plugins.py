"""Systems and models from other packages, found by entry point without importing them.

    [project.entry-points."fsdpbench.systems"]
    my-fsdp = "my_package.bench:MyFsdp"

    [project.entry-points."fsdpbench.workloads"]
    my-model = "my_package.models:FAMILY"

A plugin is loaded when it is chosen or listed; one that fails to load does not affect others. The hash of a
plugin's sources is part of the keys of its results.
"""

import functools
import hashlib
import importlib.metadata
import importlib.util
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from fsdpbench.base.errors import UsageError

SYSTEMS = "fsdpbench.systems"
FAMILIES = "fsdpbench.workloads"
OWN_FAMILIES = ("gpt", "t5", "llama", "decoder", "regnet", "deepvit", "dhen")
"""Families of models that fsdpbench has itself: entry points with these names are ignored."""
_PACKAGES = {"deepspeed-zero3": "deepspeed", "megatron-fsdp": "megatron-fsdp"}
"""Distributions of optional packages that fsdpbench's own systems use, by system."""


@functools.cache
def plugins(group: str = SYSTEMS) -> dict[str, importlib.metadata.EntryPoint]:
    """Return the entry points of the group by name; if two share a name, the first on Python's path."""
    found: dict[str, importlib.metadata.EntryPoint] = {}
    for entry in importlib.metadata.entry_points(group=group):
        found.setdefault(entry.name, entry)
    return found


def family_of(model: str) -> importlib.metadata.EntryPoint | None:
    """Return the entry point of the family whose name a model's name begins with (`my-model-7b`), or None."""
    names = [
        name
        for name in plugins(FAMILIES)
        if name not in OWN_FAMILIES and (model == name or model.startswith((f"{name}-", f"{name}+")))
    ]
    return plugins(FAMILIES)[max(names, key=len)] if names else None


def offered_by(entry: importlib.metadata.EntryPoint) -> str:
    """Return name and version of the distribution that provides an entry point."""
    return f"{entry.dist.name} {entry.dist.version}" if entry.dist is not None else entry.module


@functools.cache
def foreign_identity(system: str) -> dict[str, str] | None:
    """Return the identity of a system from another package, for a result's key: its distribution, and for a
    plugin also the hash of its sources. None for fsdpbench's own systems."""
    if system in _PACKAGES:
        try:
            return {"from": f"{_PACKAGES[system]} {importlib.metadata.version(_PACKAGES[system])}"}
        except importlib.metadata.PackageNotFoundError:
            return None
    entry = plugins().get(system)
    return None if entry is None else _identity(entry)


@functools.cache
def foreign_model(model: str) -> dict[str, str] | None:
    """Return the identity of a plugin's model, for a result's key. None for fsdpbench's own models."""
    entry = family_of(model)
    return None if entry is None else _identity(entry)


class PluginError(UsageError, ValueError):
    """A plugin that cannot be loaded, or is not what its group requires."""


ThingT = TypeVar("ThingT")


@dataclass(frozen=True)
class Offer(Generic[ThingT]):
    """A name that can be chosen. If `thing` is None, the plugin cannot be loaded, and `problem` says why."""

    name: str
    origin: str
    thing: ThingT | None
    problem: str | None = None


class Loader(Generic[ThingT]):
    """Loads each plugin of a group once, on first use.

    `own`: names of fsdpbench itself, which plugins cannot take; `flaw(name, loaded)` returns why a loaded
    object does not fit the group, or None.
    """

    def __init__(
        self, group: str, kind: str, own: Collection[str], flaw: Callable[[str, Any], str | None]
    ) -> None:
        self._group, self._kind, self._own, self._flaw = group, kind, own, flaw
        self._loaded: dict[str, ThingT] = {}

    def load(self, name: str) -> ThingT:
        """Return the plugin called `name`. Raises `PluginError`."""
        if name not in self._loaded:
            entry = plugins(self._group)[name]
            where = f"{self._kind} {name!r} of {offered_by(entry)} ({entry.value})"
            try:
                loaded = entry.load()
                thing = loaded() if isinstance(loaded, type) else loaded
            except Exception as error:  # a foreign module may raise anything while it is imported
                reason = f"{type(error).__name__}: {error}".splitlines()[0]
                raise PluginError(f"{where} cannot be loaded: {reason}") from error
            if flaw := self._flaw(name, thing):
                raise PluginError(f"{where} {flaw}")
            self._loaded[name] = thing
        return self._loaded[name]

    def offers(self) -> list[Offer[ThingT]]:
        """Return all plugins, including those that cannot be loaded."""
        return [self._offer(name, offered_by(entry)) for name, entry in plugins(self._group).items()]

    def _offer(self, name: str, origin: str) -> Offer[ThingT]:
        if name in self._own:
            return Offer(name, origin, None, "its name is one of fsdpbench's own")
        try:
            return Offer(name, origin, self.load(name))
        except PluginError as error:
            return Offer(name, origin, None, str(error))

    def forget(self) -> None:
        """Discard loaded plugins; they are loaded again on next use."""
        self._loaded.clear()


def forget() -> None:
    """Clear the caches of plugins; entry points are searched again on next use."""
    for function in (plugins, foreign_identity, foreign_model):
        function.cache_clear()


def _identity(entry: importlib.metadata.EntryPoint) -> dict[str, str]:
    digest = hashlib.sha256()
    for path in _sources(entry.module.partition(".")[0]):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return {"from": offered_by(entry), "source": digest.hexdigest()[:16]}


def _sources(package: str) -> list[Path]:
    """Return the Python files of a top-level module or package, without importing it."""
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return []
    if spec is None:
        return []
    if spec.submodule_search_locations:
        return sorted(path for place in spec.submodule_search_locations for path in Path(place).rglob("*.py"))
    return [Path(spec.origin)] if spec.origin and Path(spec.origin).is_file() else []
