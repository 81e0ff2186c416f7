"""A record of every collective of this process, made when torch calls the simulated process group.

The properties that all ranks must agree on depend on the collective: an all-reduce has the same number of
elements everywhere; an all-gather into a list has the same list of sizes, while each rank sends its own. If
ranks may differ (splits of an all-to-all), only kind and dtype are compared.
"""

import functools
import hashlib
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join

import fsdpbench
from fsdpbench.base.torch_internals import expect, replace
from fsdpbench.script.files.overlay import Overlay
from fsdpbench.script.interposing import around
from fsdpbench.script.own_files import OwnFiles
from fsdpbench.script.rank_check.calls import MOST_CALLS, Call, Ended, Frame, Group, RankLog, Stack, Values
from fsdpbench.sim import Simulation
from fsdpbench.sim.torch_device.distributed.process_group import SimProcessGroup
from fsdpbench.sim.torch_device.operators.known_values import known_of, learn
from fsdpbench.sim.torch_device.patches.dynamo import passing_to
from fsdpbench.sim.torch_device.patches.torch_patches import in_simulated_groups
from fsdpbench.sim.torch_device.tensors import Assumed, is_on_device

_MAIN = threading.main_thread().ident
_MOST_LISTED = 16
_SMALL = 1024
"""Most elements of a host tensor that other ranks get from rank 0."""


class Seen(NamedTuple):
    """A call's `kind`, the tensors whose sizes all ranks share, and its results."""

    kind: str
    shared: Sequence[torch.Tensor]
    outputs: Sequence[torch.Tensor] = ()
    """Tensors that are equal on all ranks afterwards."""
    sizes_differ: bool = False


def _flat(lists: Sequence[Sequence[torch.Tensor]]) -> list[torch.Tensor]:
    return [tensor for each in lists for tensor in each]


_METHODS: dict[str, Callable[..., Seen]] = {
    "allreduce": lambda tensors, *_: Seen("all_reduce", tensors, tensors),
    "allreduce_coalesced": lambda tensors, *_: Seen("all_reduce_coalesced", tensors, tensors),
    "broadcast": lambda tensors, *_: Seen("broadcast", tensors, tensors),
    "reduce": lambda tensors, *_: Seen("reduce", tensors),
    "allgather": lambda outputs, inputs, *_: Seen("all_gather", _flat(outputs), _flat(outputs)),
    "reduce_scatter": lambda outputs, inputs, *_: Seen("reduce_scatter", _flat(inputs)),
    "gather": lambda outputs, inputs, *_: Seen("gather", inputs),
    "scatter": lambda outputs, inputs, *_: Seen("scatter", outputs),
    "alltoall": lambda outputs, inputs, *_: Seen("all_to_all", inputs, sizes_differ=True),
    "barrier": lambda *_: Seen("barrier", ()),
}
for _name in ("all_gather_single", "_allgather_base"):
    _METHODS[_name] = lambda output, *_: Seen("all_gather_into_tensor", (output,), (output,))
for _name in ("reduce_scatter_single", "_reduce_scatter_base"):
    _METHODS[_name] = lambda output, input, *_: Seen("reduce_scatter_tensor", (input,))
for _name in ("alltoall_base", "all_to_all_single"):
    _METHODS[_name] = lambda output, input, out_splits=(), in_splits=(), *_: Seen(
        "all_to_all_single", (input,), sizes_differ=bool(out_splits or in_splits)
    )
for _name in ("all_gather_single_coalesced", "allgather_into_tensor_coalesced"):
    _METHODS[_name] = lambda outputs, *_: Seen("all_gather_coalesced", outputs, outputs)
for _name in ("reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced"):
    _METHODS[_name] = lambda outputs, inputs, *_: Seen("reduce_scatter_coalesced", inputs)


