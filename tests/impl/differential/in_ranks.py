"""What the rank pool calls: loaded by path in each rank."""

from __future__ import annotations

import faulthandler
import os
from typing import Any

import torch
from differential.lockstep import Result, compare
from differential.specs import Program

HANG_SECONDS = 0.75 * float(os.environ.get("FUZZ_SECONDS", "20"))

if not torch.accelerator.is_available():  # torch pins the parameters it offloads, and fails without a device
    torch.Tensor.pin_memory = lambda self, *_: self  # type: ignore[assignment,method-assign]


def run_program(rank: int, *, program: Program, log: Any = None) -> Any:
    """Run the program on both sides; ``log`` is told what either shows after each operation."""
    faulthandler.dump_traceback_later(HANG_SECONDS)  # so that a hang says where
    try:
        result: Result = compare(rank, program, log)
    finally:
        faulthandler.cancel_dump_traceback_later()
    result.log = None
    return result
