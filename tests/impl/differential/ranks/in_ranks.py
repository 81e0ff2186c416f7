"""What the rank pool calls: loaded by path in each rank."""

from __future__ import annotations

import faulthandler
import os
from collections.abc import Sequence
from typing import Any

import torch
from differential.ranks.lockstep import Result, compare
from differential.ranks.wrapping import SIDES
from differential.specs import Program

HANG_SECONDS = 0.75 * float(os.environ.get("FUZZ_SECONDS", "20"))

if not torch.accelerator.is_available():
    # Where parameters are offloaded torch pins memory and waits for a stream; both fail without a device.
    torch.Tensor.pin_memory = lambda self, *_: self  # type: ignore[assignment,method-assign]
    torch.cpu.Stream.synchronize = lambda self: None  # type: ignore[attr-defined]


def run_program(
    rank: int, *, program: Program, log: Any = None, sides: Sequence[str] = SIDES, trail: str = ""
) -> Any:
    """Run the program on these sides; see ``compare``."""
    faulthandler.dump_traceback_later(HANG_SECONDS)  # so that a hang says where
    try:
        result: Result = compare(rank, program, log, sides, trail)
    finally:
        faulthandler.cancel_dump_traceback_later()
    result.log = None
    return result