class Recorder:
    """The recorder of this process's rank.

    Args:
        values: rank 0 stores its results in them, other ranks get theirs from them.
        groups: all process groups, in order of creation.
    """

    def __init__(
        self, rank: int, stacks: "Stacks", values: Values, groups: Sequence[SimProcessGroup]
    ) -> None:
        self.log = RankLog(rank)
        self._all_groups = groups
        self.stacks = stacks
        self.values = values
        self._groups: dict[int, Group] = {}
        self._counts: dict[tuple[Any, ...], int] = {}
        self._silent = False
        self._of_all = 0
        self._arrivals: Arrivals | None = None

    def follow_files(self, overlay: Overlay, layer_of_rank_0: Path) -> None:
        """Note when rank 0 writes a file; on other ranks, link the file after the same collective."""
        if self.log.rank == 0:
            overlay.on_place = lambda path: self.values.placed.setdefault(path, self._called())
        else:
            self._arrivals = Arrivals(overlay, layer_of_rank_0, self.values.placed)

    def _called(self) -> "Count":
        return self._of_all, len(self.log.calls)

    def install(self) -> None:
        """Record the calls of this process from now on, until it ends."""
        for name, look in _METHODS.items():
            around(SimProcessGroup, name, functools.partial(self._recording, look))
        around(Join, "__enter__", self._entering)
        around(Join, "__exit__", self._leaving)

    def finish(self, folder: Path, ended: Ended, error: str | None = None) -> None:
        """Write the log (and rank 0's values) into `folder`."""
        if self.log.ended is Ended.OK:
            self.log.ended, self.log.error = ended, error
        if ended is not Ended.OK and not self.log.stood:
            self.log.stood = self.stacks.here()
        self.log.write(folder)
        if self.log.rank == 0:
            self.values.write(folder)

    def _recording(
        self,
        look: Callable[..., Seen],
        original: Callable[..., Any],
        group: SimProcessGroup,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        if self._silent or threading.get_ident() != _MAIN:
            return original(group, *args, **kwargs)
        seen = look(*args, **{name: value for name, value in kwargs.items() if name != "opts"})
        number = self.note(group, seen, kwargs.get("opts", args[-1] if args else None))
        made = original(group, *args, **kwargs)
        self._share(number, seen.outputs)
        return made

    def note(self, group: SimProcessGroup, seen: Seen, opts: Any, root: int | None = None) -> tuple[Any, ...]:
        """Record a call; return its key among all calls of its group. A thread's call only gets a key.

        `opts`: torch's options of the collective, with root and reduction. `root`: a rank of the group, which
        replaces the root of the options.
        """
        shared = seen.shared
        known = self._group(group, shared)
        if threading.get_ident() != _MAIN:
            known = known._replace(lane="thread")
        if root is None:
            root = getattr(opts, "rootRank", None)
        reduction = getattr(opts, "reduceOp", "")
        name = getattr(reduction, "op", reduction)
        kinds = sorted({str(tensor.dtype).removeprefix("torch.") for tensor in shared})
        self._add(
            Call(
                known,
                seen.kind,
                None if seen.sizes_differ else _sizes(shared),
                _shown(shared),
                " and ".join(kinds),
                str(name).rpartition(".")[2].partition(":")[0].lower(),
                None if root is None else known.ranks[root],
                self.stacks.here(),
                self.log.phase,
            )
        )
        count = self._counts[known.key] = self._counts.get(known.key, 0) + 1
        return (*known.key, count)

    def note_new_group(self, ranks: Sequence[int], everyone: tuple[int, ...]) -> None:
        """Record the creation of a group, in which all ranks take part, also ranks outside the group."""
        shown = f"ranks {', '.join(map(str, ranks))}" if len(ranks) <= _MOST_LISTED else f"{len(ranks)} ranks"
        self._add(
            Call(
                Group(everyone, lane="new_group"), "new_group", tuple(ranks), shown, "", "", None,
                self.stacks.here(), self.log.phase,
            )
        )  # fmt: skip

    def _add(self, call: Call) -> None:
        if call.group.lane == "thread":
            pass
        elif len(self.log.calls) < MOST_CALLS:
            self.log.calls.append(call)
            self._of_all += call.group.description == "default"
        else:
            self.log.ended = Ended.TOO_MANY
        if self._arrivals is not None:
            self._arrivals.arrive(self._called())

    def _group(self, group: SimProcessGroup, tensors: Sequence[torch.Tensor]) -> Group:
        found = self._groups.get(id(group))
        if found is None:
            alike = [each for each in self._all_groups if list(each.ranks) == list(group.ranks)]
            number = next((i for i, each in enumerate(alike) if each is group), len(alike))
            description = "default" if group.group_desc == "default_pg" else group.group_desc
            found = Group(tuple(group.ranks), number, description=description.replace("undefined", ""))
            self._groups[id(group)] = found
        if "cpu:" in group.asked_backend and tensors and not is_on_device(tensors[0]):
            return found._replace(lane="host")
        return found

    def _share(self, number: tuple[Any, ...], outputs: Sequence[torch.Tensor]) -> None:
        if self.log.rank == 0:
            for place, tensor in enumerate(outputs):
                value = _value_of(tensor)
                if value is not None:
                    self.values.put((*number, place), value)
            return
        for place, tensor in enumerate(outputs):
            for value in self.values.get((*number, place)):
                _give(tensor, value)

    def _entering(self, original: Callable[..., Any], join: Join) -> Any:
        self.log.phase += 1
        return original(join)

    def _leaving(self, original: Callable[..., Any], join: Join, *exc_info: Any) -> Any:
        """Record nothing at the end of `Join`: a rank without inputs shadows other ranks' collectives."""
        self._silent = True
        try:
            return original(join, *exc_info)
        finally:
            self._silent = False
            self.log.phase += 1


def _sizes(tensors: Sequence[torch.Tensor]) -> tuple[int, ...]:
    """Return the number of elements of each tensor; for many tensors, their count, sum and a hash."""
    sizes = tuple(tensor.numel() for tensor in tensors)
    if len(sizes) <= _MOST_LISTED:
        return sizes
    return len(sizes), sum(sizes), int(hashlib.sha256(repr(sizes).encode()).hexdigest()[:8], 16)


def _shown(tensors: Sequence[torch.Tensor]) -> str:
    if not tensors:
        return ""
    if len(tensors) == 1:
        return " x ".join(map(str, tensors[0].shape)) or "1"
    sizes = {tensor.numel() for tensor in tensors}
    if len(sizes) == 1:
        return f"{len(tensors)} of {' x '.join(map(str, tensors[0].shape)) or 1}"
    listed = ", ".join(f"{tensor.numel():,}" for tensor in tensors[:_MOST_LISTED])
    return f"{len(tensors)} tensors of {listed}{', ...' if len(tensors) > _MOST_LISTED else ''} elements"


def _value_of(tensor: torch.Tensor) -> Any:
    """Return the known value of a tensor: `(number, whether assumed)`, or a copy of a small host tensor."""
    if not is_on_device(tensor):
        return tensor.detach().clone() if tensor.numel() <= _SMALL else None
    known = known_of(tensor)
    return None if known is None else (known.value, int(known.assumed))


def _give(tensor: torch.Tensor, value: Any) -> None:
    if is_on_device(tensor):
        if isinstance(value, tuple):
            learn(tensor, value[0], assumed=Assumed(value[1]))
    elif isinstance(value, torch.Tensor) and value.shape == tensor.shape:
        with torch.no_grad():
            tensor.copy_(value)


Count = tuple[int, int]
"""The number of collectives that a rank has called: of the group of all ranks, and in total."""


class Arrivals:
    """Files that rank 0 saved, for a rank that runs after it: they exist there from the next collective on.

        rank 0    save   barrier   load            rank 0's layer of files: files/home/me/step-3/…
        rank 1           barrier   load            after the barrier the same file is in its own layer

    They are linked, not copied (they are as large as real checkpoints); a file that a rank writes itself
    replaces the link.

    Args:
        overlay: this rank's layer of files.
        root: the folder of rank 0's layer.
        placed: by file, the collectives that rank 0 had called when it wrote the file.
    """

    def __init__(self, overlay: Overlay, root: Path, placed: "Mapping[str, Count]") -> None:
        self._overlay = overlay
        self._root = str(root)
        self._waiting = sorted(self._found(placed).items(), key=lambda item: item[1])

    def arrive(self, count: "Count") -> None:
        """Link the files that rank 0 wrote before it had called as many collectives as this rank has now."""
        waiting, self._waiting = self._waiting, []  # the thread of a checkpoint calls this too
        for path, then in waiting:
            if count[0] > then[0] or count[1] > then[1]:
                self._overlay.link(self._root + path, path)
            else:
                self._waiting.append((path, then))

    def _found(self, placed: "Mapping[str, Count]") -> "dict[str, Count]":
        """Return the files of rank 0's layer. One that came with its folder gets the folder's first count."""
        of_folder: dict[str, Count] = {}
        for path, count in placed.items():
            folder = os.path.dirname(path)
            of_folder[folder] = min(count, of_folder.get(folder, count))
        found = {}
        for folder, folders, names in os.walk(self._root):
            for name in (*folders, *names):
                path = os.path.join(folder, name).removeprefix(self._root)
                then = placed.get(path) or of_folder.get(os.path.dirname(path))
                if then is not None and not name.startswith(".gone."):
                    found[path] = then
        return found


_PACKAGE = os.path.dirname(fsdpbench.__file__) + os.sep
_OF_THE_BENCH = tuple(_PACKAGE + name + os.sep for name in ("script", "sim", "launch", "devices"))
_NOT_SHOWN = (*_OF_THE_BENCH, os.path.dirname(os.__file__) + os.sep, "<frozen")
_MOST_OWN, _MOST_LIBRARY = 20, 8


class Stacks:
    """Stacks of the script's lines; equal stacks are one object."""

    def __init__(self, own_files: OwnFiles) -> None:
        self._own_files = own_files
        self._known: dict[tuple[tuple[object, int], ...], Stack] = {}

    def here(self) -> Stack:
        """Return the stack of the caller, without the bench's own frames."""
        lines = tuple((frame.f_code, line) for frame, line in traceback.walk_stack(sys._getframe(1)))
        found = self._known.get(lines)
        if found is None:
            found = self._known[lines] = self._stack(
                [(code.co_filename, line, code.co_qualname) for code, line in lines]
            )
        return found

    def of_traceback(self, trace: TracebackType | None) -> Stack:
        """Return the stack at which an exception was raised."""
        entries = traceback.extract_tb(trace)
        return self._stack([(entry.filename, entry.lineno or 0, entry.name) for entry in reversed(entries)])

    def of_frame(self, frame: FrameType | None) -> Stack:
        """Return the stack of a frame."""
        entries = traceback.extract_stack(frame)
        return self._stack([(entry.filename, entry.lineno or 0, entry.name) for entry in reversed(entries)])

    def _stack(self, innermost_first: list[tuple[str, int, str]]) -> Stack:
        own, library = [], []
        for file, line, function in innermost_first:
            if self._own_files.has(file):
                own.append(Frame(self._own_files.whole_name(file), line, function, own=True))
            elif not own and ("site-packages" in file or not file.startswith(_NOT_SHOWN)):
                library.append(Frame(file, line, function, own=False))
        return (*own[:_MOST_OWN], *library[:_MOST_LIBRARY])


def record_objects(recorder: Recorder) -> None:
    """Record collectives of Python objects and the creation of groups too.

    The simulated process group never sees them: `sim/torch_device/patches/torch_patches.py` answers them in
    Python.
    """
    for name in ("broadcast_object_list", "scatter_object_list", "gather_object", "all_gather_object"):
        original = expect(dist, name)
        call = functools.partial(_of_objects, recorder, name, original)
        _replace_everywhere(name, in_simulated_groups(original, call))
    _replace_everywhere(
        "new_group", passing_to(functools.partial(_new_group, recorder))(expect(dist, "new_group"))
    )


def _replace_everywhere(name: str, replacement: Any) -> None:
    for module in (dist, dist.distributed_c10d, dist.device_mesh):
        if hasattr(module, name):
            replace(module, **{name: replacement})


def _of_objects(
    recorder: Recorder, name: str, original: Callable[..., None], given: Mapping[str, Any]
) -> None:
    """Call and record a collective of objects; its results are rank 0's, if these are known."""
    original(**given)
    group: Any = given.get("group") or dist.group.WORLD
    root = None
    if name != "all_gather_object":
        place = "dst" if name == "gather_object" else "src"
        of_world, root = given.get(place), given.get(f"group_{place}")
        if root is None:  # torch's default
            root = 0 if of_world is None else list(group.ranks).index(of_world)
    call = recorder.note(group, Seen(name, ()), None, root)
    if "object_list" in given:
        given["object_list"][:] = _exchanged(recorder, call, list(given["object_list"]))
    elif name == "scatter_object_list":
        sent = _exchanged(recorder, call, given.get("scatter_object_input_list"))
        if isinstance(sent, list) and len(sent) == group.size():
            given["scatter_object_output_list"][0] = sent[group.rank()]


def _exchanged(recorder: Recorder, call: tuple[Any, ...], own: Any) -> Any:
    """Return the result of a call on this rank: rank 0's if it is known, else `own`."""
    if recorder.log.rank == 0:
        recorder.values.put(call, own)
        return own
    return next(iter(recorder.values.get(call)), own)


def _new_group(
    recorder: Recorder, original: Callable[..., Any], ranks: Any = None, *args: Any, **kwargs: Any
) -> Any:
    world = dist.group.WORLD
    if isinstance(world, SimProcessGroup) and not kwargs.get("use_local_synchronization"):
        members = range(world.size()) if ranks is None else list(ranks)
        recorder.note_new_group(members, tuple(range(world.size())))
    return original(ranks, *args, **kwargs)


def start_recording(simulation: Simulation, folder: Path, rank_0: Path, own_files: OwnFiles) -> Recorder:
    """Record the calls of the simulation's rank from now on; `rank_0`: the folder of rank 0, for its results.

    On SIGTERM the process writes its log to `folder`, with its stack at that time.
    """
    rank = simulation.rank
    values = Values() if rank == 0 else Values.read(rank_0)
    recorder = Recorder(rank, Stacks(own_files), values, simulation.accelerator.process_groups)
    recorder.install()
    record_objects(recorder)

    def on_sigterm(number: int, frame: FrameType | None) -> None:
        recorder.log.stood = recorder.stacks.of_frame(frame)
        recorder.finish(folder, Ended.TIMEOUT)
        os._exit(1)

    signal.signal(signal.SIGTERM, on_sigterm)
    return recorder
