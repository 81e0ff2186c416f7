"""CUDA's errors on the simulated device, with torch's texts and exception types.

The meta device, which computes result shapes, accepts more than a GPU; these rules refuse the rest. Calls are
checked when their plan is made (`plans.py`), so repeated calls cost nothing.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from fsdpbench.sim.torch_device.strict.devices import refuse_other_devices
from fsdpbench.sim.torch_device.strict.dtypes import DTYPE_RULES, refuse_integers, refuse_narrower
from fsdpbench.sim.torch_device.strict.shapes import SHAPE_RULES
from fsdpbench.sim.torch_device.strict.words import bind, packet_of


def refuse_what_cuda_refuses(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raise CUDA's error for this call; do nothing for a valid or unknown call."""
    arguments = bind(operator, args, kwargs)
    refuse_other_devices(operator, arguments)
    packet = packet_of(operator)
    for rule in (*DTYPE_RULES.get(packet, ()), SHAPE_RULES.get(packet)):
        if rule is not None:
            rule(arguments)
    refuse_integers(packet, arguments)
    refuse_narrower(operator, arguments)
