"""Every field of ``MixedPrecision``, in dtypes seen and in numbers, against torch's own FSDP1."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fsdp_cases import assert_close, our_full, torch_full
from torch import nn
from torch.distributed import fsdp as torch_fsdp
from torch.distributed.fsdp.wrap import ModuleWrapPolicy as TorchModuleWrapPolicy

from fsdpbench import impl

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
MODES = pytest.mark.parametrize("originals", [False, True], ids=["flat", "original"])


class Part(nn.Module):
    """A layer, a normalisation with running statistics, a buffer; notes the dtypes that it sees."""

    def __init__(self, normalised: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.norm: nn.Module = nn.BatchNorm1d(6) if normalised else nn.Identity()
        self.register_buffer("shift", torch.full((6,), 0.1))
        self.seen: list[torch.dtype] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += [x.dtype, self.shift.dtype]
        after = self.norm(self.linear(x.to(self.linear.weight.dtype)))
        self.seen.append(after.dtype)
        return torch.relu(after) + self.shift


class Net(nn.Module):
    """Two parts, the second on what the first returns in fp32; ``widen`` also in between."""

    def __init__(self, normalised: bool = False) -> None:
        super().__init__()
        self.first = Part(normalised)
        self.second = Part(normalised)
        self.seen: list[torch.dtype] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(x.dtype)
        return self.second(self.first(x).float())


def build(kind: str, normalised: bool, originals: bool, strategy: str, **precision: Any) -> Any:
    api: Any = torch_fsdp if kind == "torch" else impl
    policy: Any = TorchModuleWrapPolicy if kind == "torch" else impl.ModuleWrapPolicy
    torch.manual_seed(0)
    return api.FullyShardedDataParallel(
        Net(normalised),
        sharding_strategy=api.ShardingStrategy[strategy],
        auto_wrap_policy=policy({Part}),
        mixed_precision=api.MixedPrecision(**precision),
        use_orig_params=originals,
        device_id=torch.device("cpu"),
    )


def dtypes_seen(model: nn.Module) -> list[torch.dtype]:
    return [dtype for module in model.modules() if isinstance(module, (Part, Net)) for dtype in module.seen]


def gradient_dtypes(model: nn.Module) -> set[torch.dtype]:
    return {p.grad.dtype for p in model.parameters() if p.grad is not None}


def case_like_torch(
    rank: int, *, normalised: bool, originals: bool, strategy: str, precision: dict[str, Any], steps: int
) -> None:
    seen, dtypes, whole, statistics = [], [], [], []
    for kind in ("impl", "torch"):
        model = build(kind, normalised, originals, strategy, **precision)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for step in range(steps):
            x = torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + rank))
            model(x).square().sum().backward()
            dtypes.append(gradient_dtypes(model))
            if precision.get("keep_low_precision_grads"):
                for parameter in model.parameters():  # as an optimizer that takes such gradients
                    if parameter.grad is not None:
                        parameter.data.sub_(parameter.grad.data, alpha=0.1)
            else:
                optimizer.step()
            for parameter in model.parameters():
                parameter.grad = None
        seen.append(dtypes_seen(model))
        whole.append((our_full if kind == "impl" else torch_full)(model, False))
        statistics.append({n: b.float() for n, b in model.named_buffers() if b.is_floating_point()})
    assert seen[0] == seen[1]
    assert dtypes[:steps] == dtypes[steps:], dtypes
    assert_close(*whole, tolerance=1e-5)
    clean = [{n.replace("_fsdp_wrapped_module.", ""): b for n, b in found.items()} for found in statistics]
    assert_close(*clean, tolerance=1e-5)


CASES: dict[str, dict[str, Any]] = {
    "inputs_of_every_unit": {"param_dtype": BF16, "cast_forward_inputs": True},
    "inputs_of_none": {"param_dtype": BF16, "cast_root_forward_inputs": False},
    "buffers": {"param_dtype": BF16, "buffer_dtype": BF16},
    "reduced_lower": {"reduce_dtype": BF16},
    "kept_low": {"param_dtype": BF16, "keep_low_precision_grads": True},
    "kept_low_reduced_high": {"param_dtype": BF16, "reduce_dtype": FP32, "keep_low_precision_grads": True},
    "fp16": {"param_dtype": FP16, "reduce_dtype": FP16, "buffer_dtype": FP16},
}


@MODES
@pytest.mark.parametrize("name", CASES)
def test_equals_torch(two_ranks, name: str, originals: bool) -> None:
    arguments = {"normalised": False, "originals": originals, "strategy": "FULL_SHARD", "steps": 3}
    two_ranks.run(case_like_torch, precision=CASES[name], **arguments)


@pytest.mark.parametrize("name", ["kept_low", "kept_low_reduced_high"])
def test_replicas_equal_torch(two_ranks, name: str) -> None:
    arguments = {"normalised": False, "originals": False, "strategy": "NO_SHARD", "steps": 3}
    two_ranks.run(case_like_torch, precision=CASES[name], **arguments)


@MODES
@pytest.mark.parametrize("policy", [{}, {"buffer_dtype": BF16}], ids=["", "buffers"])
def test_batch_norm_stays_in_full_precision(two_ranks, policy: dict[str, Any], originals: bool) -> None:
    arguments = {"normalised": True, "originals": originals, "strategy": "FULL_SHARD", "steps": 10}
    two_ranks.run(case_like_torch, precision={"param_dtype": BF16, **policy}, **arguments)


def case_batch_norm_is_a_unit(rank: int) -> None:
    with pytest.warns(UserWarning, match="BatchNorm1d stay in full precision"):
        model = build("impl", True, False, "FULL_SHARD", param_dtype=BF16)
    model(torch.randn(4, 6)).sum().backward()
    units = {unit.name: unit.compute_dtype for unit in impl.unit_report(model)}
    assert units["first"] == "bfloat16"
    assert units["first.norm"] == "float32"
    assert {b.dtype for n, b in model.named_buffers() if "running" in n} == {FP32}
    none = build("impl", True, False, "FULL_SHARD", param_dtype=BF16, _module_classes_to_ignore=())
    assert len(impl.FullyShardedDataParallel.fsdp_modules(none)) == 3


def test_batch_norm_is_a_unit(two_ranks) -> None:
    two_ranks.run(case_batch_norm_is_a_unit)
