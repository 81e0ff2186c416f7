"""The recording mode: build modules without data and record the operations that initialise them on a tape.

Under ``deferred_init()`` every new tensor is on the meta device, whatever device was requested. Operations on
such tensors run on shapes only and are recorded (``Tape``). Real tensors in arguments of recorded operations
are copied to the tape. If a value is needed, for example by ``.item()``, the operations that produce it are
replayed immediately.

Random numbers: a random operation draws its numbers when it is recorded, into temporary memory, so that the
generator advances as in plain initialisation. The tape keeps the generator state before it, and the replay
draws the same numbers again. So the result is bitwise equal to plain initialisation in any order of replay,
and so are all later random numbers. The cost is that random numbers are drawn twice.

A deferred tensor's storage object holds its number and its tape. So all views and ``.data`` of the tensor
find them, and only the tensors keep them alive.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode

from ..shared.torch_internals import TensorBase, TorchDispatchMode, has_storage, tree_leaves, tree_map

# A tape of recorded operations on tensors without data, and its replay for a few tensors at a time.
#
# The tape records numbered *storages* and the operations that write them, not tensors. A tensor is a window
# on a storage (offset, sizes, strides, dtype). So views need no record, and a write through a view is a write
# to the storage::
#
#     op 0   makes 0      0 = empty(4, 4)
#     op 1   writes 0     uniform_(window on 0)                 with the generator state before it
#     op 2   makes 1      1 = empty(4, 4)
#     op 3   makes 2      2 = mul(window on 0, 2)
#     op 4   writes 1     copy_(window on 1, window on 2)
#     op 5   writes 0     fill_(window on row 3 of 0, 0)
#
# To replay storage 1, the tape starts at its last writer and collects backwards the writers of what each
# operation reads, up to that operation: 4, 3, 2, 1, 0, but not 5. It then runs them in order and drops every
# other storage after its last use. Values that are overwritten entirely before a read are not computed.


@dataclass(frozen=True)
class Window:
    """A tensor as a window on a numbered storage."""

    storage: int
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    def on(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """Return the tensor over a ``storage`` with data."""
        empty = torch.empty(0, dtype=self.dtype, device=storage.device)
        return empty.set_(storage, self.offset, self.size, self.stride)


@dataclass(frozen=True)
class RandomState:
    """The state of a generator before an operation. ``generator`` is ``None`` for the default one."""

    device: torch.device
    generator: torch.Generator | None
    state: torch.Tensor

    @classmethod
    def now(cls, device: torch.device, generator: torch.Generator | None) -> "RandomState":
        """Return the current state of ``generator``, or of the default generator of ``device``."""
        if generator is not None:
            return cls(device, generator, generator.get_state())
        if device.type == "cpu":
            return cls(device, None, torch.get_rng_state())
        return cls(device, None, torch.get_device_module(device).get_rng_state(device))

    def restore(self) -> None:
        """Set the generator to this state."""
        if self.generator is not None:
            self.generator.set_state(self.state)
        elif self.device.type == "cpu":
            torch.set_rng_state(self.state)
        else:
            torch.get_device_module(self.device).set_rng_state(self.state, self.device)


@dataclass(frozen=True)
class Operation:
    """One recorded call. Tensors in its arguments are windows, or copies of real tensors.

    Attributes:
        writes: storages that it changes.
        makes: storages that it allocates, by the index of the output.
        overwrites: a storage that it fills entirely without reading it.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    reads: frozenset[int]
    writes: frozenset[int]
    makes: Mapping[int, int]
    overwrites: int | None
    random: "RandomState | None"

    @property
    def uses(self) -> frozenset[int]:
        """Return the storages that it reads or writes and does not allocate."""
        return self.reads | self.writes


