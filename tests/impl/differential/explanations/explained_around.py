"""Explained differences of what comes around training, of ``FullyShardedDataParallel``."""

from __future__ import annotations

from differential import operations as ops
from differential.around import CallInside, DamagedOptimizer, Hook, OptimizerOrder
from differential.explanations.situation import (
    Explanation,
    earlier,
    flat,
    in_order,
    keeps_units,
    refused,
    replaced_after_optimizer,
    runs_backward,
    since_built,
    steps_first,
)
from differential.ranks.observing import Value

FLAT_DOC = "docs/impl-fsdp1.md"

AROUND: list[Explanation] = [
    Explanation(
        "parameters changed between forward and backward",
        "torch goes on where they were sharded again; ours refuses",
        f"{FLAT_DOC}#differences-from-torch",
        lambda s: flat(s) and (earlier(s, ops.Write) or earlier(s, ops.OptimizerInBackward))
        and "changing the parameters between forward and backward" in s.impl_words,
    ),
    Explanation(
        "a warning for one rank in hybrid sharding",
        "torch turns shard groups of one rank into NO_SHARD and says so, ours keeps them hybrid",
        f"{FLAT_DOC}#differences-from-torch",
        lambda s: flat(s) and "HYBRID" in s.program.wrap.strategy and s.name == "warned"
        and "one rank" in s.torch and [each for each in s.torch if each != "one rank"] == s.impl,
        ends=False,
    ),
    Explanation(
        "written through .data between forward and backward",
        "under SHARD_GRAD_OP torch shows whole views of original parameters there: backward computes with "
        "what is written to them, then it is lost",
        f"{FLAT_DOC}#differences-from-torch",
        lambda s: flat(s, originals=True) and keeps_units(s) and earlier(s, ops.Write, how="data_copy")
        and runs_backward(s) and s.name.startswith(("parameter", "whole", "grad")),
    ),
    Explanation(
        "a state dict inside of forward or backward without sharding",
        "torch gives it, ours refuses it as with sharding (AssertionError)",
        f"{FLAT_DOC}#differences-from-torch",
        lambda s: flat(s, strategy="NO_SHARD") and isinstance(s.operation, CallInside)
        and s.operation.call == "state_dict" and s.name == "said" and s.impl == ["AssertionError"],
        ends=False,
    ),
    Explanation(
        "summoned in backward before its own",
        "under SHARD_GRAD_OP torch finds its views gathered there (AssertionError); ours shows the values",
        f"{FLAT_DOC}#differences-from-torch",
        lambda s: flat(s, strategy="SHARD_GRAD_OP", originals=True) and isinstance(s.operation, CallInside)
        and s.operation.call in ("summon", "apply") and s.operation.backward and s.name == "said"
        and (s.torch, s.impl) == (["AssertionError"], ["done"]),
        ends=False,
    ),
    Explanation(
        "steps of original parameters without a gradient",
        "torch's have zeros, with which momentum and decay go on; ours None, as in the plain model",
        f"{FLAT_DOC}#differences-from-torch",
        lambda s: flat(s, originals=True) and isinstance(s.operation, ops.Step)
        and s.name.startswith(("parameter", "whole")) and (any(
            isinstance(each, ops.Forward) and (each.skip or not each.branch)
            for each in s.program.operations[: s.index]
        ) or (s.program.wrap.offload and steps_first(s))),
    ),
    Explanation(
        "gradients of parameters frozen since",
        "torch shows zeros or none once parameters were gathered, ours what they have, as in the plain model",
        f"{FLAT_DOC}#differences-from-torch",
        lambda s: flat(s) and earlier(s, ops.RequireGrad) and "grad" in s.name.split()
        and ((s.torch is None and in_order(s, ops.Backward, ops.RequireGrad))
             or (isinstance(s.torch, Value) and not s.torch.elements.any())),
        ends=False,
    ),
    Explanation(
        "clips and steps with gradients of parameters frozen since",
        "torch leaves them out, ours has them, as the plain model",
        f"{FLAT_DOC}#differences-from-torch",
        lambda s: flat(s) and in_order(s, ops.Backward, ops.RequireGrad) and (
            (isinstance(s.operation, ops.Clip) and (s.name == "norm" or "grad" in s.name.split()))
            or (isinstance(s.operation, ops.Step) and s.name.startswith(("parameter", "whole")))
        ),
    ),
    Explanation(
        "a state dict refused for its type and inside of forward or backward",
        "torch keeps the LOCAL type that it refused beside a mesh, and names it first; ours never takes it",
        f"{FLAT_DOC}#where-state-dicts-differ-from-torchs",
        lambda s: flat(s) and earlier(s, ops.SaveState, kind="local") and s.name == "said"
        and isinstance(s.operation, CallInside) and s.operation.call == "state_dict"
        and (s.torch, s.impl) == (["RuntimeError"], ["AssertionError"]),
        ends=False,
    ),
    Explanation(
        "a communication hook in hybrid sharding with one rank per copy",
        "torch turns it into NO_SHARD, which takes hooks; ours stays hybrid and refuses it",
        f"{FLAT_DOC}#differences-from-torch",
        lambda s: flat(s) and "HYBRID" in s.program.wrap.strategy and isinstance(s.operation, Hook)
        and not s.torch_words and "hybrid" in s.impl_words.lower(),
    ),
    Explanation(
        "a communication hook below a root that apply() found",
        "torch forgets the root after apply() and takes the hook; ours refuses it (AssertionError)",
        f"{FLAT_DOC}#differences-from-torch",
        lambda s: flat(s) and isinstance(s.operation, Hook) and s.operation.block is not None
        and earlier(s, ops.Apply) and not s.torch_words
        and "can only be called on a root instance" in s.impl_words,
    ),
    Explanation(
        "a communication hook below a root that a state dict found",
        "torch refuses it there (AssertionError); ours takes it until a forward has found the root",
        f"{FLAT_DOC}#differences-from-torch",
        lambda s: flat(s) and isinstance(s.operation, Hook) and s.operation.block is not None
        and earlier(s, ops.SaveState) and not earlier(s, ops.Forward) and not s.impl_words
        and "can only be called on a root instance" in s.torch_words,
    ),
    Explanation(
        "a communication hook where an optimizer in backward dropped the gradient",
        "without sharding torch reduces nothing then, and never calls the hook; ours does",
        f"{FLAT_DOC}#differences-from-torch",
        lambda s: flat(s, strategy="NO_SHARD") and earlier(s, ops.OptimizerInBackward) and earlier(s, Hook)
        and runs_backward(s) and not s.torch_words and "communication hook is called with" in s.impl_words,
    ),
    Explanation(
        "the order of states without sharding",
        "torch's is that of rank 0; ours exchanges nothing, so that each rank keeps its optimizer's",
        f"{FLAT_DOC}#where-state-dicts-differ-from-torchs",
        lambda s: flat(s, strategy="NO_SHARD") and s.name == "order" and sorted(s.torch) == sorted(s.impl),
        ends=False,
    ),
    Explanation(
        "the order of states, without those of parameters that have no gradient",
        "torch's got zeros for gradients and so have states, ours none, as in the plain model",
        f"{FLAT_DOC}#where-state-dicts-differ-from-torchs",
        lambda s: flat(s, originals=True) and s.name == "order"
        and [name for name in s.torch if name in s.impl] == s.impl,
        ends=False,
    ),
    Explanation(
        "optimizer states of another structure",
        "torch fails in its own code, or accepts them; ours refuses them (ValueError)",
        f"{FLAT_DOC}#where-state-dicts-differ-from-torchs",
        lambda s: flat(s) and isinstance(s.operation, DamagedOptimizer) and s.impl == "ValueError"
        and s.torch in ("", "AttributeError", "TypeError", "RuntimeError", "AssertionError"),
    ),
    Explanation(
        "the state of an optimizer whose parameter was replaced",
        "torch does not find it (KeyError), ours holds it until the next forward takes the new one up",
        f"{FLAT_DOC}#where-state-dicts-differ-from-torchs",
        lambda s: flat(s, originals=True) and isinstance(s.operation, ops.SaveOptimizer | OptimizerOrder)
        and replaced_after_optimizer(s) and s.torch == "KeyError",
    ),
    Explanation(
        "the state of an optimizer made after its parameter was replaced",
        "torch never takes up what replaces a parameter without elements on its rank (KeyError); ours does",
        f"{FLAT_DOC}#where-state-dicts-differ-from-torchs",
        lambda s: flat(s, originals=True) and isinstance(s.operation, ops.SaveOptimizer | OptimizerOrder)
        and any(isinstance(each, ops.Write) and each.how == "replace" for each in since_built(s))
        and s.torch == "KeyError" and "tensor([]" in s.torch_words and not s.impl_words,
    ),
    Explanation(
        "a hook on a wrapper that was used before its root",
        "torch's root then refuses its first forward (AssertionError), ours runs",
        f"{FLAT_DOC}#differences-from-torch",
        lambda s: flat(s) and earlier(s, Hook) and not s.impl_words
        and refused(s, "Non-root FSDP instance's `_is_root` should not have been set yet"),
    ),
]  # fmt: skip
