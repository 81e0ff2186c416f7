"""Access to torch's private names that bench and simulator use; `torch_internals.csv` is the table.

A row gives the name's location, the feature that needs it, and the public name that could replace it.

A name is looked up once, when it is first imported from here. So calls have no overhead, and heavy modules of
torch are imported only when needed::

    from fsdpbench.base.torch_internals import current_graph_task_id        # torch._C._current_graph_task_id

If this version of torch lacks the name, that import raises `TorchInternalError`; `missing` checks all names.
Monkey patches of torch go through here too: `patch` for a private name, `replace` for other attributes
(temporarily: `patched`, `replaced`). They refuse attributes that torch lacks: a patch would be useless.
"""

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fsdpbench.base.errors import BenchError, error_text
from fsdpbench.base.files.documents import typed_rows

if TYPE_CHECKING:  # used only as types
    from torch.distributed.tensor._dtensor_spec import DTensorSpec as DTensorSpec
    from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode


class TorchInternalError(BenchError):
    """The installed torch lacks a private name that a feature requires."""


@dataclass(frozen=True)
class Internal:
    """A private name: its location (module:attribute), what needs it, and the public name to replace it."""

    path: str
    needed_for: str
    public: str = "none"
    only_in: str = ""
    """The versions of torch that have it, if not all; in others it is None, and is not patched."""
    members: tuple[str, ...] = ()
    """The names that are used of a module, class or object; all of them must exist."""


IN_ITS_PLACE = "what the bench puts in its place"

FULLY_SHARD_PLACES = (
    "torch.distributed.fsdp", "torch.distributed.fsdp._fully_shard",
    "torch.distributed.fsdp._fully_shard._fully_shard", "torch.distributed._composable.fsdp",
    "torch.distributed._composable.fsdp.fully_shard",
)  # fmt: skip
"""Modules from which scripts and libraries import `fully_shard`; those that torch lacks are skipped."""


@dataclass(frozen=True, kw_only=True)
class _Row(Internal):
    name: str


INTERNALS: dict[str, Internal] = {row.name: row for row in typed_rows(__file__, "torch_internals.csv", _Row)}


def missing() -> list[str]:
    """Return a sentence for every name that the installed torch lacks; imports all their modules."""
    found = []
    for name in INTERNALS:
        try:
            find(name)
        except TorchInternalError as error:
            found.append(str(error))
    return found


def find(name: str) -> Any:
    """Return the current value of a private name in torch. Raises `TorchInternalError`, also for a member."""
    return _look_up(INTERNALS[name])[2]


def uses() -> int:
    """Return the number of torch's private names in use: each name, or each of its members that is used."""
    return sum(max(1, len(internal.members)) for internal in INTERNALS.values())


def patch(name: str, make: Callable[[Any], Any]) -> None:
    """Replace a private name by ``make(original)``. Raises `TorchInternalError` if torch lacks the name."""
    owner, attribute, original = _look_up(INTERNALS[name])
    if original is not None:
        setattr(owner, attribute, make(original))


def replace(owner: Any, **attributes: Any) -> None:
    """Set attributes that ``owner`` has. If it lacks one, raise `TorchInternalError` and set none."""
    for name in attributes:
        expect(owner, name)
    for name, value in attributes.items():
        setattr(owner, name, value)


@contextmanager
def patched(name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    """Apply `patch` inside the context, and restore the original afterwards."""
    owner, attribute, original = _look_up(INTERNALS[name])
    patch(name, make)
    try:
        yield
    finally:
        if original is not None:
            setattr(owner, attribute, original)


@contextmanager
def replaced(owner: Any, **attributes: Any) -> Iterator[None]:
    """Apply `replace` inside the context, and restore the original afterwards."""
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
    """Return the attribute that is about to be replaced. Raises `TorchInternalError` if it is missing."""
    if not hasattr(owner, name):
        whose = getattr(owner, "__qualname__", None)
        where = getattr(owner, "__module__", None) if whose else getattr(owner, "__name__", repr(owner))
        raise gone(".".join(filter(None, (where, whose, name))), IN_ITS_PLACE)
    return getattr(owner, name)


def last_part(name: str) -> str:
    """Return the last part of a dotted private name."""
    return INTERNALS[name].path.replace(":", ".").rpartition(".")[2]


def _look_up(internal: Internal) -> tuple[Any, str, Any]:
    """Return the owner of a private name, the attribute's name there, and its value: None if `only_in` allows
    this version of torch to lack it or a member of it. Raises `TorchInternalError`."""
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
            raise  # a package that torch itself needs
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
