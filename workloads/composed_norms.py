"""RMSNorm as torch before 2.9 ran it on GPUs: one operator after the other, each with its result in memory.

Torch had none before 2.4; from 2.4 to 2.8 `torch.rms_norm` was composed of operators (torch 2.8,
`aten/src/ATen/native/layer_norm.cpp`). A kernel of its own came with 2.9. The compiler fuses operators: it
gained more then. The simulator does not hold it, because the compiler traces it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def rms_norm(
    x: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    """`F.rms_norm` of x, [..., width], over the last dimension: the mean square in fp32, the rest as type
    promotion has it."""
    mean_square = x.float().pow(2).mean(-1, keepdim=True)
    normed = x * torch.rsqrt(mean_square + (eps or torch.finfo(x.dtype).eps))
    return normed.to(x.dtype) if weight is None else weight * normed.to(weight.dtype)
