"""torch's forms of each collective, reduced to two operations: run a collective, run a list form.

torch has a dozen forms of each collective (single tensors, lists, coalesced, older names). Without the other
ranks all are alike: so many bytes of this kind, from these tensors into those. `SimProcessGroup`
defines how one runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed import Work

if TYPE_CHECKING:
    # torch's stubs overload the collectives in ways that no Python class can repeat.
    class _ProcessGroup:
        def __init__(self, rank: int, size: int) -> None: ...

else:
    _ProcessGroup = dist.ProcessGroup


class Membership(_ProcessGroup):
    """One communicator. `ranks` are the global ranks of its members."""

    supports_splitting = False
    supports_coalescing = True
    backend_name: str

    def __init__(self, rank: int, size: int, ranks: Sequence[int], name: str) -> None:
        super().__init__(rank, size)
        self._rank_in_group = rank
        self._group_size = size
        self._ranks = as_range(ranks)
        self._name = name
        self._description = "default_pg" if name == "0" else "undefined"

    def rank(self) -> int:
        """Return the rank in this group."""
        return self._rank_in_group

    def size(self) -> int:
        """Return the number of members."""
        return self._group_size

    def getBackendName(self) -> str:  # noqa: N802 (torch's name)
        """Return the name of the backend."""
        return self.backend_name

    def name(self) -> str:
        """Return the name of the backend."""
        return self.backend_name

    @property
    def pg_name(self) -> str:
        """Return torch's name of the group."""
        return self._name

    @property
    def group_name(self) -> str:
        """Return torch's name of the group."""
        return self._name

    @property
    def group_desc(self) -> str:
        """Return the purpose of the group."""
        return self._description

    @property
    def ranks(self) -> Sequence[int]:
        """Return the global ranks of the members."""
        return self._ranks

    def _get_backend(self, device: Any) -> Membership:
        return self

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def _set_group_desc(self, description: str) -> None:
        self._description = description

    def _get_sequence_number_for_group(self) -> int:
        return 0

    def shutdown(self) -> None:
        """Do nothing: nothing runs."""

    def abort(self) -> None:
        """Do nothing: nothing runs."""


def collective_ranks(options: Any) -> Sequence[int]:
    """Return the global ranks of a group that torch is creating."""
    return list(options.global_ranks_in_group) or range(options.group_size)


def total_bytes(*tensors: torch.Tensor) -> int:
    """Return the bytes of all elements."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def as_range(ranks: Sequence[int]) -> Sequence[int]:
    """Return evenly spaced ranks as a range, so that later uses need not iterate over them."""
    if len(ranks) < 2:
        return range(ranks[0], ranks[0] + 1) if ranks else range(0)
    step = ranks[1] - ranks[0]
    candidate = range(ranks[0], ranks[-1] + (1 if step > 0 else -1), step or 1)
    return candidate if list(candidate) == list(ranks) else tuple(ranks)


class Coalescing(Membership):
    """Runs each call, or collects it while several are being coalesced."""

    _coalesced: list[tuple[str, int, list[torch.Tensor], list[torch.Tensor]]] | None = None

    def run(
        self,
        kind: str,
        nbytes: int,
        inputs: list[torch.Tensor],
        outputs: list[torch.Tensor],
        opts: Any,
        members: int = 1,
    ) -> Work:
        """Run one collective, or `members` as one group; `nbytes` as `Network.collective_ns` counts them.

        Abstract, as is `run_list`; pybind's metaclass does not permit ABCMeta beside it.
        """
        raise NotImplementedError

    def run_list(
        self,
        kind: str,
        inputs: list[torch.Tensor],
        outputs: list[torch.Tensor],
        listed: list[torch.Tensor],
        opts: Any,
    ) -> Work:
        """Run a list form of a collective over `listed`, the tensors that together are the full buffer."""
        raise NotImplementedError

    def _start_coalescing(self, device: Any) -> None:
        self._coalesced = []

    def _end_coalescing(self, device: Any) -> Work | None:
        calls, self._coalesced = self._coalesced or [], None
        if not calls:
            return None
        ins = [tensor for call in calls for tensor in call[2]]
        outs = [tensor for call in calls for tensor in call[3]]
        return self.call(calls[0][0], sum(call[1] for call in calls), ins, outs, None, len(calls))

    def refuse(self, tensors: Sequence[torch.Tensor]) -> None:
        """Raise NCCL's errors for tensors that it does not accept."""
        refuse_strided(tensors)

    def call(
        self,
        kind: str,
        nbytes: int,
        inputs: list[torch.Tensor],
        outputs: list[torch.Tensor],
        opts: Any,
        members: int = 1,
    ) -> Work:
        """Run one collective of `nbytes`, or collect it while some are coalesced (`members` of a group)."""
        self.refuse(inputs if inputs is outputs else (*inputs, *outputs))
        if self._coalesced is not None:
            self._coalesced.append((kind, nbytes, inputs, outputs))
            return _Queued()
        return self.run(kind, nbytes, inputs, outputs, opts, members)


