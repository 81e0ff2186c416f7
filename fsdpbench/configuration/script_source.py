"""What a configuration says of a script: which one, how it is called, and how its steps are found."""

from __future__ import annotations

import hashlib
import importlib.machinery
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from fsdpbench.errors import UsageError


class StepsBy(StrEnum):
    """What ends a step of a script."""

    OPTIMIZER = "optimizer"
    PROFILER = "profiler"


@dataclass(frozen=True)
class ScriptSource:
    """`path` as it was typed, `digest` of the file's content. `to_the_end`: go on when all is measured.
    `module`: the name of the module that the file is, if it runs as one (`torchrun -m`)."""

    path: str
    arguments: tuple[str, ...]
    digest: str
    steps_by: StepsBy = StepsBy.OPTIMIZER
    to_the_end: bool = False
    module: str = ""

    @classmethod
    def read(
        cls, path: Path, arguments: tuple[str, ...], steps_by: StepsBy, *, to_the_end: bool, module: str = ""
    ) -> ScriptSource:
        """Raises `UsageError` if the file cannot be read."""
        try:
            digest = hashlib.sha256(path.read_bytes()).hexdigest()
        except OSError as error:
            raise UsageError(f"--script {path}: cannot be read ({error.strerror})") from None
        return cls(str(path), arguments, digest, steps_by, to_the_end, module)

    @property
    def name(self) -> str:
        """The file's name, or the module's."""
        return self.module or Path(self.path).name

    @property
    def own_folder(self) -> Path:
        """Where the script's own files lie: beside it, or in its package."""
        path = Path(self.path).absolute()
        if not self.module:
            return path.parent
        package = self.module.partition(".")[0]
        return next((folder for folder in path.parents if folder.name == package), path.parent)

    def to_dict(self) -> dict[str, Any]:
        record = {**asdict(self), "arguments": list(self.arguments), "steps_by": self.steps_by.value}
        return record if self.module else {k: v for k, v in record.items() if k != "module"}

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> ScriptSource:
        return cls(
            **{
                **record,
                "arguments": tuple(record["arguments"]),
                "steps_by": StepsBy(record["steps_by"]),
            }
        )


def file_of_module(name: str) -> Path:
    """The file that `python -m NAME` would run, found without importing it. Raises `UsageError`."""
    top, *rest = name.split(".")
    spec = importlib.machinery.PathFinder.find_spec(top, [os.getcwd(), *sys.path]) if top else None
    if spec is None:
        raise UsageError(f"--module '{name}': there is no module '{top}' on Python's path")
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
    if not folders and not rest and spec.origin:
        return Path(spec.origin)
    for folder in folders:
        inside = folder.joinpath(*rest)
        for path in ([Path(f"{inside}.py")] if rest else []) + [inside / "__main__.py"]:
            if path.is_file():
                return path
    raise UsageError(f"--module '{name}': {top} has no such module, or it is a package without __main__.py")
