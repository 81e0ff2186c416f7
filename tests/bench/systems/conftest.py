"""Packages of systems that a test installs: a folder with modules and the metadata of a distribution."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from fsdpbench import workloads
from fsdpbench.base import plugins
from fsdpbench.systems import registry

Install = Callable[[Path, Mapping[str, str], Mapping[str, str]], Path]


def write_package(folder: Path, modules: Mapping[str, str], entries: Mapping[str, str]) -> Path:
    """`modules`: file name -> source; `entries`: system -> `module:Class`. Returns the path to add.

    An entry `family:name` is a family of models.
    """
    site = folder / "site"
    info = site / "my_systems-1.0.dist-info"
    info.mkdir(parents=True)
    for name, source in modules.items():
        (site / name).write_text(source)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my-systems\nVersion: 1.0\n")
    models = {name.removeprefix("family:"): v for name, v in entries.items() if name.startswith("family:")}
    systems = {name: v for name, v in entries.items() if not name.startswith("family:")}
    lines: list[str] = []
    for group, offered in ((plugins.SYSTEMS, systems), (plugins.FAMILIES, models)):
        lines += [f"[{group}]", *(f"{name} = {value}" for name, value in offered.items())]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
    return site


@pytest.fixture(scope="session")
def package() -> Install:
    return write_package


@pytest.fixture
def forgotten() -> Iterator[None]:
    """What is known of installed systems is learned anew, before and after."""

    def forget() -> None:
        plugins.forget()
        registry.PLUGINS.forget()
        workloads.PLUGINS.forget()

    forget()
    yield
    forget()
