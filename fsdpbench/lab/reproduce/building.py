"""Variants made of the validation's cases: other settings, shapes, machines."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path

from fsdpbench.base.files.documents import to_toml
from fsdpbench.base.files.whole_files import write_whole
from fsdpbench.base.settings import Value
from fsdpbench.lab.reproduce.figure import Variant
from fsdpbench.lab.validation.runs.case import Case


def with_settings(words: str, of: Callable[[Case], bool] = lambda case: True, **settings: Value) -> Variant:
    """The cases that `of` chooses, with other settings."""

    def change(case: Case) -> Case | None:
        return dataclasses.replace(case, settings={**case.settings, **settings}) if of(case) else None

    return Variant(words, change)


def with_gpus(words: str, gpus: int, of: Callable[[Case], bool] = lambda case: True) -> Variant:
    """The cases that `of` chooses, on another number of GPUs."""
    return Variant(words, lambda case: dataclasses.replace(case, gpus=gpus) if of(case) else None)


def with_profile(words: str, hardware: str, of: Callable[[Case], bool] = lambda case: True) -> Variant:
    """The cases that `of` chooses, on the machine of a packaged profile."""
    return Variant(words, lambda case: dataclasses.replace(case, hardware=hardware) if of(case) else None)


def with_shape(words: str, of: Callable[[Case], bool] = lambda case: True, **shape: int | str) -> Variant:
    """The cases that `of` chooses, with other fields of the shape."""

    def change(case: Case) -> Case | None:
        return dataclasses.replace(case, shape={**case.shape, **shape}) if of(case) else None

    return Variant(words, change)


@dataclasses.dataclass(frozen=True)
class Machine:
    """The differences of a machine: `keys` of its profile by section."""

    name: str
    keys: Mapping[str, Mapping[str, object]]

    def on(self, case: Case, folder: Path) -> Case:
        """The case on its own machine with these keys, whose profile is written to `folder`."""
        name = f"{case.hardware}-{self.name}"
        path = (folder / f"{name}.toml").resolve()
        text = to_toml({"base": case.hardware, "name": name, **self.keys})
        if not path.is_file() or path.read_text() != text:
            folder.mkdir(parents=True, exist_ok=True)
            write_whole(path, text)
        return dataclasses.replace(case, hardware=str(path), chip=case.chip or case.hardware)


def with_machine(
    words: str, machine: Machine, folder: Path, of: Callable[[Case], bool] = lambda case: True
) -> Variant:
    """The cases that `of` chooses, on another machine, whose profile is written to `folder`."""
    return Variant(words, lambda case: machine.on(case, folder) if of(case) else None)
