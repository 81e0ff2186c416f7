"""Software profiles: what belongs to the software of a time, not to a chip, read from one TOML file.

    SoftwareProfile ──> Simulation.start(..., software=...) ──> prices, collectives, mechanisms
                   └──> systems and worker: what is refused, how FSDP1 is called, what a trainer does

Software is named, as hardware is; ``current`` is the installed torch as it is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from fsdpbench.sim.model.keys import ProfileError, check_figures, require
from fsdpbench.sim.model.profile import HardwareProfile
from fsdpbench.sim.model.profile_files import ProfileFolder

# `SoftwareProfile` and its sections: frozen dataclasses that check their own values.
# The default of every key is what the installed torch and the bench's own training loop do, so that a file
# says only what was otherwise. Fields carry the TOML file's names.

CURRENT = "current"
"""The profile that changes nothing."""


@dataclass(frozen=True)
class CollectivesSoftware:
    """``own_streams``: collectives run on the communicator's stream and keep their tensors by
    `record_stream`, as before torch 2.8."""

    own_streams: bool = False


@dataclass(frozen=True)
class AttentionSoftware:
    """Fused attention. Rates are shares of those that the hardware's profile gives for today's kernels.

    ``unpads``: queries, keys and values are packed by the padding mask before the kernel and its output is
    unpacked, as flash-attn's `bert_padding` does.
    """

    forward_rate: float = 1.0
    backward_rate: float = 1.0
    unpads: bool = False


@dataclass(frozen=True)
class CheckpointingSoftware:
    """Activation checkpointing. ``reentrant``: in that form, a block is recomputed to its end, as was torch's
    default before 2.1. ``by_operator``: a block can keep outputs of operators (torch 2.4)."""

    reentrant: bool = False
    by_operator: bool = True


@dataclass(frozen=True)
class OperatorsSoftware:
    """``composed_rms_norm``: RMSNorm is composed of operators, as before torch 2.9. ``fused_rotary``:
    Llamas turn queries and keys in one pass each, by a kernel of their own."""

    composed_rms_norm: bool = False
    fused_rotary: bool = False


@dataclass(frozen=True)
class LlamaSoftware:
    """Fields of the bench's Llamas as published code of a time had them, where a shape does not give them
    (`workloads/families/llama.py`)."""

    norms: str = "fused"
    rotary: str = "halves"
    repeat_kv: bool = False
    fp32_loss: bool = True


@dataclass(frozen=True)
class Fsdp1Software:
    """PyTorch's FSDP1. ``use_orig_params``: modules have their own parameters (torch 2.0).

    ``copies_gradients``: each unit's gradient is padded also where there is nothing to pad, and the shard is
    zeroed. ``limits_prefetched_units``: the rate limiter is asked also for a unit that was prefetched.
    ``views_on_compute_stream``: parameters become views of the flat one on the stream of computation, and so
    does their backward; since torch 2.0 on the stream of gathers.
    """

    use_orig_params: bool = True
    copies_gradients: bool = False
    limits_prefetched_units: bool = False
    views_on_compute_stream: bool = False


@dataclass(frozen=True)
class TrainerSoftware:
    """What a trainer adds to each microbatch of the bench's training loop.

    ``fused_loss``: the loss is one pass over the logits forward and one backward. ``keeps_outputs``: logits
    live until the next microbatch's. ``metrics``: cross entropies of the kept logits after each backward.
    ``host_us``: time of the CPU after each backward.
    """

    fused_loss: bool = False
    keeps_outputs: bool = False
    metrics: int = 0
    host_us: float = 0.0

    def __post_init__(self) -> None:
        require(
            self.metrics <= 0 or self.keeps_outputs,
            "trainer.metrics",
            self.metrics,
            "they are taken of kept outputs: say trainer.keeps_outputs = true",
        )


@dataclass(frozen=True)
class SoftwareProfile:
    """The software of one time. What differs from the installed one is named in ``sources``, by key or
    section."""

    name: str
    title: str
    source: str
    collectives: CollectivesSoftware = CollectivesSoftware()
    attention: AttentionSoftware = AttentionSoftware()
    checkpointing: CheckpointingSoftware = CheckpointingSoftware()
    operators: OperatorsSoftware = OperatorsSoftware()
    fsdp1: Fsdp1Software = Fsdp1Software()
    trainer: TrainerSoftware = TrainerSoftware()
    llama: LlamaSoftware = LlamaSoftware()
    sources: Mapping[str, str] = field(default_factory=dict)
    table: ClassVar[str] = "software"

    def __post_init__(self) -> None:
        check_figures(self)
        for key in ("name", "title", "source"):
            if not getattr(self, key):
                raise ProfileError(f"{key} must not be empty")
        known = {*_SECTIONS, *(key for key, _, _ in self._values())}
        for key, source in self.sources.items():
            if key not in known:
                raise ProfileError(f"sources names {key!r}, which is not a key of a software profile")
            if not source:
                raise ProfileError(f"sources.{key!r} must not be empty")
        if self.name == CURRENT and self.changes:
            raise ProfileError(f"name = {CURRENT!r} is of the profile that changes nothing; choose another")
        for key, value in self.changes.items():
            if key not in self.sources and key.split(".")[0] not in self.sources:
                raise ProfileError(f"{key} = {value!r}: name where it comes from under [sources]")

    @property
    def changes(self) -> dict[str, bool | int | float | str]:
        """What differs from the installed software: dotted key -> value."""
        return {key: value for key, value, default in self._values() if value != default}

    @property
    def of_gpts(self) -> list[str]:
        """Keys among `changes` that act on the bench's own GPTs alone."""
        return [key for key in _OF_GPTS if key in self.changes]

    @property
    def of_llamas(self) -> dict[str, bool | int | float | str]:
        """What the bench's own Llamas had otherwise: field of the shape -> value."""
        return {
            key.partition(".")[2]: value for key, value in self.changes.items() if key.startswith("llama.")
        }

    @property
    def of_the_bench(self) -> list[str]:
        """Keys among `changes` that act on the bench's own models and training loop, which scripts lack."""
        return [key for key in self.changes if key in _OF_THE_BENCH or key.startswith("llama.")]

    @property
    def differs_in_models_alone(self) -> bool:
        """Whether all that it changes is how models are written and on which stream collectives run."""
        return all(key in _OF_MODELS or key.startswith("llama.") for key in self.changes)

    @property
    def compiles_as_installed(self) -> bool:
        """Whether the installed compiler does with this software what the compiler of its time did."""
        return all(key in _OUTSIDE_OF_GRAPHS or key.startswith("llama.") for key in self.changes)

    @property
    def left_to_scripts(self) -> list[str]:
        """Keys among `changes` that say how the bench calls torch; a script says it itself."""
        return [key for key in _CALLS if key in self.changes]

    def applied_to(self, hardware: HardwareProfile) -> HardwareProfile:
        """`hardware` with the rates that this software reaches on it."""
        attention = dataclasses.replace(
            hardware.attention,
            forward_tflops=hardware.attention.forward_tflops * self.attention.forward_rate,
            backward_tflops=hardware.attention.backward_tflops * self.attention.backward_rate,
        )
        return dataclasses.replace(hardware, attention=attention)

    def _values(self) -> Iterator[tuple[str, Any, Any]]:
        """Every key with its value here and its default."""
        for name in _SECTIONS:
            section = getattr(self, name)
            for spec in dataclasses.fields(section):
                yield f"{name}.{spec.name}", getattr(section, spec.name), spec.default


