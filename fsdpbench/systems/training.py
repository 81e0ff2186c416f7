"""Functions that build and train a model as the settings require: layers and loss, optimizer, compilation,
attention kernels, clipping, activation offload."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import attention
from torch.nn.attention import SDPBackend, sdpa_kernel

from fsdpbench.base.configuration.config import Config
from fsdpbench.base.errors import BenchError
from fsdpbench.base.settings import SETTINGS, Settings
from fsdpbench.base.settings.values import spread
from fsdpbench.base.torch_internals import compiler_config
from fsdpbench.workloads import Workload
from fsdpbench.workloads.losses import LINEAR_LOSSES, ComputesTokenLoss, token_loss, use_linear_loss
from fsdpbench.workloads.narrow.blocks import gather_narrowly, narrow
from fsdpbench.workloads.narrow.eight_bits import scale_weights

KERNELS = {"efficient": SDPBackend.EFFICIENT_ATTENTION, "math": SDPBackend.MATH}
"""Backends of kernels that also support fp32; all others use torch's flash operator, or cuDNN."""

MakeMuon = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
"""Makes a system's Muon for a list of matrices."""

_ADAMW = {"adamw": (None, True), "adamw-foreach": (True, False), "adamw-loop": (False, False)}
"""The arguments `foreach` and `fused` of torch's AdamW."""


def build_model(workload: Workload, settings: Settings, device: torch.device | str) -> nn.Module:
    """Build the unwrapped model of `workload` on `device`: seeded weights, the chosen layers and loss."""
    torch.manual_seed(settings.seed)
    with torch.device(device):
        model = workload.build(activation_checkpointing=settings.recomputed, seq=settings.seq)
    write_loss_as_asked(model, settings)
    narrow_as_asked(model, workload, settings)
    return model


