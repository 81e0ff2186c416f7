"""Shapes and dtypes of results are torch's, for drawn shapes: attention, and all that torch has samples of.

torch's own generator of samples (`torch.testing`'s database of operators) draws the arguments; the expected
results come from the CPU, which also runs what the meta device has no rule for.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_leaves, tree_map_only

pytestmark = pytest.mark.simulated

NOT_AS_CPU = {
    "native_batch_norm",
    "_native_batch_norm_legit",
    "bincount",
    "nn.functional.one_hot",
    "linalg.lstsq",
}
"""The CPU leaves statistics of evaluation empty, and has other drivers of least squares; `bincount` and
`one_hot` have as many bins as values say."""

REFUSED = {
    *("combinations", "masked_select", "__getitem__", "unique", "unique_consecutive", "nonzero", "argwhere"),
    *("repeat_interleave", "bincount", "masked_fill", "index_fill", "index_put", "prod"),  # lengths by values
    *("to_sparse", "sparse.mm", "sparse.sampled_addmm", "nn.functional.embedding"),
    "nn.functional.embedding_bag",
    *("histogram", "histogramdd", "tensor_split"),  # CUDA refuses them, too
    *("torch._scaled_mm", "torch._scaled_mm_v2"),  # in fp8, which this profile has not
    "cov",  # asks the device whether weights are few, and warns
}
"""What the CPU runs and the device does not; a script, whose whole numbers are followed, runs more of it."""

Attention = Callable[[str], torch.Tensor]


def attentions() -> Iterator[tuple[str, Attention]]:
    """Attention of queries, keys and values that differ in batch, heads, lengths, head sizes and masks."""
    leading = [((2, 4), (2, 4), (2, 4)), ((2, 4), (2, 2), (2, 2)), ((2, 4), (2, 1), (2, 1))]
    leading += [((2, 4), (1, 4), (1, 4)), ((2, 1), (2, 4), (2, 4)), ((4,), (4,), (4,)), ((4,), (1,), (1,))]
    leading += [
        ((), (), ()),
        ((2, 3, 4), (2, 3, 4), (2, 3, 4)),
        ((2, 4), (4,), (4,)),
        ((2, 8), (2, 4), (2, 2)),
    ]
    sizes = [(64, 64), (192, 128), (64, 128), (72, 40), (20, 20), (320, 64)]
    kinds = ["plain", "causal", "mask", "bias", "grouped"]
    every = list(itertools.product(leading, sizes, [(16, 16), (16, 8), (1, 24)], kinds))
    for heads, (size, of_values), lengths, kind in random.Random(0).sample(every, 150):
        if kind == "grouped" and not all(heads):
            continue

        def attend(
            device: str, *, dtype: Any = torch.bfloat16, h: Any = heads, s: Any = (size, of_values),
            n: Any = lengths, kind: str = kind,
        ) -> torch.Tensor:  # fmt: skip
            shapes = [(*h[0], n[0], s[0]), (*h[1], n[1], s[0]), (*h[2], n[1], s[1])]
            made = [torch.zeros(x, device=device, dtype=dtype, requires_grad=True) for x in shapes]
            mask = {"mask": torch.bool, "bias": dtype}.get(kind)
            result = F.scaled_dot_product_attention(
                *made,
                attn_mask=None if mask is None else torch.zeros(n, device=device, dtype=mask),
                is_causal=kind == "causal",
                enable_gqa=kind == "grouped",
            )
            result.sum().backward()
            assert [x.grad.shape for x in made] == [x.shape for x in made]
            return result

        yield f"{kind} {heads} {size}/{of_values} {lengths}", attend


def geometry(value: Any) -> Any:
    return [(tuple(x.shape), x.dtype) if isinstance(x, torch.Tensor) else type(x) for x in tree_leaves(value)]


def outcome(call: Callable[[], Any]) -> Any:
    """The geometry of what a call returns, or its error."""
    try:
        return geometry(call())
    except (RuntimeError, IndexError, ValueError) as error:
        return error


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_attention(dtype: str) -> None:
    from device_training import start

    sim = start()
    differing, ran = {}, 0
    for name, attend in attentions():
        expected = outcome(lambda: attend("cpu", dtype=getattr(torch, dtype)))  # type: ignore[call-arg]  # noqa: B023
        got = outcome(lambda: attend("sim", dtype=getattr(torch, dtype)))  # type: ignore[call-arg]  # noqa: B023
        if got != expected and not (isinstance(got, Exception) and isinstance(expected, Exception)):
            differing[name] = (got, expected)
        ran += not isinstance(got, Exception)
    assert not differing, differing
    assert ran > 60
    assert sim.unknown_operators == {}


@pytest.mark.parametrize(
    ("backend", "kernel"),
    [
        ("FLASH_ATTENTION", "flash"),
        ("EFFICIENT_ATTENTION", "efficient"),
        ("MATH", "softmax"),
    ],
)
def test_the_kernel_is_one_that_the_program_allows(backend: str, kernel: str) -> None:
    from device_training import start

    start()
    x = torch.zeros(2, 4, 16, 64, device="sim", dtype=torch.bfloat16, requires_grad=True)
    with sdpa_kernel(getattr(SDPBackend, backend)):
        result = F.scaled_dot_product_attention(x, x, x)
    nodes, names = [result.grad_fn], []
    while nodes:
        node = nodes.pop()
        names.append(node.name().lower())
        nodes += [each for each, _ in node.next_functions if each is not None]
    assert any(kernel in name for name in names), names


def own_kernels() -> set[str]:
    """Names of operators that have a simulated kernel of their own, or a shape rule of ours."""
    from fsdpbench.sim.torch_device.operators import attention, kernels, special_operators

    names = {*special_operators.SPECIAL_OPERATORS, *attention.SHAPE_RULES, *kernels.ONE_KERNEL}
    return {name.partition(".")[0].removesuffix("_") for name in names}


def samples(own_only: bool) -> Iterator[tuple[str, Any, Any]]:
    """Operators of torch's database with samples of their arguments on the host."""
    pytest.importorskip("expecttest", reason="needs expecttest (the extra `test`)")
    from torch.testing._internal.common_methods_invocations import op_db

    own = own_kernels() | {
        "to",
        "clone",
        "argsort",
        "__getitem__",
        "nn.functional.scaled_dot_product_attention",
    }
    for info in op_db:
        if info.name in NOT_AS_CPU or not info.dtypes or "jiterator" in info.name:  # of CUDA alone
            continue
        if own_only and info.name not in own:
            continue
        dtype = torch.float32 if torch.float32 in info.dtypes else sorted(info.dtypes, key=str)[0]
        torch.manual_seed(0)
        for sample in itertools.islice(info.sample_inputs("cpu", dtype), 10):
            yield f"{info.name}.{info.variant_test_name}", info.op, sample


