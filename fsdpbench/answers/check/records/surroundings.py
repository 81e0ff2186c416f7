"""The surroundings of figures besides their configurations: two sides are compared only where they are alike.

Simulated figures depend on torch, the simulated hardware, and the model. Measured ones depend on the machine
as well; that is its kind, not its name, so that two machines of one kind may be compared.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from fsdpbench.base.errors import CannotJudgeError


@dataclass(frozen=True)
class Surroundings:
    """`facts` by name; several values of one name are joined."""

    facts: Mapping[str, str]

    @property
    def is_exact(self) -> bool:
        return self.facts.get("device") == "sim"

    def differences(self, other: Surroundings) -> list[str]:
        """Return one line for each fact that differs; of two devices only that: the rest follows."""
        names = dict.fromkeys([*self.facts, *other.facts])
        if self.facts.get("device") != other.facts.get("device"):
            names = dict.fromkeys(["device"])
        return [
            f"{name}: {self.facts.get(name, 'unknown')} against {other.facts.get(name, 'unknown')}"
            for name in names
            if self.facts.get(name) != other.facts.get(name)
        ]


def require_alike(before: Surroundings, after: Surroundings) -> None:
    """Raise `CannotJudgeError` naming everything that differs."""
    differences = before.differences(after)
    if differences:
        raise CannotJudgeError(
            f"the sides differ in what must be equal, so nothing can be concluded: {'; '.join(differences)}"
        )


def surroundings_of(results: Iterable[Mapping[str, Any]]) -> Surroundings:
    """Return the surroundings of all results of a side."""
    values: dict[str, set[str]] = {}
    for result in results:
        for name, value in _facts(result).items():
            values.setdefault(name, set()).add(value)
    return Surroundings({name: ", ".join(sorted(found)) for name, found in values.items()})


def _facts(result: Mapping[str, Any]) -> dict[str, str]:
    config, environment = result.get("config") or {}, result.get("environment") or {}
    versions = environment.get("versions") or {}
    shape = config.get("shape") or {}
    facts = {
        "device": str(result.get("device")),
        "hardware": str((result.get("hardware") or {}).get("name")),
        "torch": _minor(versions.get("torch")),
        "model": str(config.get("model")),
        **{f"shape {name}": str(value) for name, value in sorted(shape.items())},
        "gpus_per_node": str(config.get("gpus_per_node")),
        **{name: str(config[name]) for name in ("gpus_used_per_node",) if config.get(name)},
        "data": str(config.get("data")),
    }
    if facts["device"] == "sim":
        return facts
    machine = environment.get("machine") or {}
    facts |= {
        "python": _minor(versions.get("python")),
        "processor": str(machine.get("processor")),
        "cores": str(machine.get("cores")),
    }
    for name, value in (environment.get("variables") or {}).items():
        facts[f"variable {name}"] = str(value)
    return facts


def _minor(version: object) -> str:
    return ".".join(str(version).split("+")[0].split(".")[:2])
