"""Scripts that define Triton kernels run where there is no Triton; a kernel that is launched is refused."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest

from fsdpbench.script.cuda.compiling import _Finder
from fsdpbench.script.cuda.refusals import NotSimulatedError

if TYPE_CHECKING:
    from conftest import RunScript

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
"""


@pytest.fixture
def without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where Triton is not installed, also where it is."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "triton"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [_Finder(), *sys.meta_path])


def test_kernels_are_defined_and_refused_when_they_are_launched(without_triton: None) -> None:
    defined: dict[str, object] = {}
    before = set(sys.modules)
    exec(KERNELS, defined)
    for name in set(sys.modules) - before:
        del sys.modules[name]
    for name in ("fill", "even"):
        kernel: object = defined[name]
        with pytest.raises(NotSimulatedError, match=f"^Triton kernel {name} is not simulated: code compiled"):
            kernel[(2,)]("x", n=64)  # type: ignore[index]
    assert isinstance(defined["triton"].__version__, str)  # type: ignore[attr-defined]


def test_a_script_that_defines_them_trains(run_probe: RunScript) -> None:
    run = run_probe(KERNELS + "train(7)")
    assert run.result["status"] == "ok", run.cause


def test_torch_does_not_take_it_for_the_real_one(run_probe: RunScript) -> None:
    run = run_probe(
        """
        from torch.utils._triton import has_triton_package
        known = has_triton_package()
        import triton
        assert known == (triton.__version__ != "0.0.0") == has_triton_package()
        train(7)
        """
    )
    assert run.result["status"] == "ok", run.cause
