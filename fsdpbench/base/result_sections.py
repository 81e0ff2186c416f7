"""Sections of `result.json` that a rank writes and answers read: how a user's script ran and what it was
observed to do, values that it read from simulated tensors, and who held memory.

A key that an older file lacks has its default.
"""

from typing import Any, Self

import msgspec

Argument = bool | int | str | None


class Place(msgspec.Struct, frozen=True):
    """A line of a script. An empty `file`: no line of it is known.

    Fields: `file` from the root on; `text` of the line; `span` of the call there: its first and last line,
    and its columns in bytes; None where Python does not know them.
    """

    file: str = ""
    line: int = 0
    text: str = ""
    span: tuple[int, ...] | None = None

    @property
    def short(self) -> str:
        """Return `train.py:12`, empty for no line."""
        return f"{self.file.replace(chr(92), '/').rpartition('/')[2]}:{self.line}" if self.file else ""

    @classmethod
    def at(cls, place: "Place", **fields: Any) -> Self:
        """Return the entry for `place`, with the `fields` that a place lacks."""
        return cls(place.file, place.line, place.text, place.span, **fields)

    def as_words(self) -> dict[str, Any]:
        """Return its fields by name, for a text that names them."""
        return msgspec.structs.asdict(self)


class ShardingCall(Place, frozen=True, kw_only=True):
    """A line that shards: `arguments` of its first call, its calls, and the most modules of one call."""

    api: str = "fully_shard"
    count: int = 1
    together: int = 1
    arguments: dict[str, Argument] = {}

    @property
    def is_fsdp1(self) -> bool:
        """Whether it makes FSDP1's wrappers."""
        return self.api != "fully_shard"


class OptimizerCall(Place, frozen=True, kw_only=True):
    """A line that makes an optimizer, which may have a fused implementation."""

    has_fused: bool = False
    fused: bool = False


class LoaderCall(Place, frozen=True, kw_only=True):
    """A line that makes a `DataLoader`. `batch_size`: None where a batch sampler decides it."""

    batch_size: int | None = None
    num_workers: int = 0
    pin_memory: bool = False


class Wait(Place, frozen=True, kw_only=True):
    """A line at which the CPU waits for the device in each step; seconds are of a mean step.

    `copies`: it copies from memory that is not pinned. `called`: the line of the training loop that leads to
    it, where it is in another function.
    """

    per_step: float = 0.0
    waited_s_per_step: float = 0.0
    copies: bool = False
    called: Place | None = None


class Norms(Place, frozen=True, kw_only=True):
    """A line that takes norms of tensors one by one, and how many in a step."""

    per_step: float = 0.0


class GradientCause(Place, frozen=True, kw_only=True):
    """The reason why gradients are missing or are not exchanged, with its line.

    `cause`: off, group, ignored, reentrant, replaced, unused, bare, hook; empty: no optimizer holds them. The
    rest is known of some causes: the `switch` that is off; the line at which parameters were `wrapped`; the
    argument that names `ignored` ones; the call (`api`) and mesh (`shape`) of a group.
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
    """Parameters that share a cause: `count`, first `names`, and the most `ranks` that exchange gradients.

    `kind`: without (no gradient), apart (not exchanged), late (not after the last backward), unheld (in no
    optimizer).
    """

    kind: str = ""
    count: int = 0
    names: list[str] = []
    ranks: int = 0


class GradientReport(msgspec.Struct, frozen=True):
    """The `parameters` of all optimizers, those `without` a gradient in any step, and what is wrong."""

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
    """The model when the first optimizer is made.

    `stacks`: blocks by the path of their list. `unit_classes`: FSDP units by class, without the root.
    `unwrapped_root`: FSDP wraps parts only, and `unsharded_parameters` elements are outside of them.
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
    """The command-line option that sets the batch, and its value."""

    option: str
    value: int


class ObservedScript(msgspec.Struct, frozen=True, kw_only=True):
    """The observations of a script; places are None where it does not do so.

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
    """A line that takes simulated values to the host, and how often."""

    file: str
    line: int
    operation: str
    count: int


class HostMemory(msgspec.Struct, frozen=True):
    """The host memory of one rank: the most bytes of tensors and `when`; bytes of batches that its `workers`
    hold `ahead`."""

    bytes: int = 0
    when: str = ""
    ahead: int = 0
    workers: int = 0


class SavedCheckpoint(msgspec.Struct, frozen=True):
    """The largest checkpoint that rank 0 writes after one step: bytes and tensors."""

    bytes: int
    tensors: int
    is_sharded: bool = False


class ScriptReport(msgspec.Struct, frozen=True, kw_only=True):
    """The section `script`. `peaks`: reserved bytes by phase. `unknown_share`: the share of a step that each
    operator takes whose time only its bytes say. Until steps were timed, only the first fields are known."""

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
    """A question that a line of a script asked of a simulated tensor, the answer, and how often."""

    file: str
    line: int
    operation: str
    answer: bool | int | float | str | None
    count: int


class MemoryHolder(msgspec.Struct, frozen=True):
    """A place in the program that holds `bytes`; `count`: its tensors, `line`: of a script."""

    module: str
    bytes: int
    line: str | None = None
    category: str = ""
    count: int = 0


class MemoryGrowth(msgspec.Struct, frozen=True):
    """The bytes allocated at the end of each step, and what each step adds: 0 unless every step since the
    second adds memory. `where`: places that allocated it, the largest first."""

    at_step_ends_bytes: list[int] = []
    per_step_bytes: int = 0
    where: list[MemoryHolder] = []


class MemoryAccount(msgspec.Struct, frozen=True):
    """The memory of a simulated GPU as it ran out, or at its end: who held it, and where the program was.

    total_bytes = held_bytes of all categories + waiting (other streams) + unused (reserved) + outside (the
    allocator) + free.
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
