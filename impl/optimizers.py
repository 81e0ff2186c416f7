"""Optimizers for sharded parameters: Muon, which needs whole matrices, and AdamW with bf16 moments.

They accept plain parameters and the ``DTensor``s of ``fully_shard`` (ours and torch's). ``AdamW`` also
accepts the views of FSDP1.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from .shared.layout import chunk_rows

# Operations on whole matrices, divided among the ranks: of each batch of `n` matrices a rank owns one.
#
# With an all-gather, every rank would receive every matrix and repeat the operation. Instead, a batch has as
# many matrices as there are ranks. An all-to-all gives each rank one whole matrix, and a second one returns
# the rows of the result. So each element is sent and received once in each direction.
#
# The all-to-all of the next batch overlaps with the computation on this one:
#
#     stream of the group   in 0   in 1  out 0   in 2  out 1        out 2
#     computation                 work 0       work 1        work 2
#
# Sizes may differ. Matrices are sorted by size, so that those of one batch cost about the same.


# Maps a whole matrix [rows, columns] to one of the same shape and dtype.
Work = Callable[[Tensor], Tensor]


def divisions(tensor: Tensor) -> dict[int, Placement]:
    """Return the placements that divide `tensor` among ranks, by mesh dimension."""
    if not isinstance(tensor, DTensor):
        return {}
    return {
        dimension: placement
        for dimension, placement in enumerate(tensor.placements)
        if not placement.is_replicate() and tensor.device_mesh.size(dimension) > 1
    }


def row_group(tensor: DTensor) -> dist.ProcessGroup | None:
    """Return the group over which rows are sharded, or None unless Shard(0) is the only division."""
    divided = divisions(tensor)
    rows = [dimension for dimension, by in divided.items() if type(by) is Shard and by.dim == 0]
    return tensor.device_mesh.get_group(rows[0]) if rows and len(divided) == 1 else None


def worked_on_whole(shards: Sequence[Tensor], like: Sequence[DTensor], work: Work) -> list[Tensor]:
    """Apply `work` to each whole matrix and return this rank's shards of the results.

    `shards`: this rank's parts [local rows, columns], contiguous; `like`: the parameters, which define the
    placements. Collective over the ranks of each parameter's mesh: all ranks must pass the same matrices in
    the same order. Results have the shapes and dtypes of the shards.
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
    """All-gather one matrix and apply `work` on every rank: for placements other than Shard(0) alone."""
    mesh = like.device_mesh
    sharded = DTensor.from_local(
        shard, mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )
    whole = DTensor.from_local(work(sharded.full_tensor()), mesh, [Replicate()] * mesh.ndim, run_check=False)
    return whole.redistribute(placements=like.placements).to_local()


@dataclass
class _Batch:
    """A batch of at most as many matrices as ranks. Rank `i` owns the `i`-th matrix."""

    indices: list[int]
    received: Tensor
    pending: dist.Work | None
    # Elements sent to each rank: this rank's shard of the matrix that rank owns, 0 if it owns none.
    sent: list[int] = field(default_factory=list)
    # Elements received from each rank: its shard of the matrix that this rank owns.
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
        if following is not None:  # issued before the work, so that the two overlap
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
    """Return the number of elements in each rank's chunk of rows, as split by `torch.chunk`."""
    ends = (chunk_rows(matrix.shape[0], size, rank) for rank in range(size))
    return [(end - start) * matrix.shape[1] for start, end in ends]


def _work_on(batch: _Batch, like: Sequence[DTensor], group: dist.ProcessGroup, work: Work) -> _Batch:
    """Apply `work` to the matrix that this rank owns, and start sending the result back."""
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
    """Base class of optimizers that update one parameter group after the other."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Perform one step and return the loss of `closure`, which reevaluates the model, if given."""
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
    """`torch.optim.Muon` for sharded matrices: `step` sends each matrix to one rank and back, in bf16.

    Arguments, checks and state (`momentum_buffer`, sharded like the parameter) are the same as in torch.
    Unsharded parameters are updated locally. `step` is collective: all ranks must have gradients of the
    same parameters. Raises ValueError for parameters that are not 2-D, as torch does.
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
        """Update the momentum and return this rank's part of the matrix to orthogonalise: new, in bf16."""
        gradient = parameter.grad
        assert gradient is not None
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(gradient, memory_format=torch.preserve_format)
        buffer = state["momentum_buffer"]
        own, kept = _local(gradient), _local(buffer)
        kept.lerp_(own, 1 - momentum)
        update = own.lerp(kept, momentum) if nesterov else kept
        # torch's orthogonalisation divides its input in place if it need not cast it.
        return update.to(torch.bfloat16, copy=not nesterov).contiguous()


# AdamW with moments of two bytes an element.
#
# With `betas[1]` = 0.999 the second moment moves by a thousandth of its distance to the target in each step.
# That is less than half the spacing of bf16, so rounding to nearest would never change it. Stochastic
# rounding rounds up or down with probabilities that preserve the mean. The arithmetic is fp32.
#
#     fp32   s eeeeeeee mmmmmmm|mmmmmmmmmmmmmmmm      add 16 random bits to the lower half,
#     bf16   s eeeeeeee mmmmmmm                       then cut it off


_LOWER_HALF = 0xFFFF


class AdamW(_ByGroups):
    """AdamW (Loshchilov and Hutter 2019) with `exp_avg` and `exp_avg_sq` in bf16.

    Parameters may have any floating point dtype; gradients must be on the same device. The step updates plain
    tensors and local tensors of `DTensor`s and never communicates. Raises ValueError for a negative learning
    rate, weight decay or epsilon and for betas outside [0, 1).
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
    """Round `source` (fp32) stochastically into `target` (bf16, same shape), which preserves the mean."""
    bits = source.view(torch.int32)
    noise = torch.randint_like(bits, 0, _LOWER_HALF + 1)
    rounded = bits.add(noise).bitwise_and_(~_LOWER_HALF).view(torch.float32)
    # A NaN whose bits are all ones (CUDA's) would overflow into a small number.
    target.copy_(torch.where(source.isnan(), source, rounded))


def _local(tensor: Any) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
