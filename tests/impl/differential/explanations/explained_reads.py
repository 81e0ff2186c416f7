"""Explained differences of what forward and backward read: gathered and waited for, of one version."""

from __future__ import annotations

from differential import operations as ops
from differential.explanations.situation import Explanation, Situation, carried_out, earlier, flat, refused
from differential.outputs import UNKNOWN, VIEWS

SHARDED_DOC = "docs/impl-fsdp2.md#where-it-differs-on-purpose"
RUNTIME_DOC = "docs/impl.md#what-is-read-is-there"


def _root_in_checkpoint(s: Situation) -> bool:
    """Whether the parameter's block is a root, which reentrant checkpoints run without gradients."""
    name = s.name.split()[-1].split(".")
    reentrant = name[0] == "blocks" and s.program.model.blocks[int(name[1])].checkpoint == "reentrant"
    return reentrant and not s.program.wrap.root and earlier(s, ops.Forward)


def _evaluated(s: Situation) -> bool:
    """Whether the last forward had no gradients."""
    forwards = [e for e in carried_out(s.program, s.index) if isinstance(e, ops.Forward)]
    return bool(forwards) and forwards[-1].mode != "grad"


def _written_while_kept(s: Situation) -> bool:
    """Whether something was written or attached to what torch shows gathered after an evaluation."""
    attaches = (ops.Write, ops.RequireGrad, ops.OptimizerInBackward, ops.MakeOptimizer)
    kept = False
    for each in carried_out(s.program, s.index):
        if isinstance(each, ops.Forward):
            kept = each.mode != "grad"
        elif kept and isinstance(each, attaches):
            return True
    return False


def _writes(s: Situation) -> bool:
    """Whether parameters were written to after a forward."""
    done = carried_out(s.program, s.index)
    kinds = [isinstance(each, ops.Step | ops.Write | ops.LoadState | ops.Apply) for each in done]
    forwards = [number for number, each in enumerate(done) if isinstance(each, ops.Forward)]
    return bool(forwards) and any(kinds[forwards[0] :])


def _drops_hooks(s: Situation) -> bool:
    """Whether torch's hooks do not come to an output: an unknown object, or a view changed in place."""
    returns = {block.returns for block in s.program.model.blocks}
    return bool(returns & UNKNOWN) or (s.program.model.caller != "" and bool(returns & VIEWS))


READS: list[Explanation] = [
    Explanation(
        "written to between forward and backward",
        "torch computes gradients that do not belong to the outputs; ours raises, as the plain model",
        RUNTIME_DOC,
        lambda s: (
            s.impl == "RuntimeError"
            and any(
                words in s.impl_words
                for words in ("were written to between its forward", "modified by an inplace operation")
            )
            and (_writes(s) or earlier(s, ops.OptimizerInBackward))
        ),
    ),
    Explanation(
        "the root after a forward without gradients",
        "torch keeps it gathered, and computes with the old values after a write; ours shards it again",
        SHARDED_DOC,
        lambda s: (
            not flat(s)
            and (_evaluated(s) or _root_in_checkpoint(s))
            and s.program.wrap.reshard is None
            and s.name.startswith(("parameter", "grad", "requires_grad"))
        ),
        ends=False,
    ),
    Explanation(
        "written to the root after a forward without gradients",
        "torch shows it gathered, and loses what is written there; ours shows and keeps its shard",
        SHARDED_DOC,
        lambda s: (
            not flat(s) and s.program.wrap.reshard is None and _written_while_kept(s) and not s.impl_words
        ),
    ),
    Explanation(
        "values written while units of fully_shard stay gathered",
        "torch computes with the old ones",
        SHARDED_DOC,
        lambda s: not flat(s) and s.name == "loss" and _writes(s),
    ),
    Explanation(
        "an optimizer in backward beside reentrant checkpoints",
        "torch steps in the middle of backward, and its views of the flat parameter are refused",
        "docs/impl-fsdp1.md#differences-from-torch",
        lambda s: (
            flat(s)
            and refused(s, "is a view and its base or another view of its base has been modified inplace")
            and earlier(s, ops.OptimizerInBackward)
        ),
    ),
    Explanation(
        "outputs that torch's hooks do not come to",
        "torch's backward fails or computes garbage, ours is the plain model's",
        RUNTIME_DOC,
        lambda s: (
            _drops_hooks(s)
            and earlier(s, ops.Backward)
            and (not s.impl_words or s.impl == "BoomError" or "communication hook is called" in s.impl_words)
            and (bool(s.torch_words) or s.name.startswith(("grad", "parameter", "whole", "loss", "norm")))
        ),
    ),
]
