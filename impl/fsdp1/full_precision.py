"""Modules that stay in full precision inside a model in mixed precision, such as batch normalisation.

Each is a unit of its own without mixed precision. What runs before and after it computes in a lower dtype, so
its inputs are cast up and its outputs back down::

    bf16 -> [ pre: to fp32 | module in fp32 | post: to bf16 ] -> bf16

Running statistics and their updates then have the precision that they were written for.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from ..frontends.wrap import Selection, add_classes
from ..shared.pytree import caster, map_tensors


def keep_in_full_precision(
    root: nn.Module, selection: Selection, classes: Sequence[type[nn.Module]], ignored: set[nn.Module]
) -> Selection:
    """``selection`` with every module of ``classes`` inside ``root`` as a unit of its own, without mixed
    precision.

    Warns of the units that this adds.
    """
    kinds = tuple(classes)
    found = [m for m in root.modules() if isinstance(m, kinds) and m is not root and m not in ignored]
    if not found:
        return selection
    names = ", ".join(sorted({type(module).__name__ for module in found}))
    warnings.warn(
        f"modules of class {names} stay in full precision: each is a unit without mixed precision",
        stacklevel=4,
    )
    for module in found:
        _FullPrecisionIsland(module)
    return add_classes(selection, root, kinds, ignored, {"mixed_precision": None})


class _FullPrecisionIsland:
    """Casts one module's floating point inputs to its own dtype, and its outputs to that of the inputs.

    The hooks go behind all that the module has now, so that those see what the model passes.
    """

    def __init__(self, module: nn.Module) -> None:
        held = [t for t in (*module.parameters(), *module.buffers()) if t.is_floating_point()]
        self._up = caster(held[0].dtype if held else torch.float32)
        self._outside: torch.dtype | None = None
        module.register_forward_pre_hook(self._before, with_kwargs=True)
        module.register_forward_hook(self._after)

    def _before(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, dict[str, Any]]:
        self._outside = None

        def cast(tensor: torch.Tensor) -> torch.Tensor:
            raised = self._up(tensor)
            if raised is not tensor:
                self._outside = tensor.dtype
            return raised

        return map_tensors(cast, args), map_tensors(cast, kwargs)

    def _after(self, module: nn.Module, args: Any, output: Any) -> Any:
        outside, self._outside = self._outside, None
        return output if outside is None else map_tensors(caster(outside), output)
