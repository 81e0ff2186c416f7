"""What a rank has of a parameter that several ranks share."""

from __future__ import annotations

from torch import Tensor
from torch.distributed.tensor import DTensor, Partial


def held(parameter: Tensor) -> Tensor:
    """This rank's part of `parameter`, to compute with; of one that every rank has in full the gradients of
    all of them are summed, since each has seen other tokens, or other features."""
    if not isinstance(parameter, DTensor):
        return parameter
    gradients = [Partial() if place.is_replicate() else place for place in parameter.placements]
    return parameter.to_local(grad_placements=gradients)
