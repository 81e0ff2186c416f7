"""The recording mode: modules are built without data, and what would have filled them is written to a tape.

Under ``deferred_init()`` every tensor that is made is on the meta device, whichever device was asked for;
each operation on such tensors runs on shapes only and is recorded (``Tape``). Real tensors that
meet deferred ones are copied onto the tape. Where a value is needed, as by ``.item()``, what led to it is
replayed immediately.

Random numbers: a random operation draws its numbers when it is recorded, into memory that is dropped
immediately, so that the generator moves as it would have moved; the state before it is kept, and the replay
draws the same numbers again. That is why the result equals plain initialisation to the bit, in whichever
order it is replayed, and so does all that is drawn afterwards. Its price: random numbers are drawn twice.

A deferred tensor's storage carries its number and its tape, so all of its views and ``.data`` know theirs,
and nothing is kept alive but by the tensors themselves.
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

# A tape of recorded operations on tensors without data, and its replay for a few of them at a time.
#
# What is recorded is not tensors but *storages*, numbered, and the operations that write them. A tensor is
# then a window on a storage (offset, sizes, strides, dtype), so views need no record at all, and writing
# through one is writing the storage::
#
#     op 0   makes 0      0 = empty(4, 4)
#     op 1   writes 0     uniform_(window on 0)                 with the generator's state of that moment
#     op 2   makes 1      1 = empty(4, 4)
#     op 3   makes 2      2 = mul(window on 0, 2)
#     op 4   writes 1     copy_(window on 1, window on 2)
#     op 5   writes 0     fill_(window on row 3 of 0, 0)
#
# Asked for storage 1, the replay goes backwards from its last writer and collects what each operation reads,
# as it was at that operation: 4, 3, 2, 1, 0, but not 5. It then runs them in order and drops every storage
# that is not asked for after its last use. What was overwritten whole before being read is not computed.


@dataclass(frozen=True)
class Window:
    """A tensor as a part of a numbered storage."""

    storage: int
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    def on(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """Return the tensor, on a storage with data."""
        empty = torch.empty(0, dtype=self.dtype, device=storage.device)
        return empty.set_(storage, self.offset, self.size, self.stride)


@dataclass(frozen=True)
class RandomState:
    """The state of a random number generator before an operation; ``None`` is the device's default one."""

    device: torch.device
    generator: torch.Generator | None
    state: torch.Tensor

    @classmethod
    def now(cls, device: torch.device, generator: torch.Generator | None) -> "RandomState":
        """Return the state that a random operation on ``device`` would start from now."""
        if generator is not None:
            return cls(device, generator, generator.get_state())
        if device.type == "cpu":
            return cls(device, None, torch.get_rng_state())
        return cls(device, None, torch.get_device_module(device).get_rng_state(device))

    def restore(self) -> None:
        """Put the generator back to this state."""
        if self.generator is not None:
            self.generator.set_state(self.state)
        elif self.device.type == "cpu":
            torch.set_rng_state(self.state)
        else:
            torch.get_device_module(self.device).set_rng_state(self.state, self.device)


@dataclass(frozen=True)
class Operation:
    """One recorded call; tensors in its arguments are windows, or real ones that were copied.

    Attributes:
        writes: storages that it changes.
        makes: storages that it allocates, by the position of the output among all outputs.
        overwrites: a storage that it fills without looking at what was there.
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
        """Return every storage that it touches and does not make."""
        return self.reads | self.writes


@dataclass
class Tape:
    """See the head of this file."""

    operations: list[Operation] = field(default_factory=list)
    _writers: dict[int, list[int]] = field(default_factory=dict)

    def new_storage(self) -> int:
        """Return a number for a storage that the next operation makes."""
        number = len(self._writers)
        self._writers[number] = []
        return number

    def add(self, operation: Operation) -> None:
        """Record one more operation."""
        position = len(self.operations)
        self.operations.append(operation)
        for storage in (*operation.writes, *operation.makes.values()):
            self._writers[storage].append(position)

    def replay(self, wanted: Iterable[int]) -> dict[int, torch.UntypedStorage]:
        """Return the wanted storages with data. Communicates nothing: what they are made of is made again."""
        wanted = frozenset(wanted)
        with torch.no_grad():
            return self._run(self._needed(wanted), wanted)

    def _needed(self, wanted: frozenset[int]) -> list[int]:
        """Return the positions of the operations to run, in order: those that need nothing come as late as
        they may, or the memory of all that ``wanted`` was made of would be taken at the beginning."""
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
        """Return the operations that made what ``storage`` holds before the one at position ``before``."""
        writers = [position for position in self._writers[storage] if position < before]
        for index in range(len(writers) - 1, 0, -1):
            if self.operations[writers[index]].overwrites == storage:
                return [writers[0], *writers[index:]]  # the first one allocates
        return writers

    def _run(self, positions: list[int], wanted: frozenset[int]) -> dict[int, torch.UntypedStorage]:
        """Return the wanted storages after these operations; others are dropped after their last use."""
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

# In-place operations whose result does not depend on what was there.
_FILLING = {"uniform_", "normal_", "zero_", "fill_", "copy_", "bernoulli_", "exponential_", "random_"}


@dataclass(frozen=True)
class Deferred:
    """The mark that a deferred storage carries."""

    tape: Tape
    storage: int
    # Where it will be.
    device: torch.device


def deferred_of(tensor: torch.Tensor) -> Deferred | None:
    """Return what is known of a tensor's storage, ``None`` if it is not a deferred one."""
    if not has_storage(tensor):
        return None
    return getattr(tensor.untyped_storage(), _ENTRY, None)


