"""`torch.compile` on the simulated device: torch's own compiler up to its kernels, which are simulated.

    Dynamo traces ─> AOTAutograd partitions ─> Inductor lowers, fuses, schedules ─> its wrapper
                                                                                      │ calls
                   fused kernels (by bytes) · operators (at their prices) · buffers (allocated and freed)

- `front_end.py`: `install`; from then on Inductor compiles graphs of simulated tensors in this way.
- `pretended.py`: Inductor's questions to a GPU and to Triton, answered by the hardware profile.
- `lowering.py`: makes a plan of a graph of the device, by Inductor's wrapper without its code.
- `plan.py`: the fused kernels of one graph, their launch, and the functions that a wrapper calls.
- `cuda_graphs.py`: plans that are captured (`mode="reduce-overhead"`). Their folder: `plan.py`.
- `refusals.py`: graphs that cannot be simulated, and the report of graphs, breaks, kernels and bytes.

Nothing here is imported before something compiles: Inductor's import takes seconds.
"""

import os

CACHE_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
ASKED_FOLDER = os.environ.get(CACHE_VARIABLE)
"""The user's choice, read now: the compiler's import writes its own default there."""
