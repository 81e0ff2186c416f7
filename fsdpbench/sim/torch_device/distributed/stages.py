"""Messages and collectives with ranks of other pipeline stages, each rank in its own process.

`sim/model/coupling.py` synchronizes the ranks' clocks. This module defines which calls meet: the n-th message
between two ranks of a group, the n-th collective of a group. As in NCCL, messages of a batch use the group's
communicator, others one of the two ranks alone. A message takes time from when both ranks have arrived;
NCCL's buffers, which would let a small message leave earlier, are not modelled.

Values: objects and host tensors are transferred. A device tensor has no data, but if the sender knows its
numbers and they are few, the receiver knows them after waiting.
"""

import pickle
from collections import Counter
from collections.abc import Callable, Sequence
from functools import reduce
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed import Work

from fsdpbench.sim.model.coupling import Arrival, Link
from fsdpbench.sim.model.timeline import Meeting
from fsdpbench.sim.torch_device.distributed.collective_work import CollectiveWork
from fsdpbench.sim.torch_device.operators.choices import numbers_in
from fsdpbench.sim.torch_device.operators.known_values import known_of, learn_from_host
from fsdpbench.sim.torch_device.strict.words import error_text, scalar_type
from fsdpbench.sim.torch_device.tensors import forget, is_on_device, record_of

if TYPE_CHECKING:
    from fsdpbench.sim.torch_device.accelerator import Accelerator

_FEW = 64
"""Maximum elements of a device tensor whose known numbers are transferred."""
_MOST = 1 << 16
"""Maximum elements of a host tensor that is transferred."""
_MOST_IN_GROUP = 8
"""Groups up to this size run as a whole if one member is needed (usually they are stages)."""

Values = list[torch.Tensor | None]


