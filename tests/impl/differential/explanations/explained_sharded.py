"""Explained differences of ``fully_shard``."""

from __future__ import annotations

from differential import operations as ops
from differential.explanations.situation import (
    Explanation,
    Situation,
    attached_unsharded,
    carried_out,
    earlier,
    flat,
    in_order,
    only_rounded,
    refused,
    runs_backward,
)
from differential.ranks.observing import Value

SHARDED_DOC = "docs/impl-fsdp2.md"


def _skipped(s: Situation) -> bool:
    """Whether a forward left out a block, which torch then leaves as it was."""
    return any(isinstance(each, ops.Forward) and each.skip for each in carried_out(s.program, s.index))


SHARDED: list[Explanation] = [
    Explanation(
        "several dtypes in one unit",
        "ours becomes one unit a dtype, torch refuses",
        f"{SHARDED_DOC}#where-it-differs-on-purpose",
        lambda s: refused(s, "FSDP expects uniform original parameter dtype"),
    ),
    Explanation(
        "another dtype after the first forward",
        "torch's buffers keep the old one and it fails; ours are made anew",
        f"{SHARDED_DOC}#where-it-differs-on-purpose",
        lambda s: earlier(s, ops.Convert) and (
            refused(s, "Expected out tensor to have dtype")
            or (not flat(s) and not s.impl_words and refused(s, "mixed dtype (CPU)"))
        ),
    ),
    Explanation(
        "a first forward in inference mode of fully_shard",
        "torch makes its unsharded parameters there, as inference tensors that nothing can be attached to",
        f"{SHARDED_DOC}#where-it-differs-on-purpose",
        lambda s: not flat(s) and earlier(s, ops.Forward, mode="inference") and not s.impl_words
        and any(refused(s, words) for words in (
            "Inference tensors do not track version counter",
            "Inference tensors cannot be saved for backward",
            "object has no attribute 'next_functions'",
            "Inplace update to inference tensor outside InferenceMode",
        )),
    ),
    Explanation(
        "extensions in a first forward in inference mode",
        "torch sets a version counter that inference tensors do not have",
        f"{SHARDED_DOC}#where-it-differs-on-purpose",
        lambda s: refused(s, "Cannot set version_counter for inference tensor"),
    ),
    Explanation(
        "extensions resharded to a smaller group",
        "ours refuses them",
        f"{SHARDED_DOC}#where-it-differs-on-purpose",
        lambda s: s.impl == "NotImplementedError" and "which has all-gather extensions" in s.impl_words,
    ),
    Explanation(
        "gradients of a failed backward",
        "torch's reset_iter_state leaves them at the unsharded parameters and adds them to the next ones",
        f"{SHARDED_DOC}#where-it-differs-on-purpose",
        lambda s: in_order(s, ops.Backward, ops.ResetIterState) and s.name.startswith("grad")
        and not flat(s),
    ),
    Explanation(
        "optimizers in backward of a failed backward",
        "which units have stepped depends on when their gradients arrive: torch's earlier than ours",
        f"{SHARDED_DOC}#where-it-differs-on-purpose",
        lambda s: in_order(s, ops.OptimizerInBackward, ops.Backward) and not flat(s)
        and s.name.startswith("parameter")
        and any(isinstance(each, ops.Backward) and each.fail is not None for each in s.program.operations),
    ),
    Explanation(
        "optimizers in backward between two calls of a unit",
        "torch steps on accumulated gradients in between, and the second one has the new weights",
        f"{SHARDED_DOC}#where-it-differs-on-purpose",
        lambda s: not flat(s) and earlier(s, ops.OptimizerInBackward) and earlier(s, ops.NoSync)
        and s.name.startswith("parameter") and len(s.program.model.order) > len({*s.program.model.order}),
    ),
    Explanation(
        "reset_iter_state with torch before 2.13",
        "it does not have the method",
        f"{SHARDED_DOC}#where-it-differs-on-purpose",
        lambda s: refused(s, "has no attribute 'reset_iter_state'"),
    ),
    Explanation(
        "reset_iter_state before the first forward",
        "nothing to do for ours; torch's state is not there yet (AttributeError)",
        f"{SHARDED_DOC}#where-it-differs-on-purpose",
        lambda s: isinstance(s.operation, ops.Misuse) and s.operation.what == "inner_reset"
        and s.torch == "AttributeError"
        and (not s.impl_words or "must be called on the root" in s.impl_words),
        ends=False,
    ),
    Explanation(
        "a gradient divide factor on gloo",
        "torch asks gloo for a premultiplied sum, which it has not",
        f"{SHARDED_DOC}#where-it-differs-on-purpose",
        lambda s: not flat(s) and refused(s, "Cannot use ReduceOp.PREMUL_SUM with Gloo"),
    ),
    Explanation(
        "parameters of fully_shard replaced after the first forward",
        "torch computes with the old ones; ours refuses (ValueError)",
        f"{SHARDED_DOC}#where-it-differs-on-purpose",
        lambda s: not flat(s) and in_order(s, ops.Forward, ops.Write) and earlier(s, ops.Write, how="replace")
        and "was replaced or removed after wrapping" in s.impl_words,
    ),
    Explanation(
        "an empty list of modules",
        "ours says so (ValueError), torch's fails inside (IndexError)",
        f"{SHARDED_DOC}#where-it-differs-on-purpose",
        lambda s: isinstance(s.operation, ops.Misuse) and s.operation.what == "empty_list"
        and s.impl == "ValueError",
        ends=False,
    ),
    Explanation(
        "prefetch of a block of another tree",
        "before that block ran ours says so (RuntimeError), torch's fails inside (AttributeError)",
        f"{SHARDED_DOC}#where-it-differs-on-purpose",
        lambda s: refused(s, "'FSDPCommContext' object has no attribute")
        and "has not run yet" in s.impl_words,
    ),
    Explanation(
        "unsharded by hand before the first forward",
        "ours shards a part again when the root is found, torch when its forward ends",
        f"{SHARDED_DOC}#where-it-differs-on-purpose",
        lambda s: not flat(s) and s.name.startswith(("parameter", "grad", "whole"))
        and earlier(s, ops.Unshard) and (not earlier(s, ops.Forward) or _skipped(s)),
        ends=False,
    ),
    Explanation(
        "optimizers of unsharded parameters",
        "torch's step without a gradient and train nothing; ours raise",
        f"{SHARDED_DOC}#where-it-differs-on-purpose",
        lambda s: not flat(s) and s.impl == "RuntimeError" and not s.torch_words
        and "that fully_shard does not train" in s.impl_words,
    ),
    Explanation(
        "hooks on parameters that were unsharded by hand before the first forward",
        "torch computes with the parameters they are on, ours with those that this forward gathers",
        f"{SHARDED_DOC}#where-it-differs-on-purpose",
        lambda s: not flat(s) and s.name.startswith(("grad", "parameter", "whole", "norm"))
        and attached_unsharded(s),
    ),
    Explanation(
        "gradients of extensions that compute in bf16",
        "torch sums them in bf16, ours in reduce_dtype or the parameters' own",
        f"{SHARDED_DOC}#where-it-differs-on-purpose",
        lambda s: not flat(s) and s.name.startswith("grad")
        and any(block.extension == "half" for block in s.program.model.blocks) and only_rounded(s, 2.0**-7),
    ),
    Explanation(
        "extensions of several inputs where nothing is sharded",
        "torch gathers nothing and gives them one (ValueError), ours gives all",
        f"{SHARDED_DOC}#where-it-differs-on-purpose",
        lambda s: not flat(s) and refused(s, "not enough values to unpack") and not s.impl_words
        and any(block.extension == "scaled" for block in s.program.model.blocks)
        and s.program.wrap.mesh[-1:] == (1,),
    ),
    Explanation(
        "_apply_optimizer_in_backward of fully_shard",
        "torch's optimizers never see a gradient, ours step",
        f"{SHARDED_DOC}#where-it-differs-on-purpose",
        lambda s: not flat(s) and earlier(s, ops.OptimizerInBackward, applied=True)
        and not s.torch_words and not s.impl_words,
    ),
    Explanation(
        "extensions whose gradients have another dtype than others of the unit",
        "torch reduces all in one collective and asks for one dtype; ours casts them",
        f"{SHARDED_DOC}#where-it-differs-on-purpose",
        lambda s: refused(s, "FSDP reduce-scatter expects uniform gradient dtype") and not s.impl_words
        and any(block.extension for block in s.program.model.blocks),
    ),
    Explanation(
        "padded rows of a number of ranks",
        "between forward and backward torch cuts the padded rows, ours those of torch.chunk",
        f"{SHARDED_DOC}#where-it-differs-on-purpose",
        lambda s: not flat(s) and type(s.program.wrap.reshard) is int and s.name.startswith("parameter")
        and isinstance(s.torch, Value) and isinstance(s.impl, Value) and s.torch.shape == s.impl.shape
        and s.impl.shape[0] % s.program.ranks != 0,
        ends=False,
    ),
    Explanation(
        "parameters shown after a forward in inference mode",
        "resharded to a smaller group torch's are inference tensors, which cannot be trained",
        f"{SHARDED_DOC}#where-it-differs-on-purpose",
        lambda s: not flat(s) and type(s.program.wrap.reshard) is int and not s.impl_words
        and refused(s, "Setting requires_grad=True on inference tensor"),
    ),
    Explanation(
        "a unit called several times under reentrant checkpoints",
        "torch leaves it gathered, and its gradients unreduced; ours are the plain model's",
        f"{SHARDED_DOC}#where-it-differs-on-purpose",
        lambda s: (not flat(s) or bool(s.program.wrap.precision)) and earlier(s, ops.Backward)
        and not s.torch_words and not s.impl_words
        and s.name.startswith(("grad", "parameter", "requires_grad", "whole", "loss", "norm"))
        and any(
            block.checkpoint == "reentrant" and s.program.model.order.count(number) > 1
            for number, block in enumerate(s.program.model.blocks)
        ),
    ),
    Explanation(
        "units that no forward used, in a backward without communication",
        "torch's fails there (AttributeError), or in the next backward, where gradients have two dtypes",
        f"{SHARDED_DOC}#where-it-differs-on-purpose",
        lambda s: not flat(s) and runs_backward(s) and not s.impl_words
        and (
            refused(s, "'FSDPParam' object has no attribute '_unsharded_param'")
            or (refused(s, "FSDP reduce-scatter expects uniform gradient dtype") and earlier(s, ops.NoSync))
        ),
    ),
    Explanation(
        "written to the root between forward and backward, in a group of one",
        "torch shows it gathered, in a copy, and loses what is written there; ours shows and keeps its shard",
        f"{SHARDED_DOC}#where-it-differs-on-purpose",
        lambda s: not flat(s) and s.program.wrap.mesh[-1:] == (1,) and earlier(s, ops.Write)
        and s.name.startswith("parameter") and not s.torch_words and not s.impl_words,
    ),
    Explanation(
        "written to parts of a smaller group between forward and backward",
        "torch's backward computes with what is written there, ours with the values of its forward",
        f"{SHARDED_DOC}#where-it-differs-on-purpose",
        lambda s: not flat(s) and type(s.program.wrap.reshard) is int and earlier(s, ops.Write)
        and earlier(s, ops.Backward) and s.name.startswith("grad")
        and not s.torch_words and not s.impl_words,
    ),
    Explanation(
        "a stream that is none, for hooks on CPUs",
        "torch's backward fails (AttributeError); ours has no streams there",
        f"{SHARDED_DOC}#where-it-differs-on-purpose",
        lambda s: not flat(s) and earlier(s, ops.Misuse, what="hook_text") and runs_backward(s)
        and refused(s, "object has no attribute 'wait_stream'") and not s.impl_words,
    ),
]  # fmt: skip
