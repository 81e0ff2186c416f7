"""`fully_shard` (per-parameter sharding), ours and PyTorch's."""

import os
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from fsdpbench.base.configuration.config import PARALLEL, Config, Degrees, shard_size_of
from fsdpbench.base.errors import UsageError, error_text
from fsdpbench.base.settings.values import is_mixed, spread
from fsdpbench.sim.model.profile import load_profile
from fsdpbench.systems.base import ABSENT, BuildContext, System, refuse_common
from fsdpbench.systems.narrow import refuse_narrow_gathers
from fsdpbench.systems.parallel.refusals import refuse_parallel
from fsdpbench.workloads.library import LIBRARY

if TYPE_CHECKING:  # importing torch takes most of a second; commands that only plan do not need it
    import torch
    from torch import nn
    from torch.distributed.tensor import Shard

    from fsdpbench.systems.parallel.experts import Meshes

_CONTEXT_MESH = "_fsdpbench_context_mesh"


class _FullyShardSystem(System):
    """The common part of both FSDP2s: shard units from inner to outer, then the root; set gradient sync."""

    parallel = frozenset(PARALLEL)

    @abstractmethod
    def _module(self) -> Any:
        """Return a namespace of `fully_shard` and its policies, with torch's names."""

    @abstractmethod
    def _placements(self) -> tuple[Any, Any, Any]:
        """Return the classes of a placement with its own mesh, of a sharded mesh, and of a replicated one."""

    @abstractmethod
    def _extras(self, context: BuildContext) -> Mapping[str, Any]:
        """Return the arguments of `fully_shard` that only this FSDP2 has."""

    def wrap(self, context: BuildContext) -> "nn.Module":
        import torch

        from fsdpbench.systems import training, wrapping
        from fsdpbench.systems.parallel.experts import make_meshes, placement_of_experts
        from fsdpbench.systems.parallel.tensor import parallelise

        config, settings = context.config, context.config.settings
        model = context.build_model()
        training.gather_as_asked(model, settings)
        meshes = make_meshes(Degrees.of(config), context.shard_size, context.device.type)
        parallelise(model, context.workload, meshes)
        units = wrapping.select_units(model, context.workload, settings.wrap)
        training.offload_if_asked(units, config)
        fsdp = self._module()
        arguments = {
            "mesh": meshes.data,
            "mp_policy": fsdp.MixedPrecisionPolicy(*_mixed_precision(config)),
            **self._extras(context),
        }
        if settings.cpu_offload:
            # Without an accelerator torch cannot pin memory, and raises.
            arguments["offload_policy"] = fsdp.CPUOffloadPolicy(pin_memory=context.device.type != "cpu")
        if context.workload.family == LIBRARY:
            arguments["shard_placement_fn"] = _placement_of_stacks(context.shard_size)
        if meshes.experts is not None:
            arguments["shard_placement_fn"] = placement_of_experts(model, meshes, *self._placements())
        resharded = _reshard_after_forward(config, len(units))
        for unit, reshard in zip(units, reversed(resharded), strict=True):  # units start at the model's end
            fsdp.fully_shard(unit, **arguments, reshard_after_forward=reshard)
            # By default the root stays unsharded after forward, because backward needs it first.
        fsdp.fully_shard(model, **arguments)
        _prefetch_by_unit(units[::-1], config)
        use_symmetric_memory([*units, model], config)
        if meshes.experts is not None:
            _average_over_all([*units, model], Degrees.of(config), meshes, context.device)
        if meshes.context is not None:
            setattr(model, _CONTEXT_MESH, meshes.context)
        if context.deferred:
            where = torch.device("cpu") if settings.cpu_offload else context.device
            with context.materialising():
                wrapping.materialise(model, where, with_weights=context.device.type != "sim")
        training.compile_as_asked(model, units, settings)
        return model

    def make_optimizer(self, model: "nn.Module", config: Config) -> "torch.optim.Optimizer":
        from fsdpbench.systems.training import scale_after_steps

        optimizer = super().make_optimizer(model, config)
        scale_after_steps(model, optimizer, config.settings)
        return optimizer

    def forward_context(self, config: Config, device: "torch.device") -> AbstractContextManager[object]:
        from fsdpbench.systems.parallel.tensor import context_of

        return context_of(config)

    @contextmanager
    def microbatch_of(
        self, model: "nn.Module", batch: "tuple[torch.Tensor, ...]"
    ) -> "Iterator[tuple[torch.Tensor, ...]]":
        mesh: Any = getattr(model, _CONTEXT_MESH, None)
        if mesh is None:
            yield batch
            return
        from fsdpbench.systems.parallel.context import ring

        with ring(mesh, batch) as parts:
            yield parts

    def backward_context(self, config: Config) -> AbstractContextManager[object]:
        from fsdpbench.systems.parallel.tensor import context_of

        return context_of(config)

    def microbatch(self, model: "nn.Module", *, sync: bool) -> AbstractContextManager[object]:
        return _gradient_sync(model, sync)

    def refuses(self, config: Config) -> dict[str, str]:
        refused = refuse_common(config) | refuse_parallel(config)
        refused |= refuse_symmetric_memory(config, shard_size_of(config)) | refuse_narrow_gathers(config)
        raf, ranks = config.settings.reshard_after_forward, Degrees.of(config).sharding
        if isinstance(raf, int) and not isinstance(raf, bool) and ranks % raf:
            refused["reshard_after_forward"] = f"{ranks} ranks cannot be divided into groups of {raf}"
        return refused


