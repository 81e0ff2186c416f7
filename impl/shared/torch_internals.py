"""Access to the private names of torch that this FSDP uses; `torch_internals.csv` lists them.

Each row has the path of the name, what needs it, and the public name that could replace it.

A name is looked up once, when it is first imported from here, so calls have no overhead::

    from ..shared.torch_internals import chunk_cat        # torch._chunk_cat

If this version of torch lacks the name, the import raises `TorchInternalError`; `missing` checks all names.
fsdpbench has a module of its own like this one; neither may import the other.
"""

import csv
import importlib
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:  # names used in annotations
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
    """Raised if the installed torch lacks a private name that a feature needs."""


class Internal(NamedTuple):
    """A private name: its path (module:attribute), what needs it, and the public name to replace it."""

    path: str
    needed_for: str
    public: str = "none"
    # The value changes at run time, so the import returns a function that reads it.
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
    """Return a message for every name that the installed torch lacks. Imports all modules in the table."""
    found = []
    for internal in INTERNALS.values():
        try:
            _find(internal)
        except TorchInternalError as error:
            found.append(str(error))
    return found


def _find(internal: Internal) -> Any:
    """Import and return a private name; raise `TorchInternalError` if torch lacks it."""
    module, _, attributes = internal.path.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for name in filter(None, attributes.split(".")):
            owner, found = found, getattr(found, name)
    except (ModuleNotFoundError, AttributeError) as error:
        if isinstance(error, ModuleNotFoundError) and not str(error.name).startswith("torch"):
            raise  # a missing dependency of torch, not a missing name
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