class StageCalls:
    """Calls of one communicator that other running ranks also make. `ranks`: its members."""

    def __init__(self, accelerator: "Accelerator", ranks: Sequence[int], name: Callable[[], Any]) -> None:
        self._accelerator = accelerator
        self._ranks = ranks
        self._name = name
        self._counts = Counter[tuple[Any, ...]]()

    @property
    def members(self) -> tuple[int, ...]:
        """Return the members that run, or nothing if only this one does."""
        link = self._accelerator.link
        found = () if link is None or len(link.ranks) < 2 else link.members(self._ranks)
        return found if len(found) > 1 else ()

    @property
    def _link(self) -> Link:
        link = self._accelerator.link
        assert link is not None
        return link

    def need(self, peers: Sequence[int]) -> None:
        """Restart the run with all `peers`, unless they already run. Raises `NotImplementedError` if they
        cannot run."""
        link = self._accelerator.link
        if link is None:
            raise NotImplementedError(error_text("refusals.send"))
        missing = [rank for rank in peers if rank not in link.ranks]
        if missing:
            step = abs(missing[0] - link.rank)
            if len(self._ranks) <= _MOST_IN_GROUP:
                missing = list(self._ranks)
            elif len(link.ranks) > 1:  # a chain: request all of it together
                missing = [rank for rank in self._ranks if (rank - link.rank) % step == 0]
            link.need(missing)

    def arrival(self, kind: str, *lane: Any, members: Sequence[int], said: Any, words: str) -> Arrival:
        """Return the next arrival for this group's calls of this `kind` in this `lane`."""
        key = (*self._name(), kind, *lane)
        self._counts[key] += 1
        return Arrival((*key, self._counts[key]), tuple(sorted(members)), (kind, said), words)

    def message(self, kind: str, tensors: Sequence[torch.Tensor], peer: int, lane: str) -> Arrival:
        """Return the arrival for a message to or from the group's rank `peer`."""
        here, there = self._link.rank, self._ranks[peer]
        way = (here, there) if kind == "send" else (there, here)
        size, dtype = tuple(tensors[0].shape), scalar_type(tensors[0])
        words = f"{kind} of {dtype} {list(size)} {'to' if kind == 'send' else 'from'} rank {there}"
        said = sum(each.numel() for each in tensors), dtype
        return self.arrival("message", lane, *way, members=way, said=said, words=words)

    def collective(self, kind: str, tensors: Sequence[torch.Tensor]) -> Arrival | None:
        """Return the arrival for a collective, or None if no other rank of the group runs."""
        members = self.members
        if not members:
            return None
        shown = f"{scalar_type(tensors[0])} {list(tensors[0].shape)}" if tensors else "nothing"
        words = f"{kind} of {shown} in group {list(self._ranks)[:8]}"
        said = sum(each.numel() for each in tensors) if kind in ("all_reduce", "broadcast") else 0
        return self.arrival("collective", members=members, said=(kind, said), words=words)

    def show(
        self, arrival: Arrival, sent: Sequence[torch.Tensor], received: Sequence[torch.Tensor] = ()
    ) -> None:
        """Publish the known values of `sent` to the meeting, and forget those of `received`."""
        if sent and all(tensor.numel() <= _FEW for tensor in sent):
            self._link.show(arrival.key, _packed(sent))
        _learn(received, None)

    def look(self, arrival: Arrival, ranks: Sequence[int]) -> dict[int, Values] | None:
        """Return what `ranks` have published for a meeting; None if they wait for this rank to continue."""
        timeline = self._accelerator.timeline
        assert timeline.coupling is not None
        timeline.coupling.catch_up()
        found = self._link.look(arrival.key, ranks, timeline.cpu)
        return None if found is None else {rank: pickle.loads(each) for rank, each in found.items()}

    def receive(self, messages: Sequence[tuple[Arrival, Sequence[torch.Tensor]]]) -> None:
        """Set the values of received tensors to those that their senders know."""
        for arrival, tensors in messages:
            sender = next(rank for rank in arrival.members if rank != self._link.rank)
            few = all(tensor.numel() <= _FEW for tensor in tensors)
            found = self.look(arrival, [sender]) if few else None
            _learn(tensors, None if found is None else found[sender])

    def share(self, arrival: Arrival, what: Any) -> None:
        """Set the values of a collective's outputs to those that all members together know."""
        few = all(tensor.numel() <= _FEW for tensor in what.inputs)
        found = self.look(arrival, arrival.members) if few else None
        _learn(what.outputs, None if found is None else self._combined(what, found))

    def on_host(self, what: Any) -> bool:
        """Run a collective of host tensors; return whether its outputs got real values."""
        arrival = self.collective(what.kind, what.inputs)
        if arrival is None:
            return False
        small = all(tensor.numel() <= _MOST for tensor in what.inputs)
        given = self._meet(arrival, _packed(what.inputs if small else ()))
        found = self._combined(what, given)
        for output, value in zip(what.outputs, found, strict=False):
            if value is not None:
                with torch.no_grad():
                    output.copy_(value.view(output.shape))
        return bool(found)

    def objects(self, value: Any) -> list[Any] | None:
        """Return all members' objects, each from the rank that represents the member; None without others."""
        arrival = self.collective("exchange of objects", ())
        if arrival is None:
            return None
        found = self._meet(arrival, pickle.dumps(value))
        return [found[self._link.represents(rank)] for rank in self._ranks]

    def send(self, kind: str, peer: int, lane: str, value: Any) -> None:
        """Send a host message to the group's rank `peer` without waiting."""
        arrival = self._of_host(kind, peer, lane)
        timeline = self._accelerator.timeline
        self._link.leave(arrival._replace(payload=pickle.dumps(value)), timeline.cpu)

    def take(self, kind: str, peer: int, lane: str) -> Callable[[], Any]:
        """Return a function that waits for the next host message from the group's rank `peer`."""
        arrival = self._of_host(kind, peer, lane)
        return lambda: self._meet(arrival, None)[self._ranks[peer]]

    def on_host_between(self, messages: Sequence[tuple[str, int, torch.Tensor]], tag: int) -> Work:
        """Send or receive host tensors. `messages`: kind, other rank and tensor of each."""
        received = []
        for kind, peer, tensor in messages:
            if kind == "send":
                self.send("send to", peer, f"tag {tag}", tensor.detach().clone())
            else:
                received.append((tensor.detach(), self.take("receive from", peer, f"tag {tag}")))
        work = CollectiveWork(self._accelerator, None, [tensor for *_, tensor in messages])

        def fill() -> None:
            for into, take in received:
                into.copy_(take().view(into.shape))

        work.before_wait = fill
        return work

    def _of_host(self, kind: str, peer: int, lane: str) -> Arrival:
        here, there = self._link.rank, self._ranks[peer]
        way = (here, there) if kind.startswith("send") else (there, here)
        return self.arrival("host", lane, *way, members=way, said="host", words=f"{kind} rank {there}")

    def _meet(self, arrival: Arrival, payload: bytes | None) -> dict[int, Any]:
        meeting = Meeting([arrival._replace(payload=payload)])
        coupling = self._accelerator.timeline.coupling
        assert coupling is not None
        coupling.meet(meeting)
        given = meeting.payloads[arrival.key]
        return {rank: pickle.loads(each) for rank, each in given.items() if each is not None}

    def _combined(self, what: Any, given: dict[int, Values]) -> Values:
        """Return the values of a collective's outputs; None for unknown ones."""
        rows = [given[self._link.represents(rank)] for rank in self._ranks]
        if any(len(row) != len(what.inputs) for row in rows):
            return []
        if what.kind == "broadcast":
            return rows[what.opts.rootRank]
        if what.kind == "all_reduce":
            reduction = _REDUCTIONS.get(str(getattr(what.opts.reduceOp, "op", what.opts.reduceOp)))
            columns = [[value for value in column if value is not None] for column in zip(*rows, strict=True)]
            complete = reduction is not None and all(len(each) == len(rows) for each in columns)
            return [reduce(reduction, each) for each in columns] if complete and reduction else []
        if what.kind == "all_gather" and len(what.inputs) == 1:
            gathered = [row[0] for row in rows]
            if len(what.outputs) == len(rows):
                return gathered
            known = [each.reshape(-1) for each in gathered if each is not None]
            return [torch.cat(known)] if len(known) == len(rows) and len(what.outputs) == 1 else []
        return []


_REDUCTIONS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "RedOpType.SUM": torch.add,
    "RedOpType.PRODUCT": torch.mul,
    "RedOpType.MAX": torch.maximum,
    "RedOpType.MIN": torch.minimum,
}


def _packed(tensors: Sequence[torch.Tensor]) -> bytes:
    """Return the known values of tensors as bytes (torch's own pickling would use shared memory)."""
    return pickle.dumps([_known(tensor) for tensor in tensors])


def _known(tensor: torch.Tensor) -> torch.Tensor | None:
    if not is_on_device(tensor):
        return tensor.detach().clone()
    numbers = numbers_in(tensor)
    if numbers is not None:
        return numbers.clone()
    known = known_of(tensor)
    return None if known is None else known.value.reshape(()).expand(tensor.shape).clone()


def _learn(tensors: Sequence[torch.Tensor], values: Values | None) -> None:
    """Set the known numbers of device tensors; None means unknown."""
    for place, tensor in enumerate(tensors):
        value = values[place] if values is not None and place < len(values) else None
        if value is None:
            forget(record_of(tensor.untyped_storage()))
        else:
            learn_from_host(tensor, value.reshape(tensor.shape))
