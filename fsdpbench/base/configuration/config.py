"""A `Config` holds everything that determines what one configuration does, and nothing else.

It is passed down unchanged (command line -> sweep -> launcher -> worker); a `Result` and traces are returned.
`provenance.content_key(config)` hashes it together with the versions and sources that it runs under.
"""

import dataclasses
import hashlib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from fsdpbench.base.configuration.script_source import ScriptSource
from fsdpbench.base.configuration.soak import SoakSettings
from fsdpbench.base.errors import UsageError, error_text
from fsdpbench.base.files.documents import converted
from fsdpbench.base.numbers import MOST_GPUS, finite_number, whole_number
from fsdpbench.base.settings import SETTINGS, Settings, show_value

DEVICES = ("cuda", "cpu", "sim")
DEFAULT_HARDWARE = "a100-80gb"
ShapeValue = int | float | str | bool
NO_EMULATION = error_text("config.no_emulation")


@dataclass(frozen=True)
class Measurement:
    """The number of steps of each pass, and the maximum wall time of the whole configuration in seconds.

    The warm-up runs `warmup_steps`, then continues until step times are stable, up to `most_warmup_steps`.
    If they are not stable by then, `most_timed_steps` are timed instead of `timed_steps` (0: no extra steps).
    With 0 `traced_steps` there is no trace and no figure that is read from one. If tracing adds no time
    (`sim`), the last timed steps are the traced ones; if there are too few of them, more steps are traced.
    """

    warmup_steps: int
    timed_steps: int
    traced_steps: int
    timeout_s: float
    most_warmup_steps: int = 0
    most_timed_steps: int = 0

    def __post_init__(self) -> None:
        for name, least in (("warmup_steps", 0), ("timed_steps", 1), ("traced_steps", 0)):
            if getattr(self, name) < least:
                raise UsageError(f"{name} must be at least {least}, not {getattr(self, name)}")
        if not 0 < self.timeout_s < math.inf:
            raise UsageError(f"timeout must be a finite number of seconds above 0, not {self.timeout_s}")

    @classmethod
    def default_for(cls, device: str) -> "Measurement":
        """Return the default numbers of steps: few on `sim`, because simulated times are exact."""
        if device == "sim":
            return cls(2, 1, 1, timeout_s=300.0, most_warmup_steps=12, most_timed_steps=8)
        return cls(warmup_steps=3, timed_steps=5, traced_steps=2, timeout_s=600.0, most_warmup_steps=12)


