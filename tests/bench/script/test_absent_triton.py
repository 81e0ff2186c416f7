"""Scripts that define Triton kernels run where there is no Triton; a kernel that is launched is refused."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from conftest import RunScript

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is not None, reason="Triton is installed, and taken as it is"
)

KERNELS = """
import triton
import triton.language as tl
from triton.language.extra import libdevice

@triton.autotune(configs=[triton.Config({"BLOCK": 64}, num_warps=size) for size in (4, 8)], key=["n"])
@triton.jit
def fill(x, n, BLOCK: tl.constexpr = 64):
    tl.store(x + tl.arange(0, BLOCK), 1.0)

@triton.jit(debug=True)
def helper(x):
    return libdevice.tanh(x)

@triton.heuristics({"EVEN": lambda arguments: arguments["n"] % 2 == 0})
@triton.jit
def even(x, n, EVEN: tl.constexpr):
    pass

assert [fill.__name__, even.__name__] == ["fill", "even"]
assert isinstance(triton.__version__, str)
"""
LAUNCHES = """
x = torch.zeros(64, device="cuda")
for kernel in (fill, even):
    try:
        kernel[(triton.cdiv(64, 32),)](x, n=64)
    except NotImplementedError as error:
        assert f"Triton kernel {kernel.__name__} runs code compiled for CUDA" in str(error), error
        print("refused", kernel.__name__)
"""


def test_kernels_are_defined_and_refused_when_they_are_launched(run_probe: RunScript) -> None:
    run = run_probe(KERNELS + LAUNCHES + "train(7)")
    assert run.result["status"] == "ok", run.cause
    assert run.output.split("\n")[:2] == ["refused fill", "refused even"]


def test_torch_does_not_take_it_for_the_real_one(run_probe: RunScript) -> None:
    run = run_probe(KERNELS + "from torch.utils._triton import has_triton\nassert not has_triton()\ntrain(7)")
    assert run.result["status"] == "ok", run.cause
