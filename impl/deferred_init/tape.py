"""A tape of recorded operations on tensors without data, and its replay for a few of them at a time.

What is recorded is not tensors but *storages*, numbered, and the operations that write them. A tensor is
then a window on a storage (offset, sizes, strides, dtype), so views need no record at all, and writing
through one is writing the storage::

    op 0   makes 0      0 = empty(4, 4)
    op 1   writes 0     uniform_(window on 0)                 with the generator's state of that moment
    op 2   makes 1      1 = empty(4, 4)
    op 3   makes 2      2 = mul(window on 0, 2)
    op 4   writes 1     copy_(window on 1, window on 2)
    op 5   writes 0     fill_(window on row 3 of 0, 0)

Asked for storage 1, the replay goes backwards from its last writer and collects what each operation reads,
as it was at that operation: 4, 3, 2, 1, 0, but not 5. It then runs them in order and drops every storage
that is not asked for after its last use. What was overwritten as a whole before anybody read it is not
computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..shared.torch_internals import tree_leaves, tree_map

Home = Callable[[Sequence[int]], Sequence[torch.Tensor]]
"""Where values are that were computed before: returns contiguous copies of those with the given indices."""


@dataclass(frozen=True)
class Window:
    """A tensor as a part of a numbered storage."""

    storage: int
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    def on(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """The tensor, on a storage with data."""
        empty = torch.empty(0, dtype=self.dtype, device=storage.device)
        return empty.set_(storage, self.offset, self.size, self.stride)


@dataclass(frozen=True)
class RandomState:
    """The state of a random number generator before an operation; ``None`` is the device's default one."""

    device: torch.device
    generator: torch.Generator | None
    state: torch.Tensor

    @classmethod
    def now(cls, device: torch.device, generator: torch.Generator | None) -> RandomState:
        """The state that a random operation on ``device`` would start from now."""
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
    kwargs: dict[str, Any]
    reads: frozenset[int]
    writes: frozenset[int]
    makes: Mapping[int, int]
    overwrites: int | None
    random: RandomState | None

    @property
    def uses(self) -> frozenset[int]:
        """Every storage that it touches and does not make."""
        return self.reads | self.writes


@dataclass
class Tape:
    """See the head of this file."""

    operations: list[Operation] = field(default_factory=list)
    _writers: dict[int, list[int]] = field(default_factory=dict)
    _known: dict[int, tuple[Home, int]] = field(default_factory=dict)

    def new_storage(self) -> int:
        """A number for a storage that the next operation makes."""
        number = len(self._writers)
        self._writers[number] = []
        return number

    def add(self, operation: Operation) -> None:
        """Record one more operation."""
        position = len(self.operations)
        self.operations.append(operation)
        for storage in (*operation.writes, *operation.makes.values()):
            self._writers[storage].append(position)

    def settle(self, storage: int, home: Home, index: int) -> None:
        """From now on the final values of ``storage`` are fetched: ``home([index])``."""
        self._known[storage] = home, index

    def replay(self, wanted: Iterable[int]) -> dict[int, torch.UntypedStorage]:
        """The wanted storages with data. May communicate: settled ones are fetched where others need them."""
        wanted = frozenset(wanted)
        known = set(self._known)
        while True:
            positions, fetched, outdated = self._needed(wanted, known)
            if not outdated:
                break
            known -= outdated
        with torch.no_grad():
            data = self._fetch(fetched)
            self._run(sorted(positions), wanted, data)
        return data

    def _fetch(self, storages: set[int]) -> dict[int, torch.UntypedStorage]:
        """Copies of settled storages, each home asked once and in an order that is the same on all ranks."""
        by_home: dict[Home, list[int]] = {}
        for storage in sorted(storages):
            by_home.setdefault(self._known[storage][0], []).append(storage)
        data: dict[int, torch.UntypedStorage] = {}
        for home, wanted in by_home.items():
            copies = home([self._known[storage][1] for storage in wanted])
            data |= {storage: copy.untyped_storage() for storage, copy in zip(wanted, copies, strict=True)}
        return data

    def _needed(self, wanted: frozenset[int], known: set[int]) -> tuple[set[int], set[int], set[int]]:
        """Operations to run, known storages to fetch, and those whose final values are not what is needed."""
        positions: set[int] = set()
        fetched: set[int] = set()
        outdated: set[int] = set()
        todo = [(storage, len(self.operations)) for storage in wanted]
        while todo:
            storage, before = todo.pop()
            writers = self._writers[storage]
            if storage in known:
                (fetched if writers[-1] < before else outdated).add(storage)
                continue
            for position in self._contributors(storage, before):
                if position not in positions:
                    positions.add(position)
                    todo += [(used, position) for used in self.operations[position].uses]
        return positions, fetched, outdated

    def _contributors(self, storage: int, before: int) -> list[int]:
        """The operations that made what ``storage`` holds just before the one at position ``before``."""
        writers = [position for position in self._writers[storage] if position < before]
        for index in range(len(writers) - 1, 0, -1):
            if self.operations[writers[index]].overwrites == storage:
                return [writers[0], *writers[index:]]  # the first one allocates
        return writers

    def _run(
        self, positions: list[int], wanted: frozenset[int], data: dict[int, torch.UntypedStorage]
    ) -> None:
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
        for storage in set(data) - wanted:
            del data[storage]

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
