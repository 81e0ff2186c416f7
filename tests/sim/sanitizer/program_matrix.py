"""Which programs run on which system."""

from __future__ import annotations

from typing import Any

import torch
import training_programs as programs
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from trained_models import ALL_LOW, LOW, Case


def _hook_stream(model: Any) -> None:
    """Replicas summed by a hook on a stream of the user's."""
    stream = torch.sim.Stream()
    for module in (*model.blocks, model):
        module.set_all_reduce_hook(_halve, stream=stream)


def _hook(model: Any) -> None:
    for module in (*model.blocks, model):
        module.set_all_reduce_hook(_halve)


def _halve(gradient: torch.Tensor) -> None:
    gradient.div_(2)


def _several_inputs(model: Any) -> None:
    model.set_reduce_scatter_max_input_buffers(3)


def _asynchronous(model: Any) -> None:
    for module in (*model.blocks, model):
        module._set_unshard_async_op(True)


_FSDP2: list[tuple[Any, dict[str, Any]]] = [
    (programs.train, {}),
    (programs.train, {"policy": LOW}),
    (programs.train, {"reshard_after_forward": False}),
    (programs.train, {"headless": True}),
    (programs.evaluate_after, {"headless": True}),
    (programs.train, {"reshard_after_forward": 2}),
    (programs.accumulate, {"reshard_after_forward": 4, "policy": ALL_LOW}),
    (programs.train, {"mesh": (2, 4)}),
    (programs.accumulate, {"mesh": (2, 4), "policy": LOW}),
    (programs.accumulate_without_all_reduce, {"mesh": (2, 4), "policy": ALL_LOW}),
    (programs.train, {"mesh": (8, 1)}),
    (programs.accumulate_without_sync, {"policy": LOW}),
    (programs.last_backward_by_hand, {}),
    (programs.last_backward_by_hand, {"mesh": (2, 4), "policy": ALL_LOW}),
    (programs.train, {"prefetch": 2}),
    (programs.accumulate, {"prefetch": 1, "policy": LOW, "recompute": True}),
    (programs.train, {"grouped": True}),
    (programs.train, {"offload": True}),
    (programs.accumulate, {"offload": True, "policy": LOW}),
    (programs.save_between, {"offload": True}),
    (programs.train, {"offload": True, "mesh": (2, 4)}),
    (programs.train, {"offload": True, "mesh": (2, 4), "policy": ALL_LOW}),
    (programs.save_between, {"policy": LOW}),
    (programs.clip, {"policy": ALL_LOW}),
    (programs.unshard_by_hand, {}),
    (programs.unshard_by_hand, {"policy": LOW, "reshard_after_forward": False}),
    (programs.unshard_after_the_optimizer, {}),
    (programs.unshard_after_the_optimizer, {"offload": True}),
    (programs.two_forwards, {}),
    (programs.evaluate_between, {"policy": LOW}),
    (programs.optimizer_in_backward, {"policy": LOW}),
    (programs.optimizer_in_backward, {"mesh": (2, 4), "policy": LOW}),
    (programs.fail_in_forward, {}),
    (programs.fail_in_forward, {"prefetch": 2, "reshard_after_forward": 2}),
    (programs.fail_in_backward, {}),
    (programs.fail_in_backward, {"mesh": (2, 4), "policy": LOW}),
    (programs.fail_in_backward, {"offload": True}),
    (programs.give_up_a_backward, {}),
    (programs.give_up_a_backward, {"mesh": (2, 4), "policy": LOW}),
    (programs.give_up_a_backward, {"offload": True}),
    (programs.event_after_the_optimizer, {}),
    (programs.event_after_the_optimizer, {"policy": LOW}),
    (programs.train, {"freeze": True, "recompute": True}),
    (programs.train, {"settle": _hook}),
    (programs.train, {"settle": _hook_stream}),
]
_WRITES_BEFORE_BACKWARD: list[tuple[Any, dict[str, Any]]] = [
    (programs.write_between, {}),
    (programs.write_between, {"reshard_after_forward": 2}),
    (programs.backward_twice, {"policy": LOW}),
]
_DROPS_BEHIND_A_HOOK: list[tuple[Any, dict[str, Any]]] = [
    (programs.accumulate, {"settle": _hook_stream, "policy": LOW}),
]
_WRITES_ON_HOST: list[tuple[Any, dict[str, Any]]] = [
    (programs.write_after_evaluation, {"offload": True}),
    (programs.write_after_evaluation, {"offload": True, "policy": LOW}),
    (programs.evaluate_between, {"offload": True}),
]
_PREFETCHES_AFTER_EVALUATION: list[tuple[Any, dict[str, Any]]] = [
    (programs.evaluate_after, {"offload": True, "headless": True}),
]
_EXTENDED: list[tuple[Any, dict[str, Any]]] = [
    (programs.train, {"extended": True}),
]
_IMPL_FSDP2 = [
    *_PREFETCHES_AFTER_EVALUATION,
    *_WRITES_ON_HOST,
    (programs.write_data_between, {}),
    (programs.write_data_between, {"offload": True}),
    (programs.write_while_accumulating, {"offload": True}),
    (programs.fail_and_write, {"offload": True}),
    *_EXTENDED,
    (programs.train, {"extended": True, "policy": LOW, "memory_handover": "record_stream"}),
    (programs.write_after_evaluation, {"extended": True, "offload": True}),
    (programs.unshard_before_the_optimizer, {}),
    (programs.unshard_before_the_optimizer, {"offload": True}),
    *_DROPS_BEHIND_A_HOOK,
    (programs.train, {"memory_handover": "record_stream"}),
    (programs.accumulate, {"memory_handover": "record_stream", "policy": LOW, "mesh": (2, 4)}),
    (programs.train, {"memory_handover": "record_stream", "policy": LOW, "offload": True}),
    (programs.train, {"forward_prefetch_depth": 2, "backward_prefetch_depth": 2, "policy": LOW}),
    (programs.train, {"backward_prefetch": "post", "limit_all_gathers": 1}),
    (programs.train, {"layout": "grouped", "policy": LOW}),
    (programs.accumulate, {"layout": "grouped", "mesh": (2, 4)}),
    (programs.train, {"layout": "grouped", "memory_handover": "record_stream"}),
]
_TORCH_FSDP2 = [
    (programs.train, {"settle": _several_inputs}),
    (programs.chunk_by_chunk, {"grouped": True, "skip": (1,)}),
    (programs.train, {"skip": (1,), "prefetch": 2}),
    (programs.train, {"skip": (1,), "prefetch": 2, "settle": _asynchronous}),
    (programs.fail_in_forward, {"prefetch": 2, "settle": _asynchronous}),
]
_FSDP1: list[tuple[Any, dict[str, Any]]] = [
    (programs.train, {}),
    (programs.train, {"limit_all_gathers": False}),
    (programs.train, {"limit_all_gathers": False, "policy": LOW, "forward_prefetch": True}),
    (programs.train, {"limit_all_gathers": False, "use_orig_params": True, "policy": ALL_LOW}),
    (programs.accumulate, {"sharding_strategy": "SHARD_GRAD_OP", "limit_all_gathers": False}),
    (programs.accumulate, {"sharding_strategy": "NO_SHARD", "policy": LOW}),
    (programs.train, {"sharding_strategy": "NO_SHARD"}),
    (programs.train, {"sharding_strategy": "HYBRID_SHARD", "limit_all_gathers": False}),
    (programs.accumulate, {"sharding_strategy": "HYBRID_SHARD", "limit_all_gathers": False, "policy": LOW}),
    (programs.accumulate_without_sync, {"sharding_strategy": "_HYBRID_SHARD_ZERO2", "policy": LOW}),
    (programs.accumulate_without_sync, {"limit_all_gathers": False}),
    (programs.train, {"backward_prefetch": "BACKWARD_POST", "limit_all_gathers": False}),
    (programs.train, {"backward_prefetch": None, "limit_all_gathers": False}),
    (programs.train, {"recompute": True, "policy": LOW, "limit_all_gathers": False}),
    (programs.train, {"freeze": True, "use_orig_params": True}),
    (programs.train, {"offload": True}),
    (programs.accumulate, {"offload": True, "policy": LOW, "limit_all_gathers": False}),
    (programs.train, {"offload": True, "sharding_strategy": "HYBRID_SHARD"}),
    (programs.train, {"offload": True, "sharding_strategy": "NO_SHARD"}),
    (programs.train, {"sharding_strategy": "NO_SHARD", "policy": ALL_LOW}),
    (programs.load_after_evaluation, {"offload": True}),
    (programs.scale, {}),
    (programs.save_between, {}),
    (programs.save_between, {"use_orig_params": True, "policy": LOW}),
    (programs.summon, {"policy": LOW}),
    (programs.summon_gradients, {"use_orig_params": True}),
    (programs.clip, {"policy": ALL_LOW}),
    (programs.two_forwards, {"limit_all_gathers": False}),
    (programs.evaluate_between, {"policy": LOW, "limit_all_gathers": False}),
    (programs.evaluate_between, {"sharding_strategy": "SHARD_GRAD_OP", "policy": LOW}),
]
_TORCH_FSDP1: list[tuple[Any, dict[str, Any]]] = [
    (programs.unshard_privately, {"limit_all_gathers": False}),
    (programs.save_optimizer_between, {"products": True, "use_orig_params": True}),
    (programs.save_optimizer_between, {"limit_all_gathers": False}),
]
_SCALES_ON_HOST: list[tuple[Any, dict[str, Any]]] = [
    (programs.scale, {"offload": True}),
]
_IMPL_FSDP1 = [
    *_WRITES_ON_HOST,
    *_SCALES_ON_HOST,
    (programs.write_while_accumulating, {"offload": True}),
    (
        programs.train,
        {"offload": True, "sharding_strategy": "NO_SHARD", "policy": ALL_LOW, "memory_handover": "events"},
    ),
    (programs.assign_instead_of_backward, {"use_orig_params": True}),
    # With the rate limiter the CPU waits before it writes, whatever else makes it wait.
    (programs.assign_instead_of_backward, {"offload": True, "limit_all_gathers": False}),
    (
        programs.assign_instead_of_backward,
        {"use_orig_params": True, "offload": True, "limit_all_gathers": False},
    ),
    (programs.fail_in_forward, {"limit_all_gathers": False}),
    (programs.train, {"memory_handover": "events"}),
    (programs.accumulate, {"memory_handover": "events", "policy": LOW, "limit_all_gathers": False}),
]


