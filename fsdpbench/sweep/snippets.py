"""A configuration that ran as code that can be pasted into a training script.

The code, of `snippets.jinja`, is for the system that ran, with the settings that it ran with, and for no
other: what another API would make of them has not been measured. It defines
`parallelize(model, block_class)`; what a training script has to do beside it is in its head.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping
from importlib import resources

import jinja2

from fsdpbench.base.configuration.config import PARALLEL, Config
from fsdpbench.base.settings import SETTINGS, show_value
from fsdpbench.base.settings.code import TORCH_DTYPES
from fsdpbench.systems.base import shard_size_of

_SOURCES = {True: "fsdpbench.impl", False: "torch.distributed.fsdp"}
_POLICIES = (
    "BackwardPrefetch", "CPUOffload", "CPUOffloadPolicy", "MixedPrecision", "MixedPrecisionPolicy",
    "ShardingStrategy",
)  # fmt: skip
_WAYS = {
    **dict.fromkeys(("impl-fsdp2", "torch-fsdp2"), "fully_shard"),
    **dict.fromkeys(("impl-fsdp1", "torch-fsdp1"), "FullyShardedDataParallel"),
    "torch-ddp": "ddp",
}


def snippets(configs: Iterable[Config]) -> Mapping[str, str]:
    """File name -> Python source, of the first configuration of each system that has an API to write."""
    sources: dict[str, str] = {}
    best: dict[str, Config] = {}
    for config in configs:
        best.setdefault(config.system, config)
    for system, config in best.items():
        # A plan of tensor or expert parallelism is the model's own; without it the code would be another's.
        if system in _WAYS and not any(getattr(config.settings, name) > 1 for name in PARALLEL):
            sources[f"best_{system.replace('-', '_')}.py"] = _program(config, _WAYS[system])
    return sources


@functools.cache
def _template() -> jinja2.Template:
    text = resources.files("fsdpbench.sweep").joinpath("snippets.jinja").read_text(encoding="utf-8")
    environment = jinja2.Environment(
        undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    return environment.from_string(text)


def _program(config: Config, way: str) -> str:
    """Write a whole file: its head, imports, and `parallelize`."""
    settings, ours = config.settings, config.system.startswith("impl")
    source, values = _SOURCES[ours], settings.to_dict()
    beside = [
        f"{name}={show_value(values[name])}"
        for name, setting in SETTINGS.items()
        if setting.in_script and values[name] is not None
    ]
    arguments = _arguments(config)
    used = {word for each in arguments for word in re.findall(r"\w+", each) if word in _POLICIES}
    reshard = settings.reshard_after_forward
    every = re.fullmatch(r"every-(\d+)", settings.wrap)
    return _template().render(
        model=config.model,
        gpus=config.gpus,
        hardware=config.hardware,
        api="DistributedDataParallel of torch" if way == "ddp" else f"{way} of {source}",
        beside=", ".join(beside),
        way=way,
        source=source,
        ours=ours,
        imported=lambda *names: ", ".join(sorted({*names, *used})),
        settings=settings,
        dtype=TORCH_DTYPES[settings.param_dtype],
        arguments=arguments,
        mesh=_mesh(config),
        hybrid="HYBRID" in settings.strategy,
        wrap=settings.wrap,
        every=int(every[1]) if every else None,
        reshard=settings.strategy in ("FULL_SHARD", "HYBRID_SHARD") if reshard is None else reshard,
    )


def _arguments(config: Config) -> list[str]:
    """Write the arguments of the call that wraps, as the table of settings has them for the system."""
    writes = (setting.code.get(config.system) for setting in SETTINGS.values())
    return [text for write in writes if write is not None and (text := write(config.settings)) is not None]


def _mesh(config: Config) -> str:
    shard = shard_size_of(config)
    if "HYBRID" in config.settings.strategy or shard != config.gpus:
        sizes = f"({config.gpus // shard}, {shard})"
        return f'init_device_mesh(DEVICE, {sizes}, mesh_dim_names=("replicate", "shard"))'
    return f"init_device_mesh(DEVICE, ({config.gpus},))"
