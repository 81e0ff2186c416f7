"""Which arithmetic products are taken to use: torch's own settings decide."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from fsdpbench.sim.torch_device.flops import compute_type


@pytest.fixture(autouse=True)
def settings_of_before() -> Iterator[None]:
    convolutions, matrices = torch.backends.cudnn.allow_tf32, torch.get_float32_matmul_precision()
    yield
    torch.backends.cudnn.allow_tf32 = convolutions
    torch.set_float32_matmul_precision(matrices)


@pytest.mark.parametrize(
    ("dtype", "name"),
    [(torch.bfloat16, "bf16"), (torch.float16, "fp16"), (torch.float64, "fp32")],
)
def test_other_types_are_never_rounded(dtype: torch.dtype, name: str) -> None:
    torch.set_float32_matmul_precision("high")
    assert compute_type(dtype) == compute_type(dtype, convolution=True) == name


def test_by_default_convolutions_are_rounded_and_matrix_products_are_not() -> None:
    assert compute_type(torch.float32) == "fp32"
    assert compute_type(torch.float32, convolution=True) == "tf32"


def test_each_follows_its_own_setting() -> None:
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.backends.cudnn.allow_tf32 = False
    assert compute_type(torch.float32) == "tf32"
    assert compute_type(torch.float32, convolution=True) == "fp32"


@pytest.mark.parametrize(("precision", "name"), [("ieee", "fp32"), ("tf32", "tf32")])
@pytest.mark.parametrize("convolution", [False, True])
def test_the_newer_names_count_too(convolution: bool, precision: str, name: str) -> None:
    backend = torch.backends.cudnn.conv if convolution else torch.backends.cuda.matmul  # type: ignore[attr-defined]
    before = backend.fp32_precision
    try:
        backend.fp32_precision = precision
        assert compute_type(torch.float32, convolution=convolution) == name
    finally:
        backend.fp32_precision = before
