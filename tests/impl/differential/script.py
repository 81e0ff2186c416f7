"""What the scripts of shrunk programs call: both sides, operation by operation, printed."""

from __future__ import annotations

import os
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from differential.ranks import in_ranks
from differential.specs import Program


def main(program: Program) -> None:
    """Run under torchrun, or start the ranks."""
    if "RANK" in os.environ:
        _rank(int(os.environ["RANK"]), program, "env://")
        return
    place = tempfile.mktemp(prefix="ranks-")
    multiprocessing.spawn(_rank, (program, f"file://{place}"), nprocs=program.ranks)


def _rank(rank: int, program: Program, where: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=where, rank=rank, world_size=program.ranks)
    result = in_ranks.run_program(rank, program=program, log=print if rank == 0 else None)
    if rank == 0 or result.differences:  # ranks with padding may be the only ones that differ
        found = [f"differences of rank {rank}: {len(result.differences)}", *map(str, result.differences)]
        print("\n".join([*found, f"explained: {sorted(set(result.explained))}"]))
    sys.stdout.flush()
    dist.barrier()
    dist.destroy_process_group()