class ImplFsdp2(_FullyShardSystem):
    """`fsdpbench.impl.fully_shard`."""

    name = "impl-fsdp2"
    summary = "this project's fully_shard"

    def absent_settings(self, config: Config) -> dict[str, str]:
        absent = {"buffer_dtype": "fully_shard leaves buffers alone"}
        if config.settings.memory_handover != "record_stream":
            absent["limit_all_gathers"] = error_text("fsdp2.by_events")
        return absent

    def _module(self) -> Any:
        from fsdpbench import impl

        return impl

    def _placements(self) -> tuple[Any, Any, Any]:
        from fsdpbench.impl.shared import placement

        return placement.ShardPlacementResult, placement.FSDPMeshInfo, placement.HSDPMeshInfo

    def _extras(self, context: BuildContext) -> Mapping[str, Any]:
        settings = context.config.settings
        prefetch = settings.backward_prefetch
        forward, backward = settings.forward_prefetch, settings.backward_prefetch_depth
        arguments = {
            "backward_prefetch": None if prefetch == "none" else prefetch,
            "backward_prefetch_depth": 1 if is_mixed(backward) else backward,
            "forward_prefetch_depth": None if is_mixed(forward) else forward or None,  # 0: not explicit
        }
        if settings.memory_handover is not None:
            arguments["memory_handover"] = settings.memory_handover
        if settings.layout is not None:
            arguments["layout"] = settings.layout
        if settings.limit_all_gathers is not None:
            limit = settings.limit_all_gathers
            arguments["limit_all_gathers"] = False if limit == "off" else limit
        return arguments

    def make_muon(self, matrices: "list[nn.Parameter]") -> "torch.optim.Optimizer":
        from fsdpbench.impl import Muon

        return Muon(matrices, lr=1e-3)


class TorchFsdp2(_FullyShardSystem):
    """`torch.distributed.fsdp.fully_shard`."""

    name = "torch-fsdp2"
    summary = "PyTorch's fully_shard"
    absent = ABSENT["torch-fsdp2"]

    def absent_settings(self, config: Config) -> Mapping[str, str]:
        why = "PyTorch's fully_shard prefetches so only as explicit code says, by unit (`1:20+2:12`)"
        names = ("backward_prefetch_depth", "forward_prefetch")
        return dict(self.absent) | {
            name: why for name in names if not is_mixed(getattr(config.settings, name))
        }

    def refuses(self, config: Config) -> dict[str, str]:
        refused = super().refuses(config)
        if _divides_twice(config):
            refused["ep"] = error_text("fsdp2.divides_twice")
        if config.settings.ep > 1 and not _has_meshes_of_parameters():
            refused.setdefault("ep", error_text("fsdp2.one_mesh", version("torch")))
        if config.settings.backward_prefetch != "pre":
            refused["backward_prefetch"] = "PyTorch's fully_shard always prefetches before (`pre`)"
        return refused

    def _module(self) -> Any:
        from torch.distributed import fsdp

        return fsdp

    def _placements(self) -> tuple[Any, Any, Any]:
        from fsdpbench.base.torch_internals import fsdp_common

        return fsdp_common.ShardPlacementResult, fsdp_common.FSDPMeshInfo, fsdp_common.HSDPMeshInfo

    def _extras(self, context: BuildContext) -> Mapping[str, Any]:
        return {}


def _average_over_all(
    modules: Sequence[Any], degrees: Degrees, meshes: "Meshes", device: "torch.device"
) -> None:
    """Average the experts' gradients over all ranks, because experts receive tokens of several ranks."""
    reduced = meshes.expert_data is not None and meshes.expert_data.size() > 1
    for module in modules:
        module.set_gradient_divide_factor(float(degrees.sharding))
        if device.type == "cpu" and reduced:  # gloo has no premultiplied sum
            module.set_force_sum_reduction_for_comms(True)


