"""The settings: enums, and frozen dataclasses that refuse wrong values when they are made.

Names and fields that torch has too mean what torch means by them.
"""

from dataclasses import dataclass, fields
from enum import Enum
from functools import cached_property
from typing import Any, Literal, TypeVar, cast

import torch

from . import error_text


class MemoryHandover(Enum):
    """The ways in which memory passes between streams; the notes are at the head of ``buffer.py``."""

    RECORD_STREAM = "record_stream"
    EVENTS = "events"


class CommunicationLayout(Enum):
    """The layouts of a unit of ``fully_shard`` in its collectives (``runtime/gather.py``)."""

    # Under NCCL large parameters have collectives of their own; under gloo all are packed, which it serves
    # faster, and so under backends that are not known to launch a group as one.
    AUTO = "auto"
    # All parameters have collectives of their own, straight from and to where they are.
    GROUPED = "grouped"
    # All are copied out of one all-gather and into one reduce-scatter, as torch does.
    PACKED = "packed"


Kind = TypeVar("Kind", bound=Enum)
Own = TypeVar("Own")


def one_of(kind: type[Kind], value: str | Kind, argument: str) -> Kind:
    """Return the member of ``kind`` that an argument names, or is. Raises ``ValueError`` if none is."""
    try:
        return kind(value)
    except ValueError:
        names = ", ".join(repr(member.value) for member in kind)
        raise ValueError(f"{argument} must be one of {names}, not {value!r}") from None


def own(kind: type[Own], given: Any, argument: str) -> Own:
    """Return an argument as our dataclass ``kind``; torch's is taken too, so that a script need change only
    one import. Raises ``ValueError`` for what has not its fields."""
    if isinstance(given, kind):
        return given
    names = [field.name for field in fields(cast(Any, kind))]
    if not all(hasattr(given, name) for name in names):
        raise ValueError(f"{argument} must be a {kind.__name__}, not {given!r}")
    return kind(**{name: getattr(given, name) for name in names})


