"""Fitted tables as the generated end of a profile's file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fsdpbench.sim.model.chips import OPERATOR_CHIPS, Chip
from fsdpbench.sim.model.profile import HardwareProfile, load_profile
from fsdpbench.sim.model.sections import (
    AttentionTable,
    FactorGrid,
    LibraryTables,
    ProductTable,
    RankCurve,
)
from profile_tables.attention import fit_attention
from profile_tables.collectives import fit_collectives
from profile_tables.measured import ATTENTION, COLLECTIVE, PRODUCT, Measured
from profile_tables.products import fit_products

MARK = "# From here on written by ci/fit_profiles.py, from measured operator tables."
_PER_LINE = 15
# Reported for the B200 by SimuMax: attention's backward over the rate of products.
_BLACKWELL_BACKWARD = 0.73
_LINK_SIZES = (1 << 16, 1 << 19, 1 << 21, 1 << 23, 1 << 25, 1 << 27, 1 << 29)


def with_tables(content: str, profile: HardwareProfile, chip: Chip, fitted: FittedChip) -> str:
    """A profile's file with its generated end again. Profiles whose runs use the tables get sections, too."""
    head = content.split(MARK)[0].rstrip("\n")
    lines = [head, "", MARK]
    if profile.runs_use:
        lines += _sections(chip, fitted)
    for name, tables in fitted.libraries.items():
        lines += _library(name, tables)
    return "\n".join(lines) + "\n"


def _library(name: str, tables: LibraryTables) -> list[str]:
    at = f"libraries.{name}"
    lines = ["", f"[{at}]", f'version = "{tables.version}"', f'source = "{tables.source}"']
    if tables.switch_from:
        lines.append(f"switch_from = {tables.switch_from}")
    for kind, table in tables.products.items():
        lines += ["", f"[{at}.products.{kind}]", *_product(table)]
        lines += ["", f"[{at}.products.{kind}.factors]", *_grid(table.factors)]
    if tables.attention:
        lines += ["", f"[{at}.attention]", *_attention(tables.attention)]
        lines += ["", f"[{at}.attention.factors]", *_grid(tables.attention.factors)]
    for kind, curves in tables.collectives.items():
        for curve in curves:
            lines += ["", f"[[{at}.collectives.{kind}]]", f"ranks = {curve.ranks}", *_points(curve)]
    return lines


def _product(table: ProductTable) -> list[str]:
    names = (
        "peak_tflops", "operand_bytes", "sustained", "memory_efficiency", "prologue_k", "wave_quantisation",
        "floor_us", "quantise", "cache_mib", "cache_gain",
    )  # fmt: skip
    return [f"{name} = {getattr(table, name):.6g}" for name in names] + [_tiles(table)]


def _tiles(table: ProductTable) -> str:
    return "tiles = [" + ", ".join(f"[{r:g}, {c:g}, {share:.4g}]" for r, c, share in table.tiles) + "]"


def _attention(table: AttentionTable) -> list[str]:
    names = ("forward_tflops", "head_dim_64", "memory_efficiency", "wave_quantisation", "floor_us")
    return [f"{name} = {getattr(table, name):.6g}" for name in names]


def _grid(grid: FactorGrid) -> list[str]:
    axes = ", ".join("[" + ", ".join(f"{value:g}" for value in axis) + "]" for axis in grid.axes)
    return [f"axes = [{axes}]", *_list("factors", [f"{value:g}" for value in grid.factors])]


def _points(curve: RankCurve) -> list[str]:
    return _list("points", [f"[{size:.0f}, {us:.4g}]" for size, us in curve.points], 6)


def _list(name: str, items: Sequence[str], per_line: int = _PER_LINE) -> list[str]:
    rows = [items[start : start + per_line] for start in range(0, len(items), per_line)]
    return [f"{name} = [", *("    " + ", ".join(row) + "," for row in rows), "]"]


