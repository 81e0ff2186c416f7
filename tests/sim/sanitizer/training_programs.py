"""Small training programs for the simulated device: every way in which FSDP and DDP order their streams.

A `Case` is a system, arguments and a program. Blocks are alike, so that memory which is freed too early finds a
taker. `run` gives what the sanitizer says of one case.
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


# -- programs ------------------------------------------------------------------------------------------------


def train(training: Training) -> None:
    training.loss().backward()
    training.step()


def accumulate(training: Training) -> None:
    for _ in range(3):
        training.loss().backward()
    training.step()


def _sync(model: Any, on: bool) -> Any:
    if hasattr(model, "set_requires_gradient_sync"):
        model.set_requires_gradient_sync(on)
        return contextlib.nullcontext()
    return contextlib.nullcontext() if on else model.no_sync()


def accumulate_without_sync(training: Training) -> None:
    for last in (False, False, True):
        with _sync(training.model, last):
            training.loss().backward()
    training.step()


def accumulate_without_all_reduce(training: Training) -> None:
    for last in (False, False, True):
        training.model.set_requires_all_reduce(last)
        training.loss().backward()
    training.step()


def last_backward_by_hand(training: Training) -> None:
    for last in (False, True):
        training.model.set_is_last_backward(last)
        training.loss().backward()
    training.step()


def clip(training: Training) -> None:
    training.loss().backward()
    if hasattr(training.model, "clip_grad_norm_"):
        training.model.clip_grad_norm_(1.0)
    else:
        nn.utils.clip_grad_norm_(training.model.parameters(), 1.0)
    training.step()


def save_between(training: Training) -> None:
    training.loss().backward()
    state = training.model.state_dict()
    training.step()
    training.model.load_state_dict(state)
    training.optimizer.state_dict()
    training.loss().backward()
    training.step()


def unshard_by_hand(training: Training) -> None:
    model = training.model
    model.unshard()
    handles = [block.unshard(async_op=True) for block in model.blocks]
    handles[0].wait()
    training.loss().backward()
    for block in (*model.blocks, model):
        block.reshard()
    training.step()
    model.blocks[1].unshard()
    model.blocks[1].reshard()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)
    model.blocks[2].unshard(async_op=True)
    training.loss().backward()
    training.optimizer.zero_grad()


def event_after_the_optimizer(training: Training) -> None:
    """Work between the event and forward is not waited for."""
    training.loss().backward()
    training.optimizer.step()
    training.model.set_post_optim_event(torch.sim.current_stream().record_event())
    training.optimizer.zero_grad()


def unshard_privately(training: Training) -> None:
    """What torch's FSDP1 offers to other parts of torch: before forward, and from within it."""
    train(training)  # makes the streams
    blocks = training.model.blocks

    def gather_ahead(*_: Any) -> None:
        blocks[2]._unshard(async_op=True)

    blocks[0]._wait_unshard_streams_on_current_stream()
    blocks[0]._unshard()
    blocks[0]._handle.flat_param.detach().sum()
    handle = blocks[1].register_forward_hook(gather_ahead)
    train(training)
    handle.remove()


def load_after_evaluation(training: Training) -> None:
    train(training)
    state = training.model.state_dict()
    with torch.no_grad():
        training.loss()
    training.model.load_state_dict(state)
    with torch.no_grad():
        training.loss()
    with type(training.model).summon_full_params(training.model):
        for parameter in training.model.parameters():
            parameter.data.mul_(0.5)


def scale(training: Training) -> None:
    """With a gradient scaler that looks for overflows on all ranks."""
    if training.scaler is None:
        training.scaler = _scaler_of(training.model)()
    training.scaler.scale(training.loss()).backward()
    training.scaler.unscale_(training.optimizer)
    training.step()
    training.scaler = None


def _scaler_of(model: Any) -> Any:
    if type(model).__module__.startswith("torch."):
        from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

        return ShardedGradScaler
    from fsdpbench import impl

    return impl.ShardedGradScaler


def save_optimizer_between(training: Training) -> None:
    train(training)
    kind = type(training.model)
    state = kind.optim_state_dict(training.model, training.optimizer)
    loaded = kind.optim_state_dict_to_load(training.model, training.optimizer, state)
    training.optimizer.load_state_dict(loaded)
    train(training)


def unshard_after_the_optimizer(training: Training) -> None:
    training.loss().backward()
    training.optimizer.step()
    training.model.blocks[0].unshard()
    training.model.blocks[1].unshard(async_op=True)
    training.optimizer.zero_grad()
    training.loss().backward()
    training.step()
    training.model.blocks[3].unshard(async_op=True)  # not waited for by hand


def unshard_before_the_optimizer(training: Training) -> None:
    """Gathered, and written to: the handle is waited for between."""
    training.loss().backward()
    training.model.blocks[0].unshard()
    training.model.blocks[1].unshard(async_op=True).wait()
    training.step()
    for block in training.model.blocks[:2]:
        block.reshard()