def _placement_of_stacks(ranks: int) -> "Callable[[nn.Parameter], Shard | None]":
    """Return a `shard_placement_fn` for parameters that stack all experts, [experts, ..., ...].

    `fully_shard` pads the first dimension to a multiple of the ranks: 16 experts on 256 ranks would be
    gathered 16 times. Another dimension that the ranks divide evenly needs no padding.
    """
    from torch.distributed.tensor import Shard

    def place(parameter: "nn.Parameter") -> "Shard | None":
        if parameter.dim() != 3 or parameter.shape[0] % ranks == 0:
            return None
        return next((Shard(dim) for dim in (1, 2) if parameter.shape[dim] % ranks == 0), None)

    return place


def _has_meshes_of_parameters() -> bool:
    from fsdpbench.base.torch_internals import fsdp_common  # takes half a second, so only if needed

    return fsdp_common is not None


def _divides_twice(config: Config) -> bool:
    degrees, shard = Degrees.of(config), shard_size_of(config)
    replicas = degrees.sharding > shard
    summed = config.settings.reduce_dtype == "fp16" or (config.device == "cpu" and replicas)
    return degrees.ep == shard * degrees.tp > 1 and summed


def _reshard_after_forward(config: Config, units: int) -> list[bool | int]:
    """Return `reshard_after_forward` of each unit, in forward order."""
    chosen = config.settings.reshard_after_forward
    if isinstance(chosen, str):
        each = [word == "true" for word in spread(chosen)]
        if len(each) != units:
            raise UsageError(f"reshard_after_forward names {len(each)} units, the model has {units}")
        return list(each)
    if chosen is None:
        chosen = config.settings.strategy in ("FULL_SHARD", "HYBRID_SHARD")
    kept = config.settings.keep_last_unsharded
    return [False if kept and index == units - 1 else chosen for index in range(units)]


def _prefetch_by_unit(units: Sequence[Any], config: Config) -> None:
    """Let each of the wrapped `units` (in forward order) prefetch as many others as `config` sets for it."""
    settings = config.settings
    if isinstance(settings.forward_prefetch, str):
        for place, count in enumerate(map(int, spread(settings.forward_prefetch)), 1):
            units[place - 1].set_modules_to_forward_prefetch([*units[place : place + count]])
    if isinstance(settings.backward_prefetch_depth, str):
        for place, count in enumerate(map(int, spread(settings.backward_prefetch_depth))):
            units[place].set_modules_to_backward_prefetch([*units[max(0, place - count) : place][::-1]])


def _mixed_precision(config: Config) -> "tuple[torch.dtype | None, torch.dtype | None]":
    import torch

    from fsdpbench.workloads.layers import DTYPES

    param = DTYPES[config.settings.param_dtype]
    reduce = DTYPES[config.settings.reduce_dtype or config.settings.param_dtype]
    return (None if param is torch.float32 else param), (None if reduce is param else reduce)


@contextmanager
def _gradient_sync(model: Any, sync: bool) -> Iterator[None]:
    model.set_requires_gradient_sync(sync)
    yield


_NAME = "symmetric_memory"
_POLICY = "NCCL_CTA_POLICY"


def use_symmetric_memory(modules: Iterable[Any], config: Config) -> None:
    """Let the wrapped `modules` all-gather in symmetric memory, if `config` asks for it."""
    if not config.settings.symmetric_memory:
        return
    if config.device == "sim":
        os.environ[_POLICY] = "2"  # on real GPUs the user must set it
    for module in modules:
        module.set_symm_mem_for_comm()


def refuse_symmetric_memory(config: Config, shard_size: int) -> dict[str, str]:
    """Refuse all-gathers by copy engines that `config` does not allow: setting -> reason."""
    if not config.settings.symmetric_memory:
        return {}
    why = _of_device(config)
    if why is None and shard_size == 1:
        why = "nothing is gathered where nothing is sharded"
    elif why is None and shard_size > config.ranks_per_node:
        why = error_text("fsdp2.copy_engines", config.ranks_per_node, shard_size)
    for other in PARALLEL if why is None else ():
        if getattr(config.settings, other) > 1:
            why = f"groups of {other} beside it were not tried: leave {other} at 1"
    if why is None and config.settings.layout == "grouped":
        why = "a gather in symmetric memory is packed: leave layout out"
    return {} if why is None else {_NAME: why}


def _of_device(config: Config) -> str | None:
    if config.device == "cpu":
        return "it is NCCL's, on GPUs that really communicate or simulated ones"
    if config.device == "cuda":
        missing = os.environ.get(_POLICY) != "2"
        return error_text("fsdp2.policy", _POLICY) if missing else None
    if config.software is not None:
        return f"software {config.software} is older than it: leave --software out"
    assert config.hardware is not None
    profile = load_profile(config.hardware)
    if profile.nvlink.copy_engine_gathers:
        return None
    return error_text("fsdp2.no_figures", profile.name)
