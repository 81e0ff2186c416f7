"""The rehearsal of `--device cuda` where no GPU is: "cuda" is the simulated device, asked for by a variable.

    FSDPBENCH_SIMULATED_CUDA=h100-80gb        one node of eight
    FSDPBENCH_SIMULATED_CUDA=h100-80gb:2      one of two

All code of the cuda path runs, up to torch's own. What results from it is marked `"simulated": true`, has
keys of its own, and is nothing that the gate takes. For tests and CI.
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
    """The simulated GPUs behind "cuda": a hardware profile, and how many are on this machine."""

    profile: str
    gpus: int


def simulated_cuda() -> SimulatedCuda | None:
    """Return the GPUs that the environment asks for; None where cuda is the real one. Raises `UsageError`."""
    text = os.environ.get(VARIABLE, "")
    if not text:
        return None
    profile, _, gpus = text.partition(":")
    try:
        return SimulatedCuda(profile, whole_number(gpus or str(_GPUS), 1, _MOST_GPUS if profile else 0))
    except ValueError:
        raise UsageError(error_text("simulated_cuda.form", VARIABLE, text, _MOST_GPUS)) from None
