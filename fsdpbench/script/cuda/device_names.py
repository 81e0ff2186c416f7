"""Mapping of `torch.device("cuda")` to the simulated device, which names itself "cuda".

The device is torch's PrivateUse1, which torch does not allow to be named "cuda". So the names are changed
where Python sees them:

    torch.device("cuda", 0) ──> the simulated device <── torch.zeros(.., device="cuda"), x.cuda()
                                      │
                 .type, str(), repr() └──> "cuda", "cuda:0"

* `torch.device` itself gets another constructor, `type`, `str` and `repr`. It is an immutable type of C;
  `_opened` makes it mutable for a moment, after it has checked that the type looks as expected.
* Functions that take a device parse strings in C, bypassing that constructor: they get wrappers.

A rank has one device, `cuda:LOCAL_RANK`, which is the simulation's first; `torch.device` swaps the two
indices, so that each name has one meaning. Other devices may be named, but nothing can be put there.
"""

import contextlib
import ctypes
import functools
import re
from collections.abc import Callable, Iterator
from typing import Any, Self

import torch
from torch.utils.dlpack import DLDeviceType

from fsdpbench.base.errors import error_text
from fsdpbench.base.files.documents import table_beside
from fsdpbench.base.torch_internals import (
    device_constructors,
    expect,
    is_autocast_available,
    parse_to,
    replace,
)
from fsdpbench.script.cuda.refusals import Replacements
from fsdpbench.sim.torch_device.accelerator import DEVICE_TYPE
from fsdpbench.sim.torch_device.device_module import Event, Stream
from fsdpbench.sim.torch_device.patches.dynamo import passing_to
from fsdpbench.sim.torch_device.tensors import is_on_device, is_simulated, pin, same_memory

CUDA = "cuda"
_PREFIX = "torch.cuda."
TAKES_DEVICE = "_takes_device"
"""Marks wrappers that resolve the keyword `device`, and do nothing else in a compiled graph."""
_INDEX = re.compile(r"\d+")
_LIKE = ("empty_like", "full_like", "ones_like", "zeros_like", "rand_like", "randn_like", "randint_like")
_METHODS = ("new_empty", "new_empty_strided", "new_full", "new_ones", "new_zeros", "new_tensor")
_LEGACY_DTYPES = {name: kind.dtype for name, kind in vars(torch.cuda).items() if name.endswith("Tensor")}
# Makes devices from strings in C, bypassing the constructor of `torch.device`.
_parse_to: Callable[..., Any] = parse_to


def map_device_names(replacements: Replacements, local_rank: int, on_host: bool = False) -> None:
    """Name the simulated device "cuda" everywhere, with the index `local_rank`. `on_host`: "cuda" means the
    CPU instead, with real numbers."""
    constructors = set(device_constructors())  # listed now, while they are torch's own
    if on_host:
        _make_host_of_cuda()
    else:
        _change_device_type(_Swap(local_rank))
    for function in constructors:
        replacements.add(function, _taking_device(function))
    for name in _LIKE:
        replacements.wrap(torch, name, _taking_device)
    replacements.add(parse_to, _taking_device_first(parse_to))
    replacements.add(torch.Generator, Generator)
    for kind in (Stream, Event) if not on_host else ():
        original = getattr(torch, kind.__name__)
        replacements.add(original, _OfAnyDevice(kind.__name__, (), {"simulated": kind}))
    legacy: Any = {name: _LegacyType(name, (), {"dtype": dtype}) for name, dtype in _LEGACY_DTYPES.items()}
    replace(torch.cuda, **legacy)
    replacements.wrap(torch, "set_default_tensor_type", passing_to(_set_default_tensor_type))
    replacements.wrap(torch, "from_dlpack", passing_to(_through_dlpack))
    replacements.wrap(torch, "to_dlpack", lambda original: lambda tensor: (  # the memory, not a capsule
        tensor.detach() if is_on_device(tensor) else original(tensor)
    ))  # fmt: skip
    _change_tensor_methods()


