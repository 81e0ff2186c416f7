"""`torch.compile` on the simulated device: torch's own compiler, with simulated kernels.

    Dynamo traces ─> AOTAutograd partitions ─> Inductor lowers, fuses, schedules ─> its wrapper
                                                                                      │ calls
                   fused kernels (by bytes) · operators (at their prices) · buffers (allocated and freed)

Nothing here is imported before the first compilation, because importing Inductor takes seconds.
"""

import os

CACHE_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
ASKED_FOLDER = os.environ.get(CACHE_VARIABLE)
"""The user's choice, read here because importing the compiler overwrites it with a default."""
