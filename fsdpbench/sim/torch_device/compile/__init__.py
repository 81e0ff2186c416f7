"""`torch.compile` on the simulated device: torch's own compiler, with simulated kernels.

    Dynamo traces ─> AOTAutograd partitions ─> Inductor lowers, fuses, schedules ─> its wrapper
                                                                                      │ calls
                   fused kernels (by bytes) · operators (at their prices) · buffers (allocated and freed)

- `front_end.py`: `install`, after which Inductor compiles graphs of simulated tensors in this way.
- `pretended.py`: answers Inductor's queries about a GPU and Triton from the hardware profile.
- `lowering.py`: turns a graph of the device into a plan, with Inductor's wrapper but not its kernels.
- `plan.py`: the fused kernels of one graph, their launch, the functions that wrappers call; the cache folder.
- `cuda_graphs.py`: plans that are captured (`mode="reduce-overhead"`).
- `refusals.py`: graphs that cannot be simulated, and the report of graphs, breaks, kernels and bytes.

Nothing here is imported before the first compilation, because importing Inductor takes seconds.
"""

import os

CACHE_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
ASKED_FOLDER = os.environ.get(CACHE_VARIABLE)
"""The user's choice, read here because importing the compiler overwrites it with a default."""
