"""What the device says that it knows of a tensor is what the host has; unknown is allowed, wrong is not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

pytestmark = pytest.mark.simulated

Case = Callable[[str], torch.Tensor]


def sevens(device: str) -> torch.Tensor:
    return torch.full((2, 3), 7, device=device)


def written_over(device: str) -> torch.Tensor:
    """Ones before, then other numbers of the host."""
    return torch.ones(4, dtype=torch.int64, device=device).copy_(torch.tensor([1, 5, 1, 1]))


def summed_into(device: str) -> torch.Tensor:
    ones = torch.ones(4, dtype=torch.int64, device=device)
    return torch.cumsum(torch.ones_like(ones), 0, out=ones)


def one_of_four(device: str) -> torch.Tensor:
    zeros = torch.zeros(4, dtype=torch.int64, device=device)
    zeros[:1].expand(4).fill_(7)
    return zeros


def through_halves(device: str) -> torch.Tensor:
    ones = torch.ones(3, dtype=torch.int64, device=device)
    ones.view(torch.int32)[0] = 3
    return ones


def copied_to_itself(device: str) -> torch.Tensor:
    numbers = torch.arange(4).to(device)
    return numbers.copy_(numbers)


def running_mean(device: str) -> torch.Tensor:
    mean, var = torch.zeros(1, device=device), torch.ones(1, device=device)
    F.batch_norm(torch.ones(4, 1, 2, device=device), mean, var, training=True)
    return mean


def one_more_each(device: str) -> torch.Tensor:
    numbers = written_over(device)
    torch._foreach_add_([numbers], 1)
    return numbers


def zeros(*shape: int) -> Callable[[str], torch.Tensor]:
    return lambda device: torch.zeros(shape, dtype=torch.int64, device=device)


def never(device: str) -> torch.Tensor:
    return torch.rand(4, device=device) > torch.full((4,), 2.0, device=device)


def left_of(device: str) -> torch.Tensor:
    """As a generation ends by its length, whatever was sampled."""
    longest = torch.full((4,), True, device=device)
    return torch.ones(4, dtype=torch.int64, device=device) & ~(never(device) | longest)


CASES: dict[str, Case] = {
    "one side decides": left_of,
    "a false side": lambda d: torch.full((4,), False, device=d).logical_and(never(d)),
    "nor a truth of numbers": lambda d: never(d).long().add(2) | torch.full((4,), True, device=d),
    "a number decides nothing": lambda d: torch.ones(4, dtype=torch.int64, device=d) | 2 * never(d).long(),
    "numbers over a number": written_over,
    "then as floats": lambda d: written_over(d).float().sum(),
    "then multiplied": lambda d: written_over(d).prod(),
    "then added to": one_more_each,
    "then divided": lambda d: written_over(d) / 2,
    "numbers into a number": lambda d: summed_into(d).prod(),
    "the largest of equal ones": lambda d: sevens(d).max(1).indices,
    "the least of equal ones": lambda d: sevens(d).min(1).indices,
    "their values": lambda d: sevens(d).max(),
    "fewer numbers than places": lambda d: zeros(3, 4)(d).copy_(torch.arange(4)),
    "one number, with dimensions": lambda d: zeros(3)(d).copy_(torch.tensor([5])),
    "one element in many places": one_of_four,
    "bytes of a number": lambda d: torch.ones(3, dtype=torch.int64, device=d).view(torch.int32),
    "a part of a number": through_halves,
    "itself": copied_to_itself,
    "none of its elements": lambda d: torch.zeros(1, dtype=torch.int64, device=d)[1:].all(),
    "no elements": lambda d: torch.ones(0, dtype=torch.int64, device=d).any(),
    "true as a number": lambda d: torch.full((4,), 2, dtype=torch.uint8, device=d).all(),
    "places of a column": lambda d: torch.ones(3, 1, dtype=torch.bool, device=d).nonzero(),
    "places of a number": lambda d: torch.full((), 3, device=d).nonzero(),
    "undeclared writes": running_mean,
}
KNOWN = (
    "one side decides", "a false side", "numbers over a number", "their values", "fewer numbers than places",
    "itself",
)  # fmt: skip


def test_what_is_known_is_what_the_host_has() -> None:
    from fsdpbench.sim import Simulation
    from fsdpbench.sim.model.profile import load_profile
    from fsdpbench.sim.torch_device.operators.known_values import holds_placeholders

    Simulation.start(load_profile("a100-80gb"), 1, 1).accelerator.follows_numbers = True
    wrong, unknown = {}, []
    for name, case in CASES.items():
        try:
            wanted, found = case("cpu"), case("sim").cpu()
        except (RuntimeError, TypeError) as error:
            wrong[name] = error
            continue
        if holds_placeholders(found):
            unknown.append(name)
        elif not torch.equal(found, wanted):
            wrong[name] = found
    assert not wrong
    assert {"numbers over a number", "their values", "fewer numbers than places", "itself"}.isdisjoint(
        unknown
    )


def test_counts_of_the_host_say_how_long_a_result_is() -> None:
    """Also numbers over a number, which is not there any more."""
    from fsdpbench.sim import Simulation
    from fsdpbench.sim.model.profile import load_profile

    Simulation.start(load_profile("a100-80gb"), 1, 1).accelerator.follows_numbers = True
    rows = torch.zeros(4, 2, device="sim")
    for repeats, many in ((torch.full((4,), 3, device="sim"), 12), (written_over("sim"), 8)):
        assert torch.repeat_interleave(rows, repeats, dim=0).shape == (many, 2)
    unknown = torch.randint(3, (4,), device="sim")
    for repeats in (unknown, (unknown > 0).long(), (unknown > 0).sum().view(1)):
        with pytest.raises(NotImplementedError, match="depends on data"):
            torch.repeat_interleave(rows[: len(repeats)], repeats, dim=0)
    with pytest.raises(NotImplementedError, match="depends on data"):
        (unknown > 0).int().nonzero()


def test_collectives_leave_no_number_of_before() -> None:
    import torch.distributed as dist

    from fsdpbench.sim import Simulation
    from fsdpbench.sim.model.profile import load_profile

    def read(tensor: torch.Tensor) -> tuple[int, bool]:
        asked.clear()
        return int(tensor.item()), asked[0]

    simulation = Simulation.start(load_profile("a100-80gb"), 4, 4)
    simulation.init_process_group()
    asked: list[bool] = []
    simulation.accelerator.follows_numbers = True
    simulation.accelerator.on_value = lambda name, value, is_true: asked.append(is_true)
    five, numbers = torch.full((1,), 5, device="sim"), written_over("sim")
    gathered = [torch.zeros_like(five) for _ in range(4)]
    dist.gather(five, gathered, dst=0)
    assert read(gathered[1]) == (5, False)  # if all ranks hold the same
    dist.scatter(five, [torch.full((1,), each, device="sim") for each in range(4)], src=0)
    assert not read(five)[1]
    dist.broadcast(numbers, 0)
    assert read(numbers[1]) == (5, True)
    row, both = torch.empty(16, dtype=torch.int64, device="sim"), torch.tensor([3, 1 << 40], device="sim")
    dist.all_gather_into_tensor(row, numbers)
    assert read(row[5]) == (5, False)
    assert read((row[4:] - 1)[9]) == (4, False)  # what is computed of a guess is one
    dist.all_reduce(both, op=dist.ReduceOp.MAX)
    assert both.cpu().tolist() == [3, 1 << 40]
    dist.all_reduce(numbers)
    assert read(numbers[1]) == (20, False)
    dist.reduce_scatter_tensor(numbers[:1], numbers.clone())
    assert read(numbers[1]) == (0, False)
