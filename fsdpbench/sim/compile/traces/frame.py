"""A frame that Dynamo is to trace, and where its trace is on disk."""

from __future__ import annotations

import os
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass, is_dataclass
from pathlib import Path
from typing import Any

import torch

from fsdpbench.sim.compile import CACHE_VARIABLE
from fsdpbench.sim.compile.sources import sources
from fsdpbench.sim.compile.traces.meaning import NotKeptError, digest, of_code
from fsdpbench.torch_internals import dynamo_guards, functorch_config, inductor_config, trace_rules

_FOLDER = "traces"


@dataclass(frozen=True)
class Frame:
    """With its values. `closure`: the cells of its code's free variables."""

    code: types.CodeType
    f_globals: dict[str, Any]
    f_locals: dict[str, Any]
    closure: Any

    def place(self, tag: str, *about: object) -> Path:
        """The file of its trace. `tag`: what plans depend on. `about`: how it is to be traced.

        What differs without a guard that tells has another place; so has what differs in shapes, so that
        there is one trace to look at. Raises NotKeptError: a setting is known by its number alone.
        """
        parts = (
            *(torch.__version__, sys.version, sources(), tag, about),
            *(_settings(config) for config in (dynamo_guards.config, inductor_config, functorch_config)),
            *(len(ids.function_ids or ()) for ids in _told_apart()),
            (of_code(self.code), torch.is_grad_enabled(), self.f_globals.get("__name__")),
            tuple(_shapes(self.f_locals)),
        )
        return Path(os.environ[CACHE_VARIABLE]) / _FOLDER / digest(repr(parts).encode())


def _settings(config: Any) -> str:
    """All that are not of logs alone. (torch's own hash has sets in the order of one process.)"""
    ignored = config._compile_ignored_keys
    said = repr([(k, _in_order(v)) for k, v in config.get_config_copy().items() if k not in ignored])
    if " at 0x" in said:
        raise NotKeptError("a setting is an object")
    return said


def _in_order(value: Any) -> object:
    return sorted(map(repr, value)) if isinstance(value, (set, frozenset)) else value


def _told_apart() -> tuple[Any, Any]:
    """Functions that the program has had put into graphs as they are, or left out."""
    return trace_rules._allowed_callable_ids, trace_rules._disallowed_callable_ids


def _shapes(values: Any) -> Iterator[object]:
    """What tells frames of one code apart: tensors' shapes, and what modules consist of."""
    for name, value in values.items():
        if isinstance(value, torch.nn.Module):
            for inner, module in value.named_modules():
                yield inner, type(module).__qualname__, module.training
                yield tuple((n, _shape(p)) for n, p in module._parameters.items())
                yield tuple((n, repr(v)) for n, v in vars(module).items() if _is_plain(v))
        elif isinstance(value, (tuple, list)):
            yield from _shapes({f"{name}[{index}]": each for index, each in enumerate(value)})
        else:
            yield name, _shape(value)


def _shape(value: Any) -> object:
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.stride(), value.dtype, value.requires_grad
    return value if _is_plain(value) else type(value).__qualname__


def _is_plain(value: Any) -> bool:
    """Whether its words tell it."""
    return isinstance(value, (bool, int, float, str)) or (is_dataclass(value) and " at 0x" not in repr(value))
