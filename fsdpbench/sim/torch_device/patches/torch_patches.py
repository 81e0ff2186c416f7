"""Patches of torch for the simulated device. `README.md` in this folder gives the reason for each."""

import dataclasses
import functools
import inspect
import weakref
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from fsdpbench.base.torch_internals import RecordFunctionFast, expect, patch, profiler_enabled, replace
from fsdpbench.sim.torch_device import tensors
from fsdpbench.sim.torch_device.accelerator import ACCELERATOR, DEVICE_TYPE, Accelerator
from fsdpbench.sim.torch_device.backward_streams import reaching_unused
from fsdpbench.sim.torch_device.distributed.process_group import SimProcessGroup
from fsdpbench.sim.torch_device.distributed.stages import StageCalls
from fsdpbench.sim.torch_device.distributed.symmetric import patch_symmetric_memory
from fsdpbench.sim.torch_device.operators.autocast import CAST_CACHE
from fsdpbench.sim.torch_device.operators.choices import assumed_of, whole_numbers
from fsdpbench.sim.torch_device.operators.known_values import learn_from_host
from fsdpbench.sim.torch_device.patches.dtensor import (
    cut_when_asked,
    install_random_state,
    install_sharding_shortcut,
)
from fsdpbench.sim.torch_device.patches.dynamo import as_function, passing_to, stand_in_for_dynamo
from fsdpbench.sim.torch_device.patches.host_access import install_host_access, install_two_sided_parameters
from fsdpbench.sim.torch_device.strict.words import error_text

_RANDOM_STATE = 1 << 13
"""Maximum bytes of a storage that keeps its contents when a checkpoint is loaded directly to the device."""
_OUTSIDE = -1


def make_span_methods(span_type: type) -> tuple[Callable[..., Any], Callable[..., None]]:
    """Return `__enter__` and `__exit__` for a class of spans with a `name`, based on its own methods."""
    original_enter: Any = span_type.__enter__  # type: ignore[attr-defined]
    original_exit: Any = span_type.__exit__  # type: ignore[attr-defined]
    profiling = profiler_enabled

    def enter(self: Any) -> Any:
        self._sim_start = _begin(self.name)
        if self._sim_start == _OUTSIDE and profiling():
            return original_enter(self)
        return self

    def leave(self: Any, *exc_info: Any) -> None:
        _end(self.name, self._sim_start)
        if self._sim_start == _OUTSIDE and self.record is not None:
            original_exit(self, *exc_info)

    return enter, leave


def _begin(name: str) -> int:
    """Notify the observers; return the span's start, or `_OUTSIDE` without a trace."""
    if ACCELERATOR.sanitizer is not None:
        ACCELERATOR.sanitizer.enter(name)
    if ACCELERATOR.account is not None:
        ACCELERATOR.account.enter(name)
    trace = ACCELERATOR.trace
    return _OUTSIDE if trace is None else trace.begin_span(name, ACCELERATOR.timeline.cpu)


def _end(name: str, start: int) -> None:
    if ACCELERATOR.sanitizer is not None:
        ACCELERATOR.sanitizer.leave(name)
    if ACCELERATOR.account is not None:
        ACCELERATOR.account.leave(name)
    if start != _OUTSIDE and ACCELERATOR.trace is not None:
        ACCELERATOR.trace.end_span(name, start, ACCELERATOR.timeline.cpu)


class FastSpan:
    """Replacement for `torch._C._profiler._RecordFunctionFast`, whose C++ type cannot be patched."""

    __slots__ = ("_original", "_sim_start", "name")
    _original_type = RecordFunctionFast

    def __init__(self, name: str, input_values: Any = None, keyword_values: Any = None) -> None:
        self.name = name
        self._sim_start = _OUTSIDE
        self._original: Any = None

    def __enter__(self) -> "FastSpan":
        self._sim_start = _begin(self.name)
        if self._sim_start == _OUTSIDE and profiler_enabled():
            self._original = self._original_type(self.name)
            self._original.__enter__()
        return self

    def __exit__(self, *exc_info: Any) -> None:
        _end(self.name, self._sim_start)
        if self._original is not None:
            self._original.__exit__(*exc_info)
            self._original = None
        self._sim_start = _OUTSIDE