def check_floating(owner: object, *names: str) -> None:
    """Raise ``ValueError`` unless the fields of these ``names`` are ``None`` or floating point dtypes."""
    for name in names:
        dtype, where = getattr(owner, name), f"{type(owner).__name__}.{name}"
        if dtype is not None and (not isinstance(dtype, torch.dtype) or not dtype.is_floating_point):
            raise ValueError(f"{where} must be a floating point torch.dtype or None, not {dtype!r}")


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """Dtypes of the ``fully_shard`` front end.

    Attributes:
        param_dtype: dtype of all-gather and computation; ``None`` keeps the parameters' own.
        reduce_dtype: dtype of gradient reduction; ``None`` takes the dtype of computation.
        output_dtype: floating point outputs of forward are cast to it; ``None`` leaves them.
        cast_forward_inputs: whether floating point inputs of forward are cast to ``param_dtype``.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True

    def __post_init__(self) -> None:
        check_floating(self, "param_dtype", "reduce_dtype", "output_dtype")


@dataclass(frozen=True)
class OffloadPolicy:
    """No offloading; the base class of policies that do."""


@dataclass(frozen=True)
class CPUOffloadPolicy(OffloadPolicy):
    """Sharded parameters, gradients and the optimizer step on the CPU.

    Attributes:
        pin_memory: keep shards in pinned memory and copy gradients into it, so that copies run beside the
            CPU. Has no meaning where the CPU is what is computed on.
    """

    pin_memory: bool = True


KeptGradients = Literal["compute", "reduce"] | None


@dataclass(frozen=True)
class UnitPrecision:
    """The dtypes of one unit, decided: none of them is ``None``.

    Attributes:
        original: dtype of shard, optimizer and delivered gradients.
        compute: dtype that is gathered and computed in, and of the gradients that autograd makes.
        reduce: dtype of gradient reduction.
        keep: deliver gradients in this of the other two dtypes instead of ``original``.
        wanted: the dtypes of parameters and reduction that were asked for.
    """

    original: torch.dtype
    compute: torch.dtype
    reduce: torch.dtype
    keep: KeptGradients = None
    wanted: tuple[torch.dtype | None, torch.dtype | None] = (None, None)

    @classmethod
    def decide(
        cls,
        original: torch.dtype,
        param_dtype: torch.dtype | None,
        reduce_dtype: torch.dtype | None,
        keep: KeptGradients = None,
    ) -> "UnitPrecision":
        """Fill in what was left open; an ``original`` that is not floating point is never cast."""
        wanted = (param_dtype, reduce_dtype)
        if not original.is_floating_point:
            return cls(original, original, original, wanted=wanted)
        compute = param_dtype or original
        return cls(original, compute, reduce_dtype or compute, keep, wanted)

    def for_original(self, original: torch.dtype) -> "UnitPrecision":
        """Return the precision for parameters that were converted to another dtype."""
        return self.decide(original, *self.wanted, keep=self.keep)

    @cached_property
    def delivered(self) -> torch.dtype:
        """Return the dtype of the sharded gradients."""
        if self.keep is None:
            return self.original
        return self.compute if self.keep == "compute" else self.reduce


PrefetchTiming = Literal["pre", "post"]


@dataclass(frozen=True)
class ScheduleSettings:
    """When all-gathers are issued. One object serves a whole tree of units; the root's is taken.

    Attributes:
        backward_prefetch: ``"pre"``, ``"post"`` or ``None``; see ``BackwardPrefetch``.
        backward_prefetch_depth: how many units ahead backward gathers; 0 is the same as ``None``.
        forward_prefetch_depth: how many units ahead forward gathers explicitly. ``None``: as needed; where
            the CPU runs ahead of a device gathers overlap by themselves, on the CPU it is one.
        limit_all_gathers: how many units may have been gathered and not yet given back as far as the device
            is concerned, before the CPU waits; 0 never waits.
        memory_handover: how buffers pass between streams.
        check_ranks: in how many iterations ranks compare what they are about to do before each collective
            (``agreement.py``); ``True`` for all.
    """

    backward_prefetch: PrefetchTiming | None = "pre"
    backward_prefetch_depth: int = 1
    forward_prefetch_depth: int | None = None
    limit_all_gathers: int = 0
    adapt_limit: bool = False
    memory_handover: MemoryHandover = MemoryHandover.EVENTS
    check_ranks: bool | int = False

    def __post_init__(self) -> None:
        if self.backward_prefetch not in ("pre", "post", None):
            raise ValueError(error_text("settings.prefetch", self.backward_prefetch))
        for field in ("backward_prefetch_depth", "forward_prefetch_depth", "limit_all_gathers"):
            value = getattr(self, field)
            if value is None and field == "forward_prefetch_depth":
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise ValueError(f"{field} must be a number of units, 0 or more, not {value!r}")

    @classmethod
    def decide(
        cls,
        *,
        backward_prefetch: PrefetchTiming | None,
        backward_prefetch_depth: int,
        forward_prefetch_depth: int | None,
        limit_all_gathers: bool | int | str,
        memory_handover: str | MemoryHandover,
        check_ranks: bool | int = False,
    ) -> "ScheduleSettings":
        """Read the front ends' arguments: ``limit_all_gathers=True`` is 2 as in FSDP1, enums may be names."""
        adapt = limit_all_gathers == "auto"
        if not adapt and not isinstance(limit_all_gathers, int):
            raise ValueError(error_text("settings.decide", limit_all_gathers))
        limit = 2 if adapt or limit_all_gathers is True else int(limit_all_gathers)
        handover = one_of(MemoryHandover, memory_handover, "memory_handover")
        if not isinstance(check_ranks, int) or check_ranks < 0:
            raise ValueError(error_text("settings.check_ranks", check_ranks))
        return cls(
            backward_prefetch,
            backward_prefetch_depth,
            forward_prefetch_depth,
            limit,
            adapt,
            handover,
            check_ranks,
        )
