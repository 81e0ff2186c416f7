"""Every situation of the tables ends on ours as on torch's, or is a difference that a document names."""

from __future__ import annotations

import os

from flat_programs import Side
from outcomes.rows import Table, outcome
from outcomes import flat_wrapping_rows


def run_flat(rank: int, module, only="") -> list:
    import importlib

    found = []
    table = importlib.import_module(module).TABLE
    for row in table.rows:
        if only not in row.name:
            continue
        for mode in row.modes:
            seen = []
            for kind in ("torch", "impl"):
                side = Side(kind, rank, mode)
                open(f"/tmp/where{rank}", "w").write(f"{row.name} {mode} {kind}")
                seen.append(outcome(lambda: row.program(side)))
            if seen[0] != seen[1] or os.environ.get("ALL"):
                found.append((row.name, mode, *seen))
                if rank == 0:
                    print("R0", *found[-1], sep="  ", flush=True)
    return found


def test_flat(two_ranks):
    a, b = two_ranks.run_everywhere(
        run_flat,
        module=os.environ.get("TABLE", "outcomes.flat_wrapping_rows"),
        only=os.environ.get("ONLY", ""),
    )
    if a != b:
        for each in b:
            if each not in a:
                print("R1", each)