def install_module_calls(accelerator: Accelerator) -> None:
    """Replace `nn.Module.__call__` by a function that adds CPU time for the call and its hooks.

    Dynamo decides by a function's file and name: it traces torch's `nn.Module.__call__`, but starts no graph
    there. The replacement has the same file and name, so Dynamo's decisions do not change.
    """
    module_type = torch.nn.Module
    original: Callable[..., Any] = module_type.__call__
    compiles = torch.compiler.is_compiling

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if compiles():  # Dynamo evaluates this to True and does not trace the rest
            return original(self, *args, **kwargs)
        costs = accelerator.cpu_costs
        if costs is not None:
            hooks = len(self._forward_pre_hooks) + len(self._forward_hooks) + len(self._backward_hooks)
            accelerator.timeline.cpu += costs.module_call_ns + hooks * costs.hook_ns
        return original(self, *args, **kwargs)

    code = original.__code__
    call.__code__ = call.__code__.replace(co_filename=code.co_filename, co_name=code.co_name)
    call.__name__ = original.__name__
    replace(module_type, __call__=call)


@functools.cache
def apply_patches(accelerator: Accelerator) -> None:
    """Apply all patches, once per process."""
    stand_in_for_dynamo()
    _patch_storages()
    _patch_copies_of_storages(accelerator)
    _patch_contents_of_storages()
    _patch_tensors()
    install_two_sided_parameters()
    install_host_access(accelerator)
    install_module_calls(accelerator)
    _patch_profiler()
    _patch_accelerator()
    _patch_autocast()
    _patch_backward(accelerator)
    # A build with cuDNN would flatten a recurrent layer's weights with a kernel of the real GPU.
    patch("use_cudnn_rnn_flatten_weight", lambda original: lambda: False)
    _patch_distributed(accelerator)