@dataclass(frozen=True)
class Config:
    """One configuration. Build it with `planning.make_config`, which checks it against model and hardware.

    If `script` is set, the script runs: `model` and `system` are its name, and it has no settings.
    """

    model: str
    shape: Mapping[str, ShapeValue]
    system: str
    device: str
    hardware: str | None
    gpus: int
    gpus_per_node: int
    settings: Settings
    measurement: Measurement
    data: str | None = None
    shape_given: Mapping[str, ShapeValue] = field(default_factory=dict)
    script: ScriptSource | None = None
    jitter: "JitterSettings | None" = None
    sanitize: bool = False
    """Track every memory access on the simulated GPU, and report data races."""
    software: str | None = None
    """The software profile of simulated GPUs, by name or path; `None`: the installed software."""
    what_if: "WhatIf | None" = None
    """Additional assumptions about simulated GPUs, set by `fsdpbench explain`."""
    soak: SoakSettings | None = None
    """Run many consecutive steps instead of a few timed and traced ones."""
    gpus_used_per_node: int | None = None
    """The number of GPUs of each simulated node that run ranks; `None`: all `gpus_per_node`."""

    def __post_init__(self) -> None:
        if self.device not in DEVICES:
            raise UsageError(f"device {self.device!r} is none of {', '.join(DEVICES)}")
        if self.sanitize and self.device != "sim":
            raise UsageError(error_text("config.sanitize_device", self.device))
        if self.software is not None and self.device != "sim":
            raise UsageError(error_text("config.software_device", self.software, self.device))
        check_world(self.gpus, self.gpus_per_node, self.gpus_used_per_node)
        self._check_soak()

    def _check_soak(self) -> None:
        if self.soak is None:
            return
        if self.script is not None:
            raise UsageError("--soak is for models; a script runs as many steps as it says itself")
        if self.soak.lengths is not None and self.settings.seq is None:
            raise UsageError(error_text("config.no_sequences", self.model))

    @property
    def in_one_process(self) -> bool:
        """Return whether only rank 0 runs, in one process, and the other ranks are simulated."""
        return self.device == "sim"

    @property
    def ranks_per_node(self) -> int:
        """Return the number of ranks on each node."""
        return self.gpus_used_per_node or self.gpus_per_node

    @property
    def name(self) -> str:
        """Return a unique, readable name that is safe for file systems and the same in every sweep. A name
        that is too long ends in a hash of itself."""
        jitter = [] if self.jitter is None else [f"jitter-{self.jitter.seed}"]
        jitter += ["sanitized"] if self.sanitize else []
        if self.software is not None:
            jitter.append(f"software-{re.sub(r'[^A-Za-z0-9.-]', '-', Path(self.software).stem)}")
        jitter += [] if self.soak is None else [f"soak-{self.soak.steps}"]
        jitter += [] if self.gpus_used_per_node is None else [f"used-{self.gpus_used_per_node}-a-node"]
        if self.script is not None:
            stem = self.script.name.removesuffix(".py")
            words = [stem, f"{self.gpus}x", Path(str(self.hardware)).stem, *jitter]
            return _cut(re.sub(r"[^a-z0-9.-]", "-", "-".join(words).lower()))
        parts = [self.system, self.settings.wrap.replace(":", "").replace("+", "_")]
        if self.gpus != _USUAL_GPUS:
            parts.insert(1, f"{self.gpus}x")
        if self.settings.seq not in (None, self.shape.get("max_seq")):
            parts.append(f"seq-{self.settings.seq}")
        parts += [
            f"{short}-{show_value(getattr(self.settings, name))}"
            for name, short in (("backward_prefetch", "bwd"), ("limit_all_gathers", "lim"))
            if getattr(self.settings, name) is not None
        ]
        parts.append(self.settings.param_dtype)
        parts += [
            f"{name.replace('_', '')}-{show_value(value).replace(':', '')}"
            for name, value in self.settings.to_dict().items()
            if name not in _NAMED_ALWAYS and value is not None and value != SETTINGS[name].default
        ]
        return _cut("-".join([*parts, *jitter]).lower().replace("_", ""))

    def to_dict(self) -> dict[str, object]:
        record = {spec.name: _plain(getattr(self, spec.name)) for spec in dataclasses.fields(self)}
        if self.script is not None:
            record["settings"] = {}
        return {name: value for name, value in record.items() if value or name not in _LEFT_OUT}

    def identity(self) -> dict[str, object]:
        """Return the dict that keys, samples and folder names are hashed from: `to_dict` and `emulate`, a
        field of earlier versions that keeps their hashes valid."""
        return {**self.to_dict(), "emulate": False}

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> "Config":
        """Return the configuration that `to_dict` wrote. Raises `UsageError`, `ValueError` for a field."""
        if record.get("emulate"):
            raise UsageError(NO_EMULATION)
        known = {spec.name for spec in dataclasses.fields(cls)}
        values = {name: value for name, value in record.items() if name in known}
        is_script = record.get("script") is not None
        values["settings"] = Settings.of() if is_script else Settings.from_record(record["settings"])
        for name, kind in _PARTS.items():
            if record.get(name) is not None:
                values[name] = _part(record[name], kind)
        return cls(**values)


_LEFT_OUT = ("script", "jitter", "sanitize", "software", "what_if", "soak", "gpus_used_per_node")
"""Fields that are not recorded if they have no value."""


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Settings | ScriptSource):
        return value.to_dict()
    return dataclasses.asdict(value) if dataclasses.is_dataclass(value) else value  # type: ignore[arg-type]


def _part(record: Any, kind: Any) -> Any:
    try:
        return converted(record, kind)
    except msgspec.ValidationError as error:
        raise ValueError(str(error)) from None


_USUAL_GPUS = 8
_LONGEST_NAME = 120
"""A folder's name may have 255 characters, some of which are needed for key, run and `.work-`."""
_HASH_LENGTH = 8
_NAMED_ALWAYS = {"wrap", "backward_prefetch", "limit_all_gathers", "param_dtype", "seq"}


def _cut(name: str) -> str:
    if len(name) <= _LONGEST_NAME:
        return name
    digest = hashlib.sha256(name.encode()).hexdigest()[:_HASH_LENGTH]
    return f"{name[: _LONGEST_NAME - _HASH_LENGTH - 1].rstrip('-')}-{digest}"


def check_world(gpus: int, gpus_per_node: int, used: int | None = None) -> None:
    """Raise `UsageError` unless `gpus` fill whole nodes of `used` GPUs, or fit into one node."""
    if not 1 <= gpus <= MOST_GPUS:
        raise UsageError(f"--gpus must be from 1 to {MOST_GPUS:,}, not {gpus}")
    if gpus_per_node < 1:
        raise UsageError(f"--gpus-per-node must be at least 1, not {gpus_per_node}")
    if used is not None and not 1 <= used <= gpus_per_node:
        raise UsageError(f"--gpus-used-per-node must be from 1 to the {gpus_per_node} of a node, not {used}")
    ranks, flag = (gpus_per_node, "--gpus-per-node") if used is None else (used, "--gpus-used-per-node")
    if gpus > ranks and gpus % ranks:
        fits = gpus // ranks * ranks
        raise UsageError(error_text("config.nodes_not_full", gpus, ranks, fits, fits + ranks, flag))


