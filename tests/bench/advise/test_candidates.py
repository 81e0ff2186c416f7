"""What could be changed in a script is read off what it was seen to do, with its line and what to write."""

from __future__ import annotations

from typing import Any

from fsdpbench.answers.advise.candidates import Kind, candidates
from fsdpbench.reports.result import Result

CALL = {"api": "fully_shard", "file": "/a/train.py", "line": 41, "text": "fully_shard(model)", "count": 1}
PLAIN: dict[str, Any] = {"param_dtype": "torch.bfloat16", "offload": False, "mesh": None}
MODEL = {
    "class": "Model",
    "blocks": {"path": "layers", "class": "Block", "count": 12},
    "stacks": {"layers": 12},
    "units": 13,
    "unit_classes": {"Block": 12},
    "unwrapped_root": False,
    "unsharded_parameters": 0,
    "dtype": "torch.float32",
}
SEEN: dict[str, Any] = {
    "sharding": [{**CALL, "arguments": PLAIN}],
    "model": MODEL,
    "optimizers": [],
    "loaders": [],
    "checkpointing": None,
    "forward_prefetch": None,
    "batch": None,
    "waits": [],
    "computes_in": "bf16",
}


def found(seen: dict[str, Any], **result: Any) -> dict[str, Any]:
    config = {"gpus": 64, "gpus_per_node": 8}
    content = {"status": "ok", "config": config, "script": {"observed": SEEN | seen}, **result}
    every = candidates(Result.of(content))
    return {each.variation: each for each in every}


def call(api: str = "fully_shard", **arguments: Any) -> dict[str, Any]:
    return {"sharding": [{**CALL, "api": api, "arguments": PLAIN | arguments}]}


def test_a_wait_in_every_step_is_a_fault_with_its_line() -> None:
    wait = {"file": "/a/train.py", "line": 57, "text": "print(loss.item())", "per_step": 1.0, "copies": False}
    each = found({"waits": [wait]})["no-waits"]
    assert (each.kind, each.place) == (Kind.FAULT, "train.py:57")
    assert each.write == "if step % 100 == 0: print(loss.item())"
    copy = wait | {"text": 'x.to("cuda", non_blocking=True)', "copies": True}
    loader = {"file": "/a/train.py", "line": 50, "batch_size": None, "num_workers": 0, "pin_memory": False}
    each = found({"waits": [copy], "loaders": [loader]})["no-waits"]
    assert "non_blocking=True has no effect" in each.what
    assert "pin_memory=True in the DataLoader" in each.write
    assert "DataLoader" not in found({"waits": [copy]})["no-waits"].write, "the script has none"


def test_saving_on_the_host_is_a_choice_that_memory_may_not_need() -> None:
    line = {"file": "/a/train.py", "line": 50, "text": "with save_on_cpu(pin_memory=True):", "span": None}
    each = found({"saved_on_host": line})["no-save-on-cpu"]
    assert (each.kind, each.place) == (Kind.MISTAKE, "train.py:50")
    assert not isinstance(each.edits, str)
    wrapped = found({"saved_on_host": line | {"text": "loss = model(x)"}})["no-save-on-cpu"]
    assert wrapped.edits == "save_on_cpu is called elsewhere", "by offload_wrapper, say"


def test_stages_and_two_stacks_of_blocks_are_fine() -> None:
    stages = {
        "blocks": {"path": "stages", "class": "Stage", "count": 4},
        "units": 25,
        "unit_classes": {"Block": 24},
    }
    several = {"stacks": {"stages.0.blocks": 6, "stages.1.blocks": 18}}
    assert "wrap-blocks" not in found({"model": MODEL | stages | several})
    assert "wrap-blocks" in found({"model": MODEL | stages | {"stacks": {}}})


def test_units_other_than_the_blocks_are_told() -> None:
    alone = found({"model": MODEL | {"units": 1, "unit_classes": {}}})["wrap-blocks"]
    assert (alone.kind, alone.place) == (Kind.FAULT, "train.py:41")
    assert alone.write == "before it: for block in model.layers: fully_shard(block)"
    fine = found({"model": MODEL | {"units": 60, "unit_classes": {"Linear": 59}}})["wrap-blocks"]
    assert fine.kind is Kind.MISTAKE
    assert "wrap-blocks" not in found({})
    policy = found({"model": MODEL | {"units": 1, "unit_classes": {}}, **call("FullyShardedDataParallel")})
    assert policy["wrap-blocks"].write == "auto_wrap_policy=ModuleWrapPolicy({Block})"


