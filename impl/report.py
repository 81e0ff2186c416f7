"""Report the memory and communication of each FSDP unit, to check how a model is wrapped before it runs."""

from dataclasses import dataclass

from torch import nn

from .runtime.hooks import stages_in
from .runtime.presentation import NOT_SHOWN, plain_name
from .runtime.unit import Unit


@dataclass(frozen=True)
class UnitReport:
    """One unit. Sizes are in bytes on this rank; a collective counts the larger of its input and output.

    Attributes:
        name: the FQN of the unit's module, ``root`` for the model itself.
        parameters: names in the module, in the order of the buffers.
        numel: elements of the parameters, without padding.
        padding: elements of padding, summed over all ranks.
        frozen: number of parameters that do not require a gradient.
        dtype, compute_dtype, reduce_dtype: dtypes of the shard, of all-gather and computation, and of
            gradient reduction.
        shard_bytes: size of the sharded parameters.
        unsharded_bytes: memory that unsharding allocates and resharding frees.
        all_gather_bytes, reduce_scatter_bytes, all_reduce_bytes: 0 if the unit has no such collective.
        ranks: (number of ranks that share one copy, number of copies).
        reshard_after_forward: ``None`` until the first forward determines the root.
    """

    name: str
    parameters: tuple[str, ...]
    numel: int
    padding: int
    frozen: int
    dtype: str
    compute_dtype: str
    reduce_dtype: str
    shard_bytes: int
    unsharded_bytes: int
    all_gather_bytes: int
    reduce_scatter_bytes: int
    all_reduce_bytes: int
    ranks: tuple[int, int]
    reshard_after_forward: bool | None


class UnitReports(list[UnitReport]):
    """The units of a model in the order of its modules. ``str()`` formats them as a table."""

    def __str__(self) -> str:
        head = ("unit", "parameters", "elements", "dtypes", "shard", "unsharded", "gather", "reduce", "sum")
        rows = [head, *(_row(unit) for unit in self)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [
            "  ".join(
                cell.ljust(width) if column in (0, 3) else cell.rjust(width)
                for column, (cell, width) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in rows
        ]
        return "\n".join(lines)


def unit_report(model: nn.Module) -> UnitReports:
    """List the FSDP units of ``model``, wrapped by either front end. Communicates nothing."""
    return UnitReports(
        _report(plain_name(name, NOT_SHOWN) or "root", unit)
        for stage, name in stages_in(model)
        for unit in stage.units
    )


def _report(name: str, unit: Unit) -> UnitReport:
    layout, precision, groups = unit.layout, unit.precision, unit.groups
    reduce_bytes = layout.gathered_numel * precision.reduce.itemsize
    return UnitReport(
        name=name,
        parameters=tuple(parameter.fqn for parameter in unit.parameters),
        numel=layout.parameter_numel,
        padding=layout.gathered_numel - layout.parameter_numel,
        frozen=sum(not parameter.requires_grad for parameter in unit.parameters),
        dtype=_short(precision.original),
        compute_dtype=_short(precision.compute),
        reduce_dtype=_short(precision.reduce),
        shard_bytes=layout.shard_numel * precision.original.itemsize,
        unsharded_bytes=unit.gather.nbytes,
        all_gather_bytes=layout.gathered_numel * precision.compute.itemsize if unit.gathers else 0,
        reduce_scatter_bytes=reduce_bytes if unit.gathers else 0,
        all_reduce_bytes=reduce_bytes // groups.shard_size if groups.replicate is not None else 0,
        ranks=(groups.shard_size, groups.replicate_size),
        reshard_after_forward=unit.reshard_after_forward,
    )


def _short(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")


def _row(unit: UnitReport) -> tuple[str, ...]:
    dtypes = [unit.dtype, unit.compute_dtype, unit.reduce_dtype]
    return (
        unit.name,
        str(len(unit.parameters)),
        f"{unit.numel:,}",
        dtypes[0] if len(set(dtypes)) == 1 else " / ".join(dtypes),
        *map(_size, (unit.shard_bytes, unit.unsharded_bytes)),
        *map(_size, (unit.all_gather_bytes, unit.reduce_scatter_bytes, unit.all_reduce_bytes)),
    )


def _size(count: int) -> str:
    if count == 0:
        return "-"
    size = float(count)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.2f} GiB"
