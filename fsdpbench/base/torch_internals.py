"""Doors to the private names of torch that bench and simulator use; the table is `torch_internals.csv`.

A row says where the name is, what needs it, and the public name that it waits for.

A name is looked up when it is first imported from here, and once, so that a call costs what it cost, and a
heavy module of torch is imported where it always was::

    from fsdpbench.base.torch_internals import current_graph_task_id        # torch._C._current_graph_task_id

In a torch that does not have it, that import raises `TorchInternalError`; `missing` looks for all of them.
What torch is changed by goes through here too: `patch` for a private name, `replace` for others (for a while:
`patched`, `replaced`). None patches what is not there, since it would not be noticed.
"""

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fsdpbench.base.errors import BenchError, error_text
from fsdpbench.base.files.documents import typed_rows

if TYPE_CHECKING:  # what is used as a type
    from torch.distributed.tensor._dtensor_spec import DTensorSpec as DTensorSpec
    from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode


class TorchInternalError(BenchError):
    """The installed torch lacks a name that something cannot do without."""


@dataclass(frozen=True)
class Internal:
    """A private name: where it is (module:attribute), what cannot run without it, and what it waits for."""

    path: str
    needed_for: str
    public: str = "none"
    only_in: str = ""
    """Where torch has it, if not everywhere; elsewhere it is None, and is not patched."""
    members: tuple[str, ...] = ()
    """The names in a module, class or object that are used: all of them have to be there."""


IN_ITS_PLACE = "what the bench puts in its place"

FULLY_SHARD_PLACES = (
    "torch.distributed.fsdp", "torch.distributed.fsdp._fully_shard",
    "torch.distributed.fsdp._fully_shard._fully_shard", "torch.distributed._composable.fsdp",
    "torch.distributed._composable.fsdp.fully_shard",
)  # fmt: skip
"""Where scripts and libraries import `fully_shard` from; those that a torch lacks are passed over."""


@dataclass(frozen=True, kw_only=True)
class _Row(Internal):
    name: str


INTERNALS: dict[str, Internal] = {row.name: row for row in typed_rows(__file__, "torch_internals.csv", _Row)}


def missing() -> list[str]:
    """Return a sentence for every name that the installed torch lacks; imports all modules that have one."""
    found = []
    for name in INTERNALS:
        try:
            find(name)
        except TorchInternalError as error:
            found.append(str(error))
    return found


def find(name: str) -> Any:
    """Return what torch has under a private name now. Raises `TorchInternalError`, also for a member."""
    return _look_up(INTERNALS[name])[2]


def uses() -> int:
    """Return how many names of torch are used: each private one, or the members that are used of it."""
    return sum(max(1, len(internal.members)) for internal in INTERNALS.values())


def patch(name: str, make: Callable[[Any], Any]) -> None:
    """Put ``make(original)`` in the place of a private name. Raises `TorchInternalError` where it is gone."""
    owner, attribute, original = _look_up(INTERNALS[name])
    if original is not None:
        setattr(owner, attribute, make(original))


def replace(owner: Any, **attributes: Any) -> None:
    """Set attributes that ``owner`` has. Raises `TorchInternalError` for another, and sets none."""
    for name in attributes:
        expect(owner, name)
    for name, value in attributes.items():
        setattr(owner, name, value)


@contextmanager
def patched(name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    """`patch` for a while: what was there before is there again afterwards."""
    owner, attribute, original = _look_up(INTERNALS[name])
    patch(name, make)
    try:
        yield
    finally:
        if original is not None:
            setattr(owner, attribute, original)


@contextmanager
def replaced(owner: Any, **attributes: Any) -> Iterator[None]:
    """`replace` for a while: what was there before is there again afterwards."""
    own = vars(owner)
    before = {name: own[name] for name in attributes if name in own}
    replace(owner, **attributes)
    try:
        yield
    finally:
        for name in attributes:
            if name in before:
                setattr(owner, name, before[name])
            else:
                delattr(owner, name)  # it was inherited


def expect(owner: Any, name: str) -> Any:
    """Return the attribute that is about to be replaced. Raises `TorchInternalError` where it is gone."""
    if not hasattr(owner, name):
        whose = getattr(owner, "__qualname__", None)
        where = getattr(owner, "__module__", None) if whose else getattr(owner, "__name__", repr(owner))
        raise gone(".".join(filter(None, (where, whose, name))), IN_ITS_PLACE)
    return getattr(owner, name)


def last_part(name: str) -> str:
    """Return the last part of a dotted private name."""
    return INTERNALS[name].path.replace(":", ".").rpartition(".")[2]


def _look_up(internal: Internal) -> tuple[Any, str, Any]:
    """Return the owner of a private name, the attribute's name there, and its value (None where `only_in`
    says that this torch lacks it, or a member of it). Raises `TorchInternalError`."""
    module, _, attributes = internal.path.partition(":")
    owner, name, lacking = None, "", ""
    try:
        found: Any = importlib.import_module(module)
        for name in filter(None, attributes.split(".")):
            owner, found = found, getattr(found, name)
        for member in internal.members:
            lacking = f".{member}"
            getattr(found, member)
    except (ModuleNotFoundError, AttributeError) as error:
        if isinstance(error, ModuleNotFoundError) and not str(error.name).startswith("torch"):
            raise  # something that torch itself needs
        if internal.only_in:
            return owner, name, None
        raise gone(internal.path.replace(":", ".") + lacking, internal.needed_for) from error
    return owner, name, found


def gone(path: str, needed_for: str) -> TorchInternalError:
    """Return the error for a name that the installed torch lacks."""
    import torch

    return TorchInternalError(error_text("torch_internals.gone", torch.__version__, path, needed_for))


def __getattr__(name: str) -> Any:
    if name not in INTERNALS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = found = find(name)
    return found
