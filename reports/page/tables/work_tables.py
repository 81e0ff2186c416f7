"""Tables of what ran: kernels, families of kernels, operators against the peak, modules, devices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fsdpbench.reports.analysis.operators.model import KernelTotal, Rate, WorkTables
from fsdpbench.reports.page import display
from fsdpbench.reports.page.charts.whole_run import Table

MOST_KERNELS = 40
MOST_OPERATORS = 30
MOST_MODULES = 40


def work_tables(tables: WorkTables, steps: int) -> dict[str, Any]:
    """The tables for a page's script; times are a mean step's, what is empty is None."""
    steps = max(steps, 1)
    found = {
        "kernels": _kernels(tables, tables.kernels[:MOST_KERNELS], steps, "kernel"),
        "families": _kernels(tables, tables.families, steps, "kind of work"),
        "operators": _operators(tables, steps),
        "modules": _modules(tables, steps),
        "devices": _devices(tables, steps) if len(tables.devices) > 1 else None,
    }
    content: dict[str, Any] = {name: island_table(table) if table else None for name, table in found.items()}
    return content | {"roof_note": _roof_note(tables)}


def island_table(table: Table) -> dict[str, Any]:
    """A table as the page's scripts read it."""
    return {"columns": table.columns, "rows": table.rows, "numeric": sorted(table.numeric)}


def _kernels(tables: WorkTables, shown: Sequence[KernelTotal], steps: int, what: str) -> Table | None:
    rows = [
        (
            each.name[:160],
            *((each.family,) if what == "kernel" else ()),
            display.count(round(each.count / steps, 2)),
            _ms(each.time / steps),
            *((_us(each.time / each.count),) if what == "kernel" else ()),
            display.percent(each.share),
            *_rate(each.rate),
        )
        for each in shown
    ]
    kind = ("kind of work",) if what == "kernel" else ()
    mean = ("mean, us",) if what == "kernel" else ()
    columns = (what, *kind, "a step", "ms a step", *mean, "share", *_RATES)
    return Table(columns, tuple(rows)) if rows else None


_RATES = ("TFLOPS", "GB/s", "of the peak")


def _rate(rate: Rate) -> tuple[str, str, str]:
    told = rate.to_dict()
    speed = told["bytes_per_s"]
    return (
        display.number(told["tflops"]),
        display.NOTHING if speed is None else display.number(speed / 1e9),
        display.percent(told["roof_share"]),
    )


def _operators(tables: WorkTables, steps: int) -> Table | None:
    rows = [
        (
            each.name[:80],
            each.shapes[:80],
            display.count(round(each.count / steps, 2)),
            _ms(each.time / steps),
            display.percent(each.share),
            display.number(each.intensity),
            *_rate(each.rate),
            each.bound or display.NOTHING,
        )
        for each in tables.operators[:MOST_OPERATORS]
    ]
    columns = ("operator", "shapes", "a step", "ms a step", "share", "FLOPs a byte", *_RATES, "bound by")
    return Table(columns, tuple(rows)) if rows else None


def _modules(tables: WorkTables, steps: int) -> Table | None:
    rows = [
        (
            each.name,
            display.count(each.instances),
            display.count(round(each.calls / steps, 2)),
            _ms(each.own / steps),
            _ms(each.time / steps),
            display.percent(each.share),
        )
        for each in tables.modules[:MOST_MODULES]
    ]
    columns = ("module", "instances", "calls a step", "own, ms a step", "with those inside, ms", "share")
    return Table(columns, tuple(rows)) if rows else None


def _devices(tables: WorkTables, steps: int) -> Table:
    rows = tuple(
        (
            str(each.device),
            _ms(each.computing / steps),
            _ms(each.communicating / steps),
            _ms((each.span - each.busy) / steps),
            display.percent((each.span - each.busy) / each.span if each.span else None),
        )
        for each in tables.devices
    )
    return Table(("device", "computation, ms a step", "communication, ms", "idle, ms", "idle"), rows)


def _roof_note(tables: WorkTables) -> str:
    told = []
    hidden = len(tables.kernels) - MOST_KERNELS
    if hidden > 0:
        time = sum(each.time for each in tables.kernels[MOST_KERNELS:])
        share = display.percent(time / tables.total if tables.total else None)
        told.append(f"{hidden} more names are left out ({share} of the time together).")
    if tables.roof is not None:
        told.append(f"The peak is {tables.roof}'s: peak FLOP/s of the type, bandwidth of memory or of links.")
    elif any(each.rate.time for each in tables.kernels):
        told.append("No peak is known for this device (`fsdpbench analyze --hardware` names a profile).")
    if not tables.operators:
        told.append("The trace has no shapes (record_shapes=True): FLOPs and bytes are not known.")
    return " ".join(told)


def _ms(ns: float) -> str:
    return display.ms(ns / 1e6)


def _us(ns: float) -> str:
    return display.number(ns / 1e3)
