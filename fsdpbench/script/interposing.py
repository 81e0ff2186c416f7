"""Wrappers around torch's calls in a script's process, which ends with the script: nothing is undone."""

import argparse
import functools
import inspect
import re
import sys
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from typing import Any

import torch.distributed.fsdp as fsdp
import torch.utils.checkpoint as torch_checkpoint

from fsdpbench.base.torch_internals import FULLY_SHARD_PLACES, patch
from fsdpbench.sim.torch_device.patches.dynamo import passing_to

Arguments = dict[str, Any]
Before = Callable[[Any, Arguments], None]
"""Called with the module (dataset, parameters, ...) and the keyword arguments, which it may change."""


def around(owner: Any, name: str, call: Callable[..., Any]) -> None:
    """Replace the function `name` of a module or class by one that returns `call(original, *arguments)`."""
    setattr(owner, name, passing_to(call)(getattr(owner, name)))


def around_init(kind: Any, before: Before) -> None:
    """Call `before(first, arguments)`, then the constructor; positional arguments become keywords."""
    first_name, *names = list(inspect.signature(kind.__init__).parameters)[1:]

    def init(original: Any, made: Any, *args: Any, **kwargs: Any) -> None:
        if not args:
            args = (kwargs.pop(first_name),)
        first, *more = args
        kwargs |= dict(zip(names, more, strict=False))
        before(first, kwargs)
        original(made, first, **kwargs)

    around(kind, "__init__", init)


def around_imports(names: re.Pattern[str], execute: Callable[..., Any]) -> None:
    """Call `execute(original, module)` when a module is imported whose whole name matches `names`."""

    class Finder(MetaPathFinder):
        def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
            spec = PathFinder.find_spec(name, path) if names.fullmatch(name) else None
            loader: Any = spec.loader if spec is not None else None
            if loader is not None and hasattr(loader, "exec_module"):
                loader.exec_module = functools.partial(execute, loader.exec_module)
            return spec

    sys.meta_path.insert(0, Finder())


def replace_fully_shard(make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replace torch's `fully_shard` with `make(original)`, in every module that exports it."""
    original = fsdp.fully_shard
    made = functools.wraps(original)(make(original))  # with its attribute `state`
    for name in FULLY_SHARD_PLACES:
        module = sys.modules.get(name)
        if module is not None and getattr(module, "fully_shard", None) is original:
            module.fully_shard = made  # type: ignore[attr-defined]


def around_fully_shard(before: Before) -> None:
    """Call `before(module, arguments)`, then torch's `fully_shard`."""

    def fully_shard(original: Callable[..., Any], module: Any, **kwargs: Any) -> Any:
        before(module, kwargs)
        return original(module, **kwargs)

    replace_fully_shard(passing_to(fully_shard))


_original = torch_checkpoint.checkpoint
_torchs_own: list[Any] = [_original]
"""torch's `checkpoint`, and wrappers that only observe it."""


def replace_checkpoint(made: Callable[..., Any]) -> None:
    """Give `made` to scripts that take `checkpoint` from its module.

    Dynamo recognizes `checkpoint` by its module's attribute. Wrappers imported torch's own before, and a
    compiled block inside one of them would not be compiled. So torch's own stays the function that Dynamo
    looks for, and a wrapper of it counts as torch's own if a compiled function calls it.
    """
    torch_checkpoint.checkpoint = made
    if getattr(made, "__wrapped__", None) is _original:
        _torchs_own.append(made)
    patch("is_utils_checkpoint", lambda original: lambda found: any(found is each for each in _torchs_own))


_OF_BATCH = re.compile(r"(?:.*[-_])?(?:batch|batch[-_]size|bs|b)")
_NOT_OF_TRAINING = re.compile(r"(?:.*[-_])?(?:eval|val|valid|test)[-_].*")


def after_parsing(note: Callable[[argparse.ArgumentParser, argparse.Namespace, str], None]) -> None:
    """Call `note(parser, arguments, name)` when a script's parser has read the batch size, `name`."""

    def parse_known_args(original: Any, parser: Any, *args: Any, **kwargs: Any) -> Any:
        found, rest = original(parser, *args, **kwargs)
        name = _batch_argument(found)
        if name is not None:
            note(parser, found, name)
        return found, rest

    around(argparse.ArgumentParser, "parse_known_args", parse_known_args)


def _batch_argument(found: argparse.Namespace) -> str | None:
    """Return the name of the one argument that is the batch size; None if there is none, or several."""
    names = [
        name
        for name, value in vars(found).items()
        if type(value) is int and _OF_BATCH.fullmatch(name) and not _NOT_OF_TRAINING.fullmatch(name)
    ]
    return names[0] if len(names) == 1 else None