def test_a_model_around_its_units_is_a_fault() -> None:
    root = found({"model": MODEL | {"unwrapped_root": True, "unsharded_parameters": 1_000}})["wrap-root"]
    assert root.kind is Kind.WRONG, "ranks train apart"
    assert "1,000 parameters" in root.what


def test_each_api_has_its_own_words() -> None:
    for api, words in (
        ("fully_shard", {"keep": "reshard_after_forward=False", "hybrid": "mesh=init_device_mesh"}),
        (
            "FullyShardedDataParallel",
            {"keep": "SHARD_GRAD_OP", "hybrid": "HYBRID_SHARD", "prefetch": "forward_prefetch"},
        ),
    ):
        every = found(call(api))
        assert {name: word in every[name].write for name, word in words.items()} == dict.fromkeys(words, True)
    assert '(8, 8), mesh_dim_names=("replicate", "shard")' in found({})["hybrid"].write


def test_what_the_script_has_already_is_not_tried() -> None:
    assert "keep" not in found(call(reshard_after_forward=False))
    assert "bf16" not in found({})
    assert "hybrid" not in found(call(mesh=2))
    assert "compile" not in found({}, compiled=True)
    made = {"file": "/a/train.py", "line": 50, "text": "", "has_fused": True, "fused": True}
    assert "fused" not in found({"optimizers": [made]})
    assert found({"optimizers": [made | {"fused": False}]})["fused"].place == "train.py:50"


def test_fp32_and_offloaded_shards_are_tried_otherwise() -> None:
    slow = found({**call(param_dtype=None, offload=True), "computes_in": "fp32"})
    assert "mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16" in slow["bf16"].write
    assert slow["no-offload"].write == "without offload_policy="


def test_a_full_memory_is_relieved_and_a_free_one_used() -> None:
    kept = call("FullyShardedDataParallel", sharding_strategy="SHARD_GRAD_OP")
    assert "reshard" in found(kept, alloc_retries_per_step=2.0)
    place = {"file": "/a/train.py", "line": 38, "text": "block = checkpoint_wrapper(block)"}
    assert found({"checkpointing": place})["no-checkpoint"].write == f"without: {place['text']}"


def test_the_batch_is_the_parsers_or_the_loaders() -> None:
    loader = {"file": "/a/train.py", "line": 60, "batch_size": 8, "num_workers": 0, "pin_memory": True}
    assert found({"loaders": [loader]})["double-batch"].write == "batch_size=16"
    assert found({"batch": {"option": "--bs", "value": 2}})["double-batch"].write == "--bs 4"


def test_a_run_without_figures_has_no_candidates() -> None:
    assert candidates(Result.of({"status": "ok", "config": {}, "script": None})) == []


def test_what_is_wrong_at_any_cost_is_named_with_its_line() -> None:
    place = {"file": "/a/train.py", "line": 30, "text": "optimizer = AdamW(model.parameters())"}
    assert found({"backward_in_autocast": place})[""].kind is Kind.FAULT
    assert found({"zeroed": place})["none-grads"].write.startswith("zero_grad(set_to_none=True)")


def test_norms_taken_one_by_one_are_clipped_at_the_same_time() -> None:
    norms = {"file": "/a/train.py", "line": 57, "text": "n = p.grad.norm().item()", "per_step": 90.0}
    wait = {"file": "/a/train.py", "line": 57, "text": "n = p.grad.norm().item()", "copies": False}
    alone, waiting = found({"norms": norms})[""], found({"norms": norms, "waits": [wait]})["no-waits"]
    assert "90 norms" in alone.what
    assert "CPU waits" in waiting.what
    assert "clip_grad_norm_" in waiting.write


def test_parameters_gathered_in_fp32_under_autocast_are_told() -> None:
    each = found(call(param_dtype=None))["bf16"]
    assert "gathers fp32 parameters and computes in bf16" in each.what
    assert "bf16" not in found({**call(param_dtype=None), "model": MODEL | {"dtype": "torch.bfloat16"}})


def test_several_blocks_as_one_unit_are_other_units_than_the_blocks() -> None:
    each = found({"sharding": [{**CALL, "arguments": PLAIN, "together": 4}]})["wrap-blocks"]
    assert "4 blocks are one unit" in each.what


