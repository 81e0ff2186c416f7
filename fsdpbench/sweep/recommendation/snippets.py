"""A configuration that ran as code that can be pasted into a training script.

The code is for the system that ran, with the settings that it ran with, and for no other: what another API
would make of them has not been measured. It defines `parallelize(model, block_class)`; what a training script
has to do beside it is in its head.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from fsdpbench.configuration.config import Config
from fsdpbench.configuration.degrees import PARALLEL
from fsdpbench.configuration.settings import show_value
from fsdpbench.systems.base import shard_size_of

_TORCH_DTYPES = {"bf16": "torch.bfloat16", "fp16": "torch.float16", "fp32": "torch.float32"}
_DEVICE = """
DEVICE = torch.accelerator.current_accelerator().type if torch.accelerator.is_available() else "cpu"
"""
_OF_THE_SCRIPT = (
    "seq", "batch", "grad_accum", "grad_sync", "activation_checkpointing", "checkpoint_first", "optimizer",
    "optimizer_dtype", "linear_dtype", "clip", "zero_grad", "norm", "rotary", "loss",
    "lora", "lora_targets", "lora_base", "implementation", "compile", "compile_loss",
)  # fmt: skip


def snippets(configs: Iterable[Config]) -> Mapping[str, str]:
    """File name -> Python source, of the first configuration of each system that has an API to write."""
    sources: dict[str, str] = {}
    best: dict[str, Config] = {}
    for config in configs:
        best.setdefault(config.system, config)
    for system, config in best.items():
        write = _WRITERS.get(system)
        # A plan of tensor or expert parallelism is the model's own; without it the code would be another's.
        if write is not None and not any(getattr(config.settings, name) > 1 for name in PARALLEL):
            sources[f"best_{system.replace('-', '_')}.py"] = write(config)
    return sources


def _head(config: Config, api: str) -> list[str]:
    settings = config.settings.to_dict()
    beside = [f"{name}={show_value(settings[name])}" for name in _OF_THE_SCRIPT if settings[name] is not None]
    hardware = f" on {config.hardware}" if config.hardware else ""
    return [
        f'"""{config.model} on {config.gpus} GPUs{hardware}: {api}, as fsdpbench found it best.\n',
        f"The training script's part: {', '.join(beside)}.",
        '"""\n',
        "import torch",
        "from torch import nn",
    ]


# ------------------------------------------------------------------------------------------------ fully_shard


def _impl_fsdp2(config: Config) -> str:
    settings = config.settings
    prefetch = None if settings.backward_prefetch == "none" else settings.backward_prefetch
    arguments = [
        f"backward_prefetch={prefetch!r}",
        f"backward_prefetch_depth={settings.backward_prefetch_depth}",
        f"forward_prefetch_depth={settings.forward_prefetch}",
    ]
    if settings.memory_handover is not None:
        arguments.append(f"memory_handover={settings.memory_handover!r}")
    if settings.layout is not None:
        arguments.append(f"layout={settings.layout!r}")
    if settings.limit_all_gathers is not None:
        arguments.append(f"limit_all_gathers={_limit(config)!r}")
    return _fully_shard(config, "fsdpbench.impl", arguments, "CPUOffloadPolicy()")


def _torch_fsdp2(config: Config) -> str:
    return _fully_shard(config, "torch.distributed.fsdp", [], 'CPUOffloadPolicy(pin_memory=DEVICE != "cpu")')


def _fully_shard(config: Config, source: str, own: list[str], offload: str) -> str:
    settings = config.settings
    arguments = ["mesh=mesh", f"mp_policy={_policy(config)}", *own]
    names = ["MixedPrecisionPolicy", "fully_shard"]
    if settings.cpu_offload:
        names.insert(0, "CPUOffloadPolicy")
        arguments.append(f"offload_policy={offload}")
    reshard = settings.reshard_after_forward
    if reshard is None:
        reshard = settings.strategy in ("FULL_SHARD", "HYBRID_SHARD")
    lines = [
        *_head(config, f"fully_shard of {source}"),
        "from torch.distributed.device_mesh import init_device_mesh\n",
        f"from {source} import {', '.join(names)}",
        *_offload_import(config),
        _DEVICE,
        "",
        "def parallelize(model: nn.Module, block_class: type[nn.Module]) -> nn.Module:",
        *_offload(config),
        f"    mesh = {_mesh(config)}",
        "    settings = dict(",
        *(f"        {argument}," for argument in arguments),
        "    )",
        *_units(config),
        *_shard_units(f"{reshard}", keep_last=settings.keep_last_unsharded),
        "    fully_shard(model, **settings)",
        *_symmetric(config),
        "    return model",
    ]
    return "\n".join(lines) + "\n"


