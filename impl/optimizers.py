"""Optimizers that need more than their own shard, or less memory than torch's.

They work on plain parameters, on the ``DTensor``s of ``fully_shard`` (ours and torch's) and, ``AdamW`` only,
on the views of FSDP1.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from .shared.layout import chunk_rows

# Whole matrices from their shards, and back: a rank becomes the owner of one matrix of every `n`.
#
# An operation on whole matrices that every rank would repeat is divided among the ranks here: of as many
# matrices as there are ranks, each rank receives one whole by one all-to-all, and sends the result's rows
# back by another. A rank sends and receives each element once a direction; an all-gather would bring every
# matrix to every rank.
#
# The all-to-all of the next batch runs while this one is worked on:
#
#     stream of the group   in 0   in 1  out 0   in 2  out 1        out 2
#     computation                 work 0       work 1        work 2
#
# The sizes may differ: matrices are taken in order of size, so that those of a batch cost about the same.


# From a whole matrix [rows, columns] to one of the same shape and dtype.
Work = Callable[[Tensor], Tensor]


def divisions(tensor: Tensor) -> dict[int, Placement]:
    """Return the placements by which ranks hold different parts of `tensor`, by dimension of the mesh."""
    if not isinstance(tensor, DTensor):
        return {}
    return {
        dimension: placement
        for dimension, placement in enumerate(tensor.placements)
        if not placement.is_replicate() and tensor.device_mesh.size(dimension) > 1
    }


def row_group(tensor: DTensor) -> dist.ProcessGroup | None:
    """Return the ranks among which the rows are divided; None unless that is the sole division, in chunks."""
    divided = divisions(tensor)
    rows = [dimension for dimension, by in divided.items() if type(by) is Shard and by.dim == 0]
    return tensor.device_mesh.get_group(rows[0]) if rows and len(divided) == 1 else None


def worked_on_whole(shards: Sequence[Tensor], like: Sequence[DTensor], work: Work) -> list[Tensor]:
    """Return `work` of each matrix, as the shards of its results.

    `shards`: this rank's parts [local rows, columns], contiguous; `like`: the parameters that say how they
    are divided. Collective over the ranks of each parameter's mesh: all ranks pass the same matrices in the
    same order. Results have the shards' shapes and dtypes.
    """
    results: list[Tensor | None] = [None] * len(shards)
    by_group: dict[dist.ProcessGroup | None, list[int]] = {}
    for index, parameter in enumerate(like):
        by_group.setdefault(row_group(parameter), []).append(index)
    for index in by_group.pop(None, []):
        results[index] = _gathered(shards[index], like[index], work)
    for group, indices in by_group.items():
        assert group is not None
        indices.sort(key=lambda index: (-like[index].numel(), index))
        for index, result in _divided(shards, like, indices, group, work):
            results[index] = result
    return [result for result in results if result is not None]


def _gathered(shard: Tensor, like: DTensor, work: Work) -> Tensor:
    """Return one matrix, gathered and worked on by every rank: for divisions other than the all-to-all's."""
    mesh = like.device_mesh
    sharded = DTensor.from_local(
        shard, mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )
    whole = DTensor.from_local(work(sharded.full_tensor()), mesh, [Replicate()] * mesh.ndim, run_check=False)
    return whole.redistribute(placements=like.placements).to_local()


@dataclass
class _Batch:
    """At most as many matrices as ranks; rank `i` owns the `i`-th."""

    indices: list[int]
    received: Tensor
    pending: dist.Work | None
    # Elements of this rank's shard of each matrix, 0 for ranks that own none.
    sent: list[int] = field(default_factory=list)
    # Elements that each rank has of the matrix that this one owns.
    taken: list[int] = field(default_factory=list)


