"""A baseline: the figures of a sweep, committed to a repository, with where they came from.

Simulated figures are exact for one version of torch, so a baseline holds one set a torch version (its minor
one); the space they belong to is in it too, so that `fsdpbench check` can run the same sweep again. A set
carries its provenance: versions, revision, date, command, and what its figures belong to. It names no host.
"""

from __future__ import annotations

import datetime
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsdpbench.check.entries import Entry
from fsdpbench.check.surroundings import Surroundings
from fsdpbench.errors import CannotJudgeError, UsageError
from fsdpbench.provenance import git_revision, versions
from fsdpbench.reading import read_json

if TYPE_CHECKING:
    from fsdpbench.check.sides import Side

SCHEMA = 1


@dataclass
class Baseline:
    """`sets` by torch version: {"provenance", "surroundings", "configurations": name -> entry}."""

    space: dict[str, Any]
    sets: dict[str, dict[str, Any]]

    @classmethod
    def read(cls, path: Path) -> Baseline:
        """Raises `UsageError` naming the file and what is wrong with it."""
        content = read_json(path)
        if not is_baseline(content):
            raise UsageError(f"{path}: is not a baseline of this version (schema {SCHEMA} with `sets`)")
        return cls(content["space"], content["sets"])

    def write(self, path: Path) -> None:
        content = {"schema": SCHEMA, "space": self.space, "sets": self.sets}
        partial = path.with_name(path.name + ".partial")
        partial.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n")
        os.replace(partial, path)

    def entries(self, path: Path) -> dict[str, Entry]:
        """The figures for the torch at hand, by configuration name. Raises `CannotJudgeError` if there are
        none, `UsageError` if they are broken."""
        configurations = self._set(path)["configurations"]
        try:
            return {name: Entry.from_dict(record) for name, record in configurations.items()}
        except (KeyError, TypeError, ValueError) as error:
            raise UsageError(f"{path}: its figures are broken ({type(error).__name__}: {error})") from None

    def surroundings(self, path: Path) -> Surroundings:
        """What the figures of the torch at hand belong to."""
        return Surroundings(self._set(path).get("surroundings", {}))

    @property
    def repeat(self) -> int:
        """Runs of each configuration in the set of the torch at hand; 1 where there is none."""
        configurations = self.sets.get(torch_minor(), {}).get("configurations", {})
        return max((len(record["runs"]) for record in configurations.values()), default=1)

    def update(self, side: Side, command: str) -> None:
        """Replace the set of the torch at hand with the figures of `side`."""
        self.sets[torch_minor()] = {
            "provenance": {
                "versions": dict(versions()),
                "revision": git_revision(),
                "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
                "command": command,
            },
            "surroundings": dict(side.surroundings.facts),
            "configurations": {name: entry.to_dict() for name, entry in side.entries.items()},
        }

    def _set(self, path: Path) -> dict[str, Any]:
        mine = torch_minor()
        if mine not in self.sets:
            have = ", ".join(sorted(self.sets)) or "none"
            raise CannotJudgeError(
                f"{path}: holds figures for torch {have}, and this is torch {mine}: simulated figures are "
                f"exact for one version only. Add a set with `fsdpbench baseline update {path}`."
            )
        return self.sets[mine]


def is_baseline(content: object) -> bool:
    return isinstance(content, Mapping) and content.get("schema") == SCHEMA and "sets" in content


def torch_minor() -> str:
    return ".".join(versions()["torch"].split(".")[:2])
