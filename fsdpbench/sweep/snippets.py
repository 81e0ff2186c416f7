"""Code to paste into a training script for a configuration that ran (`best.py.jinja`).

The code is only for the system and settings that ran, because other APIs with these settings were not
measured. It defines `parallelize(model, block_class)`. A comment at its top says what else the training
script must do.
"""

import functools
import itertools
import json
import re
import textwrap
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from fsdpbench.base.configuration.config import PARALLEL, Config, shard_size_of
from fsdpbench.base.settings import SETTINGS, show_value
from fsdpbench.base.settings.code import TORCH_DTYPES
from fsdpbench.base.settings.values import Value, is_mixed, spread
from fsdpbench.base.writing import write_whole
from fsdpbench.workloads.checkpointing import ATTENTION, PRODUCTS

if TYPE_CHECKING:
    import jinja2

_POLICIES = (
    "BackwardPrefetch", "CPUOffload", "CPUOffloadPolicy", "MixedPrecision", "MixedPrecisionPolicy",
    "ShardingStrategy",
)  # fmt: skip
_APIS = {
    **dict.fromkeys(("impl-fsdp2", "torch-fsdp2"), "fully_shard"),
    **dict.fromkeys(("impl-fsdp1", "torch-fsdp1"), "FullyShardedDataParallel"),
    "torch-ddp": "DistributedDataParallel",
}


def snippets(configs: Iterable[Config]) -> Mapping[str, str]:
    """Return Python source by file name, for the first configuration of each system that has an API."""
    best: dict[str, Config] = {}
    for config in configs:
        best.setdefault(config.system, config)
    return {
        f"best_{system.replace('-', '_')}.py": _program(config)
        for system, config in best.items()
        if without_code(config) is None
    }


def without_code(config: Config) -> str | None:
    """Return why no code can be written for `config`; None if it can."""
    if config.system not in _APIS:
        return f"{config.system} has no call that wraps a model"
    split = [f"{name}={degree}" for name in PARALLEL if (degree := getattr(config.settings, name)) > 1]
    return f"with {' and '.join(split)} it would need the model's own plan of its split" if split else None


@functools.cache
def _template() -> "jinja2.Template":
    import jinja2  # imported only if code is written

    text = Path(__file__).with_name("best.py.jinja").read_text(encoding="utf-8")
    environment = jinja2.Environment(undefined=jinja2.StrictUndefined, keep_trailing_newline=True)
    return environment.from_string(text)


def _program(config: Config) -> str:
    settings, values, api = config.settings, config.settings.to_dict(), _APIS[config.system]
    ours = config.system.startswith("impl")
    fsdp = "fsdpbench.impl" if ours else "torch.distributed.fsdp"
    arguments = _arguments(config)
    reshard, offload = settings.reshard_after_forward, settings.activation_offload
    beside = [
        f"{name}={show_value(values[name])}"
        for name, setting in SETTINGS.items()
        if setting.in_script and values[name] is not None and not is_mixed(values[name])
    ]
    recomputed = settings.activation_checkpointing
    return _template().render(
        config=config,
        s=settings,
        api=api,
        ours=ours,
        source="torch" if api == "DistributedDataParallel" else fsdp,
        recomputed=_listed(recomputed, json.dumps) if is_mixed(recomputed) else "",
        by_operator="op" in recomputed,
        products=PRODUCTS,
        attention=ATTENTION,
        resharded=_listed(str(reshard), str.title) if is_mixed(reshard) else "",
        offloaded=_listed(str(offload), str.title) if is_mixed(offload) else "",
        beside=textwrap.wrap(", ".join(beside), 100),
        arguments=arguments,
        imported=functools.partial(_imported, arguments),
        mesh=_mesh(config),
        hybrid="HYBRID" in settings.strategy,
        every=settings.wrap.removeprefix("every-"),
        sizes=_of_each_unit(settings.wrap.replace("every-", "")),
        forward_ahead=_of_each_unit(settings.forward_prefetch),
        backward_ahead=_of_each_unit(settings.backward_prefetch_depth),
        reshard=settings.strategy in ("FULL_SHARD", "HYBRID_SHARD") if reshard is None else reshard,
        dtype=TORCH_DTYPES[settings.param_dtype],
    )


def _of_each_unit(value: Value) -> str:
    return _listed(str(value), str) if is_mixed(value) else ""


def _listed(mixed: str, write: Callable[[str], str]) -> str:
    """Write a value for each block as a sum of lists: `["full"] * 20 + ["none"] * 12`."""
    runs = [(value, len(list(same))) for value, same in itertools.groupby(spread(mixed))]
    return " + ".join(f"[{write(value)}] * {count}" for value, count in runs)


def _arguments(config: Config) -> list[str]:
    """Write the arguments of the wrapping call, from the system's `code` in the table of settings."""
    writes = (setting.code.get(config.system) for setting in SETTINGS.values())
    return [text for write in writes if write is not None and (text := write(config.settings)) is not None]


def _imported(arguments: list[str], *names: str) -> str:
    """Write the list of an import: `names`, and the policies that the arguments use."""
    used = {word for argument in arguments for word in re.findall(r"\w+", argument) if word in _POLICIES}
    return ", ".join(sorted({*names, *used}))


def _mesh(config: Config) -> str:
    shard = shard_size_of(config)
    if "HYBRID" in config.settings.strategy or shard != config.gpus:
        sizes = f"({config.gpus // shard}, {shard})"
        return f'init_device_mesh(DEVICE, {sizes}, mesh_dim_names=("replicate", "shard"))'
    return f"init_device_mesh(DEVICE, ({config.gpus},))"


def write_recommended(folder: Path) -> list[Path]:
    """Write `best_SYSTEM.py` for the configurations that the verdict names into the run's `folder`; return
    the paths. Remove those of an earlier sweep."""
    from fsdpbench.reports.pages import load_run
    from fsdpbench.reports.pages.ranking import chosen, rank

    for outdated in folder.glob("best_*.py"):
        outdated.unlink()
    found = chosen(rank(load_run(folder)))
    rows = [each.row for each in (found.torchs, found.ours) if each is not None]
    configs = [Config.from_dict(row.result.config or {}) for row in rows]
    paths = []
    for name, source in snippets(configs).items():
        write_whole(folder / name, source)
        paths.append(folder / name)
    return paths
