"""What the CPU refuses, the device refuses, with the same type of exception: dtypes, shapes, indices.

The CPU is nearly as strict as CUDA, and where it is not the same the difference has a reason here.
"""

from __future__ import annotations

import pytest
import torch

pytestmark = pytest.mark.simulated

_MIXED = "the CPU's kernel takes parameters in float32 beside bfloat16, CUDA's does not"
_FIRST = "both refuse, but look first at another of two faults"
EXPLAINED = {
    "layer_norm: bf16@0": _MIXED,
    "group_norm: bf16@0": _MIXED,
    "bmm: bool@0": _FIRST,
    "einsum: bool@0": _FIRST,
    "conv_transpose2d: i32@0": _FIRST,
    "conv_transpose2d: bool@0": _FIRST,
    "scatter: one dimension less@2": _FIRST,
    "scatter_add: one dimension less@2": _FIRST,
}


def test_the_device_refuses_what_the_cpu_refuses() -> None:
    """More than a thousand calls, most of them wrong; one that has become right is taken off the list."""
    from device_training import start
    from refusal_cases import cases

    start()
    explained = set(EXPLAINED)
    if torch.__version__ < "2.12":  # its kernel was chosen before dtypes were compared: another subclass
        explained.add("mv: bool@0")
    differences, refused, alike = set(), 0, 0
    for case in cases():
        expected, found = case.run("cpu"), case.run("sim")
        if type(expected) is not type(found):
            differences.add(case.name)
        elif expected is not None:
            refused += 1
            alike += str(expected).splitlines()[0] == str(found).splitlines()[0]
    assert not differences ^ explained, differences ^ explained
    assert refused > 600
    assert alike > 0.6 * refused  # the words; others name what is CUDA's or Python's


def test_integers_have_no_matrix_products() -> None:
    """The CPU has them; CUDA has not."""
    from device_training import start

    start()
    a = torch.zeros(4, 4, dtype=torch.int64, device="sim")
    with pytest.raises(NotImplementedError, match="\"addmm_cuda\" not implemented for 'Long'"):
        a @ a
    with pytest.raises(NotImplementedError, match="not implemented for 'Long'"):
        torch.bmm(a[None], a[None])


def test_results_in_place_fit_their_target() -> None:
    from device_training import start

    start()
    whole = torch.ones(3, dtype=torch.int64, device="sim")
    real = whole.float()
    for wrong in (lambda: whole.mul_(real), lambda: whole.div_(whole), lambda: (whole > 0).add_(whole)):
        with pytest.raises(RuntimeError, match="can't be cast to the desired output type"):
            wrong()
    real.mul_(whole)
    whole.add_(2).div_(2, rounding_mode="floor")