_SECTIONS = ("collectives", "attention", "checkpointing", "operators", "fsdp1", "trainer", "llama")
_OF_GPTS = ("attention.unpads", "trainer.fused_loss", "trainer.keeps_outputs", "trainer.metrics")
_OF_THE_BENCH = (*_OF_GPTS, "trainer.host_us", "operators.fused_rotary")
# Collectives and library kernels, which a compiled graph calls as eager code does, and what a graph fuses.
_OUTSIDE_OF_GRAPHS = (
    "operators.composed_rms_norm",
    "collectives.own_streams",
    "attention.forward_rate",
    "attention.backward_rate",
)
_OF_MODELS = ("collectives.own_streams", "operators.composed_rms_norm", "operators.fused_rotary")
_CALLS = ("checkpointing.reentrant", "checkpointing.by_operator", "fsdp1.use_orig_params")

__all__ = ["CURRENT", "SoftwareProfile", "load_software", "parse_software", "software_names"]

_PROFILES = ProfileFolder("software", Path(__file__).parents[1] / "profiles" / "software", SoftwareProfile)


def software_names() -> list[str]:
    """Names of the profiles that come with the package, sorted."""
    return _PROFILES.names()


def load_software(name_or_path: str | Path) -> SoftwareProfile:
    """Read a profile by its name (`software_names`) or by the path of a TOML file.

    Raises `ProfileError` for an unknown name (nearest names are offered) and for a file that cannot be read,
    is not TOML, has an unknown key, holds a value of a wrong type or range, or names no source for one.
    """
    return _PROFILES.load(name_or_path)


def parse_software(content: str | bytes, origin: str) -> SoftwareProfile:
    """Make a profile from TOML text; ``origin`` (a file name) begins every error message."""
    return _PROFILES.parse(content, origin)
