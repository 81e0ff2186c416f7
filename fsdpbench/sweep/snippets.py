"""A configuration that ran as code that can be pasted into a training script.

The code is for the system that ran, with the settings that it ran with, and for no other: what another API
would make of them has not been measured. It defines `parallelize(model, block_class)`; what a training script
has to do beside it is in its head.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Mapping

from fsdpbench.base.configuration.config import PARALLEL, Config
from fsdpbench.base.settings import SETTINGS, show_value
from fsdpbench.base.settings.code import TORCH_DTYPES
from fsdpbench.systems.base import shard_size_of

_SOURCES = {True: "fsdpbench.impl", False: "torch.distributed.fsdp"}
_POLICIES = (
    "BackwardPrefetch",
    "CPUOffload",
    "CPUOffloadPolicy",
    "MixedPrecision",
    "MixedPrecisionPolicy",
    "ShardingStrategy",
)
_DEVICE = """
DEVICE = torch.accelerator.current_accelerator().type if torch.accelerator.is_available() else "cpu"
"""


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


def _program(config: Config, api: str, imports: list[str], body: list[str]) -> str:
    """Write a whole file: its head, imports, and `parallelize`, whose last lines are `body`."""
    values = config.settings.to_dict()
    beside = [
        f"{name}={show_value(values[name])}"
        for name, setting in SETTINGS.items()
        if setting.in_script and values[name] is not None
    ]
    hardware = f" on {config.hardware}" if config.hardware else ""
    offload_import, offload = [], []
    if config.settings.activation_offload:
        offload_import = ["from fsdpbench.impl import offload_activations"]
        offload = ["    offload_activations(m for m in model.modules() if isinstance(m, block_class))"]
    lines = [
        f'"""{config.model} on {config.gpus} GPUs{hardware}: {api}, as fsdpbench found it best."""\n',
        "import torch",
        "from torch import nn",
        *imports,
        *offload_import,
        _DEVICE,
        "",
        "def parallelize(model: nn.Module, block_class: type[nn.Module]) -> nn.Module:",
        *offload,
        *body,
        *["", "", "# The training script's part:"],
        *(f"# {line}" for line in textwrap.wrap(", ".join(beside), 100)),
    ]
    return "\n".join(lines) + "\n"


def _arguments(config: Config) -> list[str]:
    """Write the arguments of the call that wraps, as the table of settings has them for the system."""
    writes = (setting.code.get(config.system) for setting in SETTINGS.values())
    return [text for write in writes if write is not None and (text := write(config.settings)) is not None]


def _imported(source: str, arguments: list[str], *names: str) -> str:
    """Write the import of `names`, and of what the arguments use besides."""
    used = {word for argument in arguments for word in re.findall(r"\w+", argument) if word in _POLICIES}
    return f"from {source} import {', '.join(sorted({*names, *used}))}"


# ------------------------------------------------------------------------------------------------ fully_shard


def _fully_shard(config: Config) -> str:
    settings, source = config.settings, _SOURCES[config.system.startswith("impl")]
    arguments = ["mesh=mesh", *_arguments(config)]
    reshard = settings.reshard_after_forward
    if reshard is None:
        reshard = settings.strategy in ("FULL_SHARD", "HYBRID_SHARD")
    imports = [
        "from torch.distributed.device_mesh import init_device_mesh\n",
        _imported(source, arguments, "MixedPrecisionPolicy", "fully_shard"),
    ]
    body = [
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
    return _program(config, f"fully_shard of {source}", imports, body)


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


def _flat(config: Config) -> str:
    source = _SOURCES[ours := config.system.startswith("impl")]
    mesh = [f"device_mesh={_mesh(config)}"] if "HYBRID" in config.settings.strategy else []
    arguments = [
        "auto_wrap_policy=CustomPolicy(lambda module: units.get(module, False))",
        *_arguments(config),
        *mesh,
        "device_id=device",
        "use_orig_params=True",
    ]
    imports = [
        *(["from torch.distributed.device_mesh import init_device_mesh"] if mesh else []),
        "",
        _imported(source, arguments, "FullyShardedDataParallel", "ShardingStrategy"),
        f"from {source if ours else 'torch.distributed.fsdp.wrap'} import CustomPolicy",
    ]
    body = [
        *_flat_units(config),
        '    index = None if DEVICE == "cpu" else torch.accelerator.current_device_index()',
        "    device = torch.device(DEVICE, index)",
        "    return FullyShardedDataParallel(",
        "        model,",
        *(f"        {argument}," for argument in arguments),
        "    )",
    ]
    return _program(config, f"FullyShardedDataParallel of {source}", imports, body)


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


# ------------------------------------------------------------------------------- without sharding, and both


def _torch_ddp(config: Config) -> str:
    autocast = []
    if config.settings.param_dtype != "fp32":
        dtype = TORCH_DTYPES[config.settings.param_dtype]
        autocast = [f"    # The forward pass runs under torch.autocast(DEVICE, dtype={dtype})."]
    made = "    return DistributedDataParallel(model.to(DEVICE), gradient_as_bucket_view=True)"
    imports = ["from torch.nn.parallel import DistributedDataParallel"]
    return _program(config, "DistributedDataParallel of torch", imports, [*autocast, made])


def _mesh(config: Config) -> str:
    shard = shard_size_of(config)
    if "HYBRID" in config.settings.strategy or shard != config.gpus:
        sizes = f"({config.gpus // shard}, {shard})"
        return f'init_device_mesh(DEVICE, {sizes}, mesh_dim_names=("replicate", "shard"))'
    return f"init_device_mesh(DEVICE, ({config.gpus},))"


def _other_wrap(wrap: str) -> list[str]:
    return [] if wrap == "block" else [f"    # wrap={wrap}: choose the units accordingly."]


_WRITERS = {
    **dict.fromkeys(("impl-fsdp2", "torch-fsdp2"), _fully_shard),
    **dict.fromkeys(("impl-fsdp1", "torch-fsdp1"), _flat),
    "torch-ddp": _torch_ddp,
}
