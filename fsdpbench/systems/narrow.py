"""The setting `linear_dtype`: layers that multiply in 8 or 4 bits, and where they cannot be.

FSDP2 may gather weights in fp8, half the bytes of bf16 (torch's all-gather extensions):

    NarrowlyGathered   a sharded weight: float32, what the optimizer sees; says that fp8 is gathered
    EightBitWeight     the whole weight as it was gathered, and its scale; only `EightBitLinear` reads it

All ranks must scale alike, by the largest magnitude of the whole weight. `scale_weights` finds those of all
weights in one all-reduce, after each step of the optimizer; before the first step each weight reduces its
own. As torchao's `enable_fsdp_float8_all_gather` with `precompute_float8_dynamic_scale_for_fsdp`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdpbench.base.configuration.config import PARALLEL, Config
from fsdpbench.base.settings import SETTINGS, Settings
from fsdpbench.base.torch_internals import tree_map_only, wrapper_subclass
from fsdpbench.sim.model.profile import load_profile
from fsdpbench.sim.model.software import CURRENT, SoftwareProfile, load_software
from fsdpbench.systems.model_code import code_of_model
from fsdpbench.workloads import Workload, WorkloadError, get_workload
from fsdpbench.workloads.adapters.lora import Lora, LoraWorkload
from fsdpbench.workloads.families import gpt, llama
from fsdpbench.workloads.library_model import CONTENT, LIBRARY, LibraryWorkload, packed
from fsdpbench.workloads.narrow.blocks import NarrowProjection, check_narrow, narrow
from fsdpbench.workloads.narrow.eight_bits import E4M3, cast, scale_of

_NAME = "linear_dtype"
_WIDE = SETTINGS[_NAME].default
_TABLES = {"fp8": ("fp8",), "mxfp8": ("fp8", "nvfp4"), "nvfp4": ("nvfp4",)}
"""Tables of products that a chip's profile must have; only chips with nvfp4 multiply in mxfp8."""
_aten = torch.ops.aten
_KEEPS_CLASS = frozenset(
    {
        _aten.detach.default, _aten.empty_like.default, _aten.new_zeros.default, _aten.slice.Tensor,
        _aten.view.default, _aten.as_strided.default, _aten._to_copy.default, _aten._pin_memory.default,
        _aten.split.Tensor, _aten.clone.default, _aten.alias.default, _aten.new_empty.default,
    }
)  # fmt: skip
"""What FSDP2 makes of a weight before it is the shard, and when a shard moves. Moments are plain tensors."""


def _around(cls: type[Tensor], inner: Tensor, dtype: torch.dtype) -> Any:
    """Return a tensor of a wrapping class with the shape, strides and device of `inner`."""
    strides, offset = inner.stride(), int(inner.storage_offset())
    return wrapper_subclass(
        cls, inner.shape, strides=strides, storage_offset=offset, dtype=dtype, device=inner.device
    )


