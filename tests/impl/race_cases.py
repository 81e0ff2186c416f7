"""Programs and wrappers whose uses of memory are followed on the simulated device."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from simulated_cases import simulated
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from fsdpbench import impl
from fsdpbench.sim.followers.sanitizer import Sanitizer
from fsdpbench.sim.torch_device.accelerator import ACCELERATOR

WIDTH = 256
LOW = (torch.bfloat16, torch.float32)


def sharded(
    mesh: tuple[int, ...] = (8,), *, offload: bool = False, policy: Any = None, **arguments: Any
) -> Any:
    names = ("replicate", "shard")[-len(mesh) :]
    arguments["mesh"] = init_device_mesh("sim", mesh, mesh_dim_names=names)
    if policy is not None:
        arguments["mp_policy"] = impl.MixedPrecisionPolicy(*policy)
    if offload:
        arguments["offload_policy"] = impl.CPUOffloadPolicy()
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(3)])
    model = model if offload else model.to("sim")
    for layer in model:
        impl.fully_shard(layer, **arguments)
    return impl.fully_shard(model, **arguments)


def wrapped(mesh: tuple[int, ...] = (8,), *, policy: Any = None, **arguments: Any) -> Any:
    if len(mesh) > 1:
        arguments["device_mesh"] = init_device_mesh("sim", mesh)
    if policy is not None:
        arguments["mixed_precision"] = impl.MixedPrecision(*policy)
    if arguments.pop("offload", False):
        arguments["cpu_offload"] = impl.CPUOffload(offload_params=True)
    return impl.FullyShardedDataParallel(
        nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(3)]),
        auto_wrap_policy=impl.ModuleWrapPolicy({nn.Linear}),
        device_id=torch.device("sim", 0),
        **arguments,
    )


Program = Callable[[Any, torch.optim.Optimizer, Callable[[], torch.Tensor]], None]


def accumulate(model: Any, optimizer: torch.optim.Optimizer, loss: Callable[[], torch.Tensor]) -> None:
    for _ in range(3):
        loss().backward()
    optimizer.step()
    optimizer.zero_grad()


def unshard_after_the_optimizer(
    model: Any, optimizer: torch.optim.Optimizer, loss: Callable[[], torch.Tensor]
) -> None:
    loss().backward()
    optimizer.step()
    model[0].unshard()
    model[1].unshard(async_op=True)
    optimizer.zero_grad()
    loss().backward()
    model[0].unshard()
    optimizer.step()
    optimizer.zero_grad()


def backward_twice(model: Any, optimizer: torch.optim.Optimizer, loss: Callable[[], torch.Tensor]) -> None:
    value = loss()
    value.backward(retain_graph=True)
    value.backward()
    optimizer.step()
    optimizer.zero_grad()


def write_between(model: Any, optimizer: torch.optim.Optimizer, loss: Callable[[], torch.Tensor]) -> None:
    """Before another forward gathers again: by hand, and by a state dict."""
    loss()
    for module in (*model, model):
        module.reshard()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)
    model.load_state_dict(model.state_dict())
    loss().backward()
    optimizer.zero_grad()


def optimizer_in_backward(
    model: Any, optimizer: torch.optim.Optimizer, loss: Callable[[], torch.Tensor]
) -> None:
    for parameter in model.parameters():
        if not parameter._post_accumulate_grad_hooks:
            parameter.register_post_accumulate_grad_hook(_step)
    loss().backward()
    loss().backward()


def accumulate_without_communication(
    model: Any, optimizer: torch.optim.Optimizer, loss: Callable[[], torch.Tensor]
) -> None:
    if isinstance(model, impl.FullyShardedDataParallel):
        with model.no_sync():
            loss().backward()
    else:
        model.set_requires_gradient_sync(False)
        loss().backward()
        model.set_requires_gradient_sync(True)
    loss().backward()
    optimizer.step()
    optimizer.zero_grad()


def clip_and_save(model: Any, optimizer: torch.optim.Optimizer, loss: Callable[[], torch.Tensor]) -> None:
    """With an evaluation and a state dict between steps."""
    loss().backward()
    clip = getattr(model, "clip_grad_norm_", None)
    if clip is None:
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    else:
        clip(1.0)
    optimizer.step()
    saved = {name: value.detach().clone() for name, value in model.state_dict().items()}
    optimizer.zero_grad(set_to_none=False)
    with torch.no_grad():
        loss()
    del saved
    loss().backward()
    optimizer.step()
    optimizer.zero_grad()


def with_hooks(model: Any, optimizer: torch.optim.Optimizer, loss: Callable[[], torch.Tensor]) -> None:
    """Hooks that read what they are given."""
    layers = [module for module in model.modules() if isinstance(module, nn.Linear)]
    handles = [
        layer.register_forward_hook(lambda _module, _inputs, output: output.mul(2)) for layer in layers
    ]
    handles += [layer.register_full_backward_hook(_read_gradients) for layer in layers]
    loss().backward()
    for handle in handles:
        handle.remove()
    optimizer.step()
    optimizer.zero_grad()


def _read_gradients(_module: nn.Module, _inputs: Any, outputs: Any) -> None:
    for gradient in outputs:
        gradient.norm()


def checkpointed(model: Any, optimizer: torch.optim.Optimizer, loss: Callable[[], torch.Tensor]) -> None:
    """Every layer recomputed in backward."""
    for layer in [module for module in model.modules() if isinstance(module, nn.Linear)]:
        if "forward" not in vars(layer):
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
    loss().backward()
    optimizer.step()
    optimizer.zero_grad()


def _step(parameter: torch.Tensor) -> None:
    assert parameter.grad is not None
    with torch.no_grad():
        parameter.add_(parameter.grad, alpha=-0.1)
    parameter.grad = None


def follow(program: Program, build: Callable[..., Any], arguments: dict[str, Any]) -> tuple[list[str], int]:
    with simulated(sanitize=True) as device:
        model = build(**arguments)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)
        batch = torch.randn(8, WIDTH, device=device)

        def loss() -> torch.Tensor:
            return model(batch).sum()

        for _ in range(2):  # the first time makes buffers and optimizer states
            program(model, optimizer, loss)
        sanitizer = ACCELERATOR.sanitizer
        assert isinstance(sanitizer, Sanitizer)
        return [str(finding.to_dict()) for finding in sanitizer.findings], sanitizer.accesses
