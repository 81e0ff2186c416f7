"""A configuration as code that can be pasted into a training script, for each FSDP API.

Each snippet defines `parallelize(model, block_class)`. What an API does not have is said in a comment there,
never left out silently.
"""

from __future__ import annotations

from collections.abc import Mapping

from fsdpbench.config import Config
from fsdpbench.systems.base import shard_size_of

_TORCH_DTYPES = {"bf16": "torch.bfloat16", "fp16": "torch.float16", "fp32": "torch.float32"}
_DEVICE = """
DEVICE = torch.accelerator.current_accelerator().type if torch.accelerator.is_available() else "cpu"
"""


def snippets(config: Config) -> Mapping[str, str]:
    """File name -> Python source, the API of the configuration's own system first."""
    sources = {
        "best_impl_fsdp2.py": _fully_shard(config, ours=True),
        "best_impl_fsdp1.py": _flat(config, ours=True),
        "best_torch_fsdp2.py": _fully_shard(config, ours=False),
        "best_torch_fsdp1.py": _flat(config, ours=False),
    }
    own = f"best_{config.system.replace('-', '_')}.py"
    return dict(sorted(sources.items(), key=lambda item: item[0] != own))


def _fully_shard(config: Config, *, ours: bool) -> str:
    settings = config.settings
    source = "impl" if ours else "torch.distributed.fsdp"
    lacks = [] if ours else _lacks_fsdp2(config)
    arguments = ["mesh=mesh", f"mp_policy={_policy(config)}"]
    if ours:
        arguments += _own_arguments(config)
    reshard = settings.reshard_after_forward
    if reshard is None:
        reshard = settings.strategy in ("FULL_SHARD", "HYBRID_SHARD")
    lines = [
        f'"""{config.model}: fully_shard of {source}, as fsdpbench found it best."""\n',
        "import torch",
        "from torch import nn",
        "from torch.distributed.device_mesh import init_device_mesh\n",
        f"from {source} import MixedPrecisionPolicy, fully_shard",
        _DEVICE,
        "",
        "def parallelize(model: nn.Module, block_class: type[nn.Module]) -> nn.Module:",
        *_comments(lacks),
        f"    mesh = {_mesh(config)}",
        f"    settings = dict({', '.join(arguments)})",
        *_units(config),
        "    for unit in units:",
        f"        fully_shard(unit, reshard_after_forward={reshard}, **settings)",
        "    fully_shard(model, **settings)",
        "    return model",
    ]
    return "\n".join(lines) + "\n"


def _flat(config: Config, *, ours: bool) -> str:
    settings = config.settings
    source = "impl" if ours else "torch.distributed.fsdp"
    names = "BackwardPrefetch, FullyShardedDataParallel, MixedPrecision, ShardingStrategy"
    policy_import = (
        "from impl import CustomPolicy" if ours else "from torch.distributed.fsdp.wrap import CustomPolicy"
    )
    lines = [
        f'"""{config.model}: FullyShardedDataParallel of {source}, as fsdpbench found it best."""\n',
        "import torch",
        "from torch import nn",
        "from torch.distributed.device_mesh import init_device_mesh\n",
        f"from {source} import {names}",
        policy_import,
        _DEVICE,
        "",
        "def parallelize(model: nn.Module, block_class: type[nn.Module]) -> nn.Module:",
        *_comments([] if ours else _lacks_fsdp1(config)),
        *_flat_units(config),
        f"    mesh = {_mesh(config)}",
        '    index = None if DEVICE == "cpu" else torch.accelerator.current_device_index()',
        "    device = torch.device(DEVICE, index)",
        "    return FullyShardedDataParallel(",
        "        model,",
        f"        sharding_strategy=ShardingStrategy.{settings.strategy},",
        "        auto_wrap_policy=CustomPolicy(lambda module: module in units),",
        f"        backward_prefetch={_timing(settings.backward_prefetch)},",
        f"        mixed_precision={_mixed_precision(config)},",
        *[f"        {argument}," for argument in _flat_arguments(config, ours=ours)],
        "        device_mesh=mesh,",
        "        device_id=device,",
        "        use_orig_params=True,",
        "    )",
    ]
    return "\n".join(lines) + "\n"


def _mesh(config: Config) -> str:
    shard = shard_size_of(config)
    if "HYBRID" in config.settings.strategy or shard != config.gpus:
        sizes = f"({config.gpus // shard}, {shard})"
        return f'init_device_mesh(DEVICE, {sizes}, mesh_dim_names=("replicate", "shard"))'
    return f"init_device_mesh(DEVICE, ({config.gpus},))"


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
    return [*_comments(_other_wrap(wrap)), f"    units = {blocks}"]


