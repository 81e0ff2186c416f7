"""FLOPs of a model of the library, counted on the meta device, and its scans as one kernel each.

FLOPs are counted as operators are launched, in one forward, by the formulas of `torch.utils.flop_counter`.
Scans of state spaces and of linear attention are not counted.

The library runs scans by kernels of other packages (mamba-ssm, flash-linear-attention), or without them by
loops over tokens. On the meta device and on simulated GPUs a scan is one operator each way, which reads its
arguments and writes its result; nothing prices it, so a result counts it among its unknown operators.
"""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import flop_registry

from fsdpbench.base.torch_internals import TorchDispatchMode
from fsdpbench.workloads.base import BlockFlops, ForwardFlops

_LIKE = ("value", "hidden_states")
"""Names of the argument whose shape the result has, the first that is there."""
_WITH_VALUES = ("cpu", "cuda")
_ATEN = torch.ops.aten
_PRODUCTS = (_ATEN.mm, _ATEN.addmm, _ATEN.convolution)

_LIBRARY = torch.library.Library("fsdpbench_workloads", "FRAGMENT")
for _schema, _shapes in (
    ("scan(Tensor like, Tensor[] others) -> Tensor", lambda like, others: like.new_empty(like.shape)),
    (
        "scan_backward(Tensor gradient, Tensor[] inputs) -> Tensor[]",
        lambda gradient, inputs: [torch.empty_like(each) for each in inputs],
    ),
):
    _LIBRARY.define(_schema)
    _LIBRARY.impl(_schema.split("(")[0], _shapes, "Meta")


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, like: Tensor, *others: Tensor) -> Tensor:
        ctx.save_for_backward(like, *others)
        result: Tensor = torch.ops.fsdpbench_workloads.scan(like, others)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        wanted = [
            each for each, is_wanted in zip(ctx.saved_tensors, ctx.needs_input_grad, strict=True) if is_wanted
        ]
        made = iter(torch.ops.fsdpbench_workloads.scan_backward(gradient, wanted))
        return tuple(next(made) if is_wanted else None for is_wanted in ctx.needs_input_grad)


def fuse_scans(model: nn.Module) -> None:
    """Let the code of `model` run scans as one operator where tensors have no values, and only there."""
    for name in {type(module).__module__ for module in model.modules()}:
        scope = vars(sys.modules[name])
        for own, function in list(scope.items()):
            is_scan, with_state = _scans(own)
            if is_scan and inspect.isfunction(function) and not hasattr(function, "is_fused_scan"):
                scope[own] = _fused(function, with_state=with_state)


def _scans(name: str) -> tuple[bool, bool]:
    """Return whether a function of the library with this name scans a sequence, and if with a state too."""
    with_state = bool(name.partition("chunk_")[2].partition("delta_")[2]) or name.endswith(
        "rwkv_linear_attention"
    )
    return with_state or name.endswith(("selective_scan", "chunk_scan")), with_state


def _fused(function: Callable[..., Any], with_state: bool) -> Callable[..., Any]:
    signature = inspect.signature(function)

    @wraps(function)
    def scan(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        tensors = {name: each for name, each in given.items() if isinstance(each, Tensor)}
        like = tensors.pop(next(name for name in _LIKE if name in tensors))
        if like.device.type in _WITH_VALUES:
            return function(*args, **kwargs)
        result = _Scan.apply(like, *tensors.values())
        return (result, None) if with_state else result

    scan.is_fused_scan = True  # type: ignore[attr-defined]
    return scan


class _Counter(TorchDispatchMode):
    """FLOPs of the operators that run, block by block; `blocks` has those of each stack, by its number."""

    def __init__(self, stacks: int) -> None:
        super().__init__()
        self.blocks: list[list[BlockFlops]] = [[] for _ in range(stacks)]
        self.rest = self._depth = self._others = 0
        self._experts = 1
        self._products: list[int] = []

    def enter(self, *_: Any) -> None:
        """Begin a block; one inside of another is a part of it."""
        self._depth += 1
        if self._depth == 1:
            self._products, self._others = [], 0

    def leave(self, stack: int) -> None:
        """End a block of a stack."""
        self._depth -= 1
        if not self._depth:
            self.blocks[stack].append(BlockFlops(tuple(self._products), attention=self._others))

    def _found(self, mask: Tensor) -> Tensor:
        """Return the places of a mask: of experts that are hit, all; of one's tokens, its equal share."""
        if mask.dim() == 1:
            self._experts = len(mask)
        rows = mask.numel() if mask.dim() == 1 else max(1, mask.numel() // self._experts)
        return torch.empty(rows, mask.dim(), dtype=torch.int64, device="meta")

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is _ATEN._local_scalar_dense.default:
            # Nothing is padded, where masks and positions are asked. Numbers are places, as an expert's.
            return args[0].dtype is torch.bool or int(args[0].storage_offset())
        if func is _ATEN.nonzero.default:
            return self._found(args[0])
        out, packet = func(*args, **(kwargs or {})), func.overloadpacket
        if packet is _ATEN._grouped_mm:
            self._others += 2 * math.prod(args[0].shape) * args[1].shape[-1]
        elif packet in flop_registry:
            flops = flop_registry[packet](*args, **(kwargs or {}), out_val=out)
            if packet not in _PRODUCTS:
                self._others += flops  # outside of blocks: of rotary positions, not counted
            elif self._depth:
                self._products.append(flops)
            else:
                self.rest += flops
        return out


def counted(model: nn.Module, stacks: Sequence[nn.ModuleList], batch: int, seq: int) -> ForwardFlops:
    """Return the FLOPs of a forward of `model`, which is on the meta device, over int64 of [batch, seq]."""
    with _Counter(len(stacks)) as counter, torch.no_grad():
        hooks = []
        for number, stack in enumerate(stacks):
            for block in stack:
                hooks.append(block.register_forward_pre_hook(counter.enter))
                hooks.append(block.register_forward_hook(lambda *_, number=number: counter.leave(number)))
        try:
            model(torch.zeros(batch, seq, dtype=torch.int64, device="meta"))
        finally:
            for hook in hooks:
                hook.remove()
    return ForwardFlops(counter.blocks, counter.rest)
