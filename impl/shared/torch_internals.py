"""Doors to the private names of torch that this FSDP uses; the table is `torch_internals.csv`.

A row says where the name is, what needs it, and the public name that it waits for.

A name is looked up when it is first imported from here, and once, so that a call costs what it cost::

    from ..shared.torch_internals import chunk_cat        # torch._chunk_cat

In a torch that does not have it, that import raises `TorchInternalError`; `missing` looks for all of them.
The bench has such a module too, and neither can import the other's.
"""

import csv
import importlib
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:  # what is used as a type
    from torch.distributed._composable.contract import RegistryItem as RegistryItem
    from torch.distributed._functional_collectives import AsyncCollectiveTensor as AsyncCollectiveTensor
    from torch.distributed._shard.sharded_tensor import ShardedTensor as ShardedTensor
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
        ActivationWrapper as ActivationWrapper,
    )
    from torch.distributed.fsdp._common_utils import TrainingState as TrainingState
    from torch.distributed.tensor._dtensor_spec import DTensorSpec as DTensorSpec
    from torch.distributed.tensor._dtensor_spec import TensorMeta as TensorMeta
    from torch.distributed.tensor.placement_types import _StridedShard as StridedShard  # noqa: F401
    from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode


class TorchInternalError(ImportError):
    """The installed torch lacks a private name that something cannot do without."""


class Internal(NamedTuple):
    """A private name: where it is (module:attribute), what cannot run without it, and what it waits for."""

    path: str
    needed_for: str
    public: str = "none"
    # Its value changes: what is imported is a function that reads it.
    changes: bool = False


def _table() -> dict[str, Internal]:
    """Read `torch_internals.csv`, one private name a row."""
    with Path(__file__).with_suffix(".csv").open(encoding="utf-8", newline="") as file:
        return {
            row["name"]: Internal(row["path"], row["needed_for"], row["public"], bool(row["changes"]))
            for row in csv.DictReader(file)
        }


INTERNALS = _table()


def missing() -> list[str]:
    """Return a sentence for every name that the installed torch lacks; imports all modules that have one."""
    found = []
    for internal in INTERNALS.values():
        try:
            _find(internal)
        except TorchInternalError as error:
            found.append(str(error))
    return found


def _find(internal: Internal) -> Any:
    """Return what torch has under a name now."""
    module, _, attributes = internal.path.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for name in filter(None, attributes.split(".")):
            owner, found = found, getattr(found, name)
    except (ModuleNotFoundError, AttributeError) as error:
        if isinstance(error, ModuleNotFoundError) and not str(error.name).startswith("torch"):
            raise  # something that torch itself needs
        raise TorchInternalError(
            f"torch {torch.__version__} has no {internal.path.replace(':', '.')}, needed for "
            f"{internal.needed_for}: install a version of torch that has it"
        ) from error
    return partial(getattr, owner, name) if internal.changes else found


def __getattr__(name: str) -> Any:
    if name not in INTERNALS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = found = _find(INTERNALS[name])
    return found
