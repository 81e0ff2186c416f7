"""What a configuration says of a script: which one, how it is called, and how its steps are found."""

from __future__ import annotations

import hashlib
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
    """`path` as it was typed, `digest` of the file's content. `to_the_end`: go on when all is measured."""

    path: str
    arguments: tuple[str, ...]
    digest: str
    steps_by: StepsBy = StepsBy.OPTIMIZER
    to_the_end: bool = False

    @classmethod
    def read(
        cls, path: Path, arguments: tuple[str, ...], steps_by: StepsBy, *, to_the_end: bool
    ) -> ScriptSource:
        """Raises `UsageError` if the file cannot be read."""
        try:
            digest = hashlib.sha256(path.read_bytes()).hexdigest()
        except OSError as error:
            raise UsageError(f"--script {path}: cannot be read ({error.strerror})") from None
        return cls(str(path), arguments, digest, steps_by, to_the_end)

    @property
    def name(self) -> str:
        """The file's name."""
        return Path(self.path).name

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "arguments": list(self.arguments), "steps_by": self.steps_by.value}

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> ScriptSource:
        return cls(
            **{
                **record,
                "arguments": tuple(record["arguments"]),
                "steps_by": StepsBy(record["steps_by"]),
            }
        )