def _divided(
    shards: Sequence[Tensor],
    like: Sequence[DTensor],
    indices: Sequence[int],
    group: dist.ProcessGroup,
    work: Work,
) -> Iterator[tuple[int, Tensor]]:
    size = dist.get_world_size(group)
    batches = [list(indices[start : start + size]) for start in range(0, len(indices), size)]
    arriving = _start(shards, like, batches[0], group)
    leaving: _Batch | None = None
    for following in [*batches[1:], None]:
        current = arriving
        if following is not None:  # before the work, so that it travels meanwhile
            arriving = _start(shards, like, following, group)
        back = _work_on(current, like, group, work)
        if leaving is not None:
            yield from _results(leaving, shards)
        leaving = back
    if leaving is not None:
        yield from _results(leaving, shards)


def _start(
    shards: Sequence[Tensor], like: Sequence[DTensor], indices: list[int], group: dist.ProcessGroup
) -> _Batch:
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    sent = [shards[index].numel() for index in indices] + [0] * (size - len(indices))
    taken = _rows(like[indices[rank]], size) if rank < len(indices) else [0] * size
    packed = torch.cat([shards[index].reshape(-1) for index in indices])
    received = packed.new_empty(sum(taken))
    pending = dist.all_to_all_single(received, packed, taken, sent, group=group, async_op=True)
    return _Batch(indices, received, pending, sent, taken)


def _rows(matrix: DTensor, size: int) -> list[int]:
    """Return elements of each rank's chunk of rows, as `torch.chunk` divides them."""
    ends = (chunk_rows(matrix.shape[0], size, rank) for rank in range(size))
    return [(end - start) * matrix.shape[1] for start, end in ends]


def _work_on(batch: _Batch, like: Sequence[DTensor], group: dist.ProcessGroup, work: Work) -> _Batch:
    """Return the owner's part, and the way back."""
    if batch.pending is not None:
        batch.pending.wait()
    rank, whole = dist.get_rank(group), batch.received
    if rank < len(batch.indices):
        whole = work(whole.view(like[batch.indices[rank]].shape)).reshape(-1)
    back = whole.new_empty(sum(batch.sent))
    pending = dist.all_to_all_single(back, whole, batch.sent, batch.taken, group=group, async_op=True)
    return _Batch(batch.indices, back, pending, batch.sent)


def _results(batch: _Batch, shards: Sequence[Tensor]) -> Iterator[tuple[int, Tensor]]:
    if batch.pending is not None:
        batch.pending.wait()
    parts = batch.received.split(batch.sent[: len(batch.indices)])
    for index, part in zip(batch.indices, parts, strict=True):
        yield index, part.view(shards[index].shape)


class _ByGroups(torch.optim.Optimizer):
    """The step of optimizers whose groups are updated one after the other."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Do one step; `closure` reevaluates the model and returns the loss, which is returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            self._step_group(group)
        return loss

    def _step_group(self, group: dict[str, Any]) -> None:
        raise NotImplementedError


class Muon(_ByGroups, torch.optim.Muon):
    """`torch.optim.Muon` whose `step` moves each sharded matrix to one rank and back, in bf16.

    Arguments, checks and state (`momentum_buffer`, sharded as the parameter) are torch's. Parameters
    without shards are updated in place without communication. A `step` is collective: all ranks must have
    gradients of the same parameters. Raises ValueError for parameters not of two dimensions, as torch's.
    """

    def _step_group(self, group: dict[str, Any]) -> None:
        from .shared.torch_internals import muon_adjust_lr, muon_orthogonalise

        def orthogonalised(matrix: Tensor) -> Tensor:
            result: Tensor = muon_orthogonalise(
                matrix, group["ns_coefficients"], group["ns_steps"], group["eps"]
            )
            return result

        def apply(parameter: Tensor, update: Tensor) -> None:
            rate = muon_adjust_lr(lr, group["adjust_lr_fn"], parameter.shape)
            local = _local(parameter)
            local.mul_(1 - lr * group["weight_decay"])
            local.add_(update, alpha=-rate)

        lr = float(group["lr"])
        parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
        sharded: list[DTensor] = []
        updates: list[Tensor] = []
        for parameter in parameters:
            update = self._momentum(parameter, group["momentum"], nesterov=group["nesterov"])
            if divisions(parameter):
                sharded.append(parameter)
                updates.append(update)
            else:
                apply(parameter, orthogonalised(update))
        for parameter, result in zip(sharded, worked_on_whole(updates, sharded, orthogonalised), strict=True):
            apply(parameter, result)

    def _momentum(self, parameter: Tensor, momentum: float, *, nesterov: bool) -> Tensor:
        """Return this rank's part of what is to be orthogonalised, in bf16 and memory of its own."""
        gradient = parameter.grad
        assert gradient is not None
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(gradient, memory_format=torch.preserve_format)
        buffer = state["momentum_buffer"]
        own, kept = _local(gradient), _local(buffer)
        kept.lerp_(own, 1 - momentum)
        update = own.lerp(kept, momentum) if nesterov else kept
        # torch's iteration divides in place where it need not cast.
        return update.to(torch.bfloat16, copy=not nesterov).contiguous()


