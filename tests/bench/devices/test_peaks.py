"""Peak rates by the driver's names for GPUs."""

import pytest

from fsdpbench.engine.devices.detection import peak_flops_of


@pytest.mark.parametrize(
    ("name", "dtype", "tflops"),
    [
        ("NVIDIA A100-SXM4-80GB", "bf16", 312),
        ("NVIDIA A100-SXM4-40GB", "fp32", 19.5),
        ("NVIDIA A100 80GB PCIe", "tf32", 156),
        ("NVIDIA H100 80GB HBM3", "bf16", 989),
        ("NVIDIA H100 PCIe", "bf16", 756),
        ("NVIDIA H100 NVL", "bf16", 835.5),
        ("NVIDIA H200", "fp16", 989),
        ("NVIDIA L40S", "bf16", 362),
        ("NVIDIA L4", "bf16", 121),
        ("Tesla V100-SXM2-32GB", "fp16", 125),
    ],
)
def test_known_gpus(name, dtype, tflops):
    assert peak_flops_of(name, dtype) == pytest.approx(tflops * 1e12)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("NVIDIA A10G", "bf16"), ("NVIDIA GeForce GTX 1080", "fp32"), ("Tesla V100-SXM2-32GB", "bf16")],
)
def test_what_is_not_known_is_not_guessed(name, dtype):
    assert peak_flops_of(name, dtype) is None
