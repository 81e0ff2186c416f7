"""All tables of all chips from measured rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fsdpbench.calibrate.tables.attention import fit_attention
from fsdpbench.calibrate.tables.collectives import fit_collectives
from fsdpbench.calibrate.tables.products import fit_products
from fsdpbench.files.operator_tables import ATTENTION, COLLECTIVE, PRODUCT, Measured
from fsdpbench.sim.hardware.chips import OPERATOR_CHIPS
from fsdpbench.sim.hardware.library_sections import LibraryTables

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