# AdamW whose moments take two bytes an element.
#
# The second moment moves by a thousandth of its distance a step (`betas[1]` = 0.999): less than half the
# spacing of bf16, so that plain rounding would leave it where it is. It is rounded stochastically instead: up
# or down with the probability that keeps the mean. The arithmetic is fp32.
#
#     fp32   s eeeeeeee mmmmmmm|mmmmmmmmmmmmmmmm      add 16 random bits to the lower half,
#     bf16   s eeeeeeee mmmmmmm                       then cut it off


_LOWER_HALF = 0xFFFF


class AdamW(_ByGroups):
    """AdamW (Loshchilov and Hutter 2019) with `exp_avg` and `exp_avg_sq` in bf16.

    Parameters of any floating dtype; gradients must have the parameters' device. Works shard by shard: on
    plain tensors and on the local parts of `DTensor`s; it never communicates. Raises ValueError for a
    negative rate, decay or epsilon and for betas outside [0, 1).
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
    ) -> None:
        for name, value in {"lr": lr, "eps": eps, "weight_decay": weight_decay}.items():
            if not value >= 0.0:
                raise ValueError(f"{name} must be at least 0, not {value}")
        if not all(0.0 <= beta < 1.0 for beta in betas):
            raise ValueError(f"betas must be at least 0 and less than 1, not {betas}")
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    def _step_group(self, group: dict[str, Any]) -> None:
        for parameter in group["params"]:
            if parameter.grad is not None:
                self._update(parameter, group)

    def _update(self, parameter: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state["step"] = 0
            for name in ("exp_avg", "exp_avg_sq"):
                state[name] = torch.zeros_like(parameter, dtype=torch.bfloat16)
        state["step"] += 1
        weight, gradient, first, second = map(
            _local, (parameter, parameter.grad, state["exp_avg"], state["exp_avg_sq"])
        )
        if not weight.numel():
            return
        gradient = gradient.float()
        beta1, beta2 = group["betas"]
        mean = first.float().lerp_(gradient, 1 - beta1)
        square = second.float().mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        round_stochastically(mean, first)
        round_stochastically(square, second)
        rate = group["lr"] / (1 - beta1 ** state["step"])
        divisor = square.div_(1 - beta2 ** state["step"]).sqrt_().add_(group["eps"])
        weight.mul_(1 - group["lr"] * group["weight_decay"])
        weight.add_(mean.div_(divisor), alpha=-rate)


def round_stochastically(source: Tensor, target: Tensor) -> None:
    """Write `source` (fp32) to `target` (bf16, of the same shape), up or down so that the mean is kept."""
    bits = source.view(torch.int32)
    noise = torch.randint_like(bits, 0, _LOWER_HALF + 1)
    rounded = bits.add(noise).bitwise_and_(~_LOWER_HALF).view(torch.float32)
    # A NaN whose bits are all ones (CUDA's) would overflow into a small number.
    target.copy_(torch.where(source.isnan(), source, rounded))


def _local(tensor: Any) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
