"""Counts what a training step of FSDP2 copies, this project's beside torch's, on 8 simulated GPUs.

    python ci/measure_copies.py gpt-2.8b llama3-8b

Each operator that copies around collectives is seen as torch calls it: bytes written, and whether the dtype
changes on the way (a cast that mixed precision asks for) or not (a move, which the layout costs).
"""

from __future__ import annotations

import sys
from collections import Counter
from multiprocessing import get_context
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

RANKS = 8
_LAYERS = 4
_OPERATORS = (
    "fsdp::all_gather_copy_in", "fsdp::split_with_sizes_copy", "fsdp::chunk_cat", "aten::_foreach_copy_",
    "aten::split_with_sizes_copy", "aten::_chunk_cat", "aten::copy_", "aten::cat", "aten::_to_copy",
)  # fmt: skip


class Copies(TorchDispatchMode):
    """Bytes written by kind: moved (same dtype) or cast."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()
        self.counts = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if self.counts and func.name().split(".")[0] in _OPERATORS:
            source, target = _sides(func.name(), args, kwargs or {}, result)
            kind = "moved" if source[0].dtype == target[0].dtype else "cast"
            self.nbytes[kind] += sum(tensor.numel() * tensor.element_size() for tensor in target)
            self.calls[kind] += 1
        return result


def _sides(name: str, args: Any, kwargs: Any, result: Any) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    def tensors(value: Any) -> list[torch.Tensor]:
        if isinstance(value, torch.Tensor):
            return [value]
        return [x for each in value for x in tensors(each)] if isinstance(value, (list, tuple)) else []

    if name.startswith(("aten::copy_", "aten::_foreach_copy_")):
        return tensors(args[1]), tensors(args[0])
    if name.startswith("fsdp::all_gather_copy_in"):
        return tensors(args[0]), tensors(args[0])
    out = kwargs.get("out")
    return tensors(args[0]), tensors(result if out is None else out)


def count(kind: str, model_name: str, reduce_dtype: str, layout: str | None) -> tuple[dict[str, int], ...]:
    """One step's copies: (bytes by kind, calls by kind)."""
    from torch.distributed import fsdp as torch_fsdp
    from torch.distributed.device_mesh import init_device_mesh

    from fsdpbench import impl
    from fsdpbench.sim import Simulation, load_profile
    from fsdpbench.workloads import get_workload

    simulation = Simulation.start(load_profile("h100-80gb"), world_size=RANKS, gpus_per_node=RANKS)
    simulation.init_process_group()
    api: Any = torch_fsdp if kind == "torch" else impl
    workload = get_workload(model_name, {"layers": _LAYERS})
    device = torch.device("sim", 0)
    with torch.device("meta"):
        model: Any = workload.build()
    arguments: dict[str, Any] = {
        "mesh": init_device_mesh("sim", (RANKS,)),
        "mp_policy": api.MixedPrecisionPolicy(torch.bfloat16, getattr(torch, reduce_dtype)),
    }
    if layout is not None:
        arguments["layout"] = layout
    for block in [m for m in model.modules() if isinstance(m, workload.block_classes)]:
        api.fully_shard(block, **arguments)
    api.fully_shard(model, **arguments)
    model.to_empty(device=device)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    batches = workload.batches(1, 1024, seed=0, rank=0, device=device)
    copies = Copies()
    with copies:
        for step in range(3):
            batch = next(batches)
            copies.counts = step == 2
            model(*batch).backward()
            copies.counts = False
            optimizer.step()
            optimizer.zero_grad()
    dist.destroy_process_group()
    return dict(copies.nbytes), dict(copies.calls)


def main() -> int:
    names = sys.argv[1:] or ["gpt-2.8b", "llama3-8b"]
    print(
        f"torch {torch.__version__}; {_LAYERS} blocks and the root on {RANKS} simulated GPUs, bf16 parameters"
    )
    heads = f"{'moved MiB':>11} {'calls':>6} {'cast MiB':>11} {'calls':>6}"
    print(f"{'model':12} {'reduced in':11} {'system':16} {heads}")
    for name in names:
        for reduce_dtype in ("bfloat16", "float32"):
            for kind, layout in (("impl", "auto"), ("impl", "grouped"), ("impl", "packed"), ("torch", None)):
                with get_context("spawn").Pool(1) as pool:
                    nbytes, calls = pool.apply(count, (kind, name, reduce_dtype, layout))
                figures = " ".join(
                    f"{nbytes.get(what, 0) / 2**20:11,.1f} {calls.get(what, 0):6}"
                    for what in ("moved", "cast")
                )
                print(f"{name:12} {reduce_dtype:11} {kind + ' ' + (layout or ''):16} {figures}", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
