"""Run the `--device cuda` code path without a GPU: a variable maps "cuda" to the simulated device.

    FSDPBENCH_SIMULATED_CUDA=h100-80gb        one node of eight
    FSDPBENCH_SIMULATED_CUDA=h100-80gb:2      one node of two

All code of the cuda path runs, down to torch's own. Results are marked `"simulated": true` and have their own
keys, and the gate refuses them. For tests and CI.
"""

import os
from dataclasses import dataclass

from fsdpbench.base.errors import UsageError, error_text
from fsdpbench.base.numbers import whole_number

VARIABLE = "FSDPBENCH_SIMULATED_CUDA"
_GPUS = 8
_MOST_GPUS = 64


@dataclass(frozen=True)
class SimulatedCuda:
    """The simulated GPUs behind "cuda": their hardware profile and their number on this machine."""

    profile: str
    gpus: int


def simulated_cuda() -> SimulatedCuda | None:
    """Return the GPUs that the environment sets; None if "cuda" is the real device. Raises `UsageError`."""
    text = os.environ.get(VARIABLE, "")
    if not text:
        return None
    profile, _, gpus = text.partition(":")
    try:
        return SimulatedCuda(profile, whole_number(gpus or str(_GPUS), 1, _MOST_GPUS if profile else 0))
    except ValueError:
        raise UsageError(error_text("simulated_cuda.form", VARIABLE, text, _MOST_GPUS)) from None