class _Queued(Work):
    """Part of a coalesced collective, which runs with the whole."""

    def wait(self, timeout: Any = None) -> bool:
        return True


class CollectiveCalls(Coalescing):
    """torch's forms of each collective, reduced to `call` and `run_list`."""

    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> Work:
        """Gather equal shards into one tensor."""
        refuse_gather(output, input, self._group_size)
        return self.call("all_gather", total_bytes(output), [input], [output], opts)

    def reduce_scatter_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> Work:
        """Reduce a tensor and keep one shard."""
        refuse_reduce_scatter(output, input, self._group_size)
        return self.call("reduce_scatter", total_bytes(input), [input], [output], opts)

    # Names before torch 2.13.
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> Work:
        """Reduce tensors in place."""
        return self.call("all_reduce", total_bytes(*tensors), tensors, tensors, opts)

    def broadcast(self, tensors: list[torch.Tensor], opts: Any = None) -> Work:
        """Copy tensors from one rank to all."""
        refuse_root(opts, self._group_size, "broadcast")
        return self.call("broadcast", total_bytes(*tensors), tensors, tensors, opts)

    def reduce(self, tensors: list[torch.Tensor], opts: Any = None) -> Work:
        """Reduce to one rank: half of an all-reduce."""
        refuse_root(opts, self._group_size, "reduce")
        return self.call("reduce_scatter", total_bytes(*tensors), tensors, tensors, opts)

    def allgather(
        self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any = None
    ) -> Work:
        """Gather into a list: through one flat buffer and a copy out of it where sizes are equal."""
        for tensors in outputs:
            refuse_list(tensors, self._group_size)
        flat = [tensor for tensor_list in outputs for tensor in tensor_list]
        return self.run_list("all_gather", inputs, flat, flat, opts)

    def reduce_scatter(
        self, outputs: list[torch.Tensor], inputs: list[list[torch.Tensor]], opts: Any = None
    ) -> Work:
        """Reduce a list and keep one of it: after a copy into one flat buffer where sizes are equal."""
        for tensors in inputs:
            refuse_list(tensors, self._group_size)
        flat = [tensor for tensor_list in inputs for tensor in tensor_list]
        return self.run_list("reduce_scatter", flat, outputs, flat, opts)

    def alltoall_base(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: list[int],
        input_split_sizes: list[int],
        opts: Any = None,
    ) -> Work:
        """Send a part of `input` to every rank; splits in rows, equal if empty."""
        refuse_splits(input_split_sizes, input, self._group_size)
        refuse_splits(output_split_sizes, output, self._group_size)
        most = max(total_bytes(input), total_bytes(output))
        return self.call("all_to_all", most, [input], [output], opts)

    all_to_all_single = alltoall_base

    def alltoall(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None) -> Work:
        """Send a tensor to every rank."""
        refuse_list(inputs, self._group_size)
        refuse_list(outputs, self._group_size)
        most = max(total_bytes(*inputs), total_bytes(*outputs))
        return self.call("all_to_all", most, inputs, outputs, opts)

    def gather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any = None) -> Work:
        """Gather to one rank: it receives as much as in an all-gather."""
        refuse_root(opts, self._group_size, "gather")
        for tensors in outputs:
            refuse_count(tensors, self._group_size, "gather", "output")
            refuse_sizes(tensors, inputs[0], "gather")
        return self.call("all_gather", total_bytes(*inputs) * self._group_size, inputs, inputs, opts)

    def scatter(
        self, outputs: list[torch.Tensor], inputs: list[list[torch.Tensor]], opts: Any = None
    ) -> Work:
        """Scatter from one rank: it sends as much as in a broadcast."""
        refuse_root(opts, self._group_size, "scatter")
        for tensors in inputs:
            refuse_count(tensors, self._group_size, "scatter", "input")
            refuse_sizes(tensors, outputs[0], "scatter")
        return self.call("broadcast", total_bytes(*outputs) * self._group_size, outputs, outputs, opts)

    def barrier(self, opts: Any = None) -> Work:
        """Wait for all ranks; the CPU waits too."""
        return self.call("barrier", 0, [], [], opts)

    def allreduce_coalesced(self, tensors: list[torch.Tensor], opts: Any = None) -> Work:
        """Reduce tensors in place, in one group of kernels."""
        return self.call("all_reduce", total_bytes(*tensors), tensors, tensors, opts, len(tensors))

    def all_gather_single_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> Work:
        """Run several all-gathers in one group of kernels."""
        for output, input in zip(outputs, inputs, strict=True):
            refuse_gather(output, input, self._group_size)
        return self.call("all_gather", total_bytes(*outputs), inputs, outputs, opts, len(outputs))

    def reduce_scatter_single_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> Work:
        """Run several reduce-scatters in one group of kernels."""
        for output, input in zip(outputs, inputs, strict=True):
            refuse_reduce_scatter(output, input, self._group_size)
        return self.call("reduce_scatter", total_bytes(*inputs), inputs, outputs, opts, len(inputs))

    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def send(self, tensors: list[torch.Tensor], rank: int, tag: int = 0) -> Work:
        """Raise `NotImplementedError`: the other rank is not there."""
        raise NotImplementedError(
            "send and recv are not simulated: only one rank runs, and point-to-point needs its partner"
        )

    recv = send


