"""Prices of calls that depend on more than their shapes' product: shared heads, biases, plain copies."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fsdpbench.sim.model.kernel_costs import KernelCosts
from fsdpbench.sim.model.profile import load_profile
from fsdpbench.sim.torch_device.prices import price

ATEN = torch.ops.aten
PROFILE = load_profile("a100-80gb")


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def priced(func: Any, *args: Any, out: Any) -> int:
    return price(func, args, {}, out, KernelCosts(PROFILE)).duration_ns


@pytest.mark.parametrize("forward", [True, False])
def test_shared_keys_and_values_move_fewer_bytes(forward: bool) -> None:
    query = meta(2, 32, 2048, 128)

    def duration(kv_heads: int) -> int:
        key = meta(2, kv_heads, 2048, 128)
        if forward:
            return priced(
                ATEN._scaled_dot_product_flash_attention.default, query, key, key, 0.0, True, out=[query]
            )
        arguments = (query, query, key, key, query, None, None, None, 2048, 2048, 0.0, True, None, None)
        func = ATEN._scaled_dot_product_flash_attention_backward.default
        return priced(func, *arguments, out=[query, key, key])

    moved = 2 * 2 * 24 * 2048 * 128 * 2  # keys and values of 2 samples: 24 heads less, 2 bytes an element
    rate = PROFILE.memory_bandwidth * PROFILE.attention.memory_efficiency
    expected = moved / rate * 1e9 * (1.0 if forward else 2.5)
    assert duration(32) - duration(8) == pytest.approx(expected, rel=0.01)


def test_a_bias_is_read() -> None:
    query, bias = meta(2, 16, 1024, 64), meta(2, 16, 1024, 1024)
    func = ATEN._scaled_dot_product_efficient_attention.default
    plain = priced(func, query, query, query, None, True, 0.0, False, out=[query])
    whole = priced(func, query, query, query, bias, True, 0.0, False, out=[query])
    shared = priced(
        func, query, query, query, bias[:1, :1].expand(2, 16, -1, -1), True, 0.0, False, out=[query]
    )
    assert plain < shared < whole
    read = bias.nbytes / (PROFILE.bandwidth.efficiency["pointwise"] * PROFILE.memory_bandwidth)
    assert whole - plain == pytest.approx(read * 1e9 + PROFILE.bandwidth.floor_us * 1e3, rel=0.01)


def test_whole_copies_are_the_driver_s() -> None:
    x = meta(4096, 4096)
    plain = priced(ATEN.clone.default, x, out=meta(4096, 4096))
    turned = priced(ATEN.clone.default, x.t(), out=meta(4096, 4096))
    efficiency, floor = PROFILE.bandwidth.efficiency, PROFILE.bandwidth.floor_us * 1e3
    assert (turned - floor) / (plain - floor) > efficiency["memcpy"] / efficiency["copy"]
    assert efficiency["memcpy"] > efficiency["copy"]
    assert priced(ATEN.copy_.default, meta(4096, 4096), x, out=x) == plain
    cast = priced(ATEN.copy_.default, meta(4096, 4096, dtype=torch.float32), x, out=x)
    assert cast > 1.5 * plain


@pytest.mark.parametrize("backward", [False, True])
def test_convolutions_in_float32_are_rounded_to_tf32_by_default(
    backward: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, weight, y = (
        meta(*shape, dtype=torch.float32) for shape in ((8, 64, 56, 56), (64, 64, 3, 3), (8, 64, 56, 56))
    )
    geometry = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)

    def duration() -> int:
        if backward:
            func = ATEN.convolution_backward.default
            return priced(func, y, x, weight, None, *geometry, [True, True, False], out=[x, weight, None])
        return priced(ATEN.convolution.default, x, weight, None, *geometry, out=y)

    rounded = duration()
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    assert duration() > 4 * rounded


@pytest.mark.parametrize(
    ("func", "arguments", "passes"),
    [
        (ATEN.sort.default, (), 4),
        (ATEN._fft_c2c.default, ([1], 0, True), 1),
        (ATEN._fft_c2c.default, ([0, 1], 0, True), 2),
        (ATEN.squeeze_.dim, (0,), 0),
        (ATEN.transpose_.default, (0, 1), 0),
        (ATEN.diagonal_copy.default, (), 1),
        (ATEN.cummax.default, (0,), 1),
    ],
)
def test_each_pass_reads_and_writes_everything(func: Any, arguments: Any, passes: int) -> None:
    x, y = meta(4096, 4096, dtype=torch.complex64), meta(4096, 4096, dtype=torch.complex64)
    cost = price(func, (x, *arguments), {}, y, KernelCosts(PROFILE))
    assert (cost.nbytes, cost.unknown) == (passes * 2 * x.nbytes, False)


def test_rows_are_written_and_what_is_not_in_place_is_copied_first() -> None:
    x, index = meta(1024, 256), meta(8, dtype=torch.int64)
    costs = KernelCosts(PROFILE)
    rows = 8 * 256 * 2 + 8 * 8
    filled = price(ATEN.index_fill_.int_Scalar, (x, 0, index, 1.0), {}, x, costs)
    copied = price(ATEN.index_fill.int_Scalar, (x, 0, index, 1.0), {}, meta(1024, 256), costs)
    assert (filled.nbytes, copied.nbytes) == (rows, rows + 2 * x.nbytes)
    places, values = meta(8, 256, dtype=torch.int64), meta(8, 256)
    within = price(ATEN.scatter_add_.default, (x, 0, places, values), {}, x, costs)
    copy = price(ATEN.scatter_add.default, (x, 0, places, values), {}, meta(1024, 256), costs)
    assert copy.nbytes - within.nbytes == 2 * x.nbytes


def test_rows_that_are_added_cost_the_same_by_any_operator() -> None:
    x, index, values, costs = meta(1024, 256), meta(8, dtype=torch.int64), meta(8, 256), KernelCosts(PROFILE)
    added = price(ATEN.index_add_.default, (x, 0, index, values), {}, x, costs).nbytes
    put = [price(ATEN.index_put_.default, (x, [index], values, each), {}, x, costs) for each in (True, False)]
    assert put[0].nbytes == added > 3 * put[1].nbytes


def test_packed_attention_is_attention_of_equally_long_sequences() -> None:
    """Forward and backward, also by a causal window, with the scratch memory of a batch."""
    costs = KernelCosts(PROFILE)
    starts, packed = torch.tensor([0, 512, 1024, 2048], dtype=torch.int32), meta(2048, 8, 64)
    batch = meta(3, 8, 2048 // 3, 64)
    after = (starts, starts, 1024, 1024, 0.0)
    dense = price(ATEN._scaled_dot_product_flash_attention.default, (batch,) * 3, {}, [batch], costs)
    found = price(
        ATEN._flash_attention_forward.default, ((packed,) * 3 + after + (False, False)), {}, [packed], costs
    )
    assert (found.duration_ns, found.unknown) == (dense.duration_ns, False)
    windows = {"window_size_left": -1, "window_size_right": 0}
    both = [
        price(ATEN._flash_attention_backward.default, args, kwargs, [packed] * 3, costs)
        for args, kwargs in (
            ((packed,) * 5 + (packed,) + after + (True, packed, packed), {}),
            ((packed,) * 5 + (packed,) + after + (False, packed, packed), windows),
        )
    ]
    assert both[0] == both[1]
    assert both[0].workspace_bytes
    assert both[0].duration_ns > found.duration_ns
