"""Sections of `result.json` that a rank writes and answers read: how a user's script ran and what it did,
which values it read from simulated tensors, and what held memory.

A key that an older file lacks gets its default.
"""

from typing import Any, Self

import msgspec

Argument = bool | int | str | None


class Place(msgspec.Struct, frozen=True):
    """A line of a script. `file` is empty if the line is unknown.

    Fields: `file` relative to the root; `text` of the line; `span` of the call there: first and last line,
    and columns in bytes; None if Python does not know them.
    """

    file: str = ""
    line: int = 0
    text: str = ""
    span: tuple[int, ...] | None = None

    @property
    def short(self) -> str:
        """Return `train.py:12`, or an empty string if the line is unknown."""
        return f"{self.file.replace(chr(92), '/').rpartition('/')[2]}:{self.line}" if self.file else ""

    @classmethod
    def at(cls, place: "Place", **fields: Any) -> Self:
        """Return an entry of this class for `place`, with the additional `fields` of the class."""
        return cls(place.file, place.line, place.text, place.span, **fields)

    def as_words(self) -> dict[str, Any]:
        """Return the fields by name, for formatting a text."""
        return msgspec.structs.asdict(self)


class ShardingCall(Place, frozen=True, kw_only=True):
    """A line that shards: `arguments` of its first call, its calls, and the most modules in one call."""

    api: str = "fully_shard"
    count: int = 1
    together: int = 1
    arguments: dict[str, Argument] = {}

    @property
    def is_fsdp1(self) -> bool:
        """Return whether the call creates FSDP1 wrappers."""
        return self.api != "fully_shard"


class OptimizerCall(Place, frozen=True, kw_only=True):
    """A line that creates an optimizer. `has_fused`: the optimizer offers a fused implementation."""

    has_fused: bool = False
    fused: bool = False


class LoaderCall(Place, frozen=True, kw_only=True):
    """A line that creates a `DataLoader`. `batch_size`: None if a batch sampler sets it."""

    batch_size: int | None = None
    num_workers: int = 0
    pin_memory: bool = False


class Wait(Place, frozen=True, kw_only=True):
    """A line at which the CPU waits for the device in each step; seconds are the mean per step.

    `copies`: it copies from memory that is not pinned. `called`: the line of the training loop that calls the
    function of this line, if the line is not in the loop itself.
    """

    per_step: float = 0.0
    waited_s_per_step: float = 0.0
    copies: bool = False
    called: Place | None = None


class Norms(Place, frozen=True, kw_only=True):
    """A line that computes norms of tensors one by one, and their number per step."""

    per_step: float = 0.0


class GradientCause(Place, frozen=True, kw_only=True):
    """The reason why gradients are missing or not reduced, with its line.

    `cause`: off, group, ignored, reentrant, replaced, unused, bare, hook; empty: no optimizer has them. The
    other fields are set for some causes: the `switch` that is off; the line at which parameters were wrapped;
    the argument that names `ignored` ones; the call (`api`) and mesh (`shape`) of a group.
    """

    cause: str = ""
    switch: str | None = None
    wrapped_at: int | None = None
    wrapped_span: tuple[int, ...] | None = None
    ignored: str | None = None
    api: str | None = None
    shape: tuple[int, ...] = ()
    has_mesh: bool = False


class GradientFinding(GradientCause, frozen=True, kw_only=True):
    """Parameters with the same cause: `count`, first `names`, and the most `ranks` that reduce gradients.

    `kind`: without (no gradient), apart (not reduced), late (not after the last backward), unheld (in no
    optimizer).
    """

    kind: str = ""
    count: int = 0
    names: list[str] = []
    ranks: int = 0


class GradientReport(msgspec.Struct, frozen=True):
    """The number of `parameters` of all optimizers, those `without` any gradient, and the findings."""

    parameters: int = 0
    without: int = 0
    findings: list[GradientFinding] = []
    world: int = 1


class RepeatedBlocks(msgspec.Struct, frozen=True):
    """The repeated blocks of a model: modules of one class in a list at `path` (`model.layers`)."""

    path: str
    kind: str = msgspec.field(name="class")
    count: int