def _then(state, bucket):  # type: ignore[no-untyped-def]  # DDP compares annotations, and these would be text
    work = torch.distributed.all_reduce(bucket.buffer(), async_op=True)
    return work.get_future().then(lambda future: future.value()[0].div_(8))


_DDP: list[tuple[Any, dict[str, Any]]] = [
    (programs.train, {}),
    (programs.train, {"gradient_as_bucket_view": True}),
    (programs.train, {"bucket_cap_mb": 0.3}),
    (programs.accumulate, {"bucket_cap_mb": 0.3, "gradient_as_bucket_view": True}),
    (programs.accumulate_without_sync, {"bucket_cap_mb": 0.3}),
    (programs.accumulate_without_sync, {"gradient_as_bucket_view": True}),
    (programs.train, {"recompute": True, "bucket_cap_mb": 0.3}),
    (programs.clip, {}),
    (programs.train, {"hook": default_hooks.allreduce_hook, "bucket_cap_mb": 0.3}),
    (programs.accumulate, {"hook": default_hooks.fp16_compress_hook, "bucket_cap_mb": 0.3}),
    (programs.train, {"hook": default_hooks.fp16_compress_hook, "gradient_as_bucket_view": True}),
    (programs.accumulate_without_sync, {"hook": _then, "bucket_cap_mb": 0.3}),
    (programs.evaluate_between, {}),
    (programs.save_between, {}),
]