class NarrowlyGathered(torch.Tensor):
    """A (sharded) weight around the tensor `held`; `scale`: what the whole is cast with, once known."""

    held: Tensor
    scale: Tensor | None

    @staticmethod
    def __new__(cls, held: Tensor) -> Any:
        return _around(cls, held, held.dtype)

    def __init__(self, held: Tensor) -> None:
        self.held, self.scale = held, None

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"NarrowlyGathered({self.held!r})"

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["held"], None

    @staticmethod
    def __tensor_unflatten__(inner: Mapping[str, Tensor], *_: Any) -> NarrowlyGathered:
        return NarrowlyGathered(inner["held"])

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        plain = tree_map_only(NarrowlyGathered, lambda each: each.held, (args, kwargs or {}))
        result = func(*plain[0], **plain[1])
        if func in _KEEPS_CLASS:
            return tree_map_only(Tensor, NarrowlyGathered, result)
        if args and isinstance(args[0], NarrowlyGathered) and result is args[0].held:
            return args[0]  # in place
        return result

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
    ) -> tuple[tuple[Tensor], tuple[Tensor]]:
        """Return the shard's fp8 bytes, padded to the largest in `mesh`, and the inverse of its scale."""
        scale = self.scale
        if scale is None:
            scale = scale_of(_of_all(_magnitude(self.held), mesh.get_group()), E4M3)
        data = cast(self.held, scale, E4M3).view(torch.uint8)  # gloo gathers no fp8
        missing = -(-outer_size[0] // mesh.size()) - len(data)
        if missing:
            data = torch.cat((data, data.new_zeros(missing, data.shape[1])))
        return (data,), (scale.reciprocal(),)

    def fsdp_post_all_gather(
        self, outputs: Sequence[Tensor], metadata: tuple[Tensor], param_dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        """Make the whole weight of what was gathered, or give `out`, whose memory that is, its new scale."""
        if out is not None:
            out.inverse8 = metadata[0]
            return None
        return EightBitWeight(outputs[0].view(E4M3), metadata[0], param_dtype), outputs


class EightBitWeight(torch.Tensor):
    """A whole weight in fp8 that counts as one of `dtype`, as its gradient is."""

    data8: Tensor
    inverse8: Tensor

    @staticmethod
    def __new__(cls, data8: Tensor, inverse8: Tensor, dtype: torch.dtype) -> Any:
        return _around(cls, data8, dtype)

    def __init__(self, data8: Tensor, inverse8: Tensor, dtype: torch.dtype) -> None:
        self.data8, self.inverse8 = data8, inverse8

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"EightBitWeight({list(self.shape)}, {self.dtype})"

    def __tensor_flatten__(self) -> tuple[list[str], torch.dtype]:
        return ["data8", "inverse8"], self.dtype

    @staticmethod
    def __tensor_unflatten__(inner: Mapping[str, Tensor], dtype: torch.dtype, *_: Any) -> EightBitWeight:
        return EightBitWeight(inner["data8"], inner["inverse8"], dtype)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        rule = _VIEWS.get(func)
        if rule is None:
            raise NotImplementedError(f"{func}: a weight gathered in fp8 is read by its own layer alone")
        whole = args[0]
        return EightBitWeight(rule(whole.data8, *args[1:], **(kwargs or {})), whole.inverse8, whole.dtype)


_VIEWS: dict[Any, Callable[..., Tensor]] = {
    _aten.detach.default: _aten.detach.default,
    _aten.alias.default: _aten.alias.default,
    _aten.as_strided.default: _aten.as_strided.default,
    _aten.view.default: _aten.view.default,
}


def gather_narrowly(model: nn.Module) -> None:
    """Have FSDP2, which is applied afterwards, gather the weights of `model`'s fp8 layers in fp8."""
    for layer in model.modules():
        if isinstance(layer, NarrowProjection) and layer.kind == "fp8":
            layer.weight = nn.Parameter(NarrowlyGathered(layer.weight.detach()))


@torch.no_grad()
def scale_weights(model: nn.Module) -> None:
    """Find the scales of all weights that are gathered in fp8, in one all-reduce of their magnitudes."""
    every: list[Any] = list(model.parameters())
    weights = [each for each in every if isinstance(getattr(each, "_local_tensor", None), NarrowlyGathered)]
    if not weights:
        return
    shards: list[Any] = [weight._local_tensor for weight in weights]
    mesh = weights[0].device_mesh
    group = mesh.get_group(mesh.ndim - 1)
    magnitudes = torch.stack(_magnitudes([shard.held for shard in shards]))
    scales = scale_of(_of_all(magnitudes, group), E4M3)
    for shard, scale in zip(shards, scales.unbind(), strict=True):
        shard.scale = scale


def _magnitude(x: Tensor) -> Tensor:
    return x.abs().max() if x.numel() else x.new_zeros(())  # a rank may hold no row


def _magnitudes(shards: list[Tensor]) -> list[Tensor]:
    if all(shard.numel() for shard in shards):
        return list(_aten._foreach_norm.Scalar(shards, float("inf")))
    return [_magnitude(shard) for shard in shards]


def _of_all(magnitudes: Tensor, group: Any) -> Tensor:
    if dist.get_world_size(group) > 1:
        dist.all_reduce(magnitudes, dist.ReduceOp.MAX, group)
    return magnitudes


def narrow_as_asked(model: nn.Module, workload: Workload, settings: Settings) -> None:
    """Let the linear layers of the blocks multiply in what the settings say."""
    if settings.linear_dtype != _WIDE:
        narrow(model, workload.block_classes, settings.linear_dtype)


def gather_as_asked(model: nn.Module, settings: Settings) -> None:
    """Have FSDP2, applied afterwards, gather in fp8 what multiplies in fp8."""
    if settings.linear_dtype == "fp8":
        gather_narrowly(model)


def scale_after_steps(model: nn.Module, optimizer: torch.optim.Optimizer, settings: Settings) -> None:
    """Find the scales of what is gathered in fp8 again after each step of `optimizer`."""
    if settings.linear_dtype == "fp8":

        def again(*_: Any) -> None:
            scale_weights(model)

        optimizer.register_step_post_hook(again)


def refuse_narrow(config: Config) -> dict[str, str]:
    """Refuse products in 8 or 4 bits that the workload of `config` does not allow: setting -> reason."""
    kind = config.settings.linear_dtype
    if kind == _WIDE:
        return {}
    why = _of_other_settings(config.settings) or _of_device(config, kind)
    if why is None:
        try:
            check_narrow(workload_of(config), kind, config.settings.batch, config.settings.seq)
        except WorkloadError as error:
            why = str(error)
    return {} if why is None else {_NAME: why}


def refuse_narrow_gathers(config: Config) -> dict[str, str]:
    """Refuse settings that exclude weights gathered in fp8 under FSDP2: setting -> reason."""
    settings, raf = config.settings, config.settings.reshard_after_forward
    if settings.linear_dtype != "fp8":
        return {}
    why = None
    if isinstance(raf, int) and not isinstance(raf, bool):
        why = "FSDP2 reshards to a smaller group only what it gathers itself: reshard_after_forward=true"
    elif settings.symmetric_memory:
        why = "a gather of fp8 in symmetric memory was not tried: leave symmetric_memory out"
    elif settings.cpu_offload:
        why = "weights gathered in fp8 are scaled where they are kept: leave cpu_offload out"
    elif settings.graph != "none":
        why = "gathers of fp8 take other memory in each step, which no graph captures: leave graph out"
    elif settings.optimizer == "muon" or settings.optimizer_dtype is not None:
        why = "only torch's own AdamW and SGD step weights gathered in fp8: leave muon and bf16 out"
    return {} if why is None else {_NAME: why}


def _of_other_settings(settings: Settings) -> str | None:
    if settings.linear_dtype == "nvfp4" and settings.compile:
        return "Inductor lowers no product with nvfp4's swizzled scales: leave compile out"
    if settings.lora:
        return "frozen layers with adapters stay in param_dtype or lora_base: leave lora out"
    if settings.implementation != "own":
        return "the library's own layers stay as they are: leave implementation out"
    for name in PARALLEL:
        if getattr(settings, name) > 1:
            return f"layers of 8 or 4 bits beside {name} are not built: leave {name} at 1"
    return None


def _of_device(config: Config, kind: str) -> str | None:
    if config.device == "cuda" and kind != "fp8":
        return f"torch alone has no casts to {kind} for GPUs: take fp8, simulate it, or --device cpu"
    if config.device != "sim":
        return None
    if config.software is not None:
        return f"software {config.software} is not known to have them: leave --software out"
    assert config.hardware is not None
    profile = load_profile(config.hardware)
    missing = [table for table in _TABLES[kind] if table not in profile.narrow_peak_flops]
    if not missing:
        return None
    fit = "h100-80gb, h200 or b200" if kind == "fp8" else "b200, b300, gb200, gb300 or rtx-pro-6000"
    return f"{profile.name} has no products in {kind} (no table in its profile): --hardware {fit}"


def software_of(config: Config) -> SoftwareProfile:
    """Return the software profile of `config`; that of the installed software where it names none."""
    return _load(config.software or CURRENT)


def chosen_software(given: str | None, own: str, device: str) -> str | None:
    """Return the software that a configuration names: `given`, else its system's `own`. The installed
    software is named only in the place of another."""
    if device != "sim":
        return given
    chosen = given or own
    return None if chosen == own == CURRENT else chosen


def refused_by_software(config: Config) -> dict[str, str]:
    """Refuse values that the software of `config` does not have: setting -> reason."""
    if config.software is None:
        return {}
    software, refused = software_of(config), {}
    if software.of_gpts and workload_of(config).family != gpt.FAMILY:
        changed = ", ".join(software.of_gpts)
        refused["model"] = f"software {software.name} ({changed}) is of GPTs, not of {config.model}"
    family = workload_of(config).family
    if (software.of_llamas or software.operators.fused_rotary) and family != llama.FAMILY:
        refused["model"] = f"software {software.name} is of Llamas, not of {config.model}"
    by_operator = "op" in str(config.settings.activation_checkpointing)
    if by_operator and not software.checkpointing.by_operator:
        refused["activation_checkpointing"] = (
            f"checkpointing by operator came with torch 2.4, after software {software.name}"
        )
    if config.settings.compile and not software.compiles_as_installed:
        refused["compile"] = f"the compiler is the installed one, not that of software {software.name}"
    return refused


_load = functools.cache(load_software)


def adapted(workload: Workload, settings: Settings) -> Workload:
    """Return `workload`, or the library's own modules of it, or with `lora` its fine-tuning, whose frozen
    parameters are in `param_dtype` or 4 bits.

    Raises `WorkloadError` for a family or layers that have no adapters.
    """
    if settings.implementation == LIBRARY or workload.family == LIBRARY:
        if settings.lora:
            raise WorkloadError(
                f"lora: adapters are put beside our own layers, not the library's "
                f"({LIBRARY}); with peft it is a script (docs/models.md)"
            )
        if workload.family == LIBRARY:
            return workload
        if workload.library_config is None:
            raise WorkloadError(
                f"implementation={LIBRARY}: {workload.name} comes from no file of the library; give one with "
                "--hf-config FILE"
            )
        return LibraryWorkload.from_values(workload.name, {CONTENT: packed(workload.library_config)})
    if not settings.lora:
        return workload
    frozen = TORCH_DTYPES[settings.param_dtype]
    four_bit = settings.lora_base == "4bit"
    return LoraWorkload(workload, Lora(settings.lora, settings.lora_targets, frozen, four_bit))


def workload_of(config: Config) -> Workload:
    """Return the workload that `config` trains. Its code is as the settings say, else as the shape says, else
    as its software has it."""
    workload = get_workload(config.model, shape=dict(config.shape_given) or None)
    of_software = load_software(config.software).of_llamas if config.software else {}
    if workload.family != llama.FAMILY:
        of_software = {}
    of_settings = code_of_model(workload, config.settings)
    if of_software or of_settings:
        workload = get_workload(config.model, shape={**of_software, **config.shape_given, **of_settings})
    return adapted(workload, config.settings)


TORCH_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