def write_between(training: Training) -> None:
    """After forward, before backward gathers again."""
    value = training.loss()
    for module in (*training.model.blocks, training.model):
        module.reshard()
    with torch.no_grad():
        for parameter in training.model.parameters():
            parameter.mul_(0.5)
    value.backward()
    training.step()


def write_after_evaluation(training: Training) -> None:
    train(training)
    with torch.no_grad():
        training.loss()
        for parameter in training.model.parameters():
            parameter.mul_(0.5)


def write_while_accumulating(training: Training) -> None:
    for last in (False, True):
        with _sync(training.model, last):
            training.loss().backward()
        with torch.no_grad():
            for parameter in training.model.parameters():
                parameter.mul_(0.5)
    training.step()


def assign_between(training: Training) -> None:
    """Other values for parameters, after a step and between forward and backward."""
    train(training)
    _assign(training.model)
    value = training.loss()
    _assign(training.model)
    value.backward()
    training.step()


def _assign(model: Any) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.data = parameter.data * 0.5


def summon(training: Training) -> None:
    training.loss().backward()
    with type(training.model).summon_full_params(training.model, writeback=True):
        for parameter in training.model.parameters():
            parameter.data.mul_(0.5)
    training.step()


def summon_gradients(training: Training) -> None:
    training.loss().backward()
    with type(training.model).summon_full_params(training.model, with_grads=True):
        for parameter in training.model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(0.5)
    training.step()


def two_forwards(training: Training) -> None:
    first, second = training.loss(), training.loss()
    (first + second).backward()
    training.step()


def backward_twice(training: Training) -> None:
    value = training.loss()
    value.backward(retain_graph=True)
    training.optimizer.step()
    value.backward()
    training.step()


def evaluate_between(training: Training) -> None:
    training.loss().backward()
    training.model.eval()
    with torch.no_grad():
        training.loss()
    training.model.train()
    training.step()
    with torch.no_grad():
        training.loss()


def evaluate_after(training: Training) -> None:
    train(training)
    with torch.no_grad():
        training.loss()


def optimizer_in_backward(training: Training) -> None:
    for parameter in training.model.parameters():
        if parameter.requires_grad and not parameter._post_accumulate_grad_hooks:
            parameter.register_post_accumulate_grad_hook(_descend)
    training.loss().backward()
    training.loss().backward()


def _descend(parameter: torch.Tensor) -> None:
    assert parameter.grad is not None
    with torch.no_grad():
        parameter.add_(parameter.grad, alpha=-0.1)
    parameter.grad = None


def chunk_by_chunk(training: Training) -> None:
    """A block that is wrapped together with another, called alone: its part of the loss, in pieces."""
    output = training.model(torch.randn(16, WIDTH, device=training.device))
    start = output.detach().requires_grad_()
    for part in start.chunk(2):
        training.model.blocks[1](part).sum().backward()
    output.backward(start.grad)
    training.step()


def fail_in_forward(training: Training) -> None:
    """A forward that fails, and the next iteration."""
    handle = training.model.blocks[2].register_forward_pre_hook(_fail)
    with contextlib.suppress(ValueError):
        training.loss()
    handle.remove()
    _recover(training)


class _Fail(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        _fail()


def fail_in_backward(training: Training) -> None:
    """A backward that fails, and the next iteration."""
    handle = training.model.blocks[1].down.register_forward_hook(lambda _, __, output: _Fail.apply(output))
    with contextlib.suppress(ValueError):
        training.loss().backward()
    handle.remove()
    _recover(training)


def fail_and_write(training: Training) -> None:
    """A forward that fails, and parameters that are written by hand."""
    train(training)
    handle = training.model.blocks[2].register_forward_pre_hook(_fail)
    with contextlib.suppress(ValueError):
        training.loss()
    handle.remove()
    training.model.reset_iter_state()
    with torch.no_grad():
        for parameter in training.model.parameters():
            parameter.mul_(0.5)


def give_up_a_backward(training: Training) -> None:
    """Gradients on their way are dropped, and the next iteration begins."""
    training.model.set_is_last_backward(False)
    training.loss().backward()
    training.model.set_is_last_backward(True)
    _recover(training)


def _recover(training: Training) -> None:
    if hasattr(training.model, "reset_iter_state"):
        training.model.reset_iter_state()
    training.optimizer.zero_grad()
    train(training)


def _fail(*_: Any) -> None:
    raise ValueError("on purpose")


# -- systems -------------------------------------------------------------------------------------------------


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
    """What the sanitizer says of a case. The first step makes buffers and states, later ones take them anew."""
    with simulated() as simulation:
        model = build(case.system, case.arguments)
        training = Training(model, optimizer_of(model), torch.device("sim", 0))
        for _ in range(steps):
            case.program(training)
        assert simulation.sanitizer is not None
        return simulation.sanitizer.to_dict()
