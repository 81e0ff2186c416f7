"""The backend "sim" of torch.distributed, which reduces torch's forms of each collective to two operations.

torch has a dozen forms of each collective (single tensors, lists, coalesced, older names). Without other
ranks, they differ only in kind, number of bytes, and input and output tensors. A `Communicator` runs one
collective (`call`), or one over a list of tensors (`run_list`).
"""

import functools
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import Work

from fsdpbench.base.torch_internals import Backend_plugins
from fsdpbench.sim.torch_device.accelerator import ACCELERATOR, DEVICE_TYPE
from fsdpbench.sim.torch_device.distributed import communicator
from fsdpbench.sim.torch_device.distributed.communicator import Collective, Communicator, total_bytes
from fsdpbench.sim.torch_device.strict.words import error_text

BACKEND = "sim"


class SimProcessGroup(Communicator):
    """torch's process group over simulated ranks."""

    backend_name = BACKEND

    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> Work:
        """Gather equal shards into one tensor."""
        communicator.refuse_gather(output, input, self._group_size)
        return self.call(Collective("all_gather", total_bytes(output), [input], [output], opts))

    def reduce_scatter_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> Work:
        """Reduce a tensor and keep one shard."""
        communicator.refuse_reduce_scatter(output, input, self._group_size)
        return self.call(Collective("reduce_scatter", total_bytes(input), [input], [output], opts))

    # Names before torch 2.13.
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> Work:
        """Reduce tensors in place."""
        return self.call(Collective("all_reduce", total_bytes(*tensors), tensors, tensors, opts))

    def broadcast(self, tensors: list[torch.Tensor], opts: Any = None) -> Work:
        """Copy tensors from one rank to all."""
        communicator.refuse_root(opts, self._group_size, "broadcast")
        return self.call(Collective("broadcast", total_bytes(*tensors), tensors, tensors, opts))

    def reduce(self, tensors: list[torch.Tensor], opts: Any = None) -> Work:
        """Reduce to one rank, which costs half an all-reduce."""
        communicator.refuse_root(opts, self._group_size, "reduce")
        return self.call(Collective("reduce_scatter", total_bytes(*tensors), tensors, tensors, opts))

    def allgather(
        self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any = None
    ) -> Work:
        """Gather into a list; if sizes are equal, through one flat buffer and a copy out of it."""
        for tensors in outputs:
            communicator.refuse_list(tensors, self._group_size)
        flat = [tensor for tensor_list in outputs for tensor in tensor_list]
        return self.run_list("all_gather", inputs, flat, flat, opts)

    def reduce_scatter(
        self, outputs: list[torch.Tensor], inputs: list[list[torch.Tensor]], opts: Any = None
    ) -> Work:
        """Reduce a list and keep one entry; if sizes are equal, after a copy into one flat buffer."""
        for tensors in inputs:
            communicator.refuse_list(tensors, self._group_size)
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
        """Send a part of `input` to every rank; splits count rows, empty means equal."""
        communicator.refuse_splits(input_split_sizes, input, self._group_size)
        communicator.refuse_splits(output_split_sizes, output, self._group_size)
        most = max(total_bytes(input), total_bytes(output))
        return self.call(Collective("all_to_all", most, [input], [output], opts))

    all_to_all_single = alltoall_base

    def alltoall(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None) -> Work:
        """Send a tensor to every rank."""
        communicator.refuse_list(inputs, self._group_size)
        communicator.refuse_list(outputs, self._group_size)
        most = max(total_bytes(*inputs), total_bytes(*outputs))
        return self.call(Collective("all_to_all", most, inputs, outputs, opts))

    def gather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any = None) -> Work:
        """Gather to one rank, which receives as much as in an all-gather."""
        communicator.refuse_root(opts, self._group_size, "gather")
        for tensors in outputs:
            communicator.refuse_count(tensors, self._group_size, "gather", "output")
            communicator.refuse_sizes(tensors, inputs[0], "gather")
        flat = [tensor for tensors in outputs for tensor in tensors] or inputs
        nbytes = total_bytes(*inputs) * self._group_size
        return self.call(Collective("all_gather", nbytes, inputs, flat, opts))

    def scatter(
        self, outputs: list[torch.Tensor], inputs: list[list[torch.Tensor]], opts: Any = None
    ) -> Work:
        """Scatter from one rank, which sends as much as in a broadcast."""
        communicator.refuse_root(opts, self._group_size, "scatter")
        for tensors in inputs:
            communicator.refuse_count(tensors, self._group_size, "scatter", "input")
            communicator.refuse_sizes(tensors, outputs[0], "scatter")
        flat = [tensor for tensors in inputs for tensor in tensors]
        nbytes = total_bytes(*outputs) * self._group_size
        return self.call(Collective("broadcast", nbytes, flat, outputs, opts))

    def barrier(self, opts: Any = None) -> Work:
        """Wait for all ranks; this also blocks the CPU."""
        return self.call(Collective("barrier", 0, [], [], opts))

    def allreduce_coalesced(self, tensors: list[torch.Tensor], opts: Any = None) -> Work:
        """Reduce tensors in place, in one group of kernels."""
        return self.call(
            Collective("all_reduce", total_bytes(*tensors), tensors, tensors, opts, len(tensors))
        )

    def all_gather_single_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> Work:
        """Run several all-gathers in one group of kernels."""
        for output, input in zip(outputs, inputs, strict=True):
            communicator.refuse_gather(output, input, self._group_size)
        return self.call(Collective("all_gather", total_bytes(*outputs), inputs, outputs, opts, len(outputs)))

    def reduce_scatter_single_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> Work:
        """Run several reduce-scatters in one group of kernels."""
        for output, input in zip(outputs, inputs, strict=True):
            communicator.refuse_reduce_scatter(output, input, self._group_size)
        return self.call(
            Collective("reduce_scatter", total_bytes(*inputs), inputs, outputs, opts, len(inputs))
        )

    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def send(self, tensors: list[torch.Tensor], rank: int, tag: int = 0, kind: str = "send") -> Work:
        """Send to a rank, or receive. Raises `NotImplementedError` outside a batch if others cannot run."""
        given, taken = (tensors, []) if kind == "send" else ([], tensors)
        what = Collective(kind, total_bytes(*tensors), given, taken, rank)
        if self._coalesced is not None:
            return self.call(what)
        self.refuse(tensors)
        self.stages.need([self.ranks[rank]])
        return self.exchange([what], rank, tag)

    recv = functools.partialmethod(send, kind="recv")

    def recv_anysource(self, tensors: list[torch.Tensor], tag: int = 0) -> Work:
        """Raise `NotImplementedError`, because which rank is first depends on the run."""
        raise NotImplementedError(error_text("refusals.any_source"))


def register_backend() -> None:
    """Register the backend for `dist.init_process_group("sim")`."""
    if BACKEND.upper() not in Backend_plugins:
        dist.Backend.register_backend(BACKEND, _create, extended_api=True, devices=[DEVICE_TYPE, "cpu"])


def _create(options: Any, backend_options: Any) -> SimProcessGroup:
    ranks = list(options.global_ranks_in_group) or range(options.group_size)
    return SimProcessGroup(ACCELERATOR, options.group_rank, options.group_size, ranks, options.group_id)