def _symmetric(config: Config) -> list[str]:
    if not config.settings.symmetric_memory:
        return []
    return [
        "    for module in model.modules():  # with NCCL_CTA_POLICY=2 in the environment",
        '        if hasattr(module, "set_symm_mem_for_comm"):',
        "            module.set_symm_mem_for_comm()",
    ]


def _shard_units(reshard: str, *, keep_last: bool) -> list[str]:
    """Lines that shard each of `units`, the last of which may keep its parameters after forward."""
    if not keep_last:
        return [
            "    for unit in units:",
            f"        fully_shard(unit, reshard_after_forward={reshard}, **settings)",
        ]
    return [
        "    for index, unit in enumerate(units):",
        f"        reshard = {reshard} if index < len(units) - 1 else False",
        "        fully_shard(unit, reshard_after_forward=reshard, **settings)",
    ]


def _policy(config: Config) -> str:
    settings = config.settings
    reduce = settings.reduce_dtype or settings.param_dtype
    param = "None" if settings.param_dtype == "fp32" else _TORCH_DTYPES[settings.param_dtype]
    told = "None" if reduce == settings.param_dtype else _TORCH_DTYPES[reduce]
    return f"MixedPrecisionPolicy(param_dtype={param}, reduce_dtype={told})"


def _units(config: Config) -> list[str]:
    """Lines that set `units`, the arguments of one `fully_shard` each."""
    wrap = config.settings.wrap
    blocks = "[module for module in model.modules() if isinstance(module, block_class)]"
    if wrap == "root":
        return ["    units: list = []"]
    if wrap.startswith("every-"):
        count = int(wrap.removeprefix("every-"))
        return [
            f"    blocks = {blocks}",
            f"    units = [blocks[i : i + {count}] for i in range(0, len(blocks), {count})]",
        ]
    return [*_other_wrap(wrap), f"    units = {blocks}"]


# ------------------------------------------------------------------------------- FullyShardedDataParallel


def _impl_fsdp1(config: Config) -> str:
    settings = config.settings
    arguments = [
        f"limit_all_gathers={_limit(config)!r}",
        f"backward_prefetch_depth={settings.backward_prefetch_depth}",
        f"forward_prefetch_depth={settings.forward_prefetch}",
    ]
    if settings.memory_handover is not None:
        arguments.append(f"memory_handover={settings.memory_handover!r}")
    return _flat(config, "fsdpbench.impl", "from fsdpbench.impl import CustomPolicy", arguments)


def _torch_fsdp1(config: Config) -> str:
    settings = config.settings
    arguments = [
        f"limit_all_gathers={settings.limit_all_gathers != 'off'}",
        f"forward_prefetch={bool(settings.forward_prefetch)}",
    ]
    policy_import = "from torch.distributed.fsdp.wrap import CustomPolicy"
    return _flat(config, "torch.distributed.fsdp", policy_import, arguments)


def _flat(config: Config, source: str, policy_import: str, own: list[str]) -> str:
    settings = config.settings
    names = ["BackwardPrefetch", "FullyShardedDataParallel", "MixedPrecision", "ShardingStrategy"]
    offload = ["cpu_offload=CPUOffload(offload_params=True)"] if settings.cpu_offload else []
    if offload:
        names.insert(1, "CPUOffload")
    mesh = [f"device_mesh={_mesh(config)}"] if "HYBRID" in settings.strategy else []
    mesh_import = ["from torch.distributed.device_mesh import init_device_mesh"] if mesh else []
    arguments = [
        f"sharding_strategy=ShardingStrategy.{settings.strategy}",
        "auto_wrap_policy=CustomPolicy(lambda module: units.get(module, False))",
        f"backward_prefetch={_timing(settings.backward_prefetch)}",
        f"mixed_precision={_mixed_precision(config)}",
        *own,
        *offload,
        *mesh,
        "device_id=device",
        "use_orig_params=True",
    ]
    lines = [
        *_head(config, f"FullyShardedDataParallel of {source}"),
        *mesh_import,
        "",
        f"from {source} import {', '.join(names)}",
        policy_import,
        *_offload_import(config),
        _DEVICE,
        "",
        "def parallelize(model: nn.Module, block_class: type[nn.Module]) -> nn.Module:",
        *_offload(config),
        *_flat_units(config),
        '    index = None if DEVICE == "cpu" else torch.accelerator.current_device_index()',
        "    device = torch.device(DEVICE, index)",
        "    return FullyShardedDataParallel(",
        "        model,",
        *(f"        {argument}," for argument in arguments),
        "    )",
    ]
    return "\n".join(lines) + "\n"