def own_device(device: Any) -> torch.device:
    """Return the device that a script names. Raise `RuntimeError` for one that this rank does not have."""
    found = device if isinstance(device, torch.device) else torch.device(device)
    own = torch.cuda.current_device()
    if is_simulated(found) and found.index not in (None, own):
        raise RuntimeError(error_text("device_names.not_own", found, own))
    return found


def _make_host_of_cuda() -> None:
    """Make `torch.device` return the CPU for "cuda", "cuda:1" and plain indices."""
    device_type = torch.device

    def new(cls: type, type: Any = 0, index: int | None = None) -> torch.device:
        if isinstance(type, device_type):
            return type
        if isinstance(type, int) or type == CUDA or type.startswith(f"{CUDA}:"):
            return _parse_to("cpu")[0]
        return _parse_to(type if index is None else f"{type}:{index}")[0]

    with _opened(device_type):
        replace(device_type, __new__=staticmethod(new))


class _Swap:
    """The mapping between a script's device indices and the simulation's: `own` and 0 are swapped."""

    def __init__(self, own: int) -> None:
        self._other = {own: 0, 0: own}

    def __call__(self, index: int) -> int:
        return self._other.get(index, index)

    def in_text(self, text: str) -> str:
        """Swap the first number of a device's name."""
        return _INDEX.sub(lambda found: str(self(int(found[0]))), text, count=1)


def _change_device_type(swap: _Swap) -> None:
    device_type = torch.device
    original: Any = device_type
    type_of, as_text, represent = original.type.__get__, original.__str__, original.__repr__
    index_of = original.index.__get__

    def new(cls: type, type: Any = 0, index: int | None = None) -> torch.device:
        if isinstance(type, device_type):
            return type
        if isinstance(type, int):
            text = f"{DEVICE_TYPE}:{swap(type)}"
        else:
            text = str(type) if index is None else f"{type}:{index}"
            if text == CUDA or text.startswith(CUDA + ":"):
                text = swap.in_text(DEVICE_TYPE + text[len(CUDA) :])
        return _parse_to(text)[0]

    def read_type(self: torch.device) -> str:
        name: str = type_of(self)
        return CUDA if name == DEVICE_TYPE else name

    def read_index(self: torch.device) -> int | None:
        index: int | None = index_of(self)
        return swap(index) if index is not None and type_of(self) == DEVICE_TYPE else index

    def renamed(read: Callable[[torch.device], str]) -> Callable[[torch.device], str]:
        def as_said(self: torch.device) -> str:
            text = read(self)
            return swap.in_text(text.replace(DEVICE_TYPE, CUDA, 1)) if is_simulated(self) else text

        return as_said

    with _opened(device_type):
        replace(
            device_type,
            __new__=staticmethod(new),
            type=property(read_type),
            index=property(read_index),
            __str__=renamed(as_text),
            __repr__=renamed(represent),
        )


@contextlib.contextmanager
def _opened(kind: type) -> Iterator[None]:
    """Allow attributes of a C type to be set inside. Raise `RuntimeError` if the type looks unexpected."""
    immutable = 1 << 8  # Py_TPFLAGS_IMMUTABLETYPE
    # A type begins with the head of objects of variable size; its flags are 18 words after that.
    word = ctypes.sizeof(ctypes.c_void_p)
    flags = ctypes.c_ulong.from_address(id(kind) + object.__basicsize__ + word + 18 * word)
    if flags.value != kind.__flags__:
        raise RuntimeError(error_text("device_names.assigned", kind.__qualname__))
    flags.value &= ~immutable
    try:
        yield
    finally:
        flags.value |= immutable
        ctypes.pythonapi.PyType_Modified(ctypes.py_object(kind))


