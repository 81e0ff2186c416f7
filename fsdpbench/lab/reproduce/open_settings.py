"""The variants behind each band, of `open_settings.toml`: values that settings which are not published may
have had, and the machines that some of them need."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from fsdpbench.base.configuration.config import ShapeValue
from fsdpbench.base.files.documents import table_beside, to_toml
from fsdpbench.base.files.whole_files import write_whole
from fsdpbench.base.settings import Value
from fsdpbench.lab.reproduce.figure import Variant
from fsdpbench.lab.validation.paper_network import network_predictions
from fsdpbench.lab.validation.runs.case import Case


@dataclass(frozen=True)
class _Network:
    gpus: int = 128
    nic_gb_s: float | None = None
    efficiency: float | None = None


@dataclass(frozen=True)
class _Open:
    """A table of `open_settings.toml`, which says what its keys are."""

    words: str
    contradicts: str = ""
    models: tuple[str, ...] = ("",)
    gpus: frozenset[int] = frozenset()
    batch: int | None = None
    finished: bool = False
    settings: dict[str, Value] = field(default_factory=dict)
    shape: dict[str, ShapeValue] = field(default_factory=dict)
    on_gpus: int | None = None
    hardware: str | None = None
    machine: str | None = None
    network: _Network | None = None

    def change(self, case: Case, folder: Path) -> Case | None:
        """Return the changed case, None where it stays as it is; profiles of machines go to `folder`."""
        if (
            not case.model.startswith(self.models)
            or (self.gpus and case.gpus not in self.gpus)
            or (self.batch and case.settings.get("batch") != self.batch)
            or (self.finished and case.ran_out)
        ):
            return None
        case = dataclasses.replace(
            case,
            settings={**case.settings, **self.settings},
            shape={**case.shape, **self.shape},
            gpus=self.on_gpus or case.gpus,
            hardware=self.hardware or case.hardware,
        )
        return case if self.machine is None else on_machine(self.machine, case, folder)


_TABLES = table_beside(__file__, "open_settings.toml")
_MACHINES: Mapping[str, Mapping[str, object]] = _TABLES.pop("machines")
_OPEN = msgspec.convert(_TABLES, dict[str, tuple[_Open, ...]])


def variants(name: str, folder: Path) -> tuple[Variant, ...]:
    """Return the variants of one name; profiles of machines that they need go to `folder`."""
    return tuple(_variant(each, folder) for each in _OPEN[name])


def _variant(each: _Open, folder: Path) -> Variant:
    if each.network is None:
        return Variant(each.words, lambda case: each.change(case, folder), contradicts=each.contradicts)
    found = network_predictions(each.network.gpus, each.network.nic_gb_s, each.network.efficiency)
    return Variant(each.words, ready={point.case.name: point for point in found})


def on_machine(machine: str, case: Case, folder: Path) -> Case:
    """Return the case with the keys of `machine` ("": its chip's), whose profile is written to `folder`."""
    if not machine:
        return dataclasses.replace(case, hardware=case.profile)
    name = f"{case.hardware}-{machine}"
    path = (folder / f"{name}.toml").resolve()
    text = to_toml({"base": case.hardware, "name": name, **_MACHINES[machine]})
    if not path.is_file() or path.read_text() != text:
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(path, text)
    return dataclasses.replace(case, hardware=str(path), chip=case.profile)
