"""All figures of `fsdpbench reproduce fsdp-paper`, in the order of the page.

`figures.toml` defines how a figure is built from the validation's cases, `claims.csv` what it claims, and
`open_settings.toml` which values unpublished settings may have had: the variants behind each band. The
figures are from the FSDP paper (arXiv 2304.11277; PVLDB 16:12), PyTorch 1.11's announcement and an issue.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from fsdpbench.base.configuration.config import ShapeValue
from fsdpbench.base.files.documents import table_beside, to_toml, typed_rows
from fsdpbench.base.settings import Value
from fsdpbench.base.writing import write_whole
from fsdpbench.lab.reproduce.figure import Claim, Contrast, Drawing, Kind, PaperFigure, Place, Point, Variant
from fsdpbench.lab.validation.paper_network import network_predictions
from fsdpbench.lab.validation.runs.case import Case, Figure, PublishedFigure, known_cases, published

_OF_2022 = "a100-40gb"
"""The GPUs of all runs in the announcement."""
_LARGEST_T5 = "t5-11b"
_DRAWN = PublishedFigure("5", "arXiv 2304.11277, Fig 5 (a drawing without figures)", "", "", (), {})


@dataclass(frozen=True)
class _Traced:
    runs: dict[str, str]
    memory: bool = False
    window: float = Contrast.window
    units: float = Contrast.units


@dataclass(frozen=True)
class _Recipe:
    """A table of `figures.toml`, whose comments explain its keys."""

    drawing: Drawing
    case: str | dict[str, str] = ""
    quantity: str | dict[str, str] = ""
    variants: tuple[str, ...] = ()
    contrasts: tuple[_Traced, ...] = ()
    x_title: str = ""
    log_x: bool = False
    ready: bool = False


@dataclass(frozen=True)
class _Row:
    """A row of `claims.csv`."""

    figure: str
    kind: str
    words: str
    series: str
    x: str
    other_series: str = ""
    other_x: str = ""
    taken: str = ""

    @property
    def claim(self) -> Claim:
        places = ((self.series, _place(self.x)), (self.other_series, _place(self.other_x)))
        return Claim(
            Kind[self.kind.upper()], self.words, places if self.other_series else places[:1], self.taken
        )


def _place(text: str) -> Place:
    return int(text) if text.isdecimal() else text


PUBLICATION = "fsdp-paper"
_RECIPES = {
    name: msgspec.convert(table, _Recipe) for name, table in table_beside(__file__, "figures.toml").items()
}
_CLAIMS = typed_rows(__file__, "claims.csv", _Row)
NAMES = tuple(_RECIPES)
"""The names for `--only`: figures of the paper, runs of PyTorch 1.11's announcement, an issue of PyTorch."""


def figures(folder: Path, only: Sequence[str] = ()) -> list[PaperFigure]:
    """Return the figures in `only` (default: all); write profiles that variants need to `folder`."""
    cases = {case.name: _stated(case) for case in known_cases("gpt", "t5", "open")}
    return [_figure(name, cases, folder) for name in NAMES if not only or name in only]


def _figure(name: str, cases: Mapping[str, Case], folder: Path) -> PaperFigure:
    recipe = _RECIPES[name]
    about = published(name) if recipe.case else _DRAWN
    ready = {each.case.name: each for each in network_predictions()} if recipe.ready else {}
    known = {key: each.case for key, each in ready.items()} or cases
    points = []
    for series, values in about.series.items():
        for x, value in zip(about.x, values, strict=True):
            called = _case_name(recipe, about, series, x)  # or the beginning of the name
            case = known.get(called) or next(each for each in known.values() if each.name.startswith(called))
            if name == "2022":
                case = dataclasses.replace(case, hardware=_OF_2022)
            points.append(Point(series, x, value, _on_its_machine(name, case, folder), _kind(recipe, series)))
    return PaperFigure(
        about=about,
        drawing=recipe.drawing,
        points=tuple(points),
        variants=tuple(each for called in recipe.variants for each in variants(called, folder)),
        claims=tuple(row.claim for row in _CLAIMS if row.figure == name),
        contrasts=tuple(
            Contrast(
                {words: cases[run] for words, run in each.runs.items()}, each.memory, each.window, each.units
            )
            for each in recipe.contrasts
        ),
        x_title=recipe.x_title,
        log_x=recipe.log_x,
        ready=ready,
    )


