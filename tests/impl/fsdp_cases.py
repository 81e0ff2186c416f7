"""Models, training loops and recordings that the tests of both front ends share; runs inside the ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp as torch_fsdp
from torch.distributed.fsdp.wrap import ModuleWrapPolicy as TorchModuleWrapPolicy
from torch.utils.checkpoint import checkpoint

from fsdpbench import impl
from fsdpbench.impl.collectives import comm
from fsdpbench.impl.fsdp1.summon import gather_flat, split_full
from fsdpbench.impl.runtime.hooks import stage_of

VOCABULARY = 33
STEPS = pytest.mark.parametrize("steps", [3, pytest.param(10, marks=pytest.mark.campaign)])
"""Of a test that trains: by the third step all repeats; the campaign takes ten."""


class Block(nn.Module):
    """Uneven sizes on purpose: 15 and 60 rows do not divide by two or four ranks, a bias of 3 has fewer
    rows.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x)))) * self.scale.mean()


class Model(nn.Module):
    """An embedding, blocks and a head; ``checkpointing`` is "", "reentrant" or "non-reentrant" around
    blocks.
    """

    def __init__(
        self, blocks: int = 4, width: int = 15, tied: bool = False, frozen: str = "", checkpointing: str = ""
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.checkpointing = checkpointing
        if tied:
            self.head.weight = self.embed.weight
        for name, parameter in self.named_parameters():
            if frozen and frozen in name:
                parameter.requires_grad_(False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            if self.checkpointing:
                x = checkpoint(block, x, use_reentrant=self.checkpointing == "reentrant")
            else:
                x = block(x)
        return self.head(self.norm(x))


def checkpointed_inside(block: nn.Module) -> None:
    """Its forward is a checkpoint, so that whoever compiles the block compiles that too. It is
    here because Dynamo imports the modules of what it traces, and tests are loaded by path."""
    original = block.forward
    block.forward = lambda x: checkpoint(original, x, use_reentrant=False)  # type: ignore[method-assign]


def tokens_of(rank: int, step: int, batch: int = 2, length: int = 8) -> torch.Tensor:
    """Each rank's own batch of a step."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randint(0, VOCABULARY, (batch, length), generator=generator)


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(tokens).flatten(0, 1).float(), tokens.flatten())


@dataclass
class Outcome:
    """What a training run leaves: losses of this rank, whole gradients of the last step, whole parameters."""

    losses: list[float]
    gradients: dict[str, torch.Tensor | None] = field(default_factory=dict)
    parameters: dict[str, torch.Tensor] = field(default_factory=dict)


Read = Callable[[nn.Module], dict[str, torch.Tensor | None]]


def train(
    model: nn.Module,
    rank: int,
    read_gradients: Read,
    read_parameters: Read,
    *,
    steps: int = 10,
    optimizer: str = "AdamW",
    microbatches: int = 1,
    microbatch: Callable[[nn.Module, bool], Any] | None = None,
    loss: Callable[[nn.Module, torch.Tensor], torch.Tensor] = loss_of,
) -> Outcome:
    """Train for some steps; ``microbatch(model, is_last)`` is entered around each microbatch."""
    made = getattr(torch.optim, optimizer)(model.parameters(), lr=1e-2)
    outcome = Outcome([])
    for step in range(steps):
        for index in range(microbatches):
            tokens = tokens_of(rank, step * microbatches + index)
            if microbatch is None:
                value = loss(model, tokens)
                value.backward()
            else:
                with microbatch(model, index == microbatches - 1):
                    value = loss(model, tokens)
                    value.backward()
            outcome.losses.append(value.item())
        if step == steps - 1:
            outcome.gradients = read_gradients(model)
        made.step()
        made.zero_grad()
    outcome.parameters = {k: v for k, v in read_parameters(model).items() if v is not None}
    return outcome


# -- fully_shard ---------------------------------------------------------------------------------------------


def full_dtensors(model: nn.Module, gradients: bool) -> dict[str, torch.Tensor | None]:
    found: dict[str, torch.Tensor | None] = {}
    for name, parameter in model.named_parameters():
        value: Any = parameter.grad if gradients else parameter.detach()
        found[name] = value if value is None else value.full_tensor()
    return found


def shard_model(
    kind: str,
    model: Model,
    *,
    policy: tuple[Any, ...] | None = None,
    root_output: torch.dtype | None = None,
    blocks: bool = True,
    **arguments: Any,
) -> nn.Module:
    """Wrap with torch's or our ``fully_shard``: blocks, then the root."""
    api: Any = torch_fsdp if kind == "torch" else impl
    if policy is not None:
        arguments["mp_policy"] = api.MixedPrecisionPolicy(*policy)
    if blocks:
        for block in model.blocks:
            api.fully_shard(block, **arguments)
    if root_output is not None:
        arguments["mp_policy"] = api.MixedPrecisionPolicy(*policy, output_dtype=root_output)
    return api.fully_shard(model, **arguments)


read_fully_shard = (partial(full_dtensors, gradients=True), partial(full_dtensors, gradients=False))


def shards(model: nn.Module, gradients: bool) -> dict[str, torch.Tensor | None]:
    """This rank's part of each parameter or gradient, under its name and how it is laid out: equal on every
    rank, two models are equal as a whole. Gathering them would take longer than training.
    """
    found: dict[str, torch.Tensor | None] = {}
    for name, parameter in model.named_parameters():
        value: Any = parameter.grad if gradients else parameter.detach()
        if value is None:
            found[name] = None
        else:
            mesh = value.device_mesh
            layout = f"{tuple(value.shape)} {value.placements} on {mesh.mesh_dim_names} {mesh.mesh.tolist()}"
            found[f"{name}: {layout}"] = value.to_local()
    return found


read_shards = (partial(shards, gradients=True), partial(shards, gradients=False))


# -- FullyShardedDataParallel --------------------------------------------------------------------------------


def wrap_model(
    kind: str,
    model: Model,
    strategy: str = "FULL_SHARD",
    *,
    precision: tuple[Any, ...] | None = None,
    prefetch: str | None = "BACKWARD_PRE",
    blocks: bool = True,
    **arguments: Any,
) -> nn.Module:
    """Wrap with torch's or our ``FullyShardedDataParallel``: blocks by policy, and the root."""
    api: Any = torch_fsdp if kind == "torch" else impl
    if blocks:
        policy: Any = TorchModuleWrapPolicy if kind == "torch" else impl.ModuleWrapPolicy
        arguments["auto_wrap_policy"] = policy({Block})
    if precision is not None:
        arguments["mixed_precision"] = api.MixedPrecision(*precision)
    return api.FullyShardedDataParallel(
        model,
        sharding_strategy=api.ShardingStrategy[strategy],
        backward_prefetch=None if prefetch is None else api.BackwardPrefetch[prefetch],
        device_id=torch.device("cpu"),
        **arguments,
    )


def torch_full(model: Any, gradients: bool) -> dict[str, torch.Tensor | None]:
    with torch_fsdp.FullyShardedDataParallel.summon_full_params(model, with_grads=gradients):
        found: dict[str, torch.Tensor | None] = {}
        for name, parameter in model.named_parameters():
            value = parameter.grad if gradients else parameter.detach()
            clean = name.replace("_fsdp_wrapped_module.", "").replace("_flat_param", "")
            found[clean] = None if value is None else value.clone()
        return found


def our_full(model: Any, gradients: bool) -> dict[str, torch.Tensor | None]:
    """Whole parameters or gradients by their names in the plain model, read from the units' shards."""
    found: dict[str, torch.Tensor | None] = {}
    for module_name, module in model.named_modules():
        stage = stage_of(module)
        prefix = module_name.replace("_fsdp_wrapped_module", "").strip(".").replace("..", ".")
        for unit in stage.units if stage is not None else ():
            values = full_gradients(unit) if gradients else split_full(unit, gather_flat(unit, unit.shard))
            for parameter, value in zip(unit.parameters, values, strict=True):
                name = f"{prefix}.{parameter.fqn}" if prefix else parameter.fqn
                found[name] = None if value is None else value.clone()
    return found


def full_gradients(unit: Any) -> list[torch.Tensor | None]:
    """Gather the gradients of a flat unit as its parameters are gathered."""
    from fsdpbench.impl.fsdp1.summon import gather_flat, split_full

    shard = torch.zeros_like(unit.shard)
    presentation = unit.presentation
    if presentation.flat_param is not None:
        shard = presentation.flat_param.grad.clone()
    else:
        for segment, sharded in zip(unit.layout.segments, presentation.sharded, strict=True):
            if sharded.grad is not None:
                start = segment.shard_offset
                shard[start : start + segment.shard_numel].copy_(sharded.grad.view(-1))
    return list(split_full(unit, gather_flat(unit, shard)))


def read_flat(kind: str) -> tuple[Read, Read]:
    reader: Any = torch_full if kind == "torch" else our_full
    return partial(reader, gradients=True), partial(reader, gradients=False)


# -- comparing -----------------------------------------------------------------------------------------------


def assert_close(ours: dict[str, Any], theirs: dict[str, Any], tolerance: float = 1e-6) -> None:
    """Equal to ``tolerance`` of each tensor's largest element; ``None`` is the same as zeros in flat
    gradients.
    """
    assert set(ours) == set(theirs), set(ours) ^ set(theirs)
    for name, expected in theirs.items():
        actual = ours[name]
        if expected is None or actual is None:
            other = actual if expected is None else expected
            assert other is None or not other.any(), f"{name}: {actual} against {expected}"
            continue
        assert actual.shape == expected.shape, f"{name}: {actual.shape} against {expected.shape}"
        scale = expected.abs().max().item() if expected.numel() else 0.0
        worst = (actual.double() - expected.double()).abs().max().item() if expected.numel() else 0.0
        assert worst <= tolerance * scale, f"{name}: differs by {worst} where the largest element is {scale}"


def assert_same_outcome(ours: Outcome, theirs: Outcome, tolerance: float = 1e-6) -> None:
    assert len(ours.losses) == len(theirs.losses)
    for step, (a, b) in enumerate(zip(ours.losses, theirs.losses, strict=True)):
        assert abs(a - b) <= tolerance * max(abs(b), 1e-12), f"loss {step}: {a} against {b}"
    assert_close(ours.gradients, theirs.gradients, tolerance)
    assert_close(ours.parameters, theirs.parameters, tolerance)


def _elements(value: Any) -> int:
    if isinstance(value, list):
        return sum(_elements(item) for item in value)
    return value.numel() if isinstance(value, torch.Tensor) else 0


def _size_of_call(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Elements of a collective's larger side."""
    if name == "gather_by_broadcasts":
        return _elements(args[0])
    elements = max(map(_elements, (*args, *kwargs.values())))
    if name == "exchange_shards":  # which leaves out this rank's own part
        size = args[2].size()
        return elements * size // (size - 1)
    return elements


# -- recording collectives -----------------------------------------------------------------------------------


@contextmanager
def recorded(kind: str) -> Iterator[list[tuple[str, int]]]:
    """Record every collective with the number of elements of its larger side, in order of issue."""
    record: list[tuple[str, int]] = []
    owner: Any = dist if kind == "torch" else comm
    if kind == "torch":
        names = {
            "all_gather": "all_gather",  # what torch's FSDP1 uses on the CPU
            "all_gather_into_tensor": "all_gather",
            "all_gather_single": "all_gather",
            "reduce_scatter_tensor": "reduce_scatter",
            "reduce_scatter_single": "reduce_scatter",
            "all_reduce": "all_reduce",
        }
    else:
        names = {
            "all_gather": "all_gather",
            "gather_by_broadcasts": "all_gather",
            "all_gather_grouped": "all_gather",
            "exchange_shards": "reduce_scatter",
            "reduce_scatter_grouped": "reduce_scatter",
            "reduce_scatter": "reduce_scatter",
            "all_reduce": "all_reduce",
        }
    originals = {name: getattr(owner, name) for name in names if hasattr(owner, name)}
    nested = [False]

    def recorder(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if nested[0]:  # an older name that calls the newer one
                return function(*args, **kwargs)
            record.append((names[name], _size_of_call(name, args, kwargs)))
            nested[0] = True
            try:
                return function(*args, **kwargs)
            finally:
                nested[0] = False

        return call

    for name, function in originals.items():
        setattr(owner, name, recorder(name, function))
    try:
        yield record
    finally:
        for name, function in originals.items():
            setattr(owner, name, function)


@contextmanager
def last_reduces(model: Any, is_last: bool):
    model.set_requires_gradient_sync(is_last)
    yield


@contextmanager
def last_reduces_and_frees(model: Any, is_last: bool):
    model.set_requires_gradient_sync(is_last)
    model.set_reshard_after_backward(is_last)
    model.set_is_last_backward(is_last)
    yield


@contextmanager
def last_sums_replicas(model: Any, is_last: bool):
    model.set_requires_all_reduce(is_last)
    yield


def every_reduces(model: Any, is_last: bool):
    return nullcontext()


def no_sync(model: Any, is_last: bool):
    return nullcontext() if is_last else model.no_sync()


ACCUMULATION = {
    f.__name__: f for f in (last_reduces, last_reduces_and_frees, last_sums_replicas, every_reduces, no_sync)
}
"""Ways to accumulate gradients, by name: contexts around each microbatch."""
