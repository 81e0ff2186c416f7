"""What a program is: data. A model, how it is wrapped, and a list of operations.

All of it is frozen dataclasses of plain values, so that a program can be sent to ranks, compared, shrunk, and
printed as Python: its ``repr`` makes it again.
"""

from __future__ import annotations

from dataclasses import dataclass

from differential.operations import Operation, Plain


@dataclass(frozen=True, repr=False)
class BlockSpec(Plain):
    """One residual block; every default is the simplest."""

    wrapped: bool = True
    norm: str = ""
    """``layer``, or ``batch`` with its buffers."""
    inner: str = ""
    """A block inside: ``plain``, or ``wrapped`` as a unit of its own."""
    frozen: str = ""
    """``bias`` or ``all``: what needs no gradient from the start."""
    unused: bool = False
    """A parameter that never takes part."""
    branch: bool = False
    """A linear layer that only some forwards use."""
    extra: str = ""
    """The dtype of one more parameter."""
    extension: str = ""
    """``half`` or ``scaled``: the matrix is a tensor subclass that says what is gathered."""
    counter: bool = False
    """A buffer that each forward changes."""
    returns: str = ""
    """What it returns its result as: a name of ``outputs.RETURNS``."""
    checkpoint: str = ""
    """``reentrant``, ``non-reentrant`` or ``wrapper``: activation checkpointing."""


@dataclass(frozen=True, repr=False)
class ModelSpec(Plain):
    """A stem, blocks and a head, all from ``width`` to ``width``."""

    blocks: tuple[BlockSpec, ...] = (BlockSpec(),)
    width: int = 4
    dtype: str = "float32"
    order: tuple[int, ...] = ()
    """Which blocks run one after another: () is each once."""
    tied: bool = False
    """The head has the stem's matrix."""
    caller: str = ""
    """What is done to each block's result: a name of ``outputs.CALLERS``."""
    output: str = "tensor"
    """``tensor``, ``dict`` or ``tuple``."""


@dataclass(frozen=True, repr=False)
class Flat(Plain):
    """How ``FullyShardedDataParallel`` wraps."""

    strategy: str = "FULL_SHARD"
    originals: bool = False
    precision: tuple[str, ...] = ()
    """Dtypes of parameters, reduction and buffers; "" is none."""
    keep_low: bool = False
    cast_root: bool = True
    backward_prefetch: str = "BACKWARD_PRE"
    forward_prefetch: bool = False
    limit: bool = True
    offload: bool = False
    mesh: tuple[int, ...] = ()
    ignored: int | None = None
    """This block's parameters are left alone."""
    sync: bool = False


@dataclass(frozen=True, repr=False)
class Sharded(Plain):
    """How ``fully_shard`` wraps."""

    reshard: bool | int | None = None
    precision: tuple[str, ...] = ()
    """Dtypes of parameters, reduction and outputs; "" is none."""
    offload: bool = False
    mesh: tuple[int, ...] = ()
    """() is the default mesh."""
    columns: bool = False
    """Matrices are sharded on dim 1."""
    root: bool = True
    grouped: tuple[int, ...] = ()
    """These blocks are one unit, given as a list."""
    ignored: int | None = None
    forward_prefetch: int = 0
    """Each block names so many next ones by hand."""
    backward_prefetch: int = 0


@dataclass(frozen=True, repr=False)
class Program(Plain):
    """What both sides do."""

    model: ModelSpec = ModelSpec()
    wrap: Flat | Sharded = Sharded()
    operations: tuple[Operation, ...] = ()
    ranks: int = 2
