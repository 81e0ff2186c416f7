"""A difference and what led to it: what explanations ask of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from differential import operations as ops
from differential.around import CallInside
from differential.ranks.observing import Tolerance, Value
from differential.specs import Flat, Program


@dataclass(frozen=True)
class Situation:
    """One difference: after which operation, of what, and both values."""

    program: Program
    index: int
    operation: Any
    name: str
    torch: Any
    impl: Any
    torch_words: str
    impl_words: str


@dataclass(frozen=True)
class Explanation:
    """Why a difference is none of ours.

    Args:
        document: the file and heading that tells users.
        ends: the program ends here, since the sides can no longer be compared.
    """

    name: str
    reason: str
    document: str
    applies: Callable[[Situation], bool]
    ends: bool = True


def carried_out(program: Program, index: int) -> list[Any]:
    """The operations up to ``index``; the forward and backward inside of which something is called, too."""
    done: list[Any] = []
    for each in program.operations[: index + 1]:
        done += [each, ops.Forward(), ops.Backward()] if isinstance(each, CallInside) else [each]
    return done


def runs_backward(s: Situation) -> bool:
    return isinstance(s.operation, ops.Backward | CallInside)


def earlier(s: Situation, kind: type, /, **values: Any) -> bool:
    """Whether such an operation came before, or is this one."""
    return any(
        isinstance(each, kind) and all(getattr(each, name) == value for name, value in values.items())
        for each in carried_out(s.program, s.index)
    )


def flat(s: Situation, **values: Any) -> bool:
    wrap = s.program.wrap
    return isinstance(wrap, Flat) and all(getattr(wrap, name) == value for name, value in values.items())


def two_graphs(s: Situation) -> bool:
    """Whether two forwards waited for their backwards at once, or one had two of them."""
    waiting = 0
    for each in carried_out(s.program, s.index):
        if isinstance(each, ops.Forward) and each.mode == "grad":
            waiting += 1
            if waiting == 2:
                return True
        elif isinstance(each, ops.Backward):
            if each.retain:
                return True
            waiting = max(0, waiting - 1)
    return False


def since_built(s: Situation) -> list[ops.Operation]:
    """The operations on the model as it is now, this one included."""
    done = carried_out(s.program, s.index)
    built = [n for n, each in enumerate(done) if isinstance(each, ops.RemakeGroups)]
    return done[built[-1] + 1 :] if built else done


def leaves_unreduced(program: Program, index: int) -> bool:
    """Whether the last backward was one of ``no_sync()``: of a flat model both sides refuse to show whole
    gradients then, and torch's is in the middle of showing them from then on.
    """
    if not isinstance(program.wrap, Flat):
        return False
    on = last = False
    for each in carried_out(program, index):
        if isinstance(each, ops.NoSync):
            on = each.on
        elif isinstance(each, ops.Backward):
            last = on
        elif isinstance(each, ops.RemakeGroups):
            last = False
    return last


def attached_unsharded(s: Situation) -> bool:
    """Whether hooks were attached after an ``unshard()`` that came before the first forward."""
    unsharded = False
    for each in since_built(s):
        if isinstance(each, ops.Forward):
            break
        if isinstance(each, ops.Unshard):
            unsharded = True
        elif unsharded and isinstance(each, ops.OptimizerInBackward):
            return True
    return False


def only_rounded(s: Situation, relative: float) -> bool:
    """Whether both show the same, but for a rounding of ``relative`` to the largest element."""
    ours, theirs = s.impl, s.torch
    if not isinstance(ours, Value) or not isinstance(theirs, Value):
        return False
    return Tolerance(relative).equal(ours, theirs)


def replaced_after_optimizer(s: Situation) -> bool:
    """Whether a parameter was replaced that an optimizer held."""
    made = False
    for each in since_built(s):
        if isinstance(each, ops.MakeOptimizer | ops.Step):
            made = True
        elif made and isinstance(each, ops.Write) and each.how == "replace":
            return True
    return False


def shows_freed(s: Situation) -> bool:
    """Whether torch shows a tensor whose memory is freed."""
    return isinstance(s.torch, Value) and bool(s.torch.elements.isnan().all())


def dropped_gradients(s: Situation) -> bool:
    """Whether gradients were set to ``None``, and parameters were gathered since."""
    done, dropped = since_built(s), False
    for each in done:
        if isinstance(each, ops.ZeroGrad) and each.to_none:
            dropped = True
        elif dropped and isinstance(each, ops.Forward | ops.Apply | ops.Summon | ops.Clip):
            return True
    return False


def left_out(s: Situation) -> bool:
    """Whether the last forward did not come to the unit of the parameter that the name ends with."""
    name = s.name.split()[-1].split(".")
    forwards = [each for each in since_built(s) if isinstance(each, ops.Forward)]
    if name[0] != "blocks" or not forwards:
        return False
    block, order = int(name[1]), s.program.model.order
    skipped = block in forwards[-1].skip or bool(order and block not in order)
    patched = earlier(s, ops.Patch, of_class=True) or (block == 0 and earlier(s, ops.Patch))
    return skipped or (patched and not {"inner", "norm"}.isdisjoint(name))


def steps_first(s: Situation) -> bool:
    """Whether an optimizer stepped before there was any gradient."""
    kinds = [type(each) for each in since_built(s)]
    return ops.Step in kinds and ops.Backward not in kinds[: kinds.index(ops.Step)]


def between_passes(s: Situation) -> bool:
    """Whether a forward came last, with no backward after it."""
    last = [each for each in since_built(s) if isinstance(each, ops.Forward | ops.Backward)]
    return bool(last) and isinstance(last[-1], ops.Forward)


def last_saved(s: Situation) -> ops.SaveState | None:
    """How the state dict was made that is saved now, or that a load takes."""
    saves = [each for each in s.program.operations[: s.index + 1] if isinstance(each, ops.SaveState)]
    return saves[-1] if saves else None


def keeps_units(s: Situation) -> bool:
    """Whether units of a flat model stay gathered between forward and backward."""
    wrap = s.program.wrap
    return isinstance(wrap, Flat) and wrap.strategy in ("SHARD_GRAD_OP", "_HYBRID_SHARD_ZERO2")


def refused(s: Situation, words: str) -> bool:
    """Torch raised, ours did not, or in another way afterwards."""
    return words in s.torch_words


def in_order(s: Situation, first: type, then: type) -> bool:
    """Whether operations of these kinds came one after the other, the second before this difference."""
    kinds = [type(each) for each in carried_out(s.program, s.index)]
    return first in kinds and then in kinds[kinds.index(first) :]


def written_after_evaluation(s: Situation) -> bool:
    """Whether parameters changed after a forward without gradients, as far as the program says."""
    operations = carried_out(s.program, s.index)
    evaluated = [n for n, op in enumerate(operations) if isinstance(op, ops.Forward) and op.mode != "grad"]
    return bool(evaluated) and any(
        isinstance(op, ops.Write | ops.Step) or (isinstance(op, ops.Summon) and op.change)
        for op in operations[evaluated[0] + 1 :]
    )


def other_form(s: Situation) -> bool:
    """Whether the sides show different parts of a tensor, or in another dtype."""
    return (
        isinstance(s.torch, Value)
        and isinstance(s.impl, Value)
        and (s.torch.shape, s.torch.dtype) != (s.impl.shape, s.impl.dtype)
    )


def other_shape(s: Situation) -> bool:
    """Whether the sides show different parts of a tensor."""
    return isinstance(s.torch, Value) and isinstance(s.impl, Value) and s.torch.shape != s.impl.shape


def frozen(s: Situation) -> bool:
    """Whether the parameter that the name ends with is of a block that was made with it frozen."""
    name = s.name.split()[-1].split(".")
    if name[0] != "blocks":
        return False
    spec = s.program.model.blocks[int(name[1])]
    return spec.frozen == "all" or (spec.frozen != "" and name[-1].endswith(spec.frozen))


def views_comparable(program: Program) -> bool:
    """Whether each rank shows the same parts: torch aligns original parameters in a flat one to 16 bytes."""
    wrap, model = program.wrap, program.model
    if not isinstance(wrap, Flat) or not wrap.originals or wrap.strategy == "NO_SHARD":
        return True
    return model.width % 8 == 0 or (model.width % 4 == 0 and not wrap.precision)