def _taking_device(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `function`: resolve its keyword `device`, and mark a tensor that is to be pinned."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        pinned = kwargs.pop("pin_memory", None)
        if kwargs.get("device") is not None:
            kwargs["device"] = own_device(kwargs["device"])
        made = function(*args, **kwargs)
        return pin(made) if pinned else made

    setattr(call, TAKES_DEVICE, True)
    return call


def _taking_device_first(function: Callable[..., Any], position: int = 0) -> Callable[..., Any]:
    """Wrap `function`: resolve its keyword `device` and its argument at `position`, if that is a device."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if len(args) > position and isinstance(args[position], (str, int, torch.device)):
            args = (*args[:position], own_device(args[position]), *args[position + 1 :])
        if kwargs.get("device") is not None:
            kwargs["device"] = own_device(kwargs["device"])
        return function(*args, **kwargs)

    return call


def _through_dlpack(function: Callable[..., Any], ext_tensor: Any, *args: Any, **kwargs: Any) -> Any:
    """Replace `from_dlpack`, which needs an address: the simulated device's memory has none."""
    if isinstance(ext_tensor, torch.Tensor) and is_on_device(ext_tensor):
        return same_memory(ext_tensor)
    return function(ext_tensor, *args, **kwargs)


def _change_tensor_methods() -> None:
    tensor_type: Any = torch.Tensor
    for name in _METHODS:
        replace(tensor_type, **{name: _taking_device(expect(tensor_type, name))})
    replace(
        tensor_type,
        to=_taking_device_first(tensor_type.to, position=1),
        cuda=passing_to(_tensor_to_device)(tensor_type.cuda),
        type=_type_method(tensor_type.type),
        is_cuda=property(is_on_device),
        get_device=passing_to(
            lambda get, self: torch.cuda.current_device() if is_on_device(self) else get(self)
        )(tensor_type.get_device),
        numpy=passing_to(_numpy)(tensor_type.numpy),
        __dlpack_device__=passing_to(  # NumPy refuses CUDA's tensors
            lambda get, self: (DLDeviceType.kDLCUDA, 0) if is_on_device(self) else get(self)
        )(tensor_type.__dlpack_device__),
    )
    for storage_type in (torch.UntypedStorage, torch.storage.TypedStorage):
        replace(
            storage_type,
            is_cuda=property(lambda self: is_simulated(self.device)),
            cuda=lambda self, device=None, **how: self.to(
                device=own_device(CUDA if device is None else device), **how
            ),
        )


def _tensor_to_device(
    original: Callable[..., Any],
    self: torch.Tensor,
    device: Any = None,
    non_blocking: bool = False,
    memory_format: Any = None,
) -> torch.Tensor:
    """Replace `Tensor.cuda`: copy to the simulated device."""
    target = own_device(CUDA if device is None else device)
    if memory_format is None:
        return self.to(target, non_blocking=non_blocking)
    return self.to(target, non_blocking=non_blocking, memory_format=memory_format)


def _numpy(original: Callable[..., Any], self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """Replace `Tensor.numpy`, whose error for the device's tensors takes the device's name from C."""
    if is_on_device(self):
        raise TypeError(error_text("device_names.to_numpy", self.device))
    return original(self, *args, **kwargs)


def _type_method(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `Tensor.type`, which takes and returns names such as "torch.cuda.FloatTensor"."""

    @functools.wraps(original)
    def call(self: torch.Tensor, dtype: Any = None, non_blocking: bool = False, **kwargs: Any) -> Any:
        named = _legacy_dtype(dtype)
        if named is not None:
            return self.to(own_device(CUDA), named, non_blocking=non_blocking)
        found = original(self, dtype, non_blocking, **kwargs) if dtype is not None else original(self)
        return found.replace(f"torch.{DEVICE_TYPE}.", _PREFIX) if isinstance(found, str) else found

    return call


class _LegacyType(type):
    """The metaclass of types such as `torch.cuda.FloatTensor`, which make tensors and recognize them."""

    dtype: torch.dtype

    def __call__(cls, *given: Any, device: Any = None) -> torch.Tensor:
        if len(given) == 1 and not isinstance(given[0], int | torch.Size):
            return torch.as_tensor(given[0], dtype=cls.dtype, device=torch.device(CUDA))
        return torch.empty(*given or (0,), dtype=cls.dtype, device=torch.device(CUDA))

    def __instancecheck__(cls, tensor: Any) -> bool:
        return isinstance(tensor, torch.Tensor) and is_on_device(tensor) and tensor.dtype is cls.dtype


def _legacy_dtype(kind: Any) -> torch.dtype | None:
    """Return the dtype of `torch.cuda.FloatTensor` or of its name; None for everything else."""
    named = isinstance(kind, str) and kind.startswith(_PREFIX)
    if named and kind.removeprefix(_PREFIX) not in _LEGACY_DTYPES:
        raise ValueError(f"{kind} is not a tensor type; use tensor.to(device, dtype)")
    found: Any = getattr(torch.cuda, kind.removeprefix(_PREFIX)) if named else kind
    return found.dtype if isinstance(found, _LegacyType) else None


def _set_default_tensor_type(original: Callable[..., None], kind: Any) -> None:
    """Replace `set_default_tensor_type`: a CUDA type sets the default dtype and device."""
    dtype = _legacy_dtype(kind)
    torch.set_default_device(None if dtype is None else CUDA)
    original(kind) if dtype is None else torch.set_default_dtype(dtype)


class _OfAnyDevice(type):
    """The type of `torch.Stream` and `torch.Event`, which make those of the device and recognise them."""

    simulated: type

    def __call__(cls, device: Any = None, **kwargs: Any) -> Any:
        own_device(CUDA if device is None else device)
        return cls.simulated(**kwargs)

    def __instancecheck__(cls, found: Any) -> bool:
        return isinstance(found, cls.simulated)

    def __subclasscheck__(cls, kind: type) -> bool:
        return issubclass(kind, cls.simulated)


class Generator(torch.Generator):
    """A generator of the device, which is the host's: there are no numbers to make."""

    def __new__(cls, device: Any = "cpu") -> Self:
        new: Any = super().__new__
        return new(cls, device="cpu")


__all__ = ["CUDA", "Generator", "map_device_names", "own_device"]


def map_amp(replacements: Replacements, target: str = DEVICE_TYPE) -> None:
    """Map the device names that autocast takes as strings to `target`.

    `GradScaler` needs no mapping: it asks the device whether gradients were finite, gets the placeholder
    (zero: they were), and steps.
    """
    naming = passing_to(functools.partial(_naming_device, target))
    for name in table_beside(__file__, "refusals.toml")["device_type"]["taking"]:
        replacements.wrap(torch, name, naming)
    replacements.add(is_autocast_available, naming(is_autocast_available))
    replacements.add(torch.get_autocast_gpu_dtype, functools.partial(torch.get_autocast_dtype, target))
    replacements.add(torch.set_autocast_gpu_dtype, functools.partial(torch.set_autocast_dtype, target))
    autocast: Any = torch.amp.autocast_mode.autocast
    original = autocast.__init__

    @functools.wraps(original)
    def init(self: Any, device_type: str, dtype: Any = None, *args: Any, **kwargs: Any) -> None:
        if device_type == CUDA and target == "cpu" and dtype is None:
            dtype = torch.float16  # cuda's default
        original(self, target if device_type == CUDA else device_type, dtype, *args, **kwargs)

    replace(autocast, __init__=init)


def _naming_device(target: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function whose first argument is a device's name; if it is missing, torch means "cuda"."""
    if not args or not isinstance(args[0], str):
        return function(target, *args, **kwargs)
    return function(target if args[0] == CUDA else args[0], *args[1:], **kwargs)
