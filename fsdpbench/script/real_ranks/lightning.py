"""Lightning's Trainer and Fabric on CPU ranks: they take the ranks that are there, whose device is no GPU.

Its modules are changed when the script imports them. Everything else in them stays: they wrap, accumulate,
clip and step as they do on GPUs.
"""

from __future__ import annotations

import functools
import importlib.machinery
import os
import re
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from types import ModuleType
from typing import Any

from fsdpbench.script.interposing import around

_CHANGED = re.compile(
    r"(?:lightning\.|lightning_|pytorch_lightning)(?:pytorch|fabric)?\."
    r"(?:(?:trainer\.connectors\.accelerator_)?connector|accelerators\.cuda|strategies\.model_parallel)"
)
_ONE = "1"


def map_lightning() -> None:
    """Let a Lightning that is imported from now on take this process as one of its ranks, for good."""
    sys.meta_path.insert(0, _Finder())


class _Finder(MetaPathFinder):
    """Has Lightning's modules changed as soon as they are imported."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return the spec of a module that is to be changed, None for all others."""
        spec = importlib.machinery.PathFinder.find_spec(name, path) if _CHANGED.fullmatch(name) else None
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module
            spec.loader.exec_module = functools.partial(_change, execute)  # type: ignore[method-assign]
        return spec


def _change(execute: Callable[[ModuleType], None], module: ModuleType) -> None:
    execute(module)
    for kind in vars(module).copy().values():
        if not isinstance(kind, type) or kind.__module__ != module.__name__:
            continue
        if "_check_device_config_and_set_final_flags" in vars(kind):
            around(kind, "_check_device_config_and_set_final_flags", _counted)
        if kind.__name__ == "CUDAAccelerator":
            around(kind, "setup_device", lambda original, accelerator, device: None)
        if kind.__name__ == "ModelParallelStrategy":
            around(kind, "__init__", _sized)


def _counted(original: Callable[..., Any], connector: Any, devices: Any, num_nodes: Any) -> None:
    """Take the nodes and devices that are there, whatever number of more than one is asked for."""
    if (str(devices), str(num_nodes)) != (_ONE, _ONE):
        devices = local = int(os.environ["LOCAL_WORLD_SIZE"])
        num_nodes = int(os.environ["WORLD_SIZE"]) // local
    original(connector, devices=devices, num_nodes=num_nodes)


def _sized(original: Callable[..., Any], made: Any, *args: Any, **kwargs: Any) -> None:
    """Let data parallelism have the ranks that tensor parallelism of a stated size leaves."""
    kwargs |= dict(zip(("data_parallel_size", "tensor_parallel_size"), args, strict=False))
    tensor = kwargs.get("tensor_parallel_size", "auto")
    if isinstance(tensor, int) and isinstance(kwargs.get("data_parallel_size"), int):
        kwargs["data_parallel_size"] = int(os.environ["WORLD_SIZE"]) // tensor
    original(made, **kwargs)
