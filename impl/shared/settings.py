"""Settings: enums, and frozen dataclasses that validate their values when constructed.

Names and fields that also exist in torch have the same meaning as there.
"""

from dataclasses import dataclass, fields
from enum import Enum
from functools import cached_property
from typing import Any, Literal, TypeVar, cast

import torch

from . import error_text


class MemoryHandover(Enum):
    """How memory passes between streams; see the docstring of ``buffer.py``."""

    RECORD_STREAM = "record_stream"
    EVENTS = "events"


class CommunicationLayout(Enum):
    """The layout of a ``fully_shard`` unit's parameters in its collectives (``runtime/gather.py``)."""

    # NCCL: grouped for large parameters. gloo: packed, which is faster there. Other backends: packed too,
    # because they may not launch a group of collectives as one.
    AUTO = "auto"
    # Each parameter has its own collective, which reads and writes it in place.
    GROUPED = "grouped"
    # One all-gather with a copy-out and one reduce-scatter with a copy-in for all parameters, as in torch.
    PACKED = "packed"


Kind = TypeVar("Kind", bound=Enum)
Own = TypeVar("Own")


def one_of(kind: type[Kind], value: str | Kind, argument: str) -> Kind:
    """Return the member of ``kind`` for an argument: a member or its value. Raises ``ValueError`` if none."""
    try:
        return kind(value)
    except ValueError:
        names = ", ".join(repr(member.value) for member in kind)
        raise ValueError(f"{argument} must be one of {names}, not {value!r}") from None


def own(kind: type[Own], given: Any, argument: str) -> Own:
    """Convert an argument to our dataclass ``kind``. Accepts torch's class too, so that a script only has to
    change one import. Raises ``ValueError`` if ``given`` lacks one of the fields."""
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
        param_dtype: dtype of all-gather and computation; ``None`` keeps the parameters' dtype.
        reduce_dtype: dtype of gradient reduction; ``None`` means the dtype of computation.
        output_dtype: floating point outputs of forward are cast to it; ``None`` does not cast.
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
    """No offloading. Base class of the policies that offload."""


@dataclass(frozen=True)
class CPUOffloadPolicy(OffloadPolicy):
    """Sharded parameters, gradients and the optimizer step on the CPU.

    Attributes:
        pin_memory: keep shards in pinned memory and copy gradients into it, so that copies do not block the
            CPU. Has no effect if computation runs on the CPU.
    """

    pin_memory: bool = True


KeptGradients = Literal["compute", "reduce"] | None


@dataclass(frozen=True)
class UnitPrecision:
    """The resolved dtypes of one unit: none of the first three is ``None``.

    Attributes:
        original: dtype of the shard, the optimizer and the delivered gradients.
        compute: dtype of the all-gather, the computation and the gradients that autograd produces.
        reduce: dtype of gradient reduction.
        keep: deliver gradients in the compute or reduce dtype instead of ``original``.
        wanted: the ``param_dtype`` and ``reduce_dtype`` that the user set.
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
        """Resolve ``None`` dtypes. Never cast if ``original`` is not a floating point dtype."""
        wanted = (param_dtype, reduce_dtype)
        if not original.is_floating_point:
            return cls(original, original, original, wanted=wanted)
        compute = param_dtype or original
        return cls(original, compute, reduce_dtype or compute, keep, wanted)

    def for_original(self, original: torch.dtype) -> "UnitPrecision":
        """Return the precision for parameters that were converted to the dtype ``original``."""
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
    """When all-gathers are issued. A tree of units uses the settings of its root.

    Attributes:
        backward_prefetch: ``"pre"``, ``"post"`` or ``None``; see ``BackwardPrefetch``.
        backward_prefetch_depth: how many units ahead backward gathers; 0 means the same as ``None``.
        forward_prefetch_depth: how many units ahead forward gathers explicitly. ``None``: no explicit
            prefetch on a device, because gathers overlap if the CPU runs ahead; one unit on the CPU.
        limit_all_gathers: maximum number of units that are gathered and not yet freed on the device; at the
            maximum the CPU waits. 0 means no limit.
        memory_handover: how buffers pass between streams.
        check_ranks: number of iterations in which ranks compare their next operation before each collective
            (``agreement.py``); ``True`` for all iterations.
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
        """Convert the arguments of a front end. ``limit_all_gathers=True`` means 2, as in FSDP1."""
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
