"""Messages and collectives that ranks of other pipeline stages take part in, each rank in its own process.

`sim/model/coupling.py` brings the ranks' clocks together; here is what meets: the n-th message from a rank to
another in a group, the n-th collective of a group. Messages of one batch go through the group's communicator,
others through one of the two ranks alone, as NCCL's do. A message takes time from when both ranks are there:
NCCL's buffers, which let a small one go before, are left out.

Values: objects and tensors of the host travel. A tensor of the device has none, but numbers that its sender
knows are known to the receiver when it waits for them, if they are few.
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
"""Elements of a tensor of the device whose numbers travel."""
_MOST = 1 << 16
"""Elements of a tensor of the host that travels."""
_MOST_IN_GROUP = 8
"""Members of a group that all run, if one of them is needed: stages, as a rule."""

Values = list[torch.Tensor | None]


class StageCalls:
    """The calls of one communicator that other ranks which run make too. `ranks` are its members."""

    def __init__(self, accelerator: "Accelerator", ranks: Sequence[int], name: Callable[[], Any]) -> None:
        self._accelerator = accelerator
        self._ranks = ranks
        self._name = name
        self._counts = Counter[tuple[Any, ...]]()

    @property
    def members(self) -> tuple[int, ...]:
        """Return the members that run, if others than this one do."""
        link = self._accelerator.link
        found = () if link is None or len(link.ranks) < 2 else link.members(self._ranks)
        return found if len(found) > 1 else ()

    @property
    def _link(self) -> Link:
        link = self._accelerator.link
        assert link is not None
        return link

    def need(self, peers: Sequence[int]) -> None:
        """End this run, and have all `peers` started, unless they run. Raises `NotImplementedError` where
        they cannot."""
        link = self._accelerator.link
        if link is None:
            raise NotImplementedError(error_text("refusals.send"))
        missing = [rank for rank in peers if rank not in link.ranks]
        if missing:
            step = abs(missing[0] - link.rank)
            if len(self._ranks) <= _MOST_IN_GROUP:
                missing = list(self._ranks)
            elif len(link.ranks) > 1:  # a chain: all of it, not one more
                missing = [rank for rank in self._ranks if (rank - link.rank) % step == 0]
            link.need(missing)

    def arrival(self, kind: str, *lane: Any, members: Sequence[int], said: Any, words: str) -> Arrival:
        """Return the next arrival of this group's calls of a `kind`, in a `lane`."""
        key = (*self._name(), kind, *lane)
        self._counts[key] += 1
        return Arrival((*key, self._counts[key]), tuple(sorted(members)), (kind, said), words)

    def message(self, kind: str, tensors: Sequence[torch.Tensor], peer: int, lane: str) -> Arrival:
        """Return the arrival at a message to or from the group's rank `peer`."""
        here, there = self._link.rank, self._ranks[peer]
        way = (here, there) if kind == "send" else (there, here)
        size, dtype = tuple(tensors[0].shape), scalar_type(tensors[0])
        words = f"{kind} of {dtype} {list(size)} {'to' if kind == 'send' else 'from'} rank {there}"
        said = sum(each.numel() for each in tensors), dtype
        return self.arrival("message", lane, *way, members=way, said=said, words=words)

    def collective(self, kind: str, tensors: Sequence[torch.Tensor]) -> Arrival | None:
        """Return the arrival at a collective; None where no other rank of the group runs."""
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
        """Leave what is known of `sent` to the others of a meeting, and forget what `received` was."""
        if sent and all(tensor.numel() <= _FEW for tensor in sent):
            self._link.show(arrival.key, _packed(sent))
        _learn(received, None)

    def look(self, arrival: Arrival, ranks: Sequence[int]) -> dict[int, Values] | None:
        """Return what `ranks` have left at a meeting; None if they can only after this one continued."""
        timeline = self._accelerator.timeline
        assert timeline.coupling is not None
        timeline.coupling.catch_up()
        found = self._link.look(arrival.key, ranks, timeline.cpu)
        return None if found is None else {rank: pickle.loads(each) for rank, each in found.items()}

    def receive(self, messages: Sequence[tuple[Arrival, Sequence[torch.Tensor]]]) -> None:
        """Learn what the senders of messages know of them."""
        for arrival, tensors in messages:
            sender = next(rank for rank in arrival.members if rank != self._link.rank)
            few = all(tensor.numel() <= _FEW for tensor in tensors)
            found = self.look(arrival, [sender]) if few else None
            _learn(tensors, None if found is None else found[sender])

    def share(self, arrival: Arrival, what: Any) -> None:
        """Learn what the members together know of a collective's outputs."""
        few = all(tensor.numel() <= _FEW for tensor in what.inputs)
        found = self.look(arrival, arrival.members) if few else None
        _learn(what.outputs, None if found is None else self._combined(what, found))

    def on_host(self, what: Any) -> bool:
        """Run a collective of the host's tensors; return whether its outputs have their real values."""
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
        """Return the objects of all members, each from the one that runs in its place; None for one alone."""
        arrival = self.collective("exchange of objects", ())
        if arrival is None:
            return None
        found = self._meet(arrival, pickle.dumps(value))
        return [found[self._link.represents(rank)] for rank in self._ranks]

    def send(self, kind: str, peer: int, lane: str, value: Any) -> None:
        """Leave a message of the host to the group's rank `peer`, and continue."""
        arrival = self._of_host(kind, peer, lane)
        timeline = self._accelerator.timeline
        self._link.leave(arrival._replace(payload=pickle.dumps(value)), timeline.cpu)

    def take(self, kind: str, peer: int, lane: str) -> Callable[[], Any]:
        """Return a function that waits for the next message of the host from the group's rank `peer`."""
        arrival = self._of_host(kind, peer, lane)
        return lambda: self._meet(arrival, None)[self._ranks[peer]]

    def on_host_between(self, messages: Sequence[tuple[str, int, torch.Tensor]], tag: int) -> Work:
        """Send or receive tensors of the host; of each message: the kind, the other rank, the tensor."""
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
    """Return what is known of tensors, as bytes (torch would send them through shared memory)."""
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
    """Set the known numbers of tensors of the device; None for unknown ones."""
    for place, tensor in enumerate(tensors):
        value = values[place] if values is not None and place < len(values) else None
        if value is None:
            forget(record_of(tensor.untyped_storage()))
        else:
            learn_from_host(tensor, value.reshape(tensor.shape))