def on(device: str) -> Callable[[Any], Any]:
    def moved(x: torch.Tensor) -> torch.Tensor:
        if not x.is_cpu or x.layout is not torch.strided:
            return x
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device)

    return lambda value: tree_map_only(torch.Tensor, moved, value)


def gradients(operator: Callable[..., Any], arguments: Any) -> Any:
    """The results of a call, and the gradients of its floating-point tensors."""
    leaves = []

    def with_gradient(x: torch.Tensor) -> torch.Tensor:
        if x.is_floating_point() and x.layout is torch.strided:
            x = x.detach().requires_grad_()
            leaves.append(x)
        return x

    first, others, names = tree_map_only(torch.Tensor, with_gradient, arguments)
    out = operator(first, *others, **names)
    results = [x for x in tree_leaves(out) if isinstance(x, torch.Tensor) and x.requires_grad]
    if not results:
        return out, []
    total = sum((x.abs() if x.is_complex() else x).sum() for x in results)
    return out, torch.autograd.grad(total, leaves, allow_unused=True)  # type: ignore[arg-type]


def compared(own_only: bool) -> tuple[int, dict[str, Any], set[str]]:
    """How many calls of torch's samples, with their gradients, were compared; those that differ from the
    CPU's; and the names of those that the device refuses."""
    moved, count, differing, refused = on("sim"), 0, {}, set()
    for name, operator, sample in samples(own_only):
        given = (sample.input, sample.args, sample.kwargs)
        expected = outcome(lambda: gradients(operator, given))  # noqa: B023
        got = outcome(lambda: gradients(operator, moved(given)))  # noqa: B023
        if isinstance(expected, Exception):
            continue  # tests of refusals compare errors
        if isinstance(got, Exception):
            refused.add(name.rpartition(".")[0])
            continue
        count += 1
        if got != expected:
            differing[name] = (got, expected)
    return count, differing, refused - REFUSED