def _flat_units(config: Config) -> list[str]:
    wrap = config.settings.wrap
    if wrap == "root":
        return ["    units: dict = {}"]
    notes = _other_wrap(wrap)
    if wrap.startswith("every-"):
        notes = [
            f"    # wrap={wrap}: put so many blocks into one module each, and pass its class as block_class."
        ]
    lines = [*notes, "    units: dict = {m: True for m in model.modules() if isinstance(m, block_class)}"]
    if config.settings.keep_last_unsharded:
        kept = "SHARD_GRAD_OP" if config.settings.strategy == "FULL_SHARD" else "_HYBRID_SHARD_ZERO2"
        lines.append(f'    units[list(units)[-1]] = {{"sharding_strategy": ShardingStrategy.{kept}}}')
    return lines


def _mixed_precision(config: Config) -> str:
    settings = config.settings
    if (
        settings.param_dtype == "fp32"
        and settings.reduce_dtype in ("fp32", None)
        and not settings.buffer_dtype
    ):
        return "None"
    kinds = {
        "param": settings.param_dtype,
        "reduce": settings.reduce_dtype or settings.param_dtype,
        "buffer": settings.buffer_dtype,
    }
    told = [f"{kind}_dtype={_TORCH_DTYPES[name]}" for kind, name in kinds.items() if name]
    return f"MixedPrecision({', '.join(told)})"


def _timing(prefetch: str | None) -> str:
    names = {"pre": "BackwardPrefetch.BACKWARD_PRE", "post": "BackwardPrefetch.BACKWARD_POST"}
    return names.get(prefetch or "none", "None")


# ------------------------------------------------------------------------------- without sharding, and both


def _torch_ddp(config: Config) -> str:
    autocast = []
    if config.settings.param_dtype != "fp32":
        dtype = _TORCH_DTYPES[config.settings.param_dtype]
        autocast = [f"    # The forward pass runs under torch.autocast(DEVICE, dtype={dtype})."]
    lines = [
        *_head(config, "DistributedDataParallel of torch"),
        "from torch.nn.parallel import DistributedDataParallel",
        _DEVICE,
        "",
        "def parallelize(model: nn.Module, block_class: type[nn.Module]) -> nn.Module:",
        *autocast,
        "    return DistributedDataParallel(model.to(DEVICE), gradient_as_bucket_view=True)",
    ]
    return "\n".join(lines) + "\n"


def _offload_import(config: Config) -> list[str]:
    return ["from fsdpbench.impl import offload_activations"] if config.settings.activation_offload else []


def _offload(config: Config) -> list[str]:
    if not config.settings.activation_offload:
        return []
    return ["    offload_activations(m for m in model.modules() if isinstance(m, block_class))"]


def _mesh(config: Config) -> str:
    shard = shard_size_of(config)
    if "HYBRID" in config.settings.strategy or shard != config.gpus:
        sizes = f"({config.gpus // shard}, {shard})"
        return f'init_device_mesh(DEVICE, {sizes}, mesh_dim_names=("replicate", "shard"))'
    return f"init_device_mesh(DEVICE, ({config.gpus},))"


def _other_wrap(wrap: str) -> list[str]:
    return [] if wrap == "block" else [f"    # wrap={wrap}: choose the units accordingly."]


def _limit(config: Config) -> bool | int | str | None:
    limit = config.settings.limit_all_gathers
    return False if limit == "off" else limit


_WRITERS = {
    "impl-fsdp2": _impl_fsdp2,
    "impl-fsdp1": _impl_fsdp1,
    "torch-fsdp2": _torch_fsdp2,
    "torch-fsdp1": _torch_fsdp1,
    "torch-ddp": _torch_ddp,
}
