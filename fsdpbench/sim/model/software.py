"""Software profiles: figures and behaviour of a software version, not of a chip, from one TOML file.

    SoftwareProfile ──> Simulation.start(..., software=...) ──> prices, collectives, mechanisms
                   └──> systems and worker: refusals, calls of FSDP1, the trainer's work

Profiles are selected by name, like hardware; `current` is the installed torch.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from fsdpbench.base.files.documents import table_beside
from fsdpbench.sim.model.keys import ProfileError, check_figures, require
from fsdpbench.sim.model.profile import HardwareProfile
from fsdpbench.sim.model.profile_files import ProfileFolder

# Each default is the behaviour of the installed torch and of the bench's own training loop, so files hold
# only differences. Fields have the names in the TOML file.
CURRENT = "current"
"""The profile without changes."""


@dataclass(frozen=True)
class CollectivesSoftware:
    """``own_streams``: collectives run on the communicator's stream, with `record_stream` (torch < 2.8)."""

    own_streams: bool = False


@dataclass(frozen=True)
class AttentionSoftware:
    """Fused attention. Rates are relative to those of today's kernels in the hardware profile.

    ``unpads``: the padding mask packs queries, keys and values before the kernel, and its output is unpacked,
    as in flash-attn's `bert_padding`.
    """

    forward_rate: float = 1.0
    backward_rate: float = 1.0
    unpads: bool = False


@dataclass(frozen=True)
class KernelsSoftware:
    """Library kernels. `older`: kernels from before torch 2.11 and CUDA 13 (`sections.OlderKernels`)."""

    older: bool = False


@dataclass(frozen=True)
class CheckpointingSoftware:
    """Activation checkpointing. `reentrant`: recompute whole blocks, torch's default before 2.1.
    `by_operator`: blocks can keep outputs of selected operators (torch 2.4)."""

    reentrant: bool = False
    by_operator: bool = True


@dataclass(frozen=True)
class OperatorsSoftware:
    """Operators. `composed_rms_norm`: RMSNorm consists of several operators, as before torch 2.9.
    `fused_rotary`: Llamas rotate queries and keys with a custom kernel, in one pass each."""

    composed_rms_norm: bool = False
    fused_rotary: bool = False


@dataclass(frozen=True)
class LlamaSoftware:
    """Fields of the bench's Llamas as in published code of the time, unless a shape sets them
    (`workloads/families/llama.py`)."""

    norms: str = "fused"
    rotary: str = "halves"
    repeat_kv: bool = False
    fp32_loss: bool = True


@dataclass(frozen=True)
class Fsdp1Software:
    """PyTorch's FSDP1. `use_orig_params`: modules keep their own parameters (torch 2.0).

    `copies_gradients`: each unit's gradient is padded even without need, and the shard is zeroed.
    `limits_prefetched_units`: the rate limiter also counts prefetched units. `views_on_compute_stream`: views
    of the flat parameter, and their backward, run on the compute stream; since 2.0 on the all-gather stream.
    """

    use_orig_params: bool = True
    copies_gradients: bool = False
    limits_prefetched_units: bool = False
    views_on_compute_stream: bool = False


@dataclass(frozen=True)
class TrainerSoftware:
    """Work that a trainer adds to each microbatch of the bench's training loop.

    `fused_loss`: the loss passes over the logits once in forward and once in backward. `keeps_outputs`:
    logits live until those of the next microbatch. `metrics`: number of cross entropies of the kept logits
    after each backward. `host_us`: CPU time after each backward.
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
            "they need kept outputs: set trainer.keeps_outputs = true",
        )


@dataclass(frozen=True)
class SoftwareProfile:
    """A software version. `sources` names each difference from the installed software, by key or section."""

    name: str
    title: str
    source: str
    collectives: CollectivesSoftware = CollectivesSoftware()
    attention: AttentionSoftware = AttentionSoftware()
    kernels: KernelsSoftware = KernelsSoftware()
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
            raise ProfileError(f"name = {CURRENT!r} names the profile that changes nothing; choose another")
        for key, value in self.changes.items():
            if key not in self.sources and key.split(".")[0] not in self.sources:
                raise ProfileError(f"{key} = {value!r}: name its source under [sources]")

    @property
    def changes(self) -> dict[str, bool | int | float | str]:
        """Return the differences from the installed software: dotted key -> value."""
        return {key: value for key, value, default in self._values() if value != default}

    def changed(self, keys: Sequence[str]) -> list[str]:
        """Return the members of `keys` that are in `changes`."""
        return [key for key in keys if key in self.changes]

    @property
    def of_llamas(self) -> dict[str, bool | int | float | str]:
        """Return the changed fields of the bench's own Llamas: field of the shape -> value."""
        return {
            key.partition(".")[2]: value for key, value in self.changes.items() if key.startswith("llama.")
        }

    @property
    def of_the_bench(self) -> list[str]:
        """Return the keys in `changes` that affect only the bench's own models and loop, not scripts."""
        return [key for key in self.changes if key in _OF_THE_BENCH or key.startswith("llama.")]

    def changes_only(self, keys: Sequence[str]) -> bool:
        """Return whether all keys in `changes` are in `keys` or concern the code of Llamas."""
        return all(key in keys or key.startswith("llama.") for key in self.changes)

    def applied_to(self, hardware: HardwareProfile, attention: str = "auto") -> HardwareProfile:
        """Return `hardware` with the rates that this software reaches. Its own attention rates do not apply
        if `attention` names another kernel."""
        hardware = hardware.with_attention(attention)
        hardware = hardware.with_older_kernels() if self.kernels.older else hardware
        if attention != "auto":
            return hardware
        rates = self.attention.forward_rate, self.attention.backward_rate
        return dataclasses.replace(hardware, attention=hardware.attention.times(*rates))

    def _values(self) -> Iterator[tuple[str, Any, Any]]:
        """Yield each key with its value and its default."""
        for name in _SECTIONS:
            section = getattr(self, name)
            for spec in dataclasses.fields(section):
                yield f"{name}.{spec.name}", getattr(section, spec.name), spec.default


_SECTIONS = ("collectives", "attention", "kernels", "checkpointing", "operators", "fsdp1", "trainer", "llama")
OF_GPTS = ("attention.unpads", "trainer.fused_loss", "trainer.keeps_outputs", "trainer.metrics")
"""Keys that affect only the bench's own GPTs."""
_OF_THE_BENCH = (*OF_GPTS, "trainer.host_us", "operators.fused_rotary")
OUTSIDE_OF_GRAPHS, OF_MODELS = table_beside(__file__, "software.toml").values()
CALLS = ("checkpointing.reentrant", "checkpointing.by_operator", "fsdp1.use_orig_params")
"""Keys that describe how the bench calls torch; scripts make their own calls."""

_PROFILES = ProfileFolder("software", Path(__file__).parents[1] / "profiles" / "software", SoftwareProfile)
software_names, load_software, parse_software = _PROFILES.names, _PROFILES.load, _PROFILES.parse
