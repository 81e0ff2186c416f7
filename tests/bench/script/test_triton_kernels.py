"""Scripts that launch Triton kernels run, with Triton and without, eager and compiled, each at a price."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import pytest

from fsdpbench.script.triton_kernels import Launcher, _Finder

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


def test_kernels_are_defined_and_launched(without_triton: None) -> None:
    defined: dict[str, Any] = {}
    before = set(sys.modules)
    exec(KERNELS, defined)
    for name in set(sys.modules) - before:
        del sys.modules[name]
    for name, parameters in {"fill": ["x", "n", "BLOCK"], "even": ["x", "n", "EVEN"]}.items():
        launcher = defined[name][(2,)]
        assert isinstance(launcher, Launcher)
        assert (launcher.name, launcher.parameters) == (name, parameters)
    triton = defined["triton"]
    assert (triton.cdiv(10, 4), triton.next_power_of_2(33)) == (3, 64)


PROGRAM = (
    KERNELS
    + """
class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        out = torch.empty_like(x)
        double[lambda meta: (triton.cdiv(x.numel(), meta["BLOCK"]),)](x, out, x.numel(), BLOCK=64)
        return out
    @staticmethod
    def backward(ctx, grad):
        fill[(1,)](grad, grad.numel())
        return grad

class Layer(torch.nn.Linear):
    def forward(self, x):
        return Doubled.apply(super().forward(x)).relu() + 1

@triton.jit
def double(x, out, n, BLOCK: tl.constexpr):
    pass

if {priced}:
    from fsdpbench.sim.prices import OperatorCost, operator_price

    @operator_price(double)
    def price(call, costs):
        assert call.kwargs["x"].shape == call.args[1].shape and call.kwargs["BLOCK"] == 64
        return OperatorCost("double_kernel", 5_000_000)

model = torch.nn.Sequential(Layer(64, 64), Layer(64, 64)).cuda()
for layer in model if {compiled} else ():
    layer.compile(fullgraph=True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(4):
    model(torch.randn(1 << 20, 64, device="cuda")).sum().backward()
    optimizer.step()
"""
)


@pytest.mark.plain_cases("False-False", "True-True")
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("priced", [False, True])
def test_a_launch_has_a_price(run_probe: RunScript, priced: bool, compiled: bool) -> None:
    run = run_probe(PROGRAM.replace("{priced}", str(priced)).replace("{compiled}", str(compiled)))
    assert run.result["status"] == "ok", run.cause
    assert set(run.result["unknown_operators"]) == ({"fill"} if priced else {"fill", "double"})
    share = run.result["script"]["unknown_share"]
    assert share.keys() == run.result["unknown_operators"].keys()
    assert 0.001 < share["fill"] < 0.5
    assert not priced or run.result["step_time_s"] > 0.01
    if compiled:
        assert run.result["compilation"]["graph_breaks"] == {}


def test_a_script_that_defines_them_trains(run_probe: RunScript) -> None:
    run = run_probe(KERNELS + "train(7)")
    assert run.result["status"] == "ok", run.cause


def test_torch_does_not_take_it_for_the_real_one(run_probe: RunScript) -> None:
    run = run_probe(
        """
        from torch.utils._triton import has_triton_package
        known = has_triton_package()
        import triton
        assert known == (type(triton).__name__ == "module") == has_triton_package()
        train(7)
        """
    )
    assert run.result["status"] == "ok", run.cause
