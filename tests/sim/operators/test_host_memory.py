"""Large host tensors of a simulated rank: shapes as torch computes them, no memory, and a limit."""

from __future__ import annotations

import resource
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

pytestmark = pytest.mark.simulated
LARGE = (600, 1024)
Operator = Callable[[torch.Tensor, torch.Tensor], Any]
OPERATORS: dict[str, Operator] = {
    "in place": lambda x, y: x.mul_(0.5).add_(y, alpha=2.0),
    "in place of a part": lambda x, y: x[100:500].lerp_(y[100:500], 0.1),
    "new": lambda x, y: x.addcdiv(y, y + 1.0, value=0.1).sqrt(),
    "another dtype": lambda x, y: (x.bfloat16(), (x < y).sum(1)),
    "transposed": lambda x, y: x.t() * y.t(),
    "a norm": lambda x, y: torch.linalg.vector_norm(x, 2.0),
    "norms": lambda x, y: torch._foreach_norm([x, y, x[0]]),
    "lists in place": lambda x, y: torch._foreach_addcmul_([x, y], [y, x], [x, y], 0.5),
    "lists": lambda x, y: torch._foreach_div(torch._foreach_sqrt([x, y]), 3.0),
    "several results": lambda x, y: torch.max(x, dim=1),
    "into another": lambda x, y: torch.add(x, y, out=torch.empty_like(x)),
    "product": lambda x, y: x @ y.t(),
    "like another": lambda x, y: (torch.zeros_like(x), torch.empty_like(y, dtype=torch.float64)),
    "views": lambda x, y: (x.view(-1)[10:], y.unsqueeze(0), x.chunk(3, 1)),
    "joined": lambda x, y: torch.cat([x, y[:5]]),
}


def layout(value: Any) -> Any:
    """Shape, strides, dtype and device of each tensor in a result."""
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.stride(), value.dtype, value.device
    return [layout(each) for each in value] if isinstance(value, (list, tuple)) else value


@pytest.mark.parametrize("name", OPERATORS)
def test_results_have_the_layout_of_computed_ones(name: str) -> None:
    from device_training import start

    from fsdpbench.sim.torch_device.operators.host_memory import HostShapes

    start()
    operator = OPERATORS[name]
    computed = operator(torch.ones(LARGE), torch.ones(LARGE))
    with HostShapes():
        shaped = operator(torch.ones(LARGE), torch.ones(LARGE))
    assert layout(shaped) == layout(computed)


def test_small_tensors_and_values_of_large_ones_stay() -> None:
    from device_training import start

    from fsdpbench.sim.torch_device.operators.host_memory import HostShapes

    start()
    large, counts = torch.ones(LARGE), [torch.zeros(()), torch.zeros(3)]
    with HostShapes():
        torch._foreach_add_(counts, 1.0)
        large.mul_(7.0)
        assert torch.zeros(LARGE)[3, 5] == 0.0
    assert [each.sum().item() for each in counts] == [1.0, 3.0]
    assert large[3, 5] == 1.0, "neither read nor written"


class Offloaded(nn.Module):
    """Two layers whose shards are on the host."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(x)))


def train_offloaded(library: Any, width: int, blocks: int, **optimizer: Any) -> list[int]:
    """Train a stack of blocks on offloaded shards; nanoseconds of each of three steps."""
    from device_training import start
    from torch.distributed.device_mesh import init_device_mesh

    sim = start()
    with torch.device("meta"):
        model = nn.Sequential(*(Offloaded(width) for _ in range(blocks)))
    arguments = {"mesh": init_device_mesh("sim", (8,)), "offload_policy": library.CPUOffloadPolicy()}
    for block in model:
        library.fully_shard(block, **arguments)
    library.fully_shard(model, **arguments)
    model.to_empty(device="cpu")
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.reset_parameters()
    stepper = torch.optim.AdamW(model.parameters(), **optimizer)
    times = []
    for _ in range(3):
        began = sim.cpu_ns()
        model(torch.zeros(64, width, device="sim")).sum().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        stepper.step()
        stepper.zero_grad()
        sim.synchronize()
        times.append(sim.cpu_ns() - began)
    torch.distributed.destroy_process_group()
    return times


def library_named(name: str) -> Any:
    import torch.distributed.fsdp

    from fsdpbench import impl

    return impl if name == "impl" else torch.distributed.fsdp


@pytest.mark.parametrize("optimizer", [{"foreach": True}, {"foreach": False}])
@pytest.mark.parametrize(
    ("name", "most_mib"), [("torch", 600), ("impl", 600 + 2560)], ids=["torch", "impl, which copies shards"]
)
def test_offloading_ten_gigabytes_takes_less_memory(
    name: str, most_mib: int, optimizer: dict[str, bool]
) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    train_offloaded(library_named(name), 8192, 10, **optimizer)  # 671 M parameters a rank, 16 bytes each
    grown_mib = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    assert grown_mib < most_mib


@pytest.mark.parametrize("name", ["torch", "impl"])
def test_steps_take_the_time_of_computed_ones(name: str) -> None:
    """The same steps, once by shape and once computed on the host."""
    from fsdpbench.sim.torch_device.operators import host_memory
    from fsdpbench.sim.torch_device.patches import host_access

    by_shape = train_offloaded(library_named(name), 2048, 2)
    host_memory.has_no_values = host_access.has_no_values = lambda tensor: False
    computed = train_offloaded(library_named(name), 2048, 2)
    assert by_shape[1:] == computed[1:]


def test_a_step_that_raised_leaves_no_mode_behind_the_next() -> None:
    from device_training import start

    from fsdpbench.sim.torch_device.operators import host_memory

    start()
    parameter = nn.Parameter(torch.ones(LARGE))
    parameter.grad = torch.ones(LARGE)

    class Failing(torch.optim.SGD):
        fails = True

        def step(self, closure: Any = None) -> Any:
            if self.fails:
                raise ArithmeticError
            return super().step(closure)

    stepper = Failing([parameter], lr=0.1)
    with pytest.raises(ArithmeticError):
        stepper.step()
    assert host_memory._STEPPING
    stepper.fails = False
    stepper.step()
    assert not host_memory._STEPPING
    assert torch.ones(LARGE).mul_(2.0)[0, 0] == 2.0


def test_states_beyond_the_host_run_out_of_memory() -> None:
    from device_training import start

    from fsdpbench.sim.torch_device.tensors import pin, zeros_on_host

    sim = start()
    most = sim.profile.host_link.memory_gb * 1e9
    rows = int(0.24 * most) // 4096
    parameter = nn.Parameter(pin(zeros_on_host((rows, 1024), (1024, 1), torch.float32)))
    parameter.grad = pin(zeros_on_host((rows, 1024), (1024, 1), torch.float32))
    with pytest.raises(torch.OutOfMemoryError, match=r"host out of memory: .*host_link\.memory_gb"):
        torch.optim.AdamW([parameter]).step()
