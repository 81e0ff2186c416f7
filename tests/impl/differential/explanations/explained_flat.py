"""Explained differences of ``FullyShardedDataParallel``."""

from __future__ import annotations

from differential import operations as ops
from differential.around import CallInside, OrderedOptimizer
from differential.explanations.explained_around import AROUND
from differential.explanations.situation import (
    Explanation,
    between_passes,
    dropped_gradients,
    earlier,
    flat,
    frozen,
    in_order,
    keeps_units,
    last_saved,
    left_out,
    other_form,
    other_shape,
    refused,
    replaced_after_optimizer,
    runs_backward,
    shows_freed,
    since_built,
    two_graphs,
    views_comparable,
    written_after_evaluation,
)
from differential.ranks.observing import Value

FLAT_DOC = "docs/impl-fsdp1.md"

FLAT: list[Explanation] = [
    *AROUND,
    Explanation(
        "two graphs at once",
        "torch's FSDP1 frees parameters that the second backward needs (RuntimeError), or does not reduce it",
        f"{FLAT_DOC}#differences-from-torch",
        lambda s: flat(s) and two_graphs(s) and not s.impl_words
        and ("setStorage" in s.torch_words or s.name.startswith(("grad", "parameter"))
             or (s.name.startswith("requires_grad") and s.torch == "missing")),
    ),
    Explanation(
        "SHARD_GRAD_OP between forward and backward",
        "torch shows whole views of original parameters there, ours the parameters themselves",
        f"{FLAT_DOC}#differences-from-torch",
        lambda s: flat(s, originals=True) and keeps_units(s)
        and between_passes(s) and (
            (s.name.startswith("parameter") and other_form(s))
            or s.name.startswith("requires_grad")
            or (s.name.startswith("grad") and s.torch is None)
            or s.name == "norm"
            or (isinstance(s.operation, ops.MakeOptimizer | OrderedOptimizer)
                and refused(s, "optimize a non-leaf Tensor"))
            or (isinstance(s.operation, ops.RequireGrad) and refused(s, "requires_grad flags of leaf"))
        ),
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
        lambda s: flat(s, forward_prefetch=True) and s.name.startswith(("parameter", "get_parameter"))
        and any(isinstance(each, ops.Forward) and each.skip for each in s.program.operations[: s.index + 1]),
        ends=False,
    ),
    Explanation(
        "values written while units stay gathered",
        "torch computes with the old ones",
        f"{FLAT_DOC}#differences-from-torch",
        lambda s: flat(s) and s.name.startswith(("loss", "whole")) and written_after_evaluation(s)
        and not s.impl_words,
    ),
    Explanation(
        "reentrant checkpoints inside of a unit",
        "where an input needs gradients, torch frees the unit before it is recomputed (RuntimeError)",
        f"{FLAT_DOC}#differences-from-torch",
        lambda s: flat(s) and runs_backward(s) and not s.impl_words
        and any(refused(s, words) for words in ("setStorage", "is not allocated yet", "must be a matrix"))
        and any(block.checkpoint == "reentrant" for block in s.program.model.blocks),
    ),
    Explanation(
        "tied weights in a lower precision that is kept for gradients",
        "torch's backward gives them a gradient of that dtype (RuntimeError); ours casts it",
        f"{FLAT_DOC}#differences-from-torch",
        lambda s: flat(s, keep_low=True) and s.program.model.tied and runs_backward(s) and not s.impl_words
        and refused(s, "attempting to assign a gradient with dtype"),
    ),
    Explanation(
        "a warning for clipping without gradients",
        "torch's original parameters on the host have zeros there, ours None, as in the plain model",
        f"{FLAT_DOC}#differences-from-torch",
        lambda s: flat(s, originals=True, offload=True) and isinstance(s.operation, ops.Clip)
        and s.name == "warned" and s.impl == ["no gradients"],
        ends=False,
    ),
    Explanation(
        "a state dict after one that was refused inside of forward or backward",
        "torch stays in the middle of the refused one (AssertionError)",
        f"{FLAT_DOC}#where-state-dicts-differ-from-torchs",
        lambda s: flat(s) and earlier(s, CallInside, call="state_dict") and not s.impl_words
        and refused(s, "_unshard_params_ctx[module] is not None"),
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
        "offloaded flat parameters that no backward used",
        "torch has their last gradient again, or zeros, ours None as in the plain model",
        f"{FLAT_DOC}#differences-from-torch",
        lambda s: flat(s, originals=False, offload=True) and "grad" in s.name.split() and s.impl is None
        and isinstance(s.torch, Value) and left_out(s)
        and (earlier(s, ops.ZeroGrad) or not s.torch.elements.any()),
    ),
    Explanation(
        "summoned gradients of a lower precision that is kept for them",
        "torch gives them to parameters of full precision (RuntimeError), ours shows them",
        f"{FLAT_DOC}#differences-from-torch",
        lambda s: flat(s, originals=True, keep_low=True) and earlier(s, ops.Backward)
        and not s.impl_words and (
            (isinstance(s.operation, ops.Summon) and s.operation.with_grads
             and refused(s, "attempting to assign a gradient with dtype"))
            or (s.name.startswith("whole") and s.torch == "missing")
            or (s.name, s.torch, s.impl) == ("whole error", "RuntimeError", "missing")
        ),
    ),
    Explanation(
        "optimizer states of original parameters without a gradient",
        "torch's got zeros for gradients and so have states, ours none, as in the plain model",
        f"{FLAT_DOC}#where-it-is-not-torchs",
        lambda s: flat(s, originals=True) and isinstance(s.operation, ops.SaveOptimizer)
        and ((s.name == "optimizer parameters" and set(s.impl) < set(s.torch)) or s.impl == "missing"),
        ends=False,
    ),
    Explanation(
        "a hook on the gradient of a flat parameter",
        "torch has none to show after one that drops it (AssertionError), ours goes on, perhaps to a "
        "communication hook that does not fit",
        f"{FLAT_DOC}#differences-from-torch",
        lambda s: flat(s) and earlier(s, ops.OptimizerInBackward, applied=False) and runs_backward(s)
        and (not s.impl_words or "its communication hook is called with" in s.impl_words)
        and refused(s, "that received a gradient in the post-backward should use `_saved_grad_shard`"),
    ),
    Explanation(
        "LOCAL state dicts that lack a flat parameter",
        "torch refuses them (AssertionError) also with strict=False, ours counts it as missing",
        f"{FLAT_DOC}#where-it-is-not-torchs",
        lambda s: flat(s) and isinstance(s.operation, ops.LoadState) and s.operation.missing
        and not s.impl_words and refused(s, "No `FlatParameter` in `state_dict` for this FSDP instance"),
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
        "a state dict refused for an optimizer in backward of flat parameters",
        "after the refusal torch leaves the units gathered and shows them so, ours shows the sharded ones",
        f"{FLAT_DOC}#differences-from-torch",
        lambda s: flat(s, originals=False) and isinstance(s.operation, ops.SaveState)
        and earlier(s, ops.OptimizerInBackward, applied=True)
        and s.name.startswith(("requires_grad", "parameter")) and "missing" in (s.torch, s.impl),
    ),
    Explanation(
        "batch normalisation of float64 under mixed precision",
        "torch gives it float32 inputs and fails, ours the dtype of its parameters",
        f"{FLAT_DOC}#differences-from-torch",
        lambda s: flat(s) and refused(s, "mixed dtype (CPU)"),
    ),
    Explanation(
        "an optimizer in backward attached after the first forward",
        "torch's never steps, ours does",
        f"{FLAT_DOC}#differences-from-torch",
        lambda s: flat(s) and earlier(s, ops.OptimizerInBackward)
        and not s.impl_words and not s.torch_words
        and s.name.startswith(("grad", "parameter", "whole", "norm", "loss")),
    ),
    Explanation(
        "freezing after wrapping in mid-iteration",
        "torch fails (AssertionError); ours acts from the next forward on",
        f"{FLAT_DOC}#differences-from-torch",
        lambda s: flat(s) and earlier(s, ops.RequireGrad) and s.torch == "AssertionError"
        and not s.impl_words,
    ),
    Explanation(
        "gradients accumulated for a unit that the last microbatch skips",
        "torch leaves them on each rank, unreduced; ours reduces them",
        f"{FLAT_DOC}#differences-from-torch",
        lambda s: flat(s) and earlier(s, ops.NoSync)
        and ("grad" in s.name.split() or "_saved_grad_shard" in s.torch_words
             or (isinstance(s.operation, ops.Step) and not s.impl_words
                 and (s.name.startswith(("parameter", "whole")) or refused(s, "must match the size"))))
        and any(isinstance(each, ops.Forward) and each.skip for each in s.program.operations[: s.index + 1]),
    ),
    Explanation(
        "CPU offload of what is summoned",
        "torch frees the memory it shows where parameters are on the CPU already",
        f"{FLAT_DOC}#differences-from-torch",
        lambda s: flat(s) and isinstance(s.operation, ops.Summon | ops.SaveState) and s.operation.offload
        and not s.impl_words and (shows_freed(s) or refused(s, "setStorage")
        or refused(s, "NO_SHARD is not supported yet") or refused(s, "offload_to_cpu=True is not supported")),
    ),
    Explanation(
        "a state dict of rank 0 without sharding",
        "torch ignores rank0_only there, so that all ranks have it",
        f"{FLAT_DOC}#where-state-dicts-differ-from-torchs",
        lambda s: flat(s, strategy="NO_SHARD") and isinstance(s.operation, ops.SaveState)
        and s.operation.kind == "full" and s.operation.rank0_only
        and s.name.startswith("state ") and s.impl in ("missing", []),
        ends=False,
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
        lambda s: flat(s) and len(s.program.wrap.mesh) == 2 and s.program.wrap.mesh[1] == 1
        and s.name != "error" and (earlier(s, ops.Backward) or s.name.startswith(("attribute", "said"))),
    ),
    Explanation(
        "LOCAL state dicts of original parameters",
        "torch's have keys of both kinds and cannot be loaded",
        f"{FLAT_DOC}#where-it-is-not-torchs",
        lambda s: flat(s, originals=True) and isinstance(s.operation, ops.SaveState | ops.LoadState)
        and (saved := last_saved(s)) is not None and saved.kind == "local"
        and s.name.startswith(("state", "error", "missing", "unexpected")),
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
        lambda s: flat(s) and bool(s.program.wrap.precision)
        and (s.name.startswith("buffer")
             or (isinstance(s.operation, ops.SaveState) and s.name.endswith(".count")))
        and not any(isinstance(each, ops.Forward) for each in since_built(s)),
        ends=False,
    ),
    Explanation(
        "CPU offload of original parameters: replaced ones",
        "torch's optimizer goes on to change what replaced the parameter that it holds, ours does not",
        f"{FLAT_DOC}#differences-from-torch",
        lambda s: flat(s, originals=True, offload=True) and isinstance(s.operation, ops.Step)
        and replaced_after_optimizer(s) and s.name.startswith(("parameter", "whole")),
    ),
    Explanation(
        "CPU offload of original parameters: dropped gradients",
        "zero_grad() sets them to None, and torch has them again from the next forward on; ours stay dropped",
        f"{FLAT_DOC}#differences-from-torch",
        lambda s: flat(s, originals=True, offload=True) and dropped_gradients(s)
        and ("grad" in s.name.split() or s.name in ("norm", "warned")),
    ),
    Explanation(
        "accumulated on the host without sharding",
        "torch's next forward shows zeros for what no_sync() accumulated, and adds to these",
        f"{FLAT_DOC}#differences-from-torch",
        lambda s: flat(s, strategy="NO_SHARD", offload=True) and earlier(s, ops.NoSync)
        and in_order(s, ops.Backward, ops.Forward) and ("grad" in s.name.split() or s.name == "norm"),
    ),
    Explanation(
        "gradients of frozen original parameters",
        "without sharding torch shows them in no_sync, ours None",
        f"{FLAT_DOC}#differences-from-torch",
        lambda s: flat(s, originals=True, strategy="NO_SHARD") and earlier(s, ops.NoSync)
        and "grad" in s.name.split() and s.impl is None and frozen(s),
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
        lambda s: isinstance(s.operation, ops.Summon)
        and (s.operation.rank0_only or (not s.operation.recurse and " blocks." in s.name))
        and s.name.startswith("summoned") and not views_comparable(s.program)
        and isinstance(s.torch, Value) and isinstance(s.impl, Value) and len(s.impl.shape) == 1,
        ends=False,
    ),
    Explanation(
        "changes of parts where rank 0 alone has whole parameters",
        "torch aligns original parameters in the flat one, so that the other ranks change other parts",
        f"{FLAT_DOC}#differences-from-torch",
        lambda s: earlier(s, ops.Summon, rank0_only=True, change=True) and not views_comparable(s.program)
        and s.name.startswith("whole"),
    ),
]  # fmt: skip
