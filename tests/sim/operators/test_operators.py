"""Operators on the device: shapes, dtypes and strides as on the meta device, a cost each, none unknown."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

pytestmark = pytest.mark.simulated


def floats(device: str, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, device=device, dtype=dtype)


def indices(device: str, *shape: int) -> torch.Tensor:
    return torch.zeros(shape, device=device, dtype=torch.int64)


OPERATORS: dict[str, Callable[[str], Any]] = {
    "add": lambda d: floats(d, 4, 1) + floats(d, 8),
    "add_number": lambda d: floats(d, 4) + 1,
    "add_integers": lambda d: indices(d, 4) + 1.5,
    "mul_bf16": lambda d: floats(d, 4, dtype=torch.bfloat16) * floats(d, 4),
    "in_place": lambda d: floats(d, 4, 4).mul_(2).add_(floats(d, 4)),
    "pow": lambda d: floats(d, 4) ** 2,
    "compare": lambda d: floats(d, 4) > 0,
    "where": lambda d: torch.where(floats(d, 4) > 0, floats(d, 4), 0.0),
    "masked_fill": lambda d: floats(d, 4, 4).masked_fill(floats(d, 4, 4) > 0, float("-inf")),
    "lerp": lambda d: floats(d, 4).lerp(floats(d, 4), 0.5),
    "addcmul": lambda d: floats(d, 4).addcmul_(floats(d, 4), floats(d, 4), value=2.0),
    "clamp": lambda d: floats(d, 4).clamp(0, 1),
    "mm": lambda d: floats(d, 4, 8) @ floats(d, 8, 2),
    "mm_transposed": lambda d: floats(d, 8, 4).t() @ floats(d, 2, 8).t(),
    "mm_out": lambda d: torch.mm(floats(d, 4, 8), floats(d, 8, 2), out=floats(d, 4, 2)),
    "mm_out_resized": lambda d: torch.mm(floats(d, 4, 8), floats(d, 8, 2), out=floats(d, 0)),
    "mm_to_float": lambda d: torch.mm(
        floats(d, 4, 8, dtype=torch.bfloat16), floats(d, 8, 2, dtype=torch.bfloat16), out_dtype=torch.float32
    ),
    "addmm_to_float": lambda d: torch.addmm(
        floats(d, 4, 2),
        floats(d, 4, 8, dtype=torch.bfloat16),
        floats(d, 8, 2, dtype=torch.bfloat16),
        out_dtype=torch.float32,
    ),
    "baddbmm_to_float": lambda d: torch.baddbmm(
        floats(d, 4, 2),
        floats(d, 3, 4, 8, dtype=torch.bfloat16),
        floats(d, 3, 8, 2, dtype=torch.bfloat16),
        out_dtype=torch.float32,
    ),
    "bmm": lambda d: torch.bmm(floats(d, 3, 4, 8), floats(d, 3, 8, 2)),
    "baddbmm": lambda d: torch.baddbmm(floats(d, 3, 4, 2), floats(d, 3, 4, 8), floats(d, 3, 8, 2)),
    "matmul_4d": lambda d: floats(d, 2, 3, 4, 8) @ floats(d, 8, 2),
    "einsum": lambda d: torch.einsum("bhid,bhjd->bhij", floats(d, 2, 3, 4, 8), floats(d, 2, 3, 6, 8)),
    "linear": lambda d: F.linear(floats(d, 2, 4, 8), floats(d, 16, 8), floats(d, 16)),
    "sum": lambda d: floats(d, 4, 8).sum(),
    "sum_dim": lambda d: floats(d, 4, 8, 2).sum((0, 2), keepdim=True),
    "mean": lambda d: floats(d, 4, 8).mean(-1),
    "max_dim": lambda d: floats(d, 4, 8).max(1),
    "argmax": lambda d: floats(d, 4, 8).argmax(-1),
    "var": lambda d: floats(d, 4, 8).var(1),
    "norm": lambda d: floats(d, 4, 8).norm(),
    "cumsum": lambda d: floats(d, 4, 8).cumsum(-1),
    "logsumexp": lambda d: floats(d, 4, 8).logsumexp(-1),
    "softmax": lambda d: floats(d, 4, 8, dtype=torch.bfloat16).softmax(-1),
    "log_softmax": lambda d: F.log_softmax(floats(d, 4, 8), -1),
    "layer_norm": lambda d: F.layer_norm(floats(d, 4, 8), (8,), floats(d, 8), floats(d, 8)),
    "rms_norm": lambda d: F.rms_norm(floats(d, 4, 8), (8,), floats(d, 8)),
    "group_norm": lambda d: F.group_norm(floats(d, 2, 8, 4), 2, floats(d, 8), floats(d, 8)),
    "batch_norm": lambda d: nn.BatchNorm2d(8, device=d)(floats(d, 2, 8, 4, 4)),
    "gelu": lambda d: F.gelu(floats(d, 4, 8)),
    "silu": lambda d: F.silu(floats(d, 4, 8)),
    "glu": lambda d: F.glu(floats(d, 4, 8)),
    "dropout": lambda d: F.dropout(floats(d, 4, 8), 0.1),
    "embedding": lambda d: F.embedding(indices(d, 2, 3), floats(d, 10, 8)),
    "embedding_bag": lambda d: F.embedding_bag(indices(d, 8, 4), floats(d, 10, 8), mode="sum"),
    "upsample": lambda d: F.interpolate(floats(d, 2, 3, 4, 4), scale_factor=2.0, mode="bilinear"),
    "topk": lambda d: floats(d, 4, 8).topk(2),
    "cross_entropy": lambda d: F.cross_entropy(floats(d, 4, 8), indices(d, 4), label_smoothing=0.1),
    "mse_loss": lambda d: F.mse_loss(floats(d, 4), floats(d, 4)),
    "bce": lambda d: F.binary_cross_entropy_with_logits(floats(d, 4), floats(d, 4)),
    "conv2d": lambda d: F.conv2d(floats(d, 2, 4, 8, 8), floats(d, 6, 4, 3, 3), floats(d, 6), 2, 1),
    "conv2d_groups": lambda d: F.conv2d(floats(d, 2, 4, 8, 8), floats(d, 8, 2, 3, 3), groups=2),
    "conv_transpose2d": lambda d: F.conv_transpose2d(floats(d, 2, 4, 8, 8), floats(d, 4, 6, 3, 3)),
    "max_pool2d": lambda d: F.max_pool2d(floats(d, 2, 4, 8, 8), 2),
    "adaptive_avg_pool2d": lambda d: F.adaptive_avg_pool2d(floats(d, 2, 4, 8, 8), 1),
    "cat": lambda d: torch.cat([floats(d, 4, 8), floats(d, 2, 8)]),
    "stack": lambda d: torch.stack([floats(d, 4), floats(d, 4)], 1),
    "split": lambda d: floats(d, 4, 8).split(3, -1),
    "chunk": lambda d: floats(d, 4, 8).chunk(3, 0),
    "slice": lambda d: floats(d, 4, 8)[1:3, ::2],
    "index": lambda d: floats(d, 4, 8)[indices(d, 3)],
    "index_put": lambda d: floats(d, 4, 8).index_put_((indices(d, 3),), floats(d, 3, 8)),
    "gather": lambda d: floats(d, 4, 8).gather(1, indices(d, 4, 2)),
    "scatter_add": lambda d: floats(d, 4, 8).scatter_add(1, indices(d, 4, 2), floats(d, 4, 2)),
    "permute_contiguous": lambda d: floats(d, 2, 3, 4).permute(2, 0, 1).contiguous(),
    "expand": lambda d: floats(d, 4, 1).expand(4, 8),
    "view_dtype": lambda d: floats(d, 4, 8).view(torch.bfloat16),
    "unfold": lambda d: floats(d, 8).unfold(0, 4, 2),
    "as_strided": lambda d: floats(d, 16).as_strided((2, 3), (4, 2), 1),
    "pad": lambda d: F.pad(floats(d, 4, 8), (1, 2)),
    "tril": lambda d: floats(d, 8, 8).tril(),
    "one_hot": lambda d: F.one_hot(indices(d, 4), 10),
    "repeat_interleave": lambda d: floats(d, 4, 2).repeat_interleave(3, 0),
    "arange": lambda d: torch.arange(0, 1, 0.1, device=d),
    "full": lambda d: torch.full((3,), 1.5, device=d),
    "randint": lambda d: torch.randint(0, 10, (4,), device=d),
    "zeros_like": lambda d: torch.zeros_like(floats(d, 8, 4).t()),
    "new_empty": lambda d: floats(d, 4).new_empty((2, 3), dtype=torch.bfloat16),
    "to_bf16": lambda d: floats(d, 8, 4).t().to(torch.bfloat16),
    "complex": lambda d: torch.view_as_complex(floats(d, 4, 2)) * torch.polar(floats(d, 4), floats(d, 4)),
    "foreach": lambda d: torch._foreach_add([floats(d, 4), floats(d, 2, 2)], 1.0),
    "foreach_norm": lambda d: torch._foreach_norm([floats(d, 4), floats(d, 2, 2)]),
    "chunk_cat": lambda d: torch._chunk_cat([floats(d, 5, 4), floats(d, 8)], 0, 2),
}  # fmt: skip


def geometry(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.shape, value.stride(), value.storage_offset(), value.dtype
    return [geometry(item) for item in value]


def test_geometry_is_meta_s() -> None:
    """One process for all: 80 forks would take longer than the operators."""
    from device_training import start

    sim = start()
    differing = {}
    for name, operator in OPERATORS.items():
        for _ in range(2):  # the second time from the plan
            got, expected = geometry(operator("sim")), geometry(operator("meta"))
            if got != expected:
                differing[name] = (got, expected)
    assert not differing, differing
    assert sim.unknown_operators == {}
    assert sim.accelerator.operators_launched > len(OPERATORS)


def test_a_tensor_like_one_of_the_device_is_where_it_is_asked_for() -> None:
    from device_training import start

    sim = start()
    x = floats("sim", 8, 4).t()
    likes: list[Callable[[str], torch.Tensor]] = [
        lambda d: torch.empty_like(x, device=d),
        lambda d: torch.zeros_like(x, device=d, dtype=torch.bfloat16),
        lambda d: torch.full_like(x, 1.5, device=d),
        lambda d: torch.randn_like(x, device=d),
        lambda d: x.new_empty((2, 3), device=d),
        lambda d: x.new_zeros((2, 3), device=d),
        lambda d: x.new_empty_strided((2, 3), (1, 2), device=d),
    ]
    for like in likes:
        expected = geometry(like("sim"))
        launched, allocated = sim.accelerator.operators_launched, torch.sim.memory_allocated()
        for device in ("meta", "cpu"):
            made = like(device)
            assert made.device.type == device
            assert geometry(made) == expected
        assert (sim.accelerator.operators_launched, torch.sim.memory_allocated()) == (launched, allocated)


@pytest.mark.parametrize("options", [{"fused": True}, {"foreach": True}, {"foreach": False}], ids=str)
@pytest.mark.parametrize("optimizer", ["AdamW", "SGD", "Adam"])
def test_optimizers_take_steps(optimizer: str, options: dict[str, bool]) -> None:
    from device_training import start

    sim = start()
    layer = nn.Linear(16, 32, device="sim")
    stepper = getattr(torch.optim, optimizer)(layer.parameters(), lr=1e-3, **options)
    launches = []
    for _ in range(3):
        layer(floats("sim", 4, 16)).mean().backward()
        before = sim.accelerator.operators_launched
        stepper.step()
        stepper.zero_grad()
        launches.append(sim.accelerator.operators_launched - before)
    assert launches[1] == launches[2] > 0
    assert sim.unknown_operators == {}


def test_unknown_operators_are_costed_by_their_bytes_and_named() -> None:
    from device_training import start

    sim = start()
    small, large = floats("sim", 1024), floats("sim", 64 * 1024 * 1024)
    durations = []
    for tensor in (small, large):
        sim.synchronize()
        before = sim.cpu_ns()
        tensor.view(-1, 4, 4).matrix_exp()
        sim.synchronize()
        durations.append(sim.cpu_ns() - before)
    assert sim.unknown_operators == {"aten::linalg_matrix_exp": 2}
    assert durations[1] > durations[0] + 100_000


def test_operators_of_other_libraries_run_by_their_meta_kernel() -> None:
    from device_training import start

    sim = start()

    @torch.library.custom_op("fsdpbench_test::double", mutates_args=(), device_types="cpu")
    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @double.register_fake
    def _(x: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(x)

    assert double(floats("sim", 3, 4)).shape == (3, 4)
    assert sim.unknown_operators == {"fsdpbench_test::double": 1}


@pytest.mark.parametrize("call", ["nonzero", "mask"])
def test_shapes_that_depend_on_data_are_refused_by_name(call: str) -> None:
    from device_training import start

    start()
    tensor = floats("sim", 4)
    with pytest.raises(NotImplementedError, match="depends on data"):
        tensor.nonzero() if call == "nonzero" else tensor[tensor > 0]


def test_using_the_device_before_the_start_is_a_clear_error() -> None:
    with pytest.raises(RuntimeError, match=r"Simulation\.start"):
        torch.empty(4, device="sim")


@pytest.mark.parametrize(("dtype", "masked", "key_heads"), [
    (torch.bfloat16, False, 8), (torch.bfloat16, True, 8), (torch.float32, False, 8),
    (torch.bfloat16, False, 2), (torch.float32, True, 2),
])  # fmt: skip
def test_attention_has_gradients(dtype: torch.dtype, masked: bool, key_heads: int) -> None:
    from device_training import start

    sim = start()
    query = floats("sim", 2, 8, 100, 60, dtype=dtype).requires_grad_()
    key, value = (floats("sim", 2, key_heads, 100, 60, dtype=dtype).requires_grad_() for _ in range(2))
    mask = torch.ones(100, 100, dtype=torch.bool, device="sim") if masked else None
    out = F.scaled_dot_product_attention(query, key, value, mask, enable_gqa=key_heads != 8)
    out.sum().backward()
    assert out.shape == query.shape == query.grad.shape
    assert key.grad.shape == key.shape
    assert sim.unknown_operators == {}


def test_attention_heads_that_do_not_fit_are_refused() -> None:
    from device_training import start

    start()
    query, key = floats("sim", 2, 8, 16, 64), floats("sim", 2, 3, 16, 64)
    with pytest.raises(RuntimeError, match="8 query heads and 3 key heads"):
        F.scaled_dot_product_attention(query, key, key, enable_gqa=True)


def test_autocast_casts_as_cuda_s() -> None:
    from device_training import start

    start()
    layer = nn.Linear(16, 32, device="sim")
    x = floats("sim", 4, 16)
    with torch.autocast("sim", dtype=torch.bfloat16):
        y = layer(x)
        assert y.dtype is torch.bfloat16
        assert F.layer_norm(y, (32,)).dtype is torch.float32
        assert (y + y).dtype is torch.bfloat16
        before = torch.sim.memory_allocated()
        z = layer(x)
        assert torch.sim.memory_allocated() < before + 3 * 1024, "the weight's cast was kept"
        assert y.softmax(-1).dtype is torch.float32
        assert y.softmax(-1, dtype=torch.bfloat16).dtype is torch.bfloat16, "asked for by the caller"
        assert y.sum(-1, dtype=torch.float64).dtype is torch.float64
    y.float().sum().backward()
    del y, z
    assert layer.weight.grad.dtype is torch.float32


def test_cross_entropy_under_autocast_keeps_its_log_probabilities_in_the_logits_dtype() -> None:
    from device_training import start

    start()
    logits, targets = floats("sim", 1024, 4096, dtype=torch.bfloat16), indices("sim", 1024)
    size = logits.numel() * 2
    before = torch.sim.memory_allocated()
    torch.sim.reset_peak_memory_stats()
    with torch.autocast("sim", dtype=torch.bfloat16), torch.no_grad():
        assert F.cross_entropy(logits, targets).dtype is torch.float32
    # Log-probabilities (bf16) and nll_loss's copy of them (fp32); in fp32 throughout it would be four sizes.
    assert 3 * size <= torch.sim.max_memory_allocated() - before < 3.5 * size


def test_rms_norm_is_one_kernel_each_way_as_on_cuda() -> None:
    from device_training import start

    sim = start()
    x = floats("sim", 4, 64).requires_grad_()
    weight = floats("sim", 64).requires_grad_()
    before = sim.accelerator.operators_launched
    y = F.rms_norm(x, (64,), weight)
    assert sim.accelerator.operators_launched - before == 1
    gradient = torch.ones_like(y)
    before = sim.accelerator.operators_launched
    of_x, of_weight = torch.autograd.grad(y, (x, weight), gradient)
    assert sim.accelerator.operators_launched - before == 1
    assert (of_x.shape, of_weight.shape) == (x.shape, weight.shape)


@pytest.mark.parametrize("activation", [F.silu, F.mish, F.gelu])
def test_gradients_of_activations_are_one_kernel_as_on_cuda(
    activation: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    from device_training import start

    sim = start()
    x = floats("sim", 4, 64).requires_grad_()
    y = activation(x)
    gradient = torch.ones_like(y)
    before = sim.accelerator.operators_launched
    (of_x,) = torch.autograd.grad(y, (x,), gradient)
    assert sim.accelerator.operators_launched - before == 1
    assert of_x.shape == x.shape


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_recomputes(reentrant: bool) -> None:
    from device_training import start
    from torch.utils.checkpoint import checkpoint

    sim = start()
    block = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 64)).to("sim")
    x = floats("sim", 4, 64).requires_grad_()
    launches = []
    for recompute in (False, True):
        before = sim.accelerator.operators_launched
        out = checkpoint(block, x, use_reentrant=reentrant) if recompute else block(x)
        out.sum().backward()
        launches.append(sim.accelerator.operators_launched - before)
    assert launches[1] > launches[0] + 2
    assert x.grad.shape == x.shape


def test_weight_gradients_are_told_from_other_products() -> None:
    """`grad.t() @ input` has its own efficiency."""
    from device_training import start

    from fsdpbench.sim.model.kernel_costs import KernelCosts
    from fsdpbench.sim.torch_device.prices import price

    sim = start()
    costs = KernelCosts(sim.profile)
    grad, x = (
        floats("meta", 8192, 2560, dtype=torch.bfloat16),
        floats("meta", 8192, 1024, dtype=torch.bfloat16),
    )
    mm = torch.ops.aten.mm.default
    cost = price(mm, (grad.t(), x), {}, torch.mm(grad.t(), x), costs)
    assert cost.duration_ns == costs.gemm_ns(2560, 1024, 8192, 1, "bf16", "weight_grad")
    weight = floats("meta", 2560, 1024, dtype=torch.bfloat16)
    for a, b in ((x, weight.t()), (grad, weight)):
        m, k = a.shape
        cost = price(mm, (a, b), {}, torch.mm(a, b), costs)
        assert cost.duration_ns == costs.gemm_ns(m, b.shape[1], k, 1, "bf16", "forward")