class Together(torch.optim.Optimizer):
    """Several optimizers for different parameters, which step one after another."""

    def __init__(self, *optimizers: torch.optim.Optimizer) -> None:
        self._optimizers = optimizers
        groups = [{"params": group["params"]} for each in optimizers for group in each.param_groups]
        super().__init__(groups, {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Step all optimizers."""
        for each in self._optimizers:
            each.step()


def make_optimizer(
    settings: Settings, model: nn.Module, block_classes: tuple[type[nn.Module], ...], make_muon: MakeMuon
) -> torch.optim.Optimizer:
    """Make the optimizer of the model's (sharded) parameters. Muon gets matrices inside `block_classes`."""
    parameters = _by_mesh(p for p in model.parameters() if p.requires_grad)
    if settings.optimizer == "sgd":
        return torch.optim.SGD(parameters, lr=1e-2)
    if settings.optimizer == "muon":
        matrices = _matrices(model, block_classes)
        chosen = set(matrices)
        rest = [p for p in model.parameters() if p.requires_grad and p not in chosen]
        made = [make_muon(matrices)] if matrices else []
        return Together(*made, *([_adamw("adamw", settings, rest)] if rest else []))
    return _adamw(settings.optimizer, settings, parameters)


def _by_mesh(parameters: Iterable[nn.Parameter]) -> list[dict[str, list[nn.Parameter]]]:
    """Make a parameter group per mesh, because an operator over several DTensors requires a single mesh."""
    groups: dict[Any, list[nn.Parameter]] = {}
    for parameter in parameters:
        groups.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
    return [{"params": group} for group in groups.values()]


def _adamw(name: str, settings: Settings, parameters: Iterable[Any]) -> torch.optim.Optimizer:
    if settings.optimizer_dtype == "bf16":
        from fsdpbench.impl import AdamW

        return AdamW(parameters, lr=1e-4)
    foreach, fused = _ADAMW[name]
    return torch.optim.AdamW(parameters, lr=1e-4, foreach=foreach, fused=fused)


def _matrices(model: nn.Module, block_classes: tuple[type[nn.Module], ...]) -> list[nn.Parameter]:
    """Return all 2-D parameters inside blocks, each once; that excludes embeddings and the head."""
    blocks = (module for module in model.modules() if isinstance(module, block_classes))
    found = (p for block in blocks for p in block.parameters() if p.requires_grad and p.ndim == 2)
    return list(dict.fromkeys(found))


def compile_as_asked(model: nn.Module, units: Iterable[nn.Module], settings: Settings) -> None:
    """Mark units, and separately the loss, for compilation if the settings ask for it; they compile when run.

    Raises:
        BenchError: the model's loss cannot be compiled separately.
    """
    if not settings.compile:
        return
    for unit in units:
        unit.compile()
    if not settings.compile_loss:
        return
    inner = next((module for module in model.modules() if isinstance(module, ComputesTokenLoss)), None)
    if inner is None:
        raise BenchError("compile_loss=true: this model's loss is not `token_loss`; leave compile_loss out")
    inner.compiled_loss = torch.compile(token_loss)


def clip_gradients(parameters: Iterable[nn.Parameter], largest: float) -> Tensor:
    """Clip gradients to a total 2-norm of at most `largest`; return the norm before.

    torch stacks the norms of all gradients, which must be on one mesh. With expert parallelism, experts are
    on another mesh. The total is then the root of the sum of each mesh's squared norm, as in TorchTitan.
    """
    from torch.distributed.tensor import DTensor

    by_mesh: dict[object, list[nn.Parameter]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            mesh = parameter.grad.device_mesh if isinstance(parameter.grad, DTensor) else None
            by_mesh.setdefault(mesh, []).append(parameter)
    if len(by_mesh) == 1:
        (only,) = by_mesh.values()
        return torch.nn.utils.clip_grad_norm_(only, largest)
    if not by_mesh:
        return torch.zeros(())
    norms = [_norm_of([parameter.grad for parameter in group]) for group in by_mesh.values()]
    total = torch.linalg.vector_norm(torch.stack(norms))
    for group in by_mesh.values():
        torch.nn.utils.clip_grads_with_norm_(group, largest, total)
    return total


def _norm_of(gradients: list[Tensor | None]) -> Tensor:
    norm: Any = torch.nn.utils.get_total_norm([each for each in gradients if each is not None])
    return norm.full_tensor() if hasattr(norm, "full_tensor") else norm


def offload_if_asked(units: Sequence[nn.Module], config: Config) -> None:
    """Let the unwrapped `units` (last first) offload tensors saved for backward, if `config` asks for it."""
    asked = config.settings.activation_offload
    if not asked:
        return
    from fsdpbench.impl import offload_activations

    each = [word == "true" for word in spread(asked)] if isinstance(asked, str) else [True] * len(units)
    offload_activations(unit for unit, moved in zip(reversed(units), each, strict=True) if moved)


def write_loss_as_asked(model: nn.Module, settings: Settings) -> None:
    """Let `model` compute lm head and loss together, if the settings ask for it. Raises `BenchError`."""
    if settings.loss not in LINEAR_LOSSES:
        return
    inner = next((module for module in model.modules() if isinstance(module, ComputesTokenLoss)), None)
    if inner is None:
        raise BenchError(f"loss={settings.loss}: this model's loss is not `token_loss`; leave loss out")
    use_linear_loss(inner, settings.loss)


@contextmanager
def attention_as_asked(config: Config) -> Iterator[None]:
    """Restrict `scaled_dot_product_attention` to the kernel that the configuration names."""
    kernel, real = config.settings.attention, config.device != "sim"
    if kernel == "auto":
        yield
    else:
        if kernel == "flash3" and real:
            attention.activate_flash_attention_impl("FA3")
        flash = SDPBackend.CUDNN_ATTENTION if kernel == "cudnn" and real else SDPBackend.FLASH_ATTENTION
        # The kernel is part of the key, because compiled graphs cached on disk do not depend on it.
        with compiler_config.patch(cache_key_tag=kernel), sdpa_kernel(KERNELS.get(kernel, flash)):
            yield


def narrow_as_asked(model: nn.Module, workload: Workload, settings: Settings) -> None:
    """Let the linear layers of the blocks multiply in `linear_dtype`."""
    if settings.linear_dtype != SETTINGS["linear_dtype"].default:
        narrow(model, workload.block_classes, settings.linear_dtype)


def gather_as_asked(model: nn.Module, settings: Settings) -> None:
    """Let FSDP2, applied later, all-gather weights in fp8 if they are multiplied in fp8."""
    if settings.linear_dtype == "fp8":
        gather_narrowly(model)


def scale_after_steps(model: nn.Module, optimizer: torch.optim.Optimizer, settings: Settings) -> None:
    """Recompute the scales of weights that are gathered in fp8 after each step of `optimizer`."""
    if settings.linear_dtype == "fp8":

        def again(*_: Any) -> None:
            scale_weights(model)

        optimizer.register_step_post_hook(again)