def _case_name(recipe: _Recipe, about: PublishedFigure, series: str, x: Place) -> str:
    template = recipe.case if isinstance(recipe.case, str) else recipe.case[series]
    batch = dict(zip(about.x, about.batch, strict=False)).get(x)
    return template.format(x=x, series=series, first=series.partition(",")[0], batch=batch)


def _kind(recipe: _Recipe, series: str) -> Figure:
    last = series.rpartition(", ")[2]
    name = recipe.quantity if isinstance(recipe.quantity, str) else recipe.quantity[series]
    return Figure[(name or last).upper()]


# The runs as the FSDP paper states them; what a figure leaves open is taken from the paper's other runs.
# 6a  BF16 was turned on for the 11B model (section 5.2): the small ones are in TF32, torch's default for
#     products until 1.12, because 27 TFLOPS exceed an A100's 19.5 in fp32; batch and GPUs are those of
#     figure 7c at which T5-11B was published with the same TFLOPS
# 6c  no dtype is stated: BF16 and recomputation, as in section 5.4
# 7, 8  BF16 mixed precision, recomputation and Adam are stated (section 5.4)
# T5  Hugging Face's model is stated: its attention is not fused, with dropout of 0.1

_OF_SECTION_5_4 = {"param_dtype": "bf16", "reduce_dtype": "bf16", "activation_checkpointing": "full"}


def _on_its_machine(figure: str, case: Case, folder: Path) -> Case:
    """Return a run of the announcement (parameters on the host) or a small model of figure 6a (TF32) on a
    special machine, whose profile is written to `folder`; other cases unchanged."""
    if figure == "2022":
        return on_machine("roomy", case, folder)
    small = figure == "6a" and case.model != _LARGEST_T5
    return on_machine("tf32", case, folder) if small else case


def _stated(case: Case) -> Case:
    if case.model.startswith("t5"):
        case = dataclasses.replace(case, shape={**case.shape, "attention": "explicit", "dropout": 0.1})
    if case.group.endswith(("Fig 6c", "Fig 7a and 8a")):
        case = dataclasses.replace(case, settings={**case.settings, **_OF_SECTION_5_4})
    return case


@dataclass(frozen=True)
class _Network:
    gpus: int = 128
    nic_gb_s: float | None = None
    efficiency: float | None = None


@dataclass(frozen=True)
class _Open:
    """A table of `open_settings.toml`, whose comments explain its keys."""

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
        """Return the changed case, None if nothing changes; profiles of machines are written to `folder`."""
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
    """Return the variants called `name`; profiles of machines that they need are written to `folder`."""
    return tuple(_variant(each, folder) for each in _OPEN[name])


def _variant(each: _Open, folder: Path) -> Variant:
    if each.network is None:
        return Variant(each.words, lambda case: each.change(case, folder), contradicts=each.contradicts)
    found = network_predictions(each.network.gpus, each.network.nic_gb_s, each.network.efficiency)
    return Variant(each.words, ready={point.case.name: point for point in found})


def on_machine(machine: str, case: Case, folder: Path) -> Case:
    """Return the case with the keys of `machine` ("": its chip's); its profile is written to `folder`."""
    if not machine:
        return dataclasses.replace(case, hardware=case.profile)
    name = f"{case.hardware}-{machine}"
    path = (folder / f"{name}.toml").resolve()
    text = to_toml({"base": case.hardware, "name": name, **_MACHINES[machine]})
    if not path.is_file() or path.read_text() != text:
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(path, text)
    return dataclasses.replace(case, hardware=str(path), chip=case.profile)
