"""Small models under FSDP and DDP on the simulated device, and what the sanitizer says of a program.

A `Case` is a system, arguments and a program. Blocks are alike, so that memory which is freed too early finds
a taker.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from extended_parameters import extend
from torch import nn
from torch.utils.checkpoint import checkpoint

from fsdpbench.sim import Simulation, load_profile

WIDTH = 128
BLOCKS = 5
LOW = (torch.bfloat16, torch.float32)
ALL_LOW = (torch.bfloat16, torch.bfloat16)


class Block(nn.Module):
    """Two products, so that a unit has parameters of two sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Product(nn.Module):
    """One parameter, so that each rank has a part of each."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x @ self.weight)


class Network(nn.Module):
    """Blocks one after another, recomputed in backward if asked, and a head that the root owns.

    Args:
        skip: blocks that forward leaves out.
        products: blocks of one parameter each.
        headless: the root owns nothing.
    """

    def __init__(
        self,
        *,
        recompute: bool = False,
        freeze: bool = False,
        skip: tuple[int, ...] = (),
        products: bool = False,
        headless: bool = False,
    ) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Product() if products else Block() for _ in range(BLOCKS))
        self.head: nn.Module = Product() if products else nn.Linear(WIDTH, WIDTH)
        if headless:
            self.head = nn.Identity()
        self.recompute = recompute
        self.skip = skip
        if freeze:
            self.blocks[1].requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index, block in enumerate(self.blocks):
            if index in self.skip:
                continue
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return self.head(x)


@dataclass
class Training:
    """A wrapped model, its optimizer, and what a step needs."""

    model: Any
    optimizer: torch.optim.Optimizer
    device: torch.device
    scaler: Any = None

    def loss(self) -> torch.Tensor:
        """A forward on a batch that was just made."""
        return self.model(torch.randn(16, WIDTH, device=self.device)).sum()

    def step(self) -> None:
        """The optimizer's."""
        self.optimizer.step()
        self.optimizer.zero_grad()


Program = Callable[[Training], None]


@dataclass(frozen=True)
class Case:
    """One program of the matrix."""

    system: str
    program: Program
    arguments: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """For tables."""
        told = ", ".join(f"{key}={_told(value)}" for key, value in self.arguments.items())
        return f"{self.system} {self.program.__name__} {told}".strip()


def _told(value: Any) -> str:
    return str(getattr(value, "__name__", value)).replace("torch.", "")


def _mesh(shape: tuple[int, ...]) -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("sim", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])


def _taken(arguments: dict[str, Any], *names: str) -> dict[str, Any]:
    """Arguments that are the network's own, taken out."""
    return {name: arguments.pop(name) for name in names if name in arguments}


def _sharded(library: Any, arguments: dict[str, Any]) -> Any:
    """`fully_shard`, ours or torch's."""
    model = Network(**_taken(arguments, "recompute", "freeze", "skip", "headless"))
    if arguments.pop("extended", False):
        extend(model)
    prefetch, settle = arguments.pop("prefetch", 0), arguments.pop("settle", None)
    arguments["mesh"] = _mesh(arguments.pop("mesh", (8,)))
    if (policy := arguments.pop("policy", None)) is not None:
        arguments["mp_policy"] = library.MixedPrecisionPolicy(*policy)
    if arguments.pop("offload", False):
        arguments["offload_policy"] = library.CPUOffloadPolicy()
    else:
        model = model.to("sim")
    pairs = [[first, second] for first, second in zip(model.blocks[::2], model.blocks[1::2], strict=False)]
    for part in pairs if arguments.pop("grouped", False) else model.blocks:
        library.fully_shard(part, **arguments)
    library.fully_shard(model, **arguments)
    for index, block in enumerate(model.blocks if prefetch else ()):
        block.set_modules_to_forward_prefetch(list(model.blocks[index + 1 : index + 1 + prefetch]))
        block.set_modules_to_backward_prefetch(list(model.blocks[max(0, index - prefetch) : index])[::-1])
    if settle is not None:
        settle(model)
    return model


def _wrapped(library: Any, policies: Any, arguments: dict[str, Any]) -> Any:
    """`FullyShardedDataParallel`, ours or torch's."""
    model = Network(**_taken(arguments, "recompute", "freeze", "products"))
    settle = arguments.pop("settle", None)
    if (policy := arguments.pop("policy", None)) is not None:
        arguments["mixed_precision"] = library.MixedPrecision(*policy)
    if arguments.pop("offload", False):
        arguments["cpu_offload"] = library.CPUOffload(offload_params=True)
    for key, kind in (
        ("sharding_strategy", library.ShardingStrategy),
        ("backward_prefetch", library.BackwardPrefetch),
    ):
        if isinstance(arguments.get(key), str):
            arguments[key] = kind[arguments[key]]
    if "HYBRID" in str(arguments.get("sharding_strategy")):
        arguments["device_mesh"] = _mesh((2, 4))
    model = library.FullyShardedDataParallel(
        model,
        auto_wrap_policy=policies.ModuleWrapPolicy({Block, Product}),
        device_id=torch.device("sim", 0),
        **arguments,
    )
    if settle is not None:
        settle(model)
    return model


def build(system: str, arguments: dict[str, Any]) -> Any:
    """The wrapped model."""
    arguments = dict(arguments)
    if system == "impl-fsdp2" or system == "impl-fsdp1":
        from fsdpbench import impl

        return _sharded(impl, arguments) if system == "impl-fsdp2" else _wrapped(impl, impl, arguments)
    if system == "torch-ddp":
        return _replicated(arguments)
    import torch.distributed.fsdp as torch_fsdp
    import torch.distributed.fsdp.wrap as torch_wrap

    if system == "torch-fsdp2":
        return _sharded(torch_fsdp, arguments)
    return _wrapped(torch_fsdp, torch_wrap, arguments)


def _replicated(arguments: dict[str, Any]) -> Any:
    hook = arguments.pop("hook", None)
    model = Network(**_taken(arguments, "recompute")).to("sim")
    model = nn.parallel.DistributedDataParallel(model, **arguments)
    if hook is not None:
        model.register_comm_hook(None, hook)
    return model


@contextlib.contextmanager
def simulated() -> Iterator[Simulation]:
    """Eight A100s under the sanitizer. Copies to the host are slow, so that asking whether one is done (which
    orders, where the answer is yes) does not stand in for a wait."""
    profile = load_profile("a100-80gb")
    profile = replace(profile, host_link=replace(profile.host_link, gb_s=0.01))
    simulation = Simulation.start(profile, 8, 8, sanitize=True)
    simulation.init_process_group()
    try:
        yield simulation
    finally:
        dist.destroy_process_group()


def optimizer_of(model: Any) -> torch.optim.Optimizer:
    """Of the parameters that are trained."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.AdamW(trained, lr=1e-3, foreach=True)


def run(case: Case, steps: int = 2) -> dict[str, Any]:
    """What the sanitizer says of a case. The first step makes buffers and states, later ones take them
    anew."""
    with simulated() as simulation:
        model = build(case.system, case.arguments)
        training = Training(model, optimizer_of(model), torch.device("sim", 0))
        for _ in range(steps):
            case.program(training)
        assert simulation.sanitizer is not None
        return simulation.sanitizer.to_dict()
