"""NVIDIA's Megatron-FSDP (package `megatron-fsdp`): shards model and optimizer; units are classes."""

from typing import TYPE_CHECKING

from fsdpbench.base.configuration.config import Config, shard_size_of
from fsdpbench.base.settings import Settings
from fsdpbench.systems.base import ABSENT, BuildContext, System, refuse_under

if TYPE_CHECKING:
    import torch
    from torch import nn

_STRATEGIES = {
    "FULL_SHARD": "optim_grads_params",
    "SHARD_GRAD_OP": "optim_grads",
    "NO_SHARD": "no_shard",
    "HYBRID_SHARD": "optim_grads_params",
    "_HYBRID_SHARD_ZERO2": "optim_grads",
}


class MegatronFsdp(System):
    """`fully_shard` of the package `megatron-fsdp`."""

    name = "megatron-fsdp"
    summary = "NVIDIA's Megatron-FSDP (extra `megatron-fsdp`)"
    devices = frozenset({"cuda"})
    package = "megatron_fsdp"
    installation = "pip install 'fsdpbench[megatron-fsdp]'"
    absent = ABSENT["megatron-fsdp"]

    def refuses(self, config: Config) -> dict[str, str]:
        refused = refuse_under("Megatron-FSDP", config)
        wrap = config.settings.wrap
        if wrap == "root" or wrap.startswith("size:"):
            refused["wrap"] = "Megatron-FSDP's units are classes of modules below the model"
        return refused

    def wrap(self, context: BuildContext) -> "nn.Module":
        self.require()
        from megatron_fsdp import MixedPrecisionPolicy, fully_shard_model

        from fsdpbench.systems.wrapping import select_units
        from fsdpbench.workloads.layers import DTYPES

        config = context.config
        # The model computes in its own dtype; the optimizer has the fp32 weights.
        model = context.build_model().to(DTYPES[config.settings.param_dtype])
        units = select_units(model, context.workload, config.settings.wrap)
        wrapped: nn.Module = fully_shard_model(
            module=model,
            fsdp_unit_modules=list(dict.fromkeys(type(unit) for unit in units)),
            mixed_precision_policy=MixedPrecisionPolicy(**megatron_precision(config.settings)),
            device=None if context.deferred else context.device,
            init_model_with_meta_device=context.deferred and config.settings.strategy != "NO_SHARD",
            **megatron_arguments(config),
            **_mesh(context),
        )
        return wrapped

    def make_optimizer(self, model: "nn.Module", config: Config) -> "torch.optim.Optimizer":
        from megatron_fsdp import fully_shard_optimizer

        sharded: torch.optim.Optimizer = fully_shard_optimizer(super().make_optimizer(model, config))
        return sharded


def megatron_arguments(config: Config) -> dict[str, str | bool | None]:
    """Return the arguments of `fully_shard_model` that depend on settings, except dtypes."""
    settings = config.settings
    return {
        "zero_dp_strategy": _STRATEGIES[settings.strategy],
        "outer_dp_sharding_strategy": "no_shard",
        "dp_shard_dim": "shard",
        "dp_outer_dim": "replicate" if "HYBRID" in settings.strategy else None,
        "sync_model_each_microbatch": True,
        "preproc_state_dict_for_dcp_ckpt": False,
    }


def megatron_precision(settings: Settings) -> "dict[str, torch.dtype]":
    """Return the dtypes for Megatron-FSDP's policy. Gradients are accumulated in fp32, like FSDP's sharded
    gradients, and reduced in `reduce_dtype`."""
    import torch

    from fsdpbench.workloads.layers import DTYPES

    reduced = DTYPES[settings.reduce_dtype or settings.param_dtype]
    both = dict.fromkeys(("main_params_dtype", "main_grads_dtype"), torch.float32)
    return {**both, "grad_comm_dtype": reduced}


def _mesh(context: BuildContext) -> dict[str, object]:
    """Return the device mesh; for hybrid sharding also the group of all ranks for Megatron-FSDP."""
    from torch.distributed.device_mesh import init_device_mesh

    config = context.config
    if "HYBRID" not in config.settings.strategy:
        return {"device_mesh": init_device_mesh("cuda", (config.gpus,), mesh_dim_names=("shard",))}
    shard = shard_size_of(config)
    mesh = init_device_mesh("cuda", (config.gpus // shard, shard), mesh_dim_names=("replicate", "shard"))
    return {"device_mesh": mesh, "hybrid_fsdp_group": mesh._flatten("all").get_group()}
