"""A baseline: the figures of a sweep, committed to a repository, with where they came from.

Simulated figures are exact for one version of torch, so a baseline holds one set a torch version (its minor
one); the space they belong to is in it too, so that `fsdpbench check` can run the same sweep again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsdpbench.check.metrics import figures_of
from fsdpbench.errors import CannotJudgeError, UsageError
from fsdpbench.provenance import versions
from fsdpbench.store import StoredPoint

SCHEMA = 1


@dataclass
class Baseline:
    """`sets` by torch version: configuration name -> {"status", figures}."""

    space: dict[str, Any]
    sets: dict[str, dict[str, Any]]

    @classmethod
    def read(cls, path: Path) -> Baseline:
        """Raises `UsageError` naming the file and what is wrong with it."""
        try:
            content = json.loads(path.read_text())
        except OSError as error:
            raise UsageError(f"{path}: cannot be read ({error.strerror})") from None
        except ValueError as error:
            raise UsageError(f"{path}: is not JSON ({error})") from None
        if not isinstance(content, dict) or content.get("schema") != SCHEMA or "sets" not in content:
            raise UsageError(f"{path}: is not a baseline of this version (schema {SCHEMA} with `sets`)")
        return cls(content["space"], content["sets"])

    def write(self, path: Path) -> None:
        content = {"schema": SCHEMA, "space": self.space, "sets": self.sets}
        partial = path.with_name(path.name + ".partial")
        partial.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n")
        os.replace(partial, path)

    def configurations(self, path: Path) -> dict[str, dict[str, Any]]:
        """The figures for the torch at hand. Raises `CannotJudgeError` if there are none."""
        mine = torch_minor()
        if mine not in self.sets:
            have = ", ".join(sorted(self.sets)) or "none"
            raise CannotJudgeError(
                f"{path}: holds figures for torch {have}, and this is torch {mine}: simulated figures are "
                f"exact for one version only. Add a set with `fsdpbench baseline update {path}`."
            )
        configurations: dict[str, dict[str, Any]] = self.sets[mine]["configurations"]
        return configurations

    def update(self, points: Iterable[StoredPoint]) -> None:
        """Replace the set of the torch at hand with the figures of `points`."""
        self.sets[torch_minor()] = {
            "provenance": dict(versions()),
            "configurations": {point.config["name"]: entry_of(point.result) for point in points},
        }


def entry_of(result: Mapping[str, Any]) -> dict[str, Any]:
    return {"status": result["status"], "device": result["device"], **figures_of(result)}


def torch_minor() -> str:
    return ".".join(versions()["torch"].split(".")[:2])