# NCCL's refusals, with its texts and exception types. `torch.distributed` itself checks dtypes of lists and
# members of groups.
_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def refuse_strided(tensors: Iterable[torch.Tensor]) -> None:
    """Raise unless tensors are dense and contiguous, or channels-last."""
    for tensor in tensors:
        if tensor.is_sparse:
            raise ValueError("Tensors must be CUDA and dense")
        if tensor.is_contiguous():
            continue
        order = _CHANNELS_LAST.get(tensor.dim())
        if order is None or not tensor.is_contiguous(memory_format=order):
            raise ValueError("Tensors must be contiguous")


def refuse_gather(output: torch.Tensor, input: torch.Tensor, ranks: int) -> None:
    """Raise unless an all-gather's output fits its input."""
    if output.dtype is not input.dtype:
        raise TypeError("output tensor must have the same type as input tensor")
    if output.numel() != input.numel() * ranks:
        raise ValueError("output tensor size must be equal to world_size times input tensor size")


def refuse_reduce_scatter(output: torch.Tensor, input: torch.Tensor, ranks: int) -> None:
    """Raise unless a reduce-scatter's input fits its output."""
    if output.dtype is not input.dtype:
        raise TypeError("input tensor must be the same type as the output tensor.")
    if input.numel() != output.numel() * ranks:
        raise ValueError("input tensor must be the same size as output size times world size")


def refuse_splits(sizes: Sequence[int] | None, tensor: torch.Tensor, ranks: int) -> None:
    """Raise unless an all-to-all has a part for each rank and these are the tensor; NCCL takes no sizes."""
    if not sizes:
        return
    if len(sizes) != ranks:
        raise RuntimeError("Number of tensor splits not equal to group size")
    if sum(sizes) != tensor.shape[0]:
        raise RuntimeError("Split sizes doesn't match total dim 0 size")


def refuse_list(tensors: Sequence[torch.Tensor], ranks: int) -> None:
    """Raise unless there is one tensor a rank."""
    if len(tensors) != ranks:
        raise ValueError(
            f"Tensor list input to scatter/gather must match number of collective participants (got "
            f"{len(tensors)} tensors for {ranks} ranks)"
        )


def refuse_sizes(tensors: Sequence[torch.Tensor], own: torch.Tensor, name: str) -> None:
    """Raise unless each tensor of `gather`'s or `scatter`'s list has the size of the own one."""
    for index, tensor in enumerate(tensors):
        if tensor.shape != own.shape:
            raise ValueError(
                f"ProcessGroupNCCL::{name}: invalid tensor size at index {index} (expected "
                f"{tuple(own.shape)}, got {tuple(tensor.shape)})"
            )


def refuse_count(tensors: Sequence[torch.Tensor], ranks: int, name: str, side: str) -> None:
    """Raise unless `gather`'s or `scatter`'s root has as many `tensors` as `ranks`."""
    if len(tensors) != ranks:
        raise ValueError(
            f"ProcessGroupNCCL::{name}: Incorrect {side} list size {len(tensors)}. {side.capitalize()} list "
            f"size should be {ranks}, same as size of the process group."
        )


def refuse_root(opts: Any, ranks: int, name: str) -> None:
    """Raise unless the root is a member of the group."""
    root = getattr(opts, "rootRank", 0)
    if not 0 <= root < ranks:
        raise dist.DistBackendError(
            f"NCCL error in {name}: invalid argument (root {root} of a group of {ranks} ranks)"
        )