class ObservedModel(msgspec.Struct, frozen=True):
    """The model at the time when the first optimizer is created.

    `stacks`: number of blocks by the path of their list. `unit_classes`: FSDP units by class, without the
    root. `unwrapped_root`: FSDP wraps only parts; `unsharded_parameters` elements are outside of them.
    """

    kind: str | None = msgspec.field(default=None, name="class")
    blocks: RepeatedBlocks | None = None
    stacks: dict[str, int] = {}
    units: int = 0
    unit_classes: dict[str, int] = {}
    unwrapped_root: bool = False
    unsharded_parameters: int = 0
    dtype: str | None = None


class BatchOption(msgspec.Struct, frozen=True):
    """The command-line option that sets the batch size, and its value."""

    option: str
    value: int


class ObservedScript(msgspec.Struct, frozen=True, kw_only=True):
    """Observations of a script. A place is None if the script does not do this.

    `computes_in`: the dtype of most of its matrix products (`bf16`).
    """

    sharding: list[ShardingCall] = []
    model: ObservedModel = ObservedModel()
    optimizers: list[OptimizerCall] = []
    loaders: list[LoaderCall] = []
    checkpointing: Place | None = None
    saved_on_host: Place | None = None
    forward_prefetch: Place | None = None
    batch: BatchOption | None = None
    waits: list[Wait] = []
    backward_in_autocast: Place | None = None
    zeroed: Place | None = None
    anomaly: Place | None = None
    launch_blocking: Place | None = None
    norms: Norms | None = None
    gradients: GradientReport = GradientReport()
    computes_in: str | None = None


class NumbersRead(msgspec.Struct, frozen=True):
    """A line that reads values of simulated tensors on the host, and how often."""

    file: str
    line: int
    operation: str
    count: int


class HostMemory(msgspec.Struct, frozen=True):
    """The host memory of one rank: peak bytes of tensors and `when` they occur; bytes of batches that its
    `workers` prefetch (`ahead`)."""

    bytes: int = 0
    when: str = ""
    ahead: int = 0
    workers: int = 0


class SavedCheckpoint(msgspec.Struct, frozen=True):
    """The largest checkpoint that rank 0 writes after one step, in bytes and tensors."""

    bytes: int
    tensors: int
    is_sharded: bool = False


class ScriptReport(msgspec.Struct, frozen=True, kw_only=True):
    """The section `script`. `peaks`: reserved bytes by phase. `unknown_share`: each operator's share of a
    step, if its time follows from its bytes alone. Before steps are timed, only the first fields are set."""

    steps: int = 0
    flops: str = ""
    notes: list[str] = []
    unknown_share: dict[str, float] = {}
    observed: ObservedScript | None = None
    numbers_read: list[NumbersRead] = []
    peaks: dict[str, int] = {}
    host_peak: HostMemory = HostMemory()
    saved: SavedCheckpoint | None = None


class PlaceholderDecision(msgspec.Struct, frozen=True):
    """A branch of a script on a simulated tensor's value: its line, the answer it got, and how often."""

    file: str
    line: int
    operation: str
    answer: bool | int | float | str | None
    count: int


class MemoryHolder(msgspec.Struct, frozen=True):
    """The part of the program that holds `bytes` in `count` tensors. `line`: a line of a script."""

    module: str
    bytes: int
    line: str | None = None
    category: str = ""
    count: int = 0


class MemoryGrowth(msgspec.Struct, frozen=True):
    """Bytes allocated at the end of each step, and bytes that each step adds: 0 unless every step from the
    second on adds memory. `where`: the parts of the program that allocated them, largest first."""

    at_step_ends_bytes: list[int] = []
    per_step_bytes: int = 0
    where: list[MemoryHolder] = []


class MemoryAccount(msgspec.Struct, frozen=True):
    """The memory of a simulated GPU when it ran out, or at the end: what held it, and which code was running.

    total_bytes = held_bytes of all categories + waiting (for other streams) + unused (reserved) + outside
    (the allocator) + free.
    """

    step: int = 0
    phase: str = ""
    module: str = ""
    line: str | None = None
    held_bytes: dict[str, int] = {}
    waiting_bytes: int = 0
    unused_bytes: int = 0
    outside_bytes: int = 0
    free_bytes: int = 0
    total_bytes: int = 0
    holders: list[MemoryHolder] = []
    growth: MemoryGrowth = MemoryGrowth()