@dataclass
class Tape:
    """A tape of operations; the comment above explains it."""

    operations: list[Operation] = field(default_factory=list)
    _writers: dict[int, list[int]] = field(default_factory=dict)

    def new_storage(self) -> int:
        """Return the number for a storage that the next operation allocates."""
        number = len(self._writers)
        self._writers[number] = []
        return number

    def add(self, operation: Operation) -> None:
        """Append an operation to the tape."""
        position = len(self.operations)
        self.operations.append(operation)
        for storage in (*operation.writes, *operation.makes.values()):
            self._writers[storage].append(position)

    def replay(self, wanted: Iterable[int]) -> dict[int, torch.UntypedStorage]:
        """Return the wanted storages with data, by replaying operations. Communicates nothing."""
        wanted = frozenset(wanted)
        with torch.no_grad():
            return self._run(self._needed(wanted), wanted)

    def _needed(self, wanted: frozenset[int]) -> list[int]:
        """Return the positions of the operations to run, in order. Operations without inputs run as late as
        possible; otherwise all memory would be allocated at the beginning."""
        positions: set[int] = set()
        todo = [(storage, len(self.operations)) for storage in wanted]
        while todo:
            storage, before = todo.pop()
            for position in self._contributors(storage, before):
                if position not in positions:
                    positions.add(position)
                    operation = self.operations[position]
                    todo += [(used, position) for used in operation.uses - {operation.overwrites}]
        order = sorted(positions)
        first_use = {
            used: position for position in reversed(order) for used in self.operations[position].uses
        }

        def turn(position: int) -> tuple[int, bool]:
            operation = self.operations[position]
            if operation.uses:
                return position, True
            made = operation.makes.values()
            return min((first_use[each] for each in made if each in first_use), default=position), False

        return sorted(order, key=turn)

    def _contributors(self, storage: int, before: int) -> list[int]:
        """Return the operations that produce the contents of ``storage`` at position ``before``."""
        writers = [position for position in self._writers[storage] if position < before]
        for index in range(len(writers) - 1, 0, -1):
            if self.operations[writers[index]].overwrites == storage:
                return [writers[0], *writers[index:]]  # the first one allocates
        return writers

    def _run(self, positions: list[int], wanted: frozenset[int]) -> dict[int, torch.UntypedStorage]:
        """Run operations and return the wanted storages; drop others after their last use."""
        data: dict[int, torch.UntypedStorage] = {}
        last_use: dict[int, int] = {}
        for position in positions:
            operation = self.operations[position]
            for storage in (*operation.uses, *operation.makes.values()):
                last_use[storage] = position
        for position in positions:
            operation = self.operations[position]
            outputs = self._call(operation, data)
            for index, storage in operation.makes.items():
                data[storage] = outputs[index].untyped_storage()
            del outputs
            for storage in (*operation.uses, *operation.makes.values()):
                if last_use[storage] == position and storage not in wanted:
                    del data[storage]
        return data

    @staticmethod
    def _call(operation: Operation, data: Mapping[int, torch.UntypedStorage]) -> list[Any]:
        def real(value: Any) -> Any:
            return value.on(data[value.storage]) if isinstance(value, Window) else value

        args, kwargs = tree_map(real, (operation.args, operation.kwargs))
        if operation.random is None:
            return tree_leaves(operation.function(*args, **kwargs))
        random = operation.random
        now = RandomState.now(random.device, random.generator)
        random.restore()
        try:
            return tree_leaves(operation.function(*args, **kwargs))
        finally:
            now.restore()


_META = torch.device("meta")
_ENTRY = "_fsdp_deferred"
_VERSION = "_fsdp_recorded_version"

# In-place operations whose result does not depend on the old values.
_FILLING = {"uniform_", "normal_", "zero_", "fill_", "copy_", "bernoulli_", "exponential_", "random_"}


@dataclass(frozen=True)
class Deferred:
    """The entry attached to a deferred storage."""

    tape: Tape
    storage: int
    # The device on which it will be materialised.
    device: torch.device


def deferred_of(tensor: torch.Tensor) -> Deferred | None:
    """Return the entry of a tensor's storage, ``None`` if it is not deferred."""
    if not has_storage(tensor):
        return None
    return getattr(tensor.untyped_storage(), _ENTRY, None)


def window_of(tensor: torch.Tensor, entry: Deferred) -> Window:
    """Return a deferred tensor as a window on its storage."""
    return Window(
        entry.storage, int(tensor.storage_offset()), tuple(tensor.size()), tensor.stride(), tensor.dtype
    )


