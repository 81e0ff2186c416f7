"""A published run: everything needed to simulate it, and the figures that were measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from fsdpbench.base.configuration.config import ShapeValue
from fsdpbench.base.settings import Value


class Figure(Enum):
    """A figure that a publication gives: where it is in a result, and its unit in tables."""

    TOKENS = ("tokens_per_s_per_gpu", "tokens/s/GPU", 1.0)
    HARDWARE_TFLOPS = ("hardware_tflops_per_gpu", "TFLOPS/GPU (with recompute)", 1.0)
    SAMPLES = ("samples_per_s_per_gpu", "samples/s/GPU", 1.0)
    SECONDS = ("step_time_s", "s a step", 1.0)
    MILLISECONDS = ("step_time_s", "ms", 1e-3)
    RETRIES = ("alloc_retries_per_step", "alloc retries a step", 1.0)
    ALLOCATED = ("peak_memory_bytes.allocated", "GB allocated", 1e9)
    ACTIVE = ("peak_memory_bytes.active", "GB active", 1e9)
    RESERVED = ("peak_memory_bytes.reserved", "GB reserved", 1e9)

    @property
    def path(self) -> list[str]:
        return self.value[0].split(".")

    @property
    def words(self) -> str:
        return self.value[1]

    @property
    def unit(self) -> float:
        """Return one unit of the published figure in the result's own."""
        return self.value[2]

    @property
    def is_speed(self) -> bool:
        """Whether more of it is a shorter step."""
        return self in (Figure.TOKENS, Figure.HARDWARE_TFLOPS, Figure.SAMPLES)

    @property
    def is_time(self) -> bool:
        """Whether it says how long a step took."""
        return self.is_speed or self in (Figure.SECONDS, Figure.MILLISECONDS)


_FITTED = frozenset({"llm-foundry"})


class Network(Enum):
    """The statement of a publication on the network between nodes."""

    STATED = "stated"
    ONE_NODE = "one node"
    NOT_STATED = "not stated"


@dataclass(frozen=True)
class Case:
    """One published run. `assumed` names what the publication does not say; such a case has no bar."""

    name: str
    group: str
    source: str
    model: str
    hardware: str
    gpus: int
    settings: Mapping[str, Value]
    published: Mapping[Figure, float]
    system: str = "torch-fsdp1"
    """The software that was used, of its time."""
    shape: Mapping[str, ShapeValue] = field(default_factory=dict)
    assumed: str = ""
    collapsed: bool = False
    """Memory was full and the run slow: it has its own target, and no place on average."""
    software: str | None = None
    """A software profile instead of the system's own."""
    chip: str = ""
    """Profile of the chip, where `hardware` is a file made of it."""
    network: Network = Network.STATED
    ran_out: bool = False
    """The run was out of memory; nothing else was published of it."""
    chosen: bool = False
    """A setting that is not published, or published otherwise, is the one with which the run comes out: its
    error says nothing about runs that are not known."""
    open: bool = False
    """Shape or settings that decide are not published: shown, but no error is counted."""

    @property
    def profile(self) -> str:
        """The packaged profile of the run's chip."""
        return self.chip or self.hardware

    @property
    def compiled(self) -> bool:
        """Whether it is compiled, and not eager."""
        return bool(self.settings.get("compile"))

    @property
    def how(self) -> str:
        """`compiled` or `eager`."""
        return "compiled" if self.compiled else "eager"

    @property
    def fitted(self) -> bool:
        """Whether constants were fitted to its source (docs/simulator.md), or a setting was chosen by it."""
        return self.chosen or self.source in _FITTED