def _patch_storages() -> None:
    storage_type = torch.UntypedStorage
    original_resize, original_nbytes, original_pointer = (
        storage_type.resize_,
        storage_type.nbytes,
        storage_type.data_ptr,
    )

    def resize_(self: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
        record = tensors.record_of(self)
        if record is None:
            return original_resize(self, size)
        tensors.resize(record, int(size))
        return self

    def nbytes(self: torch.UntypedStorage) -> int:
        record = tensors.record_of(self)
        return original_nbytes(self) if record is None else record.nbytes

    def data_ptr(self: torch.UntypedStorage) -> int:
        where = tensors.address(self)
        return original_pointer(self) if where is None else where

    replace(storage_type, resize_=resize_, nbytes=nbytes, size=nbytes, __len__=nbytes, data_ptr=data_ptr)


def _patch_copies_of_storages(accelerator: Accelerator) -> None:
    storage_type = torch.UntypedStorage
    original_new: Any = storage_type.__new__
    original_to, original_cpu = storage_type.to, storage_type.cpu

    def new(cls: type, *args: Any, device: Any = None, **kwargs: Any) -> Any:
        if device is None:
            return original_new(cls, *args, **kwargs)
        if not tensors.is_simulated(torch.device(device)):
            return original_new(cls, *args, device=device, **kwargs)
        size = int(args[0]) if args else 0
        return tensors.new_tensor((size,), None, torch.uint8, size).untyped_storage()

    def to(self: torch.UntypedStorage, *, device: Any, non_blocking: bool = False) -> torch.UntypedStorage:
        if not tensors.is_simulated(torch.device(device)) or tensors.is_simulated(self.device):
            return original_to(self, device=torch.device(device), non_blocking=non_blocking)
        made = new(storage_type, self.nbytes(), device=device)
        target = torch.empty((0,), dtype=torch.uint8, device=DEVICE_TYPE).set_(made)
        accelerator.copy_over_host_link("HtoD", self.nbytes(), blocking=not non_blocking, device=target)
        if 0 < self.nbytes() <= _RANDOM_STATE:
            learn_from_host(target, torch.empty((0,), dtype=torch.uint8).set_(self))
        return made

    def cpu(self: torch.UntypedStorage) -> torch.UntypedStorage:
        if tensors.record_of(self) is None:
            return original_cpu(self)
        source = torch.empty((0,), dtype=torch.uint8, device=DEVICE_TYPE).set_(self)
        accelerator.copy_over_host_link("DtoH", self.nbytes(), blocking=True, device=source)
        numbers = None if assumed_of(source) else whole_numbers(source)
        host = torch.zeros(self.nbytes(), dtype=torch.uint8) if numbers is None else numbers.clone()
        return host.untyped_storage()

    replace(storage_type, __new__=staticmethod(new), to=to, cpu=cpu)


def _patch_contents_of_storages() -> None:
    storage_type = torch.UntypedStorage
    original_copy, original_repr = storage_type.copy_, storage_type.__repr__

    def copy_(
        self: torch.UntypedStorage, source: Any, non_blocking: bool | None = None
    ) -> torch.UntypedStorage:
        sides = [tensors.record_of(storage) for storage in (self, source)]
        if sides == [None, None]:
            return original_copy(self, source, bool(non_blocking))
        if self.nbytes() != source.nbytes():
            raise RuntimeError(error_text("torch_patches.copy", self.nbytes(), source.nbytes()))
        target, origin = (
            torch.empty((0,), dtype=torch.uint8, device=s.device).set_(s) for s in (self, source)
        )
        target.copy_(origin, non_blocking=bool(non_blocking))
        return self

    def represent(self: torch.UntypedStorage) -> str:
        record = tensors.record_of(self)
        return original_repr(self) if record is None else f"[sim storage of {record.nbytes} bytes]"

    def read(original: Callable[..., Any], self: torch.UntypedStorage, *args: Any) -> Any:
        if tensors.record_of(self) is None:
            return original(self, *args)
        host = torch.UntypedStorage(self.nbytes())
        original(host, *args)
        return self.copy_(host)

    replace(storage_type, copy_=copy_, __repr__=represent)
    patch("write_storage", passing_to(lambda original, self, *args: original(self.cpu(), *args)))
    patch("read_storage", passing_to(read))


def _patch_tensors() -> None:
    tensor_type = torch.Tensor
    original_pointer = tensor_type.data_ptr
    original_repr: Any = tensor_type.__repr__
    original_deepcopy = tensor_type.__deepcopy__

    def data_ptr(self: torch.Tensor) -> int:
        if not tensors.is_on_device(self):
            return original_pointer(self)
        base = tensors.address(self.untyped_storage())
        return base + int(self.storage_offset()) * self.element_size() if base else 0

    def represent(self: torch.Tensor, *, tensor_contents: Any = None) -> str:
        if not tensors.is_on_device(self) or type(self) not in (torch.Tensor, torch.nn.Parameter):
            return original_repr(self, tensor_contents=tensor_contents)
        label = "Parameter containing:\n" if isinstance(self, torch.nn.Parameter) else ""
        gradient = ", requires_grad=True" if self.requires_grad else ""
        shape = tuple(self.shape)
        return f"{label}tensor(..., device='{self.device}', size={shape}, dtype={self.dtype}{gradient})"

    def deepcopy(self: torch.Tensor, memo: dict[int, Any]) -> Any:
        if type(self) not in (torch.Tensor, torch.nn.Parameter) or not tensors.is_on_device(self):
            return original_deepcopy(self, memo)
        if id(self) in memo:
            return memo[id(self)]
        if not self.is_leaf:
            raise RuntimeError("only tensors that the user made (graph leaves) can be deep-copied")
        copy: Any = self.detach().clone()
        if isinstance(self, torch.nn.Parameter):
            copy = torch.nn.Parameter(copy, self.requires_grad)
        else:
            copy.requires_grad_(self.requires_grad)
        memo[id(self)] = copy
        return copy

    replace(tensor_type, data_ptr=data_ptr, __repr__=represent, __deepcopy__=deepcopy)


def _patch_profiler() -> None:
    span = torch.autograd.profiler.record_function
    enter, leave = make_span_methods(span)
    replace(span, __enter__=enter, __exit__=leave)
    patch("RecordFunctionFast", lambda original: FastSpan)


def _patch_accelerator() -> None:
    module = torch.get_device_module(DEVICE_TYPE)
    names = (
        "synchronize", "current_stream", "set_stream", "empty_cache", "memory_stats", "memory_allocated",
        "max_memory_allocated", "memory_reserved", "max_memory_reserved", "reset_peak_memory_stats",
    )  # fmt: skip
    replace(torch.accelerator, **{name: as_function(getattr(module, name)) for name in names})
    replace(torch.accelerator, get_memory_info=as_function(module.mem_get_info))


def _patch_backward(accelerator: Accelerator) -> None:
    def run_on_streams(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        try:
            return accelerator.backward.run(original, *args, **kwargs)
        except SystemError as error:
            failed = error
        raise accelerator.backward.errors.pop() if accelerator.backward.errors else failed

    patch("engine_run_backward", passing_to(run_on_streams))


def _patch_autocast() -> None:
    autocast = torch.amp.autocast_mode.autocast
    original = autocast.__exit__

    def leave(self: Any, *exc_info: Any) -> Any:
        result = original(self, *exc_info)
        if self.device == DEVICE_TYPE and not torch.is_autocast_enabled(DEVICE_TYPE):
            CAST_CACHE.clear()
        return result

    replace(autocast, __exit__=leave)


def _patch_distributed(accelerator: Accelerator) -> None:
    # DDP compares shapes among ranks, but the others do not run.
    patch("verify_param_shape_across_processes", lambda original: lambda group, *args: (
        None if isinstance(group, SimProcessGroup) else original(group, *args)
    ))  # fmt: skip
    ddp = torch.nn.parallel.DistributedDataParallel
    join_hook, by_all = ddp.join_hook, {"divide_by_initial_world_size": True}
    replace(ddp, __init__=_without_graphs(ddp.__init__, accelerator))
    # No rank leaves `Join` early. C++ would wait forever for a work whose Python part is gone.
    replace(ddp, join_hook=lambda self, **given: join_hook(self, **given | by_all))
    patch_symmetric_memory(accelerator)
    _replace_collectives_of_objects()
    _patch_checkpoint_plans()
    install_states_of_other_ranks()
    patch("chunk_with_empty", passing_to(cut_when_asked))
    install_sharding_shortcut()
    install_random_state()


def _without_graphs(init: Callable[..., None], accelerator: Accelerator) -> Callable[..., None]:
    """Wrap DDP's constructor. Options for which its C++ needs pinned device memory become a hook that makes
    backward reach unused parameters; nodes that accumulate gradients are kept."""

    @functools.wraps(init)
    def construct(self: Any, module: Any, *args: Any, **options: Any) -> None:
        asked = set()
        for name in ("find_unused_parameters", "static_graph"):
            if options.get(name) and any(map(tensors.is_on_device, module.parameters())):
                asked.add(name)
                options[name] = False
        init(self, module, *args, **options)
        accelerator.backward.keep_accumulators(filter(tensors.is_on_device, module.parameters()))
        self.find_unused_parameters = "find_unused_parameters" in asked  # results pass through torch's node
        if asked:
            self.register_forward_hook(reaching_unused("static_graph" in asked))

    return construct


def _replace_collectives_of_objects() -> None:
    for name, deliver in (
        ("all_gather_object", _all_alike),
        ("gather_object", _all_alike),
        ("broadcast_object_list", _as_if_sent),
        ("scatter_object_list", _first_for_this_rank),
        ("send_object_list", _to_another),
        ("recv_object_list", _from_another),
    ):
        replacement = in_simulated_groups(expect(dist, name), deliver)
        for module in (dist, dist.distributed_c10d):
            replace(module, **{name: replacement})


def in_simulated_groups(original: Callable[..., Any], call: Callable[[Mapping[str, Any]], Any]) -> Any:
    """Return a collective that calls `call` with its arguments by name if its group is simulated."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def collective(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        if isinstance(_group_of(given), SimProcessGroup):
            return call(given)
        return original(*args, **kwargs)

    return collective


def _all_alike(given: Mapping[str, Any]) -> None:
    """Gather the objects of all ranks; without other ranks, this rank's object from each."""
    gathered = given.get("object_list", given.get("object_gather_list"))
    objects = _group_of(given).stages.objects(given["obj"])
    if objects is not None and gathered is not None:
        gathered[:] = objects
    elif gathered is not None:
        gathered[:] = [given["obj"]] * len(gathered)
        if len(gathered) > 1:
            ACCELERATOR.guess("object", f"all {len(gathered)} ranks' objects are this rank's")


def _as_if_sent(given: Mapping[str, Any]) -> None:
    """Keep the objects: this rank sends them, or the sender is assumed to send the same."""
    objects = _group_of(given).stages.objects(given["object_list"])
    if objects is not None:
        given["object_list"][:] = objects[_source(given)]
    elif not _is_source(given):
        ACCELERATOR.guess("object", "another rank's objects are this rank's")


def _first_for_this_rank(given: Mapping[str, Any]) -> None:
    scattered = given.get("scatter_object_input_list")
    objects = _group_of(given).stages.objects(scattered)
    if objects is not None:
        given["scatter_object_output_list"][0] = objects[_source(given)][dist.get_rank(given.get("group"))]
    elif scattered and _is_source(given):
        given["scatter_object_output_list"][0] = scattered[0]
    elif dist.get_rank() == 0:  # when ranks are compared, the others receive from it
        raise NotImplementedError("scatter_object_list from another rank: only rank 0 runs, others have none")


def _to_another(given: Mapping[str, Any]) -> None:
    """Send objects to a rank of another stage, which receives them unchanged."""
    peer = _source(given, "dst")
    _stages_with(given, peer).send("send objects to", peer, "objects", given["object_list"])


def _from_another(given: Mapping[str, Any]) -> int:
    peer = _source(given)
    given["object_list"][:] = _stages_with(given, peer).take("receive objects from", peer, "objects")()
    return int(_group_of(given).ranks[peer])


def _stages_with(given: Mapping[str, Any], peer: int) -> StageCalls:
    group = _group_of(given)
    group.stages.need([group.ranks[peer]])
    return group.stages


def _group_of(given: Mapping[str, Any]) -> Any:
    return given.get("group") or dist.group.WORLD


def _source(given: Mapping[str, Any], place: str = "src") -> int:
    """Return the group rank of the peer in a collective of objects, by default 0."""
    of_world, of_group = given.get(place), given.get(f"group_{place}")
    if of_group is not None or of_world is None:
        return of_group or 0
    return dist.get_group_rank(_group_of(given), of_world)


def _is_source(given: Mapping[str, Any]) -> bool:
    return _source(given) == dist.get_rank(given.get("group"))


def _others_are_simulated() -> bool:
    return isinstance(dist.group.WORLD, SimProcessGroup) and dist.group.WORLD.size() > 1


def _patch_checkpoint_plans() -> None:
    import torch.distributed.checkpoint.default_planner as planner

    patch("validate_global_plan", _valid_as_it_is)
    deduplicated = expect(planner, "dedup_save_plans")

    def dedup_save_plans(plans: Any, *args: Any, **kwargs: Any) -> Any:
        """Keep all of rank 0's plan: all ranks have the same plan, and the others save nothing."""
        if not _others_are_simulated():
            return deduplicated(plans, *args, **kwargs)
        return [plans[0], *(dataclasses.replace(plan, items=[]) for plan in plans[1:])]

    replace(planner, dedup_save_plans=dedup_save_plans)


def _valid_as_it_is(original: Any) -> Callable[..., Any]:
    """Accept a plan of what all ranks save although the others' parts are missing."""
    fine: Any = True if original.__annotations__.get("return") in (bool, "bool") else []

    def validate(global_plan: Any, metadata: Any) -> Any:
        return fine if _others_are_simulated() else original(global_plan, metadata)

    return validate


def install_states_of_other_ranks() -> None:
    """Answer two queries of FSDP1 for ranks that do not run.

    A rank has states of those parameters of which its shards hold a part. To gather states, torch asks all
    ranks for the names of theirs, and for dtypes, steps and sizes. Ranks that do not run answer like this
    one. So a parameter that is entirely on other ranks gets the states of another parameter of its unit."""
    known = _Known()
    patch("map_param_key_to_optim_keys", passing_to(known.keys_of_all))
    patch("allgather_state_info", passing_to(known.infos_of_all))


class _Known:
    """An optimizer state of this rank, from which those of other ranks are inferred; holds no tensors."""

    def __init__(self) -> None:
        self._state: dict[str, Callable[[], Any]] = {}

    def keys_of_all(
        self,
        original: Any,
        optim_state_dict: Any,
        group: Any,
        param_key_to_param: Any,
        param_to_fqns: Any,
        fqn_to_fsdp_param_info: Any,
        merge_keys: bool = False,
    ) -> Any:
        """Return the sorted keys of all ranks' states, and this rank's; `merge_keys`: original parameters.

        Raises `NotImplementedError` if this rank holds no part of a trainable parameter.
        """
        keys, here = original(
            optim_state_dict, group, param_key_to_param, param_to_fqns, fqn_to_fsdp_param_info, merge_keys
        )
        if not merge_keys or not isinstance(group or dist.group.WORLD, SimProcessGroup):
            return keys, here
        states: list[dict[str, Any]] = [optim_state_dict["state"][key] for key in here.values()]
        self._state = {
            name: weakref.ref(value) if isinstance(value, torch.Tensor) else partial(lambda same: same, value)
            for name, value in (states[0] if states else {}).items()
        }
        with_states, without, elsewhere = set[int](), set[int](), list[tuple[str, int]]()
        for key, parameter in param_key_to_param.items():
            name = param_to_fqns[parameter][0]
            unit = id(fqn_to_fsdp_param_info.get(name))
            if name not in fqn_to_fsdp_param_info or not parameter.requires_grad:
                continue
            if key in optim_state_dict["state"]:
                with_states.add(unit)
            elif parameter.numel():
                without.add(unit)
            else:
                elsewhere.append((name, unit))
        # If no parameter of a unit has states here, the unit did not run.
        missing = [name for name, unit in elsewhere if unit in with_states or unit not in without]
        if missing and not keys:
            raise NotImplementedError(error_text("torch_patches.states", missing[0]))
        added = {keys[0]._replace(unflat_param_names=(name,), is_fsdp_managed=True) for name in missing}
        return sorted({*keys, *here, *added}), here

    def infos_of_all(self, original: Any, fsdp_state: Any, input_states: Any) -> Any:
        """Return what each rank of a unit's group reports about `input_states`: other ranks report what this
        one has, and for parameters without states here those of another parameter."""
        infos = original(fsdp_state, input_states)
        if not isinstance(fsdp_state.process_group, SimProcessGroup):
            return infos
        own = infos[fsdp_state.rank]
        like = next((info for info in own.values() if _has_elements(info)), None)
        if like is None and self._state:
            state = {name: value() for name, value in self._state.items()}
            like = next(iter(original(fsdp_state, {"": state})[0].values()))
        others = {name: info if like is None or _has_elements(info) else like for name, info in own.items()}
        return [own if rank == fsdp_state.rank else others for rank in range(len(infos))]


def _has_elements(info: Any) -> bool:
    return any(tensor.shape.numel() for tensor in info.tensors.values())