@dataclass(frozen=True)
class WhatIf:
    """Assumptions about a simulation, and what it records, in addition to its configuration.

    account: record what holds memory at each moment.
    room: a factor for the GPU's memory.
    allocator: settings in the form of `PYTORCH_CUDA_ALLOC_CONF`; they replace those of the environment.
    variation: a change to a script's own calls (`script/variations`); several are joined by `+`.
    """

    account: bool = False
    room: float = 1.0
    allocator: str | None = None
    variation: str | None = None

    def __post_init__(self) -> None:
        if not 0 < self.room < math.inf:
            raise UsageError(f"room must be a finite number above 0, not {self.room}")

    def after(self, earlier: "WhatIf") -> "WhatIf":
        """Return both changes as one. This one's allocator takes precedence; its variation comes first."""
        names = [each for each in (self.variation, earlier.variation) if each]
        return replace(
            earlier, allocator=self.allocator or earlier.allocator, variation="+".join(names) or None
        )


@dataclass(frozen=True)
class JitterSettings:
    """Random noise of simulated GPUs, drawn with `seed`. kernels: relative spread of their times. arrival_us:
    delay of ranks that join a collective, in microseconds. straggler: relative slowdown of one rank."""

    seed: int
    kernels: float = 0.02
    arrival_us: float = 20.0
    straggler: float = 0.0

    def __post_init__(self) -> None:
        for name, most in (("kernels", 0.25), ("arrival_us", 1e6), ("straggler", 10.0)):
            value = getattr(self, name)
            if not 0 <= value <= most:
                raise UsageError(f"--jitter: {name}={value} must be from 0 to {most:g}")

    @classmethod
    def parse(cls, text: str) -> "JitterSettings":
        """Parse `7`, or ``seed=7,kernels=0.03,arrival_us=50,straggler=0.05``. Raises `UsageError`."""
        fields = {field.name: field for field in dataclasses.fields(cls)}
        values: dict[str, float] = {}
        for part in text.split(","):
            name, equals, value = part.partition("=")
            name, value = (name.strip(), value.strip()) if equals else ("seed", name.strip())
            if name not in fields:
                raise UsageError(f"--jitter: unknown {name!r}; known are {', '.join(fields)}")
            try:
                values[name] = whole_number(value, 0) if name == "seed" else finite_number(value)
            except ValueError:
                raise UsageError(error_text("config.jitter", part.strip())) from None
        if "seed" not in values:
            raise UsageError(f"--jitter: {text!r} has no seed; write seed=7,{text}")
        return cls(seed=round(values.pop("seed")), **values)

    def to_text(self) -> str:
        """Return the text that `parse` reads."""
        return ",".join(f"{name}={str(value).removesuffix('.0')}" for name, value in vars(self).items())


_PARTS = {
    "measurement": Measurement,
    "script": ScriptSource,
    "jitter": JitterSettings,
    "what_if": WhatIf,
    "soak": SoakSettings,
}

# How ranks are divided: each data-parallel group of tp x cp ranks has one batch.
# rank = ((replica x shards) + shard) x cp x tp      tp varies fastest: its ranks are neighbours in a node

PARALLEL = ("tp", "cp", "ep")
"""The settings that are degrees of parallelism other than FSDP."""


@dataclass(frozen=True)
class Degrees:
    """The parallel degrees `tp`, `cp` and `ep` of `gpus` ranks."""

    gpus: int
    tp: int = 1
    cp: int = 1
    ep: int = 1

    @classmethod
    def of(cls, config: Config) -> "Degrees":
        """Return the degrees of `config`."""
        settings = config.settings
        return cls(config.gpus, settings.tp, settings.cp, settings.ep)

    @property
    def group(self) -> int:
        """Return the number of ranks that share one batch."""
        return self.tp * self.cp

    @property
    def data(self) -> int:
        """Return the number of groups, each with its own batch; at least 1, also if a group exceeds them."""
        return max(1, self.gpus // self.group)

    @property
    def sharding(self) -> int:
        """Return the number of ranks over which FSDP shards and reduces: all ranks divided by `tp`."""
        return max(1, self.gpus // self.tp)

    def data_rank(self, rank: int) -> int:
        """Return the index of the batch that `rank` works on."""
        return rank // self.group


def shard_size_of(config: Config) -> int:
    """Return the number of ranks over which FSDP shards one copy of the model under the strategy of `config`.
    Tensor-parallel ranks do not count, because they hold other parts of the parameters."""
    settings, degrees = config.settings, Degrees.of(config)
    if settings.strategy == "NO_SHARD":
        return 1
    if "HYBRID" in settings.strategy:
        node = max(min(config.gpus, config.ranks_per_node) // degrees.tp, 1)
        return settings.shard_size or node
    return degrees.sharding
