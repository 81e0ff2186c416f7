"""CUDA's refusals on the simulated device: with torch's texts and the same type of exception.

The meta device, which computes the shapes of results, is more generous than a GPU; these rules refuse what it
lets pass. Calls are checked when their plan is made (`plans.py`), so that a repeated call costs nothing.

================ =======================================================================================
`devices.py`     tensors of the host beside those of the device
`dtypes.py`      dtypes that do not go together, integers where CUDA has kernels for floats alone, and the
                 operands and scales of scaled products
`shapes.py`      sizes, dimensions, and indices out of range where they are known (with each call: values
                 are not part of a plan)
`words.py`       dtypes and arguments as torch's errors call them
================ =======================================================================================
"""

from collections.abc import Mapping, Sequence
from typing import Any

from fsdpbench.sim.torch_device.strict.devices import refuse_other_devices
from fsdpbench.sim.torch_device.strict.dtypes import DTYPE_RULES, refuse_integers, refuse_narrower
from fsdpbench.sim.torch_device.strict.shapes import SHAPE_RULES
from fsdpbench.sim.torch_device.strict.words import bind, packet_of


def refuse_what_cuda_refuses(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raise CUDA's error for this call; nothing for a valid or unknown call."""
    arguments = bind(operator, args, kwargs)
    refuse_other_devices(operator, arguments)
    packet = packet_of(operator)
    for rule in (*DTYPE_RULES.get(packet, ()), SHAPE_RULES.get(packet)):
        if rule is not None:
            rule(arguments)
    refuse_integers(packet, arguments)
    refuse_narrower(operator, arguments)