def _flat_units(config: Config) -> list[str]:
    wrap = config.settings.wrap
    if wrap == "root":
        return ["    units: set = set()"]
    notes = _other_wrap(wrap)
    if wrap.startswith("every-"):
        notes = [f"wrap={wrap}: put so many blocks into one module each, and pass its class as block_class"]
    return [*_comments(notes), "    units = {m for m in model.modules() if isinstance(m, block_class)}"]


def _other_wrap(wrap: str) -> list[str]:
    return [] if wrap in ("block", "root") else [f"wrap={wrap}: choose the units accordingly"]


def _policy(config: Config) -> str:
    settings = config.settings
    reduce = settings.reduce_dtype or settings.param_dtype
    param = "None" if settings.param_dtype == "fp32" else _TORCH_DTYPES[settings.param_dtype]
    return f"MixedPrecisionPolicy(param_dtype={param}, reduce_dtype={_TORCH_DTYPES[reduce]})"


def _mixed_precision(config: Config) -> str:
    settings = config.settings
    reduce = settings.reduce_dtype or settings.param_dtype
    if settings.param_dtype == "fp32" and reduce == "fp32":
        return "None"
    param = _TORCH_DTYPES[settings.param_dtype]
    return f"MixedPrecision(param_dtype={param}, reduce_dtype={_TORCH_DTYPES[reduce]})"


def _timing(prefetch: str | None) -> str:
    names = {"pre": "BackwardPrefetch.BACKWARD_PRE", "post": "BackwardPrefetch.BACKWARD_POST", "none": "None"}
    return names[prefetch or "pre"]


def _own_arguments(config: Config) -> list[str]:
    settings = config.settings
    prefetch = None if settings.backward_prefetch == "none" else settings.backward_prefetch or "pre"
    arguments = [
        f"backward_prefetch={prefetch!r}",
        f"backward_prefetch_depth={settings.backward_prefetch_depth or 1}",
        f"forward_prefetch_depth={settings.forward_prefetch or 0}",
    ]
    if settings.memory_handover is not None:
        arguments.append(f"memory_handover={settings.memory_handover!r}")
        if settings.memory_handover == "record_stream":
            arguments.append(f"limit_all_gathers={_limit(config)}")
    return arguments


def _flat_arguments(config: Config, *, ours: bool) -> list[str]:
    settings = config.settings
    if not ours:
        return [
            f"limit_all_gathers={settings.limit_all_gathers != 'off'}",
            f"forward_prefetch={bool(settings.forward_prefetch)}",
        ]
    arguments = [
        f"limit_all_gathers={_limit(config)}",
        f"backward_prefetch_depth={settings.backward_prefetch_depth or 1}",
        f"forward_prefetch_depth={settings.forward_prefetch or 0}",
    ]
    if settings.memory_handover is not None:
        arguments.append(f"memory_handover={settings.memory_handover!r}")
    elif config.system == "impl-fsdp2":
        arguments.append("memory_handover='events'")
    return arguments


def _limit(config: Config) -> bool | int:
    limit = config.settings.limit_all_gathers
    if limit in ("off", None):
        return False
    return limit if isinstance(limit, int) else True


def _lacks_fsdp2(config: Config) -> list[str]:
    settings, lacks = config.settings, []
    if settings.backward_prefetch not in ("pre", None):
        lacks.append(f"backward_prefetch={settings.backward_prefetch}: it always prefetches before (pre)")
    if (settings.backward_prefetch_depth or 1) != 1:
        lacks.append(
            f"backward_prefetch_depth={settings.backward_prefetch_depth}: say it with set_modules_to_*"
        )
    if settings.forward_prefetch:
        lacks.append(
            f"forward_prefetch={settings.forward_prefetch}: say it with set_modules_to_forward_prefetch"
        )
    if settings.limit_all_gathers not in ("off", None):
        lacks.append(f"limit_all_gathers={settings.limit_all_gathers}: it has no rate limiter")
    if settings.memory_handover == "record_stream":
        lacks.append("memory_handover=record_stream: it passes memory by events only")
    return lacks


def _lacks_fsdp1(config: Config) -> list[str]:
    settings, lacks = config.settings, []
    if (settings.backward_prefetch_depth or 1) != 1:
        lacks.append(f"backward_prefetch_depth={settings.backward_prefetch_depth}: it prefetches one unit")
    if (settings.forward_prefetch or 0) > 1:
        lacks.append(f"forward_prefetch={settings.forward_prefetch}: it prefetches one unit")
    if settings.limit_all_gathers not in ("off", 2, None):
        lacks.append(f"limit_all_gathers={settings.limit_all_gathers}: it keeps two in flight")
    if settings.memory_handover == "events" or config.system == "impl-fsdp2":
        lacks.append("memory_handover=events: it passes memory by record_stream only")
    return lacks


def _comments(notes: list[str]) -> list[str]:
    return [f"    # Not the same here: {note}." for note in notes]
