"""The setting `clip`: the norm of all gradients, whatever meshes they are on.

torch stacks the norms of all gradients, which it can only do on one mesh. With expert parallelism experts are
on another: the norm is then the root of the sum of the squares of the meshes' norms, as TorchTitan has it.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


def clip_gradients(parameters: Iterable[nn.Parameter], largest: float) -> Tensor:
    """Scale gradients so that the 2-norm of all is `largest` at most; returns what it was before."""
    by_mesh: dict[object, list[nn.Parameter]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            mesh = parameter.grad.device_mesh if isinstance(parameter.grad, DTensor) else None
            by_mesh.setdefault(mesh, []).append(parameter)
    if len(by_mesh) == 1:
        (only,) = by_mesh.values()
        return torch.nn.utils.clip_grad_norm_(only, largest)
    if not by_mesh:
        return torch.zeros(())
    norms = [_norm_of([parameter.grad for parameter in group]) for group in by_mesh.values()]
    total = torch.linalg.vector_norm(torch.stack(norms))
    for group in by_mesh.values():
        torch.nn.utils.clip_grads_with_norm_(group, largest, total)
    return total


def _norm_of(gradients: list[Tensor | None]) -> Tensor:
    norm = torch.nn.utils.get_total_norm([each for each in gradients if each is not None])
    return norm.full_tensor() if isinstance(norm, DTensor) else norm