@contextmanager
def deferred_init() -> Iterator[None]:
    """Build modules without memory inside this context. Wrapping them materialises one unit at a time.

    ::

        with deferred_init():
            model = Model()
        model = FullyShardedDataParallel(model, auto_wrap_policy=policy, device_id=device)

    All ranks must record the same operations with the same seed. All initialisation must happen inside:
    deferred tensors cannot be written afterwards. ``materialise_deferred`` replays without FSDP.
    """
    mode = _Recorder(torch.get_default_device())
    registered: dict[int, weakref.ref[nn.Parameter]] = {}

    def note(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None:
            registered[id(parameter)] = weakref.ref(parameter)

    hook = register_module_parameter_registration_hook(note)
    try:
        with _Disguise(mode), mode:
            yield
    finally:
        hook.remove()
        for parameter in (reference() for reference in registered.values()):
            if parameter is not None and deferred_of(parameter) is not None:
                parameter.__dict__[_VERSION] = parameter._version


def written_since(tensor: torch.Tensor) -> bool:
    """Return whether a deferred parameter was written, without a record, after its recording ended."""
    return bool(tensor.__dict__.get(_VERSION, tensor._version) != tensor._version)


class _Disguise(TorchFunctionMode):
    """Makes deferred tensors report the device on which they will be materialised.

    ``nn.init`` skips tensors on the meta device. Some methods read memory without calling the dispatcher;
    they get replayed values.
    """

    _READS = frozenset(
        {torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__, torch.Tensor.__repr__}
    )
    _QUESTIONS: ClassVar[dict[Any, Callable[[torch.device], Any]]] = {
        vars(TensorBase)[name].__get__: answer
        for name, answer in {
            "device": lambda device: device,
            "is_meta": lambda device: False,
            "is_cpu": lambda device: device.type == "cpu",
            "is_cuda": lambda device: device.type == "cuda",
        }.items()
    }

    def __init__(self, recorder: "_Recorder") -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if args and isinstance(args[0], torch.Tensor):
            if function in self._QUESTIONS:
                entry = deferred_of(args[0])
                if entry is not None:
                    return self._QUESTIONS[function](entry.device)
            elif function in self._READS:
                with self._recorder.paused():
                    return function(self._recorder.real(args[0]), *args[1:], **(kwargs or {}))
        return function(*args, **(kwargs or {}))


class _Recorder(TorchDispatchMode):
    """The dispatch mode that records; the module docstring explains it.

    Args:
        home: the device of tensors that are created without an explicit one.
    """

    def __init__(self, home: torch.device) -> None:
        super().__init__()
        self._tape = Tape()
        self._home = home
        self._paused = False

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Run operations without recording inside this context."""
        self._paused = True
        try:
            yield
        finally:
            self._paused = False

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if self._paused:
            return function(*args, **kwargs)
        tensors = [value for value in tree_leaves((args, kwargs)) if isinstance(value, torch.Tensor)]
        arguments = function._schema.arguments
        makes_from_nothing = not tensors and any(argument.name == "device" for argument in arguments)
        if not makes_from_nothing and not any(deferred_of(tensor) for tensor in tensors):
            return function(*args, **kwargs)
        if self._needs_values(function, args, kwargs):
            return function(*tree_map(self.real, args), **self._at_home(tree_map(self.real, kwargs)))
        return self._record(function, args, kwargs)

    def real(self, value: Any) -> Any:
        """Replay and return the values of a deferred tensor; return other values unchanged."""
        entry = deferred_of(value) if isinstance(value, torch.Tensor) else None
        if entry is None:
            return value
        return window_of(value, entry).on(entry.tape.replay([entry.storage])[entry.storage])

    @staticmethod
    def _needs_values(function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Return whether an operation returns a number, or writes to a real tensor."""
        if not any("Tensor" in str(value.type) for value in function._schema.returns):
            return bool(function._schema.returns)
        return any(deferred_of(tensor) is None for tensor in _written(function, args, kwargs))

    def _at_home(self, kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return keyword arguments for a real call: replace the meta ``device`` of a deferred tensor."""
        device = kwargs.get("device")
        if device is not None and torch.device(device) == _META:
            return {**kwargs, "device": self._home}
        return kwargs

    # -- recording -------------------------------------------------------------------------------------------

    def _record(self, function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        kwargs = self._at_home(kwargs)
        device = self._device_of_result(function, args, kwargs)
        random = None
        if torch.Tag.nondeterministic_seeded in function.tags:
            random = RandomState.now(device, kwargs.get("generator"))
            self._draw(function, args, kwargs, device)
        written = {entry.storage for entry in map(deferred_of, _written(function, args, kwargs)) if entry}
        before = {
            t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)
        }
        output = self._shapes(function, args, kwargs)
        makes: dict[int, int] = {}
        for index, value in enumerate(tree_leaves(output)):
            if isinstance(value, torch.Tensor) and value.untyped_storage()._cdata not in before:
                makes[index] = self._tape.new_storage()
                entry = Deferred(self._tape, makes[index], device)
                setattr(value.untyped_storage(), _ENTRY, entry)
        if written or makes:
            self._add(function, args, kwargs, frozenset(written), makes, random)
        return output

    def _add(
        self,
        function: Any,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        written: frozenset[int],
        makes: dict[int, int],
        random: "RandomState | None",
    ) -> None:
        reads: set[int] = set()

        def note(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            entry = deferred_of(value)
            if entry is None:
                return value.detach().clone()  # the original may change before the replay
            reads.add(entry.storage)
            return window_of(value, entry)

        noted = tree_map(note, args), tree_map(note, kwargs)
        overwrites = None
        if function._schema.name.removeprefix("aten::") in _FILLING:
            target, *others = tree_leaves(noted)
            whole = 0 not in args[0].stride() and args[0].nbytes == args[0].untyped_storage().nbytes()
            sources = {each.storage for each in others if isinstance(each, Window)}
            if whole and isinstance(target, Window) and target.storage not in sources:
                overwrites = target.storage
        self._tape.add(
            Operation(function, *noted, frozenset(reads) - written, written, makes, overwrites, random)
        )

    def _device_of_result(
        self, function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> torch.device:
        if kwargs.get("device") is not None:
            return torch.device(kwargs["device"])
        for value in tree_leaves((args, kwargs)):
            if isinstance(value, torch.Tensor) and value.dim():
                entry = deferred_of(value)
                return entry.device if entry is not None else value.device
        return self._home

    def _shapes(self, function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Return the outputs without data."""

        def empty(value: Any) -> Any:
            if isinstance(value, torch.Tensor) and value.device != _META:
                return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=_META)
            return value

        on_meta = {k: None if k in ("generator", "pin_memory") else value for k, value in kwargs.items()}
        if any(argument.name == "device" for argument in function._schema.arguments):
            on_meta["device"] = _META
        try:
            return function(*tree_map(empty, args), **tree_map(empty, on_meta))
        except NotImplementedError:
            # No meta kernel (its shapes may depend on values): run it on real tensors and keep the shapes.
            return tree_map(empty, function(*tree_map(self.real, args), **tree_map(self.real, kwargs)))

    def _draw(
        self, function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], device: torch.device
    ) -> None:
        """Run a random operation only to advance the generator."""
        tensors = [value for value in tree_leaves((args, kwargs)) if isinstance(value, torch.Tensor)]
        if len(tensors) == 1 and _written(function, args, kwargs):
            # It fills its only tensor, so temporary memory of the same shape is enough.
            target = tensors[0]
            scratch = torch.empty_strided(target.size(), target.stride(), dtype=target.dtype, device=device)
            function(scratch, *args[1:], **kwargs)
        else:
            function(*tree_map(self.real, args), **tree_map(self.real, kwargs))


def _written(function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """Return the tensors that an operation writes, according to its schema."""
    found: list[torch.Tensor] = []
    for index, argument in enumerate(function._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = kwargs.get(argument.name, args[index] if index < len(args) else None)
            found += [each for each in tree_leaves(value) if isinstance(each, torch.Tensor)]
    return found
