"""Differences that are meant or torch's own fault, each with its reason and the place that documents it."""

from __future__ import annotations

from differential import operations as ops
from differential.observing import Value
from differential.situation import (
    Explanation,
    Situation,
    earlier,
    flat,
    frozen,
    in_order,
    keeps_units,
    other_shape,
    refused,
    two_graphs,
    views_comparable,
    written_after_evaluation,
)  # fmt: skip

FLAT_DOC = "docs/impl-fsdp1.md"
SHARDED_DOC = "docs/impl-fsdp2.md"


EXPLANATIONS: list[Explanation] = [
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
        lambda s: refused(s, "Expected out tensor to have dtype") and earlier(s, ops.Convert),
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
        "two graphs at once",
        "torch's FSDP1 frees parameters that the second backward needs (RuntimeError), or does not reduce it",
        f"{FLAT_DOC}#differences-from-torch",
        lambda s: flat(s) and two_graphs(s) and not s.impl_words
        and ("setStorage" in s.torch_words or s.name.startswith("grad") or s.name.startswith("parameter")),
    ),
    Explanation(
        "SHARD_GRAD_OP between forward and backward",
        "torch shows whole views of original parameters there, ours the parameters themselves",
        f"{FLAT_DOC}#differences-from-torch",
        lambda s: flat(s, originals=True) and keeps_units(s)
        and s.name.startswith(("parameter", "requires_grad", "grad", "norm"))
        and earlier(s, ops.Forward),
        ends=False,
    ),
    Explanation(
        "SHARD_GRAD_OP after no_sync",
        "torch shows whole flat parameters of units that stay gathered, ours the sharded ones",
        f"{FLAT_DOC}#differences-from-torch",
        lambda s: keeps_units(s) and earlier(s, ops.NoSync) and not isinstance(s.operation, ops.Step)
        and (s.name.startswith("grad") or (s.name.startswith("parameter") and other_shape(s))),
        ends=False,
    ),
    Explanation(
        "gathered ahead in forward and then skipped",
        "torch leaves such a unit gathered and shows it so, ours shards it again",
        f"{FLAT_DOC}#differences-from-torch",
        lambda s: flat(s, forward_prefetch=True) and s.name.startswith("parameter")
        and any(isinstance(each, ops.Forward) and each.skip for each in s.program.operations[: s.index + 1]),
        ends=False,
    ),
    Explanation(
        "values written while units stay gathered",
        "torch computes with the old ones",
        f"{FLAT_DOC}#differences-from-torch",
        lambda s: flat(s) and s.name != "error" and written_after_evaluation(s),
    ),
    Explanation(
        "original parameters without a gradient",
        "torch has zeros where others of the unit have one, ours None as in the plain model",
        f"{FLAT_DOC}#differences-from-torch",
        lambda s: flat(s, originals=True) and "grad" in s.name.split() and s.impl is None
        and isinstance(s.torch, Value) and not s.torch.elements.any(),
        ends=False,
    ),
    Explanation(
        "no_sync gradients with reduce_dtype",
        "torch keeps them in param_dtype, ours in the dtype they are summed in",
        f"{FLAT_DOC}#differences-from-torch",
        lambda s: flat(s) and bool(s.program.wrap.precision) and earlier(s, ops.NoSync)
        and "grad" in s.name.split(),
    ),
    Explanation(
        "zero_grad after no_sync",
        "torch keeps what was reduced before and adds it again",
        f"{FLAT_DOC}#differences-from-torch",
        lambda s: flat(s) and in_order(s, ops.NoSync, ops.ZeroGrad) and "grad" in s.name.split(),
    ),
    Explanation(
        "new data of a flat parameter",
        "torch uses it once and drops it, ours keeps it",
        f"{FLAT_DOC}#differences-from-torch",
        lambda s: flat(s, originals=False) and earlier(s, ops.Write, how="data") and s.name != "error"
        and not isinstance(s.operation, ops.Write),
    ),
    Explanation(
        "a parameter assigned where only a flat one is trained",
        "torch drops it; ours refuses",
        f"{FLAT_DOC}#differences-from-torch",
        lambda s: flat(s, originals=False) and earlier(s, ops.Write, how="replace"),
    ),
    Explanation(
        "summoned without writing back where nothing is sharded",
        "torch keeps the changes, ours drops them",
        f"{FLAT_DOC}#differences-from-torch",
        lambda s: flat(s, strategy="NO_SHARD") and earlier(s, ops.Summon, change=True, writeback=False)
        and not s.torch_words and not s.impl_words,
    ),
    Explanation(
        "clipping gradients of float64",
        "torch computes norms in float32 and fails; ours in float64",
        f"{FLAT_DOC}#differences-from-torch",
        lambda s: flat(s) and isinstance(s.operation, ops.Clip)
        and refused(s, "convertible without narrowing"),
    ),
    Explanation(
        "data of another shape",
        "both refuse; what torch raises depends on the shapes, and ours may be told a call earlier",
        f"{FLAT_DOC}#differences-from-torch",
        lambda s: flat(s) and earlier(s, ops.Write, how="wrong") and s.name in ("error", "whole error")
        and s.impl in ("AssertionError", "RuntimeError"),
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
        "an empty list of modules",
        "ours says so (ValueError), torch's fails inside (IndexError)",
        f"{SHARDED_DOC}#where-it-differs-on-purpose",
        lambda s: isinstance(s.operation, ops.Misuse) and s.operation.what == "empty_list"
        and s.impl == "ValueError",
        ends=False,
    ),
    Explanation(
        "unsharded by hand before the first forward",
        "ours shards a part again when the root is found, torch when its forward ends",
        f"{SHARDED_DOC}#where-it-differs-on-purpose",
        lambda s: not flat(s) and s.name.startswith(("parameter", "grad")) and earlier(s, ops.Unshard)
        and not earlier(s, ops.Forward),
        ends=False,
    ),
    Explanation(
        "settings that differ in one model",
        "torch refuses them at the first forward, ours when it is wrapped",
        f"{FLAT_DOC}#differences-from-torch",
        lambda s: flat(s) and isinstance(s.operation, ops.Misuse) and s.impl == "ValueError"
        and "of a model need the same" in s.impl_words,
        ends=False,
    ),
    Explanation(
        "an optimizer in backward of flat parameters",
        "torch's never steps, ours refuses at the next gather",
        f"{FLAT_DOC}#differences-from-torch",
        lambda s: flat(s, originals=False) and (
            "optimizer in backward steps with use_orig_params" in s.impl_words
            or "optimizer in backward only supported with use_orig_params" in s.torch_words
        ),
    ),
    Explanation(
        "_apply_optimizer_in_backward of fully_shard",
        "torch's optimizers never see a gradient, ours step",
        f"{SHARDED_DOC}#where-it-differs-on-purpose",
        lambda s: not flat(s) and earlier(s, ops.OptimizerInBackward, applied=True)
        and not s.torch_words and not s.impl_words,
    ),
    Explanation(
        "batch normalisation of float64 under mixed precision",
        "torch gives it float32 inputs and fails, ours the dtype of its parameters",
        f"{FLAT_DOC}#differences-from-torch",
        lambda s: flat(s) and refused(s, "mixed dtype (CPU)"),
    ),
    Explanation(
        "CPU offload without sharding and without a GPU",
        "torch asks a CPU stream to synchronize and fails",
        f"{FLAT_DOC}#differences-from-torch",
        lambda s: flat(s, offload=True) and refused(s, "'Stream' object has no attribute 'synchronize'"),
    ),
    Explanation(
        "an optimizer in backward attached after the first forward",
        "torch's never steps, ours does",
        f"{FLAT_DOC}#differences-from-torch",
        lambda s: flat(s) and earlier(s, ops.OptimizerInBackward)
        and not s.impl_words and not s.torch_words,
    ),
    Explanation(
        "freezing after wrapping in mid-iteration",
        "torch fails (AssertionError); ours acts from the next forward on",
        f"{FLAT_DOC}#differences-from-torch",
        lambda s: flat(s) and earlier(s, ops.RequireGrad) and s.torch == "AssertionError"
        and not s.impl_words,
    ),
    Explanation(
        "extensions beside plain parameters while accumulating",
        "torch reduces both in one collective and asks for one dtype; ours has units of their own",
        f"{SHARDED_DOC}#where-it-differs-on-purpose",
        lambda s: refused(s, "FSDP reduce-scatter expects uniform gradient dtype") and not s.impl_words
        and any(block.extension for block in s.program.model.blocks),
    ),
    Explanation(
        "gradients accumulated for a unit that the last microbatch skips",
        "torch leaves them on each rank, unreduced; ours reduces them",
        f"{FLAT_DOC}#differences-from-torch",
        lambda s: flat(s) and earlier(s, ops.NoSync)
        and ("grad" in s.name.split() or "_saved_grad_shard" in s.torch_words)
        and any(isinstance(each, ops.Forward) and each.skip for each in s.program.operations[: s.index + 1]),
    ),
    Explanation(
        "CPU offload of what is summoned",
        "torch frees the memory it shows where parameters are on the CPU already",
        f"{FLAT_DOC}#differences-from-torch",
        lambda s: flat(s) and isinstance(s.operation, ops.Summon | ops.SaveState) and s.operation.offload
        and not s.impl_words,
    ),
    Explanation(
        "LOCAL state dicts with a mesh",
        "ours refuses at once",
        f"{FLAT_DOC}#where-it-is-not-torchs",
        lambda s: flat(s) and "LOCAL_STATE_DICT does not go with a device_mesh" in s.impl_words,
        ends=False,
    ),
    Explanation(
        "deep copy of a flat wrapper",
        "torch's fails in the middle (RuntimeError) or crashes, ours refuses (TypeError)",
        f"{FLAT_DOC}#differences-from-torch",
        lambda s: isinstance(s.operation, ops.Copy) and s.torch == "RuntimeError" and s.impl == "TypeError",
        ends=False,
    ),
    Explanation(
        "sync_module_states on a CPU",
        "gloo can broadcast from a CPU; torch asks for a GPU whatever the backend",
        f"{FLAT_DOC}#differences-from-torch",
        lambda s: refused(s, "`sync_module_states=True`, which requires them to be on GPU"),
    ),
    Explanation(
        "scalar parameters",
        "ours takes them; torch refuses",
        f"{FLAT_DOC}#differences-from-torch",
        lambda s: flat(s) and refused(s, "FSDP doesn't support scalar parameters"),
        ends=False,
    ),
    Explanation(
        "whole gradients of flat parameters",
        "summon_full_params(with_grads=True) shows them; torch has it for original parameters only",
        f"{FLAT_DOC}#differences-from-torch",
        lambda s: refused(s, "with_grads=True, use_orig_params="),
    ),
    Explanation(
        "hybrid sharding with shard groups of one rank",
        "torch turns it into NO_SHARD of that one rank and never sums over the replicas",
        f"{FLAT_DOC}#differences-from-torch",
        lambda s: flat(s, mesh=(2, 1)) and s.name != "error"
        and (earlier(s, ops.Backward) or s.name.startswith("attribute")),
    ),
    Explanation(
        "LOCAL state dicts of original parameters",
        "torch's have keys of both kinds and cannot be loaded",
        f"{FLAT_DOC}#where-it-is-not-torchs",
        lambda s: flat(s, originals=True) and earlier(s, ops.SaveState, kind="local")
        and isinstance(s.operation, ops.SaveState | ops.LoadState),
    ),
    Explanation(
        "first forward in inference mode",
        "torch makes its flat parameters there and cannot train them afterwards",
        f"{FLAT_DOC}#differences-from-torch",
        lambda s: flat(s) and earlier(s, ops.Forward, mode="inference")
        and ("Error" in str(s.torch) or s.torch == "missing"),
    ),
    Explanation(
        "buffers before the first forward",
        "ours are cast when the module is wrapped",
        f"{FLAT_DOC}#differences-from-torch",
        lambda s: flat(s) and s.name.startswith("buffer") and bool(s.program.wrap.precision)
        and not earlier(s, ops.Forward),
        ends=False,
    ),
    Explanation(
        "CPU offload of original parameters",
        "torch's differs from its own result without offload",
        f"{FLAT_DOC}#differences-from-torch",
        lambda s: flat(s, originals=True, offload=True) and not s.impl_words
        and not s.name.startswith(("requires_grad", "buffer", "training")),
    ),
    Explanation(
        "gradients of frozen original parameters",
        "without sharding torch shows them in no_sync, ours None",
        f"{FLAT_DOC}#differences-from-torch",
        lambda s: flat(s, originals=True, strategy="NO_SHARD") and earlier(s, ops.NoSync)
        and "grad" in s.name.split() and s.impl is None and frozen(s),
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
        "sharded optimizer state where nothing is sharded",
        "torch's are ShardedTensors, ours whole tensors",
        f"{FLAT_DOC}#where-it-is-not-torchs",
        lambda s: flat(s, strategy="NO_SHARD") and isinstance(s.operation, ops.SaveOptimizer)
        and isinstance(s.torch, Value) and s.torch.kind.startswith("ShardedTensor")
        and isinstance(s.impl, Value) and s.impl.kind == "tensor",
    ),
    Explanation(
        "original parameters of units that are not summoned",
        "torch aligns them in the flat parameter, so that ranks have other parts",
        f"{FLAT_DOC}#differences-from-torch",
        lambda s: isinstance(s.operation, ops.Summon) and not s.operation.recurse
        and s.name.startswith("summoned blocks.") and not views_comparable(s.program)
        and isinstance(s.torch, Value) and isinstance(s.impl, Value) and len(s.impl.shape) == 1,
        ends=False,
    ),
]  # fmt: skip


def explanation_of(situation: Situation) -> Explanation | None:
    """The first that applies."""
    return next((each for each in EXPLANATIONS if each.applies(situation)), None)
