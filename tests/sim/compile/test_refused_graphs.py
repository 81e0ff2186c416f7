"""Graphs without a counterpart are refused by name and line; a user's own operators have their prices."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fsdpbench.sim.torch_device.compile.refusals import (
    CompileRefusedError,
    refusal_behind,
    refuse_graph,
    refused,
)

pytestmark = pytest.mark.simulated


def start() -> Any:
    """A simulated GPU among eight on which things compile, without anything on disk."""
    from fsdpbench.sim import Simulation, load_profile
    from fsdpbench.sim.torch_device.compile.front_end import install

    install()
    torch._inductor.config.force_disable_caches = True
    return Simulation.start(load_profile("h100-80gb"), 8, 8)


def graph_of(name: str) -> torch.fx.Graph:
    """A graph that calls something called `name`."""
    graph = torch.fx.Graph()
    target: Any = lambda x: x  # noqa: E731
    target.__name__ = name
    node = graph.call_function(target, (graph.placeholder("x"),))
    node.stack_trace = '  File "train.py", line 7, in forward\n    return f(x)'
    return graph


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("cond", 'torch\'s cond, File "train.py", line 7, in forward.*decide it in Python'),
        ("while_loop", "control flow"),
        ("triton_kernel_wrapper_functional", "Triton kernel.*train.py.*operator_price"),
        ("invoke_subgraph", "nested_compile_region.*call the function as it is"),
    ],
)
def test_nodes_without_a_counterpart(name: str, words: str) -> None:
    with pytest.raises(CompileRefusedError, match=words):
        refuse_graph(graph_of(name))
    refuse_graph(graph_of("addmm"))


def test_a_refusal_is_found_behind_the_compilers_errors() -> None:
    wrapped = RuntimeError("backend='inductor' raised:")
    wrapped.__cause__ = ValueError("lowering failed")
    wrapped.__cause__.__context__ = refused("this")
    assert refusal_behind(wrapped) is wrapped.__cause__.__context__
    assert refusal_behind(ValueError("other")) is None


@pytest.mark.campaign
@pytest.mark.parametrize("kind", ["cond", "while_loop", "scan"])
def test_control_flow_by_its_line(kind: str) -> None:
    from torch._higher_order_ops.scan import scan
    from torch._higher_order_ops.while_loop import while_loop

    start()
    one = torch.ones((), device="sim")
    programs: dict[str, Any] = {
        "cond": lambda x: torch.cond(x.sum() > 0, lambda y: y + 1, lambda y: y - 1, (x,)),
        "while_loop": lambda x: while_loop(lambda n, y: n < 3, lambda n, y: (n + 1, y * 2), (one, x)),
        "scan": lambda x: scan(lambda carry, y: (carry + y, carry * y), x[0], x),
    }
    with pytest.raises(CompileRefusedError) as refusal:
        torch.compile(programs[kind])(torch.zeros(8, 8, device="sim"))
    first = str(refusal.value).splitlines()[0]
    assert f"torch's {kind}" in first
    assert "test_refused_graphs.py" in first


@pytest.mark.campaign
def test_shapes_that_depend_on_data_are_refused_as_in_eager_programs() -> None:
    start()
    x = torch.zeros(8, 8, device="sim")
    with pytest.raises(NotImplementedError, match=r"nonzero.*torch\.where"):
        torch.compile(lambda x: x.nonzero() + 1)(x)


@pytest.mark.campaign
def test_an_operator_of_the_users_own_runs_at_its_price() -> None:
    """As a Triton kernel does that is made an operator."""
    from fsdpbench.sim.torch_device.compile.refusals import REPORT
    from fsdpbench.sim.torch_device.prices import OperatorCost, operator_price

    @torch.library.custom_op("of_a_test::norm", mutates_args=(), device_types="cuda")
    def norm(x: torch.Tensor) -> torch.Tensor:
        raise AssertionError

    norm.register_fake(torch.empty_like)

    @operator_price("of_a_test::norm")
    def price(call: Any, costs: Any) -> Any:
        return OperatorCost("my_norm", 7_000_000)

    simulation = start()
    compiled = torch.compile(lambda x: norm(x * 2) + 1)
    compiled(torch.zeros(8, 8, device="sim"))
    simulation.synchronize()
    began = simulation.cpu_ns()
    compiled(torch.zeros(8, 8, device="sim"))
    simulation.synchronize()
    assert 7_000_000 < simulation.cpu_ns() - began < 7_200_000
    assert REPORT.to_dict()["fallbacks"] == {"of_a_test.norm.default": 1}
    assert simulation.unknown_operators == {}


@pytest.mark.campaign
def test_collectives_inside_of_a_graph_are_those_of_the_network() -> None:
    """Functional ones, as SimpleFSDP has them."""
    import torch.distributed._functional_collectives as functional

    simulation = start()
    simulation.init_process_group()
    group = torch.distributed.group.WORLD

    def gathered(x: torch.Tensor) -> torch.Tensor:
        return functional.all_gather_tensor(x * 2, 0, group) + 1

    x = torch.zeros(1 << 22, 8, device="sim")
    took = []
    for program in (gathered, torch.compile(gathered, fullgraph=True)):
        for _ in range(2):
            simulation.synchronize()
            began = simulation.cpu_ns()
            assert program(x).shape == (1 << 25, 8)
            simulation.synchronize()
        took.append(simulation.cpu_ns() - began)
    eager, compiled = took
    assert compiled == pytest.approx(eager, rel=0.1)
