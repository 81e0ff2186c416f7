"""Parameters that are more than plain tensors, in a flat parameter: the hook for tensor parallelism.

A flat parameter holds plain elements. ``pre_flatten_transform`` says which tensor of a parameter goes into
it, and what turns the gathered tensor back (a ``WholeForm``: ``unsharded`` after the all-gather,
``local_gradient`` before the reduction; torch calls the first ``post_unflatten_transform``). A kind of
parameter that is served is a line here; ``DTensor``s are, by the form that ``fully_shard`` uses too::

    DTensor on tp --pre_flatten--> local tensor [flat, sharded over dp, gathered] --unsharded--> DTensor on tp

What is shown or saved whole outside of training is the local tensor; norms are over dp alone.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ..runtime.presentation import WholeForm
from ..shared.placement import TensorParallel
from ..shared.torch_internals import is_traceable_wrapper_subclass


def pre_flatten_transform(parameter: nn.Parameter) -> tuple[nn.Parameter, WholeForm | None]:
    """What is flattened for ``parameter``, and its form while whole; itself and ``None`` if it is plain.

    Raises:
        RuntimeError: a tensor subclass, of which a flat parameter would keep the elements alone.
    """
    if not isinstance(parameter, DTensor):
        if is_traceable_wrapper_subclass(parameter):
            kind = type(parameter.data).__name__
            raise RuntimeError(
                f"a parameter of shape {tuple(parameter.shape)} is a {kind}: a flat parameter holds plain "
                "tensors and DTensors. Leave it out (ignored_states), or use fully_shard"
            )
        return parameter, None
    local: torch.Tensor = parameter._local_tensor
    flattened = nn.Parameter(local.detach(), requires_grad=parameter.requires_grad)
    return flattened, TensorParallel(parameter._spec)
