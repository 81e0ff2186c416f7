"""Names that descriptions list without torch are those that the code of training knows."""

from __future__ import annotations

from fsdpbench.systems import model_code, training
from fsdpbench.workloads import losses, rotations, shape
from fsdpbench.workloads.families import llama_workload
from fsdpbench.workloads.layers import DTYPES


def test_rotations_of_a_shape_are_those_of_the_model() -> None:
    assert set(llama_workload.ROTARY) == rotations.ROTATIONS.keys()


def test_bytes_are_those_of_the_dtypes() -> None:
    assert {name: dtype.itemsize for name, dtype in DTYPES.items()} == shape.DTYPE_BYTES


def test_losses_that_have_the_lm_head_inside() -> None:
    assert set(model_code.LINEAR_LOSSES) == losses.LINEAR_LOSSES.keys()


def test_kernels_of_attention_that_compute_in_any_dtype() -> None:
    assert set(model_code.IN_ANY_DTYPE) == training.KERNELS.keys()