def test_what_is_written_for_a_line_that_waits_is_python_and_means_the_same() -> None:
    def write(text: str) -> str:
        wait = {"file": "/a/train.py", "line": 57, "text": text, "copies": False}
        return found({"waits": [wait]})["no-waits"].write

    assert write("if torch.isnan(loss): stop()") == "if step % 100 == 0 and (torch.isnan(loss)): stop()"
    assert write("total += loss.item()") == "total += loss.detach(), and read it every 100 steps"
    assert write("torch.cuda.synchronize()") == "without: torch.cuda.synchronize()"
    assert write("norm = clip_grad_norm_(p, 1.0).item()") == (
        "norm = clip_grad_norm_(p, 1.0).detach(), and read it every 100 steps"
    )
    assert write("total += float(loss)") == "total += loss.detach(), and read it every 100 steps"
    assert write("loss.backward()") == "without what waits in it: loss.backward()"
    assert write("loss = model(x[mask])") == "without what waits in it: loss = model(x[mask])"


def test_what_is_for_finding_errors_is_named_and_not_what_waits_because_of_it() -> None:
    place = {"file": "/a/train.py", "line": 9, "text": "torch.autograd.set_detect_anomaly(True)"}
    wait = {"file": "/a/train.py", "line": 57, "text": "loss.backward()", "copies": False}
    every = found({"anomaly": place, "waits": [wait]})
    assert (every[""].kind, every[""].place, "no-waits" in every) == (Kind.FAULT, "train.py:9", False)
    assert "no-waits" in found({"waits": [wait]})
    outside = found({"launch_blocking": {"file": "", "line": 0, "text": ""}})[""]
    assert (outside.kind, outside.place) == (Kind.FAULT, "")


STEP = {"file": "/a/train.py", "line": 12, "text": "optimizer.step()", "names": ["a.b", "c", "d"], "ranks": 1}


def told(kind: str, cause: str, count: int = 3, **more: Any) -> Any:
    """The one advice on such a finding of gradients."""
    finding = {**STEP, "kind": kind, "cause": cause, "count": count, **more}
    gradients = {"parameters": 26, "world": 8, "without": 0, "findings": [finding]}
    content = {
        "status": "ok",
        "config": {"gpus": 8, "gpus_per_node": 8},
        "script": {"observed": SEEN | {"gradients": gradients}},
    }
    every = candidates(Result.of(content))
    (found,) = [each for each in every if not each.variation]
    return found


def test_gradients_that_do_not_exist_are_named_with_their_cause() -> None:
    early = told("without", "replaced", wrapped_at=41, wrapped_span=[1, 1, 0, 4])
    assert (early.kind, "line 41" in early.what) == (Kind.WRONG, True)
    off = told("without", "off", switch="set_requires_gradient_sync")
    assert (off.kind, off.write) == (
        Kind.WRONG,
        "model.set_requires_gradient_sync(True) before the last backward of a step",
    )
    assert "3 of 26 trainable parameters (a.b, c, ...) have no gradient in any step" in off.what
    assert "outside of no_sync()" in told("apart", "off", switch="no_sync").write
    reentrant = told("without", "reentrant", 24)
    assert (reentrant.kind, "enable_input_require_grads" in reentrant.write) == (Kind.WRONG, True)
    assert told("without", "unused").kind is Kind.FAULT, "a part that is not used is no error"
    assert told("without", "unused", 26).kind is Kind.WRONG


def test_gradients_that_ranks_do_not_exchange_are_named_with_their_cause() -> None:
    alone = told("apart", "group", api="FullyShardedDataParallel", shape=(8, 1), has_mesh=True)
    assert "exchanged in none of these steps" in alone.what
    assert "8x1 device_mesh shards over one rank" in alone.what
    assert alone.write == "sharding_strategy=ShardingStrategy.NO_SHARD, without device_mesh="
    half = told("apart", "group", api="fully_shard", shape=(4,), has_mesh=True, ranks=4)
    assert "reduced over 4 of the 8 ranks only" in half.what
    assert half.write == "without mesh=, for all ranks"
    ddp = told("apart", "group", api="DistributedDataParallel", shape=(4,), has_mesh=False, ranks=4)
    assert ddp.write == "without process_group=, for all ranks"
    ignored = told("apart", "ignored", ignored="ignored_modules")
    assert "ignored_modules=" in ignored.what
    assert "not reduced after the last backward" in told("late", "off", switch="no_sync").what


def test_a_wait_in_a_helper_is_mended_where_the_loop_calls_it() -> None:
    wait = {"file": "/a/train.py", "line": 3, "text": "return value.item()", "copies": False, "per_step": 1.0}
    called = {"file": "/a/train.py", "line": 40, "text": "log(step, loss)"}
    first = found({"waits": [wait | {"called": called}]})["no-waits"]
    assert (first.place, first.write) == ("train.py:3", "if step % 100 == 0: log(step, loss)")
    assert "train.py:40" in first.what
