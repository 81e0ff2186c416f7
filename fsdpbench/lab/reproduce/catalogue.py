"""All figures of `fsdpbench reproduce fsdp-paper`, of the table `figures.toml` and the validation's runs."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from importlib import resources
from pathlib import Path

import msgspec

from fsdpbench.base.configuration.config import ShapeValue
from fsdpbench.base.files.documents import to_toml
from fsdpbench.base.files.whole_files import write_whole
from fsdpbench.base.settings import Value
from fsdpbench.lab.reproduce.claims import Claim
from fsdpbench.lab.reproduce.figure import Contrast, Drawing, PaperFigure, Point, Variant
from fsdpbench.lab.validation.paper_network import Prediction, network_predictions
from fsdpbench.lab.validation.runs.case import Case, Figure
from fsdpbench.lab.validation.runs.paper import PublishedFigure, known_cases, published_figures

PUBLICATION = "fsdp-paper"
NAMES = ("2a", "2b", "5", "6a", "6b", "6c", "7a", "7b", "7c", "8a", "8b", "8c", "2022", "104509")
"""What `--only` takes: the paper's figures, the runs of PyTorch 1.11's announcement, an issue of PyTorch."""
_DRAWN = PublishedFigure("5", "arXiv 2304.11277, Fig 5 (a drawing without figures)", "", "", (), {})


class _Contrast(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Words and name of each run, and how they are shown."""

    runs: dict[str, str]
    memory: bool = False
    window: float = 0.6


class _Figure(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A figure, as the head of the table explains it."""

    drawing: Drawing
    x_title: str = ""
    log_x: bool = False
    cases: str = ""
    named: dict[str, str] = {}
    value: str = ""
    values: dict[str, str] = {}
    hardware: str = ""
    machine: str = ""
    models: tuple[str, ...] = ()
    variants: tuple[str, ...] = ()
    claims: tuple[Claim, ...] = ()
    contrasts: tuple[_Contrast, ...] = ()


class _Variant(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Other settings of some cases, as the table explains them."""

    words: str
    network: dict[str, float] = {}
    models: tuple[str, ...] = ()
    on_gpus: tuple[int, ...] = ()
    batch: int | None = None
    fits: bool = False
    settings: dict[str, Value] = {}
    shape: dict[str, ShapeValue] = {}
    gpus: int | None = None
    hardware: str = ""
    machine: str = ""
    contradicts: str = ""

    def changes(self, case: Case) -> bool:
        """Return whether a case is one of those that it changes."""
        return (
            (not self.models or case.model in self.models)
            and (not self.on_gpus or case.gpus in self.on_gpus)
            and (self.batch is None or case.settings["batch"] == self.batch)
            and not (self.fits and case.ran_out)
        )


_Machines = Mapping[str, dict[str, dict[str, object]]]


class _Table(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`figures.toml`. `machines`: keys of profiles by section."""

    figures: dict[str, _Figure]
    variants: dict[str, tuple[_Variant, ...]]
    machines: _Machines


@functools.cache
def _table() -> _Table:
    text = resources.files("fsdpbench.lab.reproduce").joinpath("figures.toml").read_bytes()
    return msgspec.toml.decode(text, type=_Table)


def figures(folder: Path, only: Sequence[str] = ()) -> list[PaperFigure]:
    """The figures named in `only` (none: all); profiles of machines that variants need go to `folder`."""
    cases = {case.name: _stated(case) for case in known_cases("gpt", "t5", "open")}
    return [_figure(name, cases, folder) for name in NAMES if not only or name in only]


def _figure(name: str, cases: Mapping[str, Case], folder: Path) -> PaperFigure:
    row, about = _table().figures[name], published_figures().get(name, _DRAWN)
    networks = any(each.network for group in row.variants for each in _table().variants[group])
    ready = {each.case.name: each for each in network_predictions()} if networks else {}
    known = {name: each.case for name, each in ready.items()} or cases
    return PaperFigure(
        about,
        row.drawing,
        tuple(_points(row, about, known, folder)),
        tuple(_variant(each, folder) for group in row.variants for each in _table().variants[group]),
        row.claims,
        tuple(
            Contrast({words: cases[run] for words, run in each.runs.items()}, each.memory, each.window)
            for each in row.contrasts
        ),
        row.x_title,
        row.log_x,
        ready,
    )


def _points(row: _Figure, about: PublishedFigure, cases: Mapping[str, Case], folder: Path) -> Iterator[Point]:
    """Yield a point for every published value."""
    for series, values in about.series.items():
        kind = Figure[row.values.get(series, row.value)]
        for index, (x, value) in enumerate(zip(about.x, values, strict=True)):
            batch = about.batch[index] if about.batch else ""
            place, of = row.named.get(str(x), x), row.named.get(series, series)
            case = cases[row.cases.format(x=place, series=of, batch=batch)]
            if row.hardware:
                case = dataclasses.replace(case, hardware=row.hardware)
            if row.machine and (not row.models or case.model in row.models):
                case = _on(row.machine, case, folder)
            yield Point(series, x, value, case, kind)


def _variant(row: _Variant, folder: Path) -> Variant:
    def change(case: Case) -> Case | None:
        if not row.changes(case):
            return None
        made = dataclasses.replace(
            case,
            settings={**case.settings, **row.settings},
            shape={**case.shape, **row.shape},
            gpus=row.gpus or case.gpus,
            hardware=row.hardware or case.hardware,
        )
        return _on(row.machine, made, folder) if row.machine else made

    if row.network:
        gpus, nic, efficiency = (row.network.get(name) for name in ("gpus", "nic_gb_s", "efficiency"))
        found: list[Prediction] = network_predictions(int(gpus or 128), nic, efficiency)
        return Variant(row.words, ready={each.case.name: each for each in found})
    return Variant(row.words, change, contradicts=row.contradicts)


def _on(machine: str, case: Case, folder: Path) -> Case:
    """Return the case on its own machine with other keys, whose profile is written to `folder`."""
    name = f"{case.hardware}-{machine}"
    path = (folder / f"{name}.toml").resolve()
    text = to_toml({"base": case.hardware, "name": name, **_table().machines[machine]})
    if not path.is_file() or path.read_text() != text:
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(path, text)
    return dataclasses.replace(case, hardware=str(path), chip=case.chip or case.hardware)


# The runs as the FSDP paper states them; what a figure leaves open is taken from the paper's other runs.
# 6a  BF16 was turned on for the 11B model (section 5.2): the small ones are in TF32, torch's default for
#     products until 1.12, as 27 TFLOPS exceed an A100's 19.5 in fp32; batch and GPUs are those of
#     figure 7c at which T5-11B was published with the same TFLOPS
# 6c  no dtype is stated: BF16 and recomputation, as in section 5.4
# 7, 8  BF16 mixed precision, recomputation and Adam are stated (section 5.4)
# T5  Hugging Face's model is stated: its attention is written out, with dropout of 0.1

_OF_SECTION_5_4 = {"param_dtype": "bf16", "reduce_dtype": "bf16", "activation_checkpointing": "full"}


def _stated(case: Case) -> Case:
    """Return a run of the validation as the paper states it."""
    if case.model.startswith("t5"):
        case = dataclasses.replace(case, shape={**case.shape, "attention": "explicit", "dropout": 0.1})
    if case.group.endswith(("Fig 6c", "Fig 7a and 8a")):
        case = dataclasses.replace(case, settings={**case.settings, **_OF_SECTION_5_4})
    return case