def test_operators_with_a_kernel_of_their_own() -> None:
    from device_training import start

    start()
    count, differing, refused = compared(own_only=True)
    assert not differing, differing
    assert not refused
    assert count > 150


@pytest.mark.campaign
def test_all_of_torchs_operators() -> None:
    from device_training import start

    start()
    count, differing, refused = compared(own_only=False)
    assert not differing, differing
    assert not refused
    assert count > 2500


@pytest.mark.parametrize("of_input", [False, True])
@pytest.mark.parametrize("of_weights", [False, True])
def test_channels_last_as_in_convolutions_of_torch(of_input: bool, of_weights: bool) -> None:
    """Copies, convolutions and their gradients have the CPU's memory format, which is cuDNN's here."""
    from device_training import start

    start()
    found = []
    for device in ("cpu", "sim"):
        layers = torch.nn.Sequential(
            torch.nn.Conv2d(4, 8, 3), torch.nn.Conv2d(8, 8, 3, groups=8), torch.nn.ConvTranspose2d(8, 6, 2, 2)
        )
        kinds = [torch.channels_last if last else torch.contiguous_format for last in (of_input, of_weights)]
        layers = layers.to(device, memory_format=kinds[1])
        x = torch.zeros(2, 4, 9, 9).to(device, memory_format=kinds[0]).requires_grad_()
        y = layers(x)
        y.sum().backward()
        made = [y, y.detach().cpu(), x, x.grad, *(p.grad for p in layers.parameters())]
        found.append([each.stride() for each in made])
    assert found[0] == found[1]


def test_group_norm_makes_contiguous_tensors() -> None:
    from device_training import start

    start()
    x = torch.zeros(2, 4, 3, 3, device="sim").to(memory_format=torch.channels_last)
    assert F.group_norm(x, 2).is_contiguous()


@pytest.mark.parametrize("per_channel", [False, True])
def test_quantisation_that_is_pretended(per_channel: bool) -> None:
    from device_training import start

    start()
    x = torch.zeros(4, 6, device="sim", requires_grad=True)
    count = 4 if per_channel else 1
    scale, zero = (torch.ones(count, device="sim", requires_grad=True) for _ in range(2))
    whole = torch.zeros(count, dtype=torch.int32, device="sim")
    if per_channel:
        fixed = torch.fake_quantize_per_channel_affine(x, scale.detach(), whole, 0, -128, 127)
        learned = torch._fake_quantize_learnable_per_channel_affine(x, scale, zero, 0, -128, 127, 1.0)
    else:
        fixed = torch.fake_quantize_per_tensor_affine(x, scale.detach(), whole, -128, 127)
        learned = torch._fake_quantize_learnable_per_tensor_affine(x, scale, zero, -128, 127, 1.0)
    found = torch.autograd.grad((fixed + learned).sum(), [x, scale, zero])
    assert [each.shape for each in found] == [(4, 6), (count,), (count,)]


def test_least_squares_as_cuda_s_driver() -> None:
    from device_training import start

    start()
    a, b = torch.zeros(4, 6, 2, device="sim", requires_grad=True), torch.zeros(4, 6, 3, device="sim")
    found = torch.linalg.lstsq(a, b)
    assert [each.shape for each in found] == [(4, 2, 3), (4, 3), (0,), (0,)]
    assert torch.autograd.grad(found.solution.sum(), a)[0].shape == a.shape
    assert torch.linalg.lstsq(a, b[..., 0]).solution.shape == (4, 2)
