"""Which families and named sizes exist, and how a name becomes a workload."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from fsdpbench.workloads import deepvit, dhen, gpt, llama, regnet, t5
from fsdpbench.workloads.base import Workload
from fsdpbench.workloads.errors import ShapeError, UnknownModelError


@dataclass(frozen=True)
class Family:
    """A family of models: how to make one from shape values, and its named sizes with theirs."""

    make: Callable[[str, Mapping[str, Any]], Workload]
    sizes: Mapping[str, Mapping[str, Any]]

    @classmethod
    def of(cls, make: Callable[[str, Mapping[str, Any]], Workload], sizes: Mapping[str, Any]) -> Family:
        """`sizes` are shapes: frozen dataclasses."""
        return cls(make, {name: asdict(shape) for name, shape in sizes.items()})


_FAMILIES: dict[str, Family] = {
    gpt.FAMILY: Family.of(gpt.GPTWorkload.from_values, gpt.SIZES),
    t5.FAMILY: Family.of(t5.T5Workload.from_values, t5.SIZES),
    llama.FAMILY: Family.of(llama.LlamaWorkload.from_values, llama.SIZES),
    regnet.FAMILY: Family.of(regnet.RegNetWorkload.from_values, regnet.SIZES),
    deepvit.FAMILY: Family.of(deepvit.DeepViTWorkload.from_values, deepvit.SIZES),
    dhen.FAMILY: Family.of(dhen.DHENWorkload.from_values, dhen.SIZES),
}


def families() -> tuple[str, ...]:
    """Names of the families, each usable with a shape of the user's own."""
    return tuple(_FAMILIES)


def workload_names() -> tuple[str, ...]:
    """Names of the sized models, family by family, small to large."""
    return tuple(name for family in _FAMILIES.values() for name in family.sizes)


def get_workload(name: str, shape: Mapping[str, Any] | None = None) -> Workload:
    """The workload called `name` (`gpt-2.8b`), or of the family `name` (`gpt`) in the given `shape`.

    `shape` also overrides single fields of a named size; the workload's name then tells them.

    Raises:
        UnknownModelError: there is no such name; it carries the nearest ones.
        ShapeError: a shape field is unknown, missing or impossible.
    """
    overrides = dict(shape or {})
    for family_name, family in _FAMILIES.items():
        if name == family_name and not overrides and name not in family.sizes:
            raise ShapeError(
                f"'{name}' is a family and needs a shape: give one with --shape, or a named size such as "
                f"{', '.join(list(family.sizes)[:3])}"
            )
        if name == family_name or name in family.sizes:
            base = family.sizes.get(name, {})
            return family.make(_label(name, base, overrides), {**base, **overrides})
    known = workload_names() + families()
    raise UnknownModelError(name, difflib.get_close_matches(name, known, n=3, cutoff=0.5), known)


def _label(name: str, base: Mapping[str, Any], overrides: Mapping[str, Any]) -> str:
    """`name`, followed by what differs from the size of that name: `gpt-2.8b+layers=4,tied=true`."""
    changed = [
        f"{key}={str(value).lower()}"
        for key, value in overrides.items()
        if key not in base or str(base[key]).lower() != str(value).lower()
    ]
    return f"{name}+{','.join(changed)}" if changed else name