def window_of(tensor: torch.Tensor, entry: Deferred) -> Window:
    """Return a deferred tensor as a part of its storage."""
    return Window(
        entry.storage, int(tensor.storage_offset()), tuple(tensor.size()), tensor.stride(), tensor.dtype
    )


@contextmanager
def deferred_init() -> Iterator[None]:
    """Inside, modules are built without memory; wrapping them gives each unit its values when it is sharded.

    ::

        with deferred_init():
            model = Model()
        model = FullyShardedDataParallel(model, auto_wrap_policy=policy, device_id=device)

    All ranks must record the same, with the same seed. All that initialises belongs inside: deferred tensors
    cannot be written afterwards. ``materialise_deferred`` runs what was recorded without FSDP.
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
    """Return whether a deferred parameter was written after its recording ended, which nothing recorded."""
    return bool(tensor.__dict__.get(_VERSION, tensor._version) != tensor._version)


class _Disguise(TorchFunctionMode):
    """Lets deferred tensors pass for tensors on the device where they will be.

    Initialisers ask: ``nn.init`` skips tensors on the meta device. And some methods read memory without
    passing the dispatcher; they get the values.
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
    """See the head of this file.

    Args:
        home: the device of tensors that are asked for without one.
    """

    def __init__(self, home: torch.device) -> None:
        super().__init__()
        self._tape = Tape()
        self._home = home
        self._paused = False

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Let operations run as they are."""
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
        """Return a deferred tensor's values now; anything else as it is."""
        entry = deferred_of(value) if isinstance(value, torch.Tensor) else None
        if entry is None:
            return value
        return window_of(value, entry).on(entry.tape.replay([entry.storage])[entry.storage])

    @staticmethod
    def _needs_values(function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Return whether an operation answers with a number, or writes into a real tensor."""
        if not any("Tensor" in str(value.type) for value in function._schema.returns):
            return bool(function._schema.returns)
        return any(deferred_of(tensor) is None for tensor in _written(function, args, kwargs))

    def _at_home(self, kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return keyword arguments for a real call: ``device`` may have been read off a deferred tensor."""
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
                return value.detach().clone()  # it may be changed before the replay
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
            # No rule for its shapes (it may depend on values): run it for real and keep those.
            return tree_map(empty, function(*tree_map(self.real, args), **tree_map(self.real, kwargs)))

    def _draw(
        self, function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], device: torch.device
    ) -> None:
        """Run a random operation for its effect on the generator alone."""
        tensors = [value for value in tree_leaves((args, kwargs)) if isinstance(value, torch.Tensor)]
        if len(tensors) == 1 and _written(function, args, kwargs):
            # It fills its only tensor: any memory of that shape does.
            target = tensors[0]
            scratch = torch.empty_strided(target.size(), target.stride(), dtype=target.dtype, device=device)
            function(scratch, *args[1:], **kwargs)
        else:
            function(*tree_map(self.real, args), **tree_map(self.real, kwargs))


def _written(function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """Return the tensors that an operation writes, by its schema."""
    found: list[torch.Tensor] = []
    for index, argument in enumerate(function._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = kwargs.get(argument.name, args[index] if index < len(args) else None)
            found += [each for each in tree_leaves(value) if isinstance(each, torch.Tensor)]
    return found
