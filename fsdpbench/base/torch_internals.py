"""Every private name of torch that bench and simulator use: what for, and the public name that it waits for.

A name is looked up when it is first imported from here, and once, so that a call costs what it cost, and a
heavy module of torch is imported where it always was::

    from fsdpbench.base.torch_internals import current_graph_task_id        # torch._C._current_graph_task_id

In a torch that does not have it, that import raises `TorchInternalError`; `missing` looks for all of them.
What torch is changed by goes through here too: `patch` for a private name, `replace` for others (for a while:
`patched`, `replaced`). None patches what is not there, since it would not be noticed.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from fsdpbench.base.errors import BenchError

if TYPE_CHECKING:  # what is used as a type
    from torch.distributed.tensor._dtensor_spec import DTensorSpec as DTensorSpec
    from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode


class TorchInternalError(BenchError):
    """The installed torch lacks a name that something cannot do without."""


class Internal(NamedTuple):
    """A private name: where it is (module:attribute), what cannot run without it, and what it waits for."""

    path: str
    needed_for: str
    public: str = "none"
    only_in: str = ""
    """Where torch has it, if not everywhere; elsewhere it is None, and is not patched."""
    members: tuple[str, ...] = ()
    """The names in a module, class or object that are used: all of them have to be there."""


_KERNELS = "the simulated device's kernels"
_DEVICE = "the simulated device"
_TENSORS = "tensors of the simulated device"
_AUTOCAST = "autocast on the simulated device"
_OPTIMIZERS = "optimizers over DTensors on the simulated device, without seconds of propagation"
_SPANS = "spans of record_function in simulated time"
_TORCHSCRIPT = "scripted functions where torch's own are replaced"
_OF_2022 = "the software fsdp1-2022"
_CUDA = 'scripts on simulated GPUs, where "cuda" means the simulated device'
_SNAPSHOTS = "memory snapshots of scripts on simulated GPUs"
IN_ITS_PLACE = "what the bench puts in its place"
_COMPILER = "torch.compile on the simulated device"
_CHECKPOINTS = "saving distributed checkpoints on the simulated device"

IMPORTED_LATE = (
    "torch._functorch._aot_autograd.subclass_codegen",
    "torch._inductor.choices",
    "torch._inductor.codegen.memory_planning",
    "torch._inductor.compiler_bisector",
    "torch._inductor.fx_passes.fuse_attention",
    "torch._inductor.fx_passes.pad_mm",
    "torch._inductor.hooks",
    "torch._inductor.tiling_utils",
    "torch._subclasses.schema_check_mode",
    "torch.distributed.tensor.experimental",
    "torch.export._trace",
    "torch.export._unlift",
    "torch.fx.experimental.validator",
    "torch.utils._cpp_embed_headers",
    "sympy.combinatorics",
    "sympy.tensor.tensor",
)
"""Modules that torch imports when it first traces or lowers a graph; a server that forks has them before."""

_OBSERVED = "advice on scripts, which observes what they call"

FULLY_SHARD_PLACES = (
    "torch.distributed.fsdp",
    "torch.distributed.fsdp._fully_shard",
    "torch.distributed.fsdp._fully_shard._fully_shard",
    "torch.distributed._composable.fsdp",
    "torch.distributed._composable.fsdp.fully_shard",
)
"""Where scripts and libraries import `fully_shard` from; those that a torch lacks are passed over."""

INTERNALS = {
    "IterableDatasetFetcher": Internal("torch.utils.data._utils.fetch:_IterableDatasetFetcher", _OBSERVED),
    "BaseDataLoaderIter": Internal("torch.utils.data.dataloader:_BaseDataLoaderIter", _OBSERVED),
    "MapDatasetFetcher": Internal("torch.utils.data._utils.fetch:_MapDatasetFetcher", _OBSERVED),
    "checkpoint_wrappers": Internal(
        "torch.distributed.algorithms._checkpoint.checkpoint_wrapper",
        _OBSERVED,
        members=("apply_activation_checkpointing", "checkpoint_wrapper"),
    ),
    # Read or called.
    "Backend_plugins": Internal("torch.distributed:Backend._plugins", "the simulated process group"),
    "DTensorSpec": Internal("torch.distributed.tensor._dtensor_spec:DTensorSpec", _OPTIMIZERS),
    "DisableTorchFunctionSubclass": Internal(
        "torch._C:DisableTorchFunctionSubclass",
        "following what a script decides by",
    ),
    "DeviceGuard": Internal("torch._C._acc:DeviceGuard", _DEVICE),
    "DispatchKey": Internal("torch._C:DispatchKey", _DEVICE, members=("BackendSelect", "Meta")),
    "DispatchKeySet": Internal("torch._C:DispatchKeySet", _DEVICE),
    "ExcludeDispatchKeyGuard": Internal("torch._C:_ExcludeDispatchKeyGuard", _AUTOCAST),
    "ForceDispatchKeyGuard": Internal("torch._C:_ForceDispatchKeyGuard", _TENSORS),
    "OutputSharding": Internal("torch.distributed.tensor._op_schema:OutputSharding", _OPTIMIZERS),
    "RecordFunctionFast": Internal("torch._C._profiler:_RecordFunctionFast", _SPANS),
    "TorchDispatchMode": Internal(
        "torch.utils._python_dispatch:TorchDispatchMode", "pricing work to calibrate by"
    ),
    "create_empty_tensor": Internal("torch._C._acc:create_empty_tensor", _TENSORS),
    "cuda_attach_out_of_memory_observer": Internal(
        "torch._C:_cuda_attach_out_of_memory_observer",
        "telling how much a GPU was asked for when its memory ran out",
        only_in="builds for CUDA",
    ),
    "current_autograd_node": Internal(
        "torch._C:_current_autograd_node", "the forward operator of what backward does"
    ),
    "current_graph_task_id": Internal(
        "torch._C:_current_graph_task_id", "telling backward, and what is recomputed in it, from forward"
    ),
    "device_constructors": Internal("torch.utils._device:_device_constructors", _CUDA),
    "dispatch_get_all_op_names": Internal("torch._C:_dispatch_get_all_op_names", _KERNELS),
    "dispatch_has_kernel_for_dispatch_key": Internal(
        "torch._C:_dispatch_has_kernel_for_dispatch_key", _KERNELS
    ),
    "dynamo": Internal(
        "torch._dynamo",
        "training without its import, and with it where ranks are forked",
        members=("config",),
    ),
    "dynamo_stance": Internal(
        "torch._dynamo.eval_frame:_stance",
        "scripts that switch torch.compile off",
        "torch.compiler.set_stance, sets it",
        members=("stance",),
    ),
    "find_builtin": Internal("torch.jit._builtins:_find_builtin", _TORCHSCRIPT),
    "functorch_config": Internal(
        "torch._functorch.config",
        "the fork server, which imports it for all",
        members=("force_non_lazy_backward_lowering", "patch"),
    ),
    "fused_adamw_": Internal("torch:_fused_adamw_", "calibrating optimizers"),
    "fsdp_common": Internal(
        "torch.distributed.fsdp._fully_shard._fsdp_common",
        "expert parallelism beside torch's fully_shard (parameters with a mesh of their own)",
        members=("FSDPMeshInfo", "HSDPMeshInfo", "ShardPlacementResult"),
    ),
    "symmetric_memory": Internal(
        "torch.distributed._symmetric_memory",
        "gathers by copy engines, simulated",
        members=("get_mem_pool", "rendezvous", "set_backend"),
    ),
    "get_sequence_nr": Internal(
        "torch._C._autograd:_get_sequence_nr", "the forward operator of what backward does"
    ),
    "flex_permute_strides": Internal(
        "torch._higher_order_ops.flex_attention:_permute_strides", "FlexAttention"
    ),
    "unset_fake_temporarily": Internal(
        "torch._subclasses.fake_tensor:unset_fake_temporarily", "FlexAttention"
    ),
    "barrier_after_init": Internal(
        "torch.distributed.distributed_c10d:_is_barrier_after_init", "scripts with TORCH_DIST_INIT_BARRIER=1"
    ),
    "has_triton": Internal("torch.utils._triton:has_triton", "scripts that launch Triton kernels"),
    "has_triton_package": Internal(
        "torch.utils._triton:has_triton_package", "scripts that define Triton kernels"
    ),
    "is_autocast_available": Internal(
        "torch._C:_is_autocast_available", _CUDA, "torch.amp.is_autocast_available, which calls it"
    ),
    "op_dispatcher": Internal(
        "torch.distributed.tensor:DTensor._op_dispatcher", _OPTIMIZERS, members=("sharding_propagator",)
    ),
    "OffsetBasedRNGTracker": Internal(
        "torch.distributed.tensor._random:OffsetBasedRNGTracker",
        "random numbers of DTensors, simulated",
        members=("_get_device_state",),
    ),
    "parse_to": Internal("torch._C._nn:_parse_to", _CUDA),
    "private_use_1": Internal("torch._C._autograd:DeviceType.PrivateUse1", _DEVICE),
    "profiler_enabled": Internal("torch.autograd:_profiler_enabled", _SPANS),
    "queue_callback": Internal(
        "torch.autograd:Variable._execution_engine.queue_callback", "DDP's collectives, joined after backward"
    ),
    "reinterpret_tensor": Internal("torch._C._dynamo.guards:_reinterpret_tensor", _TENSORS, "as_strided"),
    "register_builtin": Internal("torch.jit._builtins:_register_builtin", _TORCHSCRIPT),
    "ring_attention": Internal(
        "torch.distributed.tensor.experimental._context_parallel._attention:_templated_ring_attention",
        "ring attention (cp) on CPU ranks",
        "context_parallel, which has no kernel for the CPU",
    ),
    "ring_attention_backward": Internal(
        "torch.distributed.tensor.experimental._context_parallel._attention:_templated_ring_attention_backward",
        "ring attention (cp) on CPU ranks",
        "context_parallel, which has no kernel for the CPU",
    ),
    "set_is_profiler_enabled": Internal(
        "torch.autograd.profiler:_set_is_profiler_enabled", "labels of FSDP in simulated traces"
    ),
    "set_rotate_method": Internal(
        "torch.distributed.tensor.experimental._attention:set_rotate_method",
        "ring attention (cp)",
        "a public choice of the way that keys and values go",
    ),
    "set_storage_by_key": Internal("torch:ops.aten.set_.source_Storage_storage_offset._op_dk", _TENSORS),
    "setup_privateuseone": Internal(
        "torch.utils.backend_registration:_setup_privateuseone_for_python_backend",
        _DEVICE,
        "torch.utils.rename_privateuse1_backend, for devices written in C++",
    ),
    "swap_tensor_impl": Internal(
        "torch._C:_swap_tensor_impl",
        "FSDP1 that offloads or saves, on the simulated device",
        "torch.utils.swap_tensors, which refuses tensors that are referred to",
    ),
    "sync_batch_norm_module": Internal("torch.nn.modules._functions", "SyncBatchNorm in scripts"),
    "tree_leaves": Internal("torch.utils._pytree:tree_leaves", "what a script saves"),
    "tree_map_only": Internal("torch.utils._pytree:tree_map_only", "DTensors on the host, weights in fp8"),
    "wrapper_subclass": Internal("torch:Tensor._make_wrapper_subclass", "weights gathered in fp8"),
    # Of the compiler, looked up when something compiles: their import takes seconds.
    "DeviceOpOverrides": Internal("torch._inductor.codegen.common:DeviceOpOverrides", _COMPILER),
    "PythonWrapperCodegen": Internal("torch._inductor.codegen.wrapper:PythonWrapperCodegen", _COMPILER),
    "TritonScheduling": Internal("torch._inductor.codegen.triton:TritonScheduling", _COMPILER),
    "assert_size_stride": Internal("torch._C._dynamo.guards:assert_size_stride", _COMPILER),
    "check_cudagraph_devices": Internal(
        "torch._inductor.cudagraph_utils:check_multiple_devices_or_any_cpu_nodes", _COMPILER
    ),
    "check_cudagraph_mutation": Internal(
        "torch._inductor.cudagraph_utils:check_for_mutation_ignore_cuda_graph_managed_tensor", _COMPILER
    ),
    "compiler_config": Internal("torch.compiler.config", _COMPILER, members=("patch",)),
    "detect_fake_mode": Internal("torch._guards:detect_fake_mode", _COMPILER),
    "device_interface": Internal(
        "torch._dynamo.device_interface",
        _COMPILER,
        members=("DeviceInterface", "device_interfaces", "get_registered_device_interfaces"),
    ),
    "ShortenTraceback": Internal("torch._dynamo.exc:ShortenTraceback", _COMPILER),
    "exceeds_recompile_limit": Internal(
        "torch._dynamo.convert_frame:exceeds_recompile_limit", "telling what Dynamo gave up to compile"
    ),
    "dynamo_function_name": Internal(
        "torch._dynamo.symbolic_convert:get_funcname",
        "tracing without reading the sources of all that is traced",
    ),
    "dynamo_output_codes": Internal("torch._dynamo.convert_frame:output_codes", _COMPILER),
    "dynamo_torch_variables": Internal(
        "torch._dynamo.variables.torch",
        "compiled scripts, whose functions of torch are wrapped",
        members=(
            "TorchInGraphFunctionVariable",
            "VariableTracker",
            "constant_fold_functions",
            "constant_fold_functions_need_guards",
        ),
    ),
    "dynamo_utils": Internal(
        "torch._dynamo.utils",
        "telling graph breaks and recompilations",
        members=("counters", "get_compilation_metrics"),
    ),
    "first_node_not_for_cudagraphs": Internal(
        "torch._inductor.utils:get_first_incompatible_cudagraph_node", _COMPILER
    ),
    "is_utils_checkpoint": Internal("torch._dynamo.variables.builder:is_utils_checkpoint", _OBSERVED),
    "inductor_cache_dir": Internal("torch._inductor.runtime.cache_dir_utils:cache_dir", _COMPILER),
    "inductor_default_cache_dir": Internal(
        "torch._inductor.runtime.cache_dir_utils:default_cache_dir", _COMPILER
    ),
    "inductor_common": Internal(
        "torch._inductor.codegen.common",
        _COMPILER,
        members=(
            "DeviceCodegen",
            "device_codegens",
            "device_op_overrides_dict",
            "get_device_op_overrides",
            "init_backend_registration",
        ),
    ),
    "inductor_compile_fx": Internal("torch._inductor.compile_fx", _COMPILER, members=("compile_fx_inner",)),
    "inductor_config": Internal("torch._inductor.config", _COMPILER, members=("patch",)),
    "inductor_torch_key": Internal("torch._inductor.codecache:torch_key", _COMPILER),
    "inductor_virtualized": Internal("torch._inductor.virtualized:V", _COMPILER, members=("graph",)),
    "run_and_save_rng_state": Internal("torch._prims.rng_prims:run_and_save_rng_state", _COMPILER),
    "run_with_rng_state": Internal("torch._prims.rng_prims:run_with_rng_state", _COMPILER),
    "trace_rules": Internal(
        "torch._dynamo.trace_rules", _COMPILER, members=("add", "clear_lru_cache", "get_torch_obj_rule_map")
    ),
    # Patched.
    "compiled_graph_to_disk": Internal(
        "torch._inductor.output_code:CompiledFxGraph.write_to_disk", _COMPILER
    ),
    "compiled_code_to_disk": Internal("torch._inductor.codecache:PyCodeCache.write", _COMPILER),
    "compile_fx": Internal("torch._inductor.compile_fx:compile_fx", _COMPILER),
    "triton_hash": Internal("torch.utils._triton:triton_hash_with_backend", _COMPILER),
    "chunk_with_empty": Internal(
        "torch.distributed.fsdp._fully_shard._fsdp_param:_chunk_with_empty",
        "torch's fully_shard on many ranks",
    ),
    "engine_run_backward": Internal("torch.autograd:_engine_run_backward", "backward on forward's streams"),
    "use_cudnn_rnn_flatten_weight": Internal(
        "torch:_use_cudnn_rnn_flatten_weight", "recurrent layers where torch is built with cuDNN"
    ),
    "cuda_dump_snapshot": Internal("torch.cuda.memory:_dump_snapshot", _SNAPSHOTS),
    "cuda_exchange_device": Internal("torch.cuda:_exchange_device", _CUDA),
    "cuda_is_compiled": Internal("torch.cuda:_is_compiled", _CUDA),
    "cuda_is_in_bad_fork": Internal("torch.cuda:_is_in_bad_fork", _CUDA),
    "cuda_lazy_call": Internal("torch.cuda:_lazy_call", _CUDA),
    "cuda_lazy_init": Internal("torch.cuda:_lazy_init", _CUDA),
    "cuda_maybe_exchange_device": Internal("torch.cuda:_maybe_exchange_device", _CUDA),
    "cuda_nvtx": Internal("torch.cuda.nvtx:_nvtx", "NVTX ranges of scripts on simulated GPUs"),
    "cuda_record_memory_history": Internal("torch.cuda.memory:_record_memory_history", _SNAPSHOTS),
    "cuda_snapshot": Internal("torch.cuda.memory:_snapshot", _SNAPSHOTS),
    "prefetch_handle": Internal("torch.distributed.fsdp._runtime_utils:_prefetch_handle", _OF_2022),
    "propagate_use_strided_shard_flag": Internal(
        "torch.distributed.tensor._sharding_prop:_propagate_use_strided_shard_flag",
        "a time of propagation that is not quadratic",
        only_in="2.13, 2.14 and some before",
    ),
    "use_unsharded_views": Internal(
        "torch.distributed.fsdp._flat_param:FlatParamHandle._use_unsharded_views",
        "FSDP1 of software before torch 2.0",
    ),
    "reduce_scatter_tensors": Internal(
        "torch.distributed.fsdp._runtime_utils:_get_reduce_scatter_tensors", _OF_2022
    ),
    "validate_global_plan": Internal(
        "torch.distributed.checkpoint.default_planner:_validate_global_plan", _CHECKPOINTS
    ),
    "verify_param_shape_across_processes": Internal(
        "torch.nn.parallel.distributed:_verify_param_shape_across_processes", "DDP on the simulated device"
    ),
}


def missing() -> list[str]:
    """Return a sentence for every name that the installed torch lacks; imports all modules that have one."""
    found = []
    for name in INTERNALS:
        try:
            find(name)
        except TorchInternalError as error:
            found.append(str(error))
    return found


def find(name: str) -> Any:
    """Return what torch has under a private name now. Raises `TorchInternalError`, also for a member."""
    internal = INTERNALS[name]
    found = _look_up(internal)[2]
    for member in internal.members:
        if not hasattr(found, member):
            raise gone(f"{internal.path.replace(':', '.')}.{member}", internal.needed_for)
    return found


def uses() -> int:
    """Return how many names of torch are used: each private one, or the members that are used of it."""
    return sum(max(1, len(internal.members)) for internal in INTERNALS.values())


def patch(name: str, make: Callable[[Any], Any]) -> None:
    """Put ``make(original)`` in the place of a private name. Raises `TorchInternalError` where it is gone."""
    owner, attribute, original = _look_up(INTERNALS[name])
    if original is not None:
        setattr(owner, attribute, make(original))


def replace(owner: Any, **attributes: Any) -> None:
    """Set attributes that ``owner`` has. Raises `TorchInternalError` for one that it does not have, and sets
    none then."""
    for name in attributes:
        expect(owner, name)
    for name, value in attributes.items():
        setattr(owner, name, value)


@contextmanager
def patched(name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    """`patch` for a while: what was there before is there again afterwards."""
    owner, attribute, original = _look_up(INTERNALS[name])
    patch(name, make)
    try:
        yield
    finally:
        if original is not None:
            setattr(owner, attribute, original)


@contextmanager
def replaced(owner: Any, **attributes: Any) -> Iterator[None]:
    """`replace` for a while: what was there before is there again afterwards."""
    own = vars(owner)
    before = {name: own[name] for name in attributes if name in own}
    replace(owner, **attributes)
    try:
        yield
    finally:
        for name in attributes:
            if name in before:
                setattr(owner, name, before[name])
            else:
                delattr(owner, name)  # it was inherited


def expect(owner: Any, name: str) -> Any:
    """Return the attribute that is about to be replaced. Raises `TorchInternalError` where it is gone."""
    if not hasattr(owner, name):
        whose = getattr(owner, "__qualname__", None)
        where = getattr(owner, "__module__", None) if whose else getattr(owner, "__name__", repr(owner))
        raise gone(".".join(filter(None, (where, whose, name))), IN_ITS_PLACE)
    return getattr(owner, name)


def last_part(name: str) -> str:
    """Return the last part of a dotted private name."""
    return INTERNALS[name].path.replace(":", ".").rpartition(".")[2]


def _look_up(internal: Internal) -> tuple[Any, str, Any]:
    """Who has a name, how it is called there, and what it is."""
    module, _, attributes = internal.path.partition(":")
    owner, name = None, ""
    try:
        found: Any = importlib.import_module(module)
        for name in filter(None, attributes.split(".")):
            owner, found = found, getattr(found, name)
    except (ModuleNotFoundError, AttributeError) as error:
        if isinstance(error, ModuleNotFoundError) and not str(error.name).startswith("torch"):
            raise  # something that torch itself needs
        if internal.only_in:
            return owner, name, None
        raise gone(internal.path.replace(":", "."), internal.needed_for) from error
    return owner, name, found


def gone(path: str, needed_for: str) -> TorchInternalError:
    """Return the error for a name that the installed torch lacks."""
    import torch

    return TorchInternalError(
        f"torch {torch.__version__} has no {path}, needed for {needed_for}: "
        "install a version of torch that has it"
    )


def __getattr__(name: str) -> Any:
    if name not in INTERNALS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = found = find(name)
    return found