MATRIX: dict[str, list[Case]] = {
    "impl-fsdp2": [Case("impl-fsdp2", *each) for each in (*_FSDP2, *_IMPL_FSDP2)],
    "impl-fsdp1": [Case("impl-fsdp1", *each) for each in (*_FSDP1, *_IMPL_FSDP1)],
    "torch-fsdp2": [Case("torch-fsdp2", *each) for each in (*_FSDP2, *_TORCH_FSDP2)],
    "torch-fsdp1": [Case("torch-fsdp1", *each) for each in (*_FSDP1, *_TORCH_FSDP1)],
    "torch-ddp": [Case("torch-ddp", *each) for each in _DDP],
}
REFUSED = [
    *[Case("impl-fsdp2", *each) for each in _WRITES_BEFORE_BACKWARD],
    Case("impl-fsdp2", programs.write_between, {"offload": True}),
    Case("impl-fsdp1", programs.assign_between, {"use_orig_params": True}),
    Case("impl-fsdp1", programs.assign_between, {"use_orig_params": True, "offload": True}),
]
"""Programs whose gradients would not belong to their outputs: `impl` raises an error."""
KNOWN = {
    "writes_on_host": [
        Case(system, *each) for system in ("torch-fsdp2", "torch-fsdp1") for each in _WRITES_ON_HOST
    ],
    "prefetches_after_evaluation": [Case("torch-fsdp2", *each) for each in _PREFETCHES_AFTER_EVALUATION],
    "writes_before_backward": [Case("torch-fsdp2", *each) for each in _WRITES_BEFORE_BACKWARD],
    "drops_behind_a_hook": [Case("torch-fsdp2", *each) for each in _DROPS_BEHIND_A_HOOK],
    "scales_on_host": [Case("torch-fsdp1", *each) for each in _SCALES_ON_HOST],
    "drops_metadata": [Case("torch-fsdp2", *each) for each in _EXTENDED],
}
"""Programs that race with torch's FSDP as it is (docs/races-in-torch.md says why)."""
OWNERS = {
    "impl": MATRIX["impl-fsdp2"] + MATRIX["impl-fsdp1"],
    "torch-fsdp2": MATRIX["torch-fsdp2"],
    "torch-fsdp1": MATRIX["torch-fsdp1"],
}
"""By whose code is mutated: the programs that run."""