def _sections(chip: Chip, fitted: FittedChip) -> list[str]:
    """Return the sections that price what the tables do not: other types, batches, lengths, more nodes."""
    trtllm = fitted.libraries["trtllm"]
    product, attention = trtllm.products["bf16"], trtllm.attention
    assert attention is not None
    names = ("sustained", "memory_efficiency", "prologue_k", "wave_quantisation", "floor_us")
    lines = ["", "[gemm]", _tiles(product), *(f"{name} = {getattr(product, name):.4g}" for name in names)]
    lines += ["", "[attention]", f"forward_tflops = {attention.forward_tflops:.4g}"]
    lines.append(f"backward_tflops = {_backward(chip, product, attention):.4g}")
    for name in ("head_dim_64", "memory_efficiency"):
        lines.append(f"{name} = {min(1.0, getattr(attention, name)):.4g}")
    lines += [f"{name} = {getattr(attention, name):.4g}" for name in ("wave_quantisation", "floor_us")]
    return [*lines, *_links(fitted.libraries["nccl"])]


def _backward(chip: Chip, product: ProductTable, attention: AttentionTable) -> float:
    if chip.family == "blackwell":
        return _BLACKWELL_BACKWARD * product.peak_tflops * product.sustained
    base = load_profile("a100-80gb" if chip.family == "ada" else "h100-80gb").attention
    return attention.forward_tflops * base.backward_tflops / base.forward_tflops


def _links(tables: LibraryTables) -> list[str]:
    """Bus bandwidths of the largest group at a few sizes, above the latency of the smallest message."""
    few, most = (tables.collectives["all_gather"][index] for index in (0, -1))
    latency = most.points[0][1]
    per_rank = max(0.0, (latency - few.points[0][1]) / (most.ranks - few.ranks))
    lines = ["", "[nvlink]", f"base_us = {latency - per_rank * (most.ranks - 1):.4g}"]
    lines += [f"per_rank_us = {per_rank:.4g}", f"curve_ranks = {most.ranks}", "ranks_exponent = 0.0"]
    peak = 0.0
    for kind in ("all_gather", "reduce_scatter", "all_reduce"):
        curve, passes = tables.collectives[kind][-1], 2 if kind == "all_reduce" else 1
        at = dict(zip(_LINK_SIZES, _times(curve), strict=True))
        floor = latency + per_rank * (passes - 1) * (most.ranks - 1)
        points = []
        for size, us in at.items():
            sent = size * passes * (curve.ranks - 1) / curve.ranks
            points.append((sent, sent / max(us - floor, 0.05 * us) / 1e3))
        peak = max(peak, points[-1][1])
        shown = ", ".join(f"[{sent:.4g}, {speed:.4g}]" for sent, speed in points)
        lines.append(f"{kind} = {{ points = [{shown}] }}")
    return [*lines, f"peak_gb_s = {peak:.4g}"]


def _times(curve: RankCurve) -> list[float]:
    from fsdpbench.sim.model.network import time_on

    return [time_on(curve, size) * 1e6 for size in _LINK_SIZES]


SOURCE = "operator tables of ai-dynamo/aiconfigurator (Apache-2.0), August 2026, one node"


@dataclass(frozen=True)
class FittedChip:
    """The tables of one chip, by library."""

    libraries: Mapping[str, LibraryTables]


def fit_chips(rows: Sequence[Measured], source: str = SOURCE) -> dict[str, FittedChip]:
    """Tables of every chip in ``rows`` that `OPERATOR_CHIPS` knows."""
    rows = [row for row in rows if row.gpu in OPERATOR_CHIPS]
    of_kind = {kind: [row for row in rows if row.kind == kind] for kind in (COLLECTIVE, PRODUCT, ATTENTION)}
    products = fit_products(of_kind[PRODUCT], OPERATOR_CHIPS)
    attention = fit_attention(of_kind[ATTENTION], OPERATOR_CHIPS)
    collectives = fit_collectives(of_kind[COLLECTIVE], OPERATOR_CHIPS)
    found: dict[str, dict[str, LibraryTables]] = {}
    for row in rows:
        libraries = found.setdefault(row.gpu, {})
        if row.library in libraries:
            continue
        parts: dict[str, Any] = {}
        if row.kind == COLLECTIVE:
            parts = {"collectives": collectives[row.gpu], "switch_from": OPERATOR_CHIPS[row.gpu].switch_from}
        else:
            of_library = {
                key[2]: table for key, table in products.items() if key[:2] == (row.gpu, row.library)
            }
            parts = {"products": of_library, "attention": attention.get((row.gpu, row.library))}
        libraries[row.library] = LibraryTables(row.measured_with.split(" ", 1)[-1], source, **parts)
    return {gpu: FittedChip(libraries) for gpu, libraries in found.items()}
