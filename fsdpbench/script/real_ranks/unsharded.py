"""A script without sharding: its wrappers do nothing, and gradients become the mean over all ranks.

Every rank runs the script with its own data on the whole model; the script's own collectives are real. After
each backward the ranks' new gradients are added in double precision. So the gradient is that of the joint
batch, for any script, and needs no joint batch. `scale` multiplies the sum: 1 / ranks, or 1
if the script divides its loss by a number of all ranks. Units of mixed precision still compute in their
dtype: parameters are cast before each forward.
"""

import contextlib
import functools
import inspect
import itertools
import math
import sys
from collections.abc import Callable, Iterator, Set
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp as fsdp
import torch.distributed.tensor as distributed_tensor
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import BatchSampler

from fsdpbench.base.torch_internals import checkpoint_wrappers, patch, replace, tree_map_only
from fsdpbench.script.cuda.refusals import Replacements
from fsdpbench.script.interposing import around, replace_checkpoint, replace_fully_shard
from fsdpbench.script.model_blocks import plain_name, roots
from fsdpbench.script.own_files import OwnFiles
from fsdpbench.script.real_ranks.pieces import keep, kept_beside
from fsdpbench.script.real_ranks.sending import SENDS, Context, joint, sent
from fsdpbench.script.real_ranks.watching import NotComparedError, Watch, function_of, optimized
from fsdpbench.sim.torch_device.patches.dynamo import passing_to

_all_reduce, _broadcast = dist.all_reduce, dist.broadcast
_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
"""Modules that FSDP1's mixed precision leaves alone."""
_SHORT = 2  # batches of a short epoch
_SAME = 1e-2
"""Share by which a norm over shards may differ from the norm of the whole."""


_Sum = tuple[torch.Tensor, torch.Tensor]
"""A gradient and its magnitude, summed over ranks."""


class Reference(Watch):
    """The watch of the script without sharding. Each step begins with the weights of the sharded run at that
    step, from `weights` (a file for each step), and steps with the gradients that the sharded run read, so
    that each difference is found only once. `moves`: the share of itself by which each weight is changed at
    random; `follows`: gradients follow what is sent; `prefixed`: names have the wrappers' parts;
    `shared`: values besides parameters that each rank takes from rank 0."""

    def __init__(self, own_files: OwnFiles, folder: Path, rank: int, steps: int, weights: Path, scale: float):
        super().__init__(own_files, folder, rank, steps)
        self._weights, self._scale = weights, scale
        self.moves, self._generator = 0.0, torch.Generator().manual_seed(rank)
        self.follows = self.prefixed = False
        self.silent = self.shared = frozenset[str]()
        self._parameters: dict[str, nn.Parameter] = {}
        self._known: Set[int] = frozenset()
        self._aliases: dict[str, str] = {}
        self._sums: list[dict[str, _Sum]] = []
        self._starts = [0]
        """Indices of the step's backwards that begin without gradients."""
        self._last = list[float]()
        self._loses, self._moved = True, False
        self._sparse: set[str] = set()
        self._hooked = False  # whether the script all-reduces something in a backward
        self._given: list[torch.Tensor | None] = []
        for name in ("all_gather", "all_gather_into_tensor", "all_to_all_single", "all_reduce", *SENDS):
            around(dist, name, self._sending_on)
        around(dist, "all_reduce", self._adding)
        function: Any = torch.autograd.Function
        apply = function.apply.__func__
        function.apply = classmethod(lambda *args, **kwargs: self._applying(apply, *args, **kwargs))
        around(BatchSampler, "__iter__", self._batches)
        for name in ("named_parameters", "named_modules"):
            around(nn.Module, name, self._naming)

    def begin(self) -> None:
        """Load the weights of the sharded run; first save the weights that this run's optimizer made."""
        self._find()
        if self.count:
            self._write_updated()
        beside = kept_beside(self._own_files, sys._getframe(1)) if self.shared else {}
        for name in sorted(self.shared & beside.keys()):
            _broadcast(dense := beside[name].detach().cpu().contiguous(), 0)
            beside[name].detach().copy_(dense)
        saved = self._saved(self.count)
        self._given = saved["added"][self.rank] if saved.get("added") else []
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                given = saved["weights"].get(name, parameter)
                if not torch.equal(given, parameter):  # a backward may still need unchanged weights
                    parameter.copy_(given)
                if self.moves and parameter.is_floating_point():
                    random = torch.rand(parameter.shape, generator=self._generator) - 0.5
                    parameter.mul_(1 + self.moves * random)

    def _naming(self, original: Any, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Give the script the names of parameters and modules without wrappers."""
        if self.prefixed or not self._own_files.has(sys._getframe(2).f_code.co_filename):
            return original(module, *args, **kwargs)
        return ((_unwrapped(module, path), each) for path, each in original(module, *args, **kwargs))

    def _batches(self, original: Any, sampler: Any) -> Any:
        return itertools.islice(original(sampler), None if self.epochs is None else _SHORT)

    def finish(self) -> None:
        """Save the weights after the last step."""
        self._write_updated()

    def backward(self, run: Callable[[], None]) -> None:
        """Run a backward on this rank's data, then replace its gradients by the joint batch's."""
        self._find()
        own = {name: each for name, each in self._parameters.items() if each.requires_grad}
        before = {name: each.grad for name, each in own.items()}
        record, local, sums = self.record, dict[str, torch.Tensor](), dict[str, _Sum]()
        weights = [float(each.detach().double().sum()) for each in self._parameters.values()]
        self._moved, self._last = bool(record.local) and (self._moved or weights != self._last), weights
        if not record.local:
            self._sums, self._starts = [], [0]
        elif not any(each is not None and each.to_dense().any() for each in before.values()):
            self._starts.append(len(self._sums))
        raw = dict[str, torch.Tensor]()
        hooks = [each.register_hook(functools.partial(_add_to, raw, name)) for name, each in own.items()]
        for each in own.values():
            each.grad = None
        self._hooked = False
        run()
        for hook in hooks:
            hook.remove()
        has = torch.tensor([float(each.grad is not None) for each in own.values()])
        _sum(has)
        for (name, each), somewhere in zip(own.items(), has.tolist(), strict=True):
            if somewhere:
                gradient = torch.zeros_like(each) if each.grad is None else each.grad
                self._sparse |= {name} if gradient.is_sparse else set()
                local[name] = gradient.detach().to_dense().double()
                if self._hooked and name in raw and self._is_added(local[name], raw[name]):
                    local[name] = raw[name]
                total, size = local[name].clone(), local[name].abs()
                _sum(total)
                _sum(size)
                sums[name] = total * self._scale, size * self._scale
                eps = torch.finfo(each.dtype).eps
                record.low, record.computes = max(record.low, eps), max(record.computes, eps)
            else:
                each.grad = before[name]
        self._sums.append(sums)
        record.local.append(local)
        record.mean, record.bound = self._joint_since(self._starts[-1])
        for name in sums:
            own[name].grad = self._of_kind(name, record.mean[name].to(own[name].dtype))
        record.held, record.aliases = self.held(), self._aliases
        record.computes = max([record.computes, *_computes])

    def _is_added(self, gradient: torch.Tensor, raw: torch.Tensor) -> bool:
        """Return whether a hook of the script turned a rank's `raw` gradient into the sum of all ranks'."""
        joint = raw.clone()
        _sum(joint)
        return self._scale < 1 and torch.allclose(
            gradient, joint, rtol=1e-3, atol=1e-6 * float(joint.abs().max())
        )

    def _joint_since(self, start: int) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """Return the joint gradients of the step's backwards from `start` on, and their magnitudes."""
        means, sizes = dict[str, torch.Tensor](), dict[str, torch.Tensor]()
        for name, (total, size) in itertools.chain.from_iterable(each.items() for each in self._sums[start:]):
            means[name], sizes[name] = means.get(name, 0) + total, sizes.get(name, 0) + size
        return means, sizes

    def settle(self) -> None:
        """If a script dropped gradients in a step, choose the backwards that its optimizer reads: it may have
        kept the dropped ones, or trained without them. A common factor of all gradients does not matter."""
        read = {name: each.grad for name, each in self._parameters.items() if each.grad is not None}

        def apart(start: int) -> float:
            mean, _ = self._joint_since(start)
            pairs = [(read[name].to_dense().double(), mean[name]) for name in mean.keys() & read.keys()]
            factor = sum(float((a * b).sum()) for a, b in pairs)
            factor /= sum(float(b.square().sum()) for _, b in pairs) or 1.0
            error = sum(float((a - factor * b).square().sum()) for a, b in pairs)
            return error if math.isfinite(error) else math.inf

        start = min(self._starts, key=apart) if len(self._starts) > 1 else 0
        self._loses &= start > 0 and not self._moved
        start = 0 if self._loses and self.count else start  # each step loses some: none was skipped
        self.record.mean, self.record.bound = self._joint_since(start)
        others = optimized(*self._leaders).keys() - optimized(self._leading)
        out = {name for name, each in self._parameters.items() if id(each) in others}
        whole = self.record.mean, self.record.bound, *self.record.local[start:]
        self.record.mean, self.record.bound, *self.record.local = (
            {name: gradient for name, gradient in each.items() if name not in out} for each in whole
        )

    def _of_kind(self, name: str, gradient: torch.Tensor) -> torch.Tensor:
        """Return a gradient as rows of an embedding's table (sparse), if the script's own was sparse."""
        return gradient.to_sparse(1) if name in self._sparse else gradient

    def _adding(self, original: Any, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Leave joint gradients as they are, alone or flattened together, if a script adds parts of a mean;
        and values that already equal the result of all shards together, such as a norm."""
        caller, first = sys._getframe(2), tensor.detach().reshape(-1)[:1]
        self._hooked |= bool(self._depth) and self._own_files.has(caller.f_code.co_filename)
        given = self._given.pop(0) if self._given and self.adds("all_reduce", caller) else None
        is_sum = next(filter(None, (*args[:1], kwargs.get("op"), dist.ReduceOp.SUM))) == dist.ReduceOp.SUM
        own = self._parameters.values() if is_sum and self._scale == 1 and self.record.losses else ()
        for each in own:
            if self._depth and each.shape == tensor.shape and _is_of_hook(caller):
                return _nothing()
            if each.grad is not None and (
                each.grad.data_ptr() == tensor.data_ptr()
                or (any(first) and torch.equal(each.grad.detach().reshape(-1)[:1].to(first.dtype), first))
            ):
                return _nothing()
        before, done = tensor.detach().clone(), original(tensor, *args, **kwargs)
        if not is_sum or given is None or (given.shape, given.dtype) != (before.shape, before.dtype):
            return done
        if done is not None:
            done.wait()
        if torch.allclose(before, given, rtol=_SAME, atol=0.0, equal_nan=True):
            tensor.detach().copy_(before)
        return done

    def _sending_on(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        """Send; `follows`: the output gets the gradient that the joint loss has there."""
        own = sent(original, *args, **kwargs) if self.follows and not self._depth else []
        if not own or function_of(self._own_files, sys._getframe(2))[1] is not None:
            return original(*args, **kwargs)
        with torch.enable_grad():
            into, whole = joint(original, own[0], *args, **kwargs)
            whole.register_hook(self._following)
            for each, part in zip(into, whole.reshape(len(into), *into[0].shape), strict=True):
                each.copy_(part)
        return _nothing() if kwargs.get("async_op") else None

    def _applying(self, original: Any, kind: Any, *args: Any, **kwargs: Any) -> Any:
        """Call an autograd function; `follows`: one that is `silent` in backward gets autograd's own."""
        if not self.follows or f"{kind.__name__}Backward" not in self.silent:
            return original(kind, *args, **kwargs)
        made = kind.forward(Context(), *args, **kwargs)
        if not isinstance(made, torch.Tensor) or not made.requires_grad:
            raise NotComparedError(f"what {kind.__name__} sends and does not send back")
        return made

    def _following(self, gradient: torch.Tensor) -> None:
        self.record.follows |= bool(gradient.any())

    def stepping(self) -> None:
        """Give the optimizer the gradients that the sharded run's read, unless that one reduces them."""
        saved = self._saved(self.count)
        if saved.get("reduces"):
            return
        clipped = saved.get("clipped") or {}
        for name, parameter in self._parameters.items():
            if name in self._others and name not in self._reached:
                continue
            given = clipped.get(name)
            parameter.grad = None
            if given is not None:
                parameter.grad = self._of_kind(name, given.to(parameter.dtype).reshape(parameter.shape))

    def _find(self) -> None:
        known = optimized(*self._optimizers)
        if self._parameters and known.keys() == self._known:
            return
        self._known = known.keys()
        names: dict[int, str] = {}
        named: dict[str, nn.Parameter] = {}
        every = [list(root.named_parameters(remove_duplicate=False)) for root in roots()]
        paths = [[(plain_name(path), id(parameter)) for path, parameter in each] for each in every]
        for index, lasting in self._names.of_all(paths, known):
            for name, (_, parameter) in zip(lasting, every[index], strict=True):
                first = names.setdefault(id(parameter), name)
                if first == name:
                    named.setdefault(name, parameter)
                else:
                    self._aliases.setdefault(name, first)
        self._parameters = dict(sorted((named | self._others).items()))

    def _saved(self, step: int) -> Any:
        path = self._weights / f"step{step}.pt"
        return torch.load(path) if path.exists() else {"weights": {}}

    def _write_updated(self) -> None:
        found = {name: each.detach().clone() for name, each in self._parameters.items()}
        keep(found, updated_path(self.folder, self.rank, self.count))


def _add_to(gradients: dict[str, torch.Tensor], name: str, gradient: torch.Tensor) -> None:
    gradients[name] = gradients.get(name, 0) + gradient.detach().to_dense().double()


def _unwrapped(module: Any, path: str) -> str:
    """Return the name of a part of a module without wrappers."""
    parts = []
    for part in path.split("."):
        if plain_name(part) or (part == "module" and not isinstance(module, _Unsharded)):
            parts.append(part)
        module = getattr(module, part, module)
    return ".".join(parts)


def _is_of_hook(frame: FrameType | None) -> bool:
    """Return whether a tensor's hook is running in backward, rather than a function of the script's own."""
    while frame is not None and frame.f_code.co_filename != torch.autograd.graph.__file__:
        if frame.f_code.co_filename == torch.autograd.function.__file__:
            return False
        frame = frame.f_back
    return frame is not None


def updated_path(folder: Path, rank: int, step: int) -> Path:
    """Return the path of the weights that a rank's optimizer has made by a step."""
    return folder / f"updated{step}_rank{rank}.pt"


def _sum(tensor: torch.Tensor) -> None:
    if dist.is_initialized() and dist.get_world_size() > 1:
        _all_reduce(tensor)


_computes: list[float] = []
"""Machine epsilons of the dtypes in which units compute."""


def leave_out_wrappers(casts_buffers: bool) -> None:
    """Make FSDP1, FSDP2 and DDP wrap nothing in this process, for good. Unless `casts_buffers`, buffers keep
    their dtype, which FSDP1's mixed precision would change."""
    _Unsharded.casts_buffers = casts_buffers
    replacements = Replacements()
    replacements.add(fsdp.FullyShardedDataParallel, _Unsharded)
    replacements.add(DistributedDataParallel, _Replica)
    replacements.add(fsdp.register_fsdp_forward_method, _nothing)
    replacements.wrap(distributed_tensor, "distribute_tensor", passing_to(_distributing))
    replacements.apply()
    replace_fully_shard(lambda original: _fully_shard)
    patch("replicate", lambda original: _fully_shard)
    replace_checkpoint(_without_recomputing)
    replace(checkpoint_wrappers, torch_utils_checkpoint=_without_recomputing)
    for name in ("to_local", "full_tensor"):  # of a DTensor
        setattr(torch.Tensor, name, lambda tensor, *args, **kwargs: tensor)
    for name, value in (("device_mesh", None), ("placements", ())):
        setattr(torch.Tensor, name, value)


def _distributing(make: Callable[..., Any], tensor: Any, device_mesh: Any, *args: Any, **kwargs: Any) -> Any:
    """Distribute a tensor; without a mesh, as without sharding, return it unchanged."""
    return tensor if device_mesh is None else make(tensor, device_mesh, *args, **kwargs)


_OF_CHECKPOINT = {*inspect.signature(checkpoint).parameters, "preserve_rng_state"}


def _without_recomputing(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function to be checkpointed without recomputing it: so nothing can change in between."""
    return function(*args, **{name: each for name, each in kwargs.items() if name not in _OF_CHECKPOINT})


def _nothing(*args: Any, **kwargs: Any) -> SimpleNamespace:
    """Do nothing; replaces methods of wrappers. The result's `wait` returns immediately."""
    return SimpleNamespace(wait=lambda: None)


@contextlib.contextmanager
def _unchanged(*args: Any, **kwargs: Any) -> Iterator[None]:
    """Change nothing: parameters and state dicts are whole, gradients are always joint."""
    yield


def _fully_shard(module: Any, *, mp_policy: Any = None, **kwargs: Any) -> Any:
    """Give a module the methods of `FSDPModule`, which do nothing, and the dtypes of its policy."""
    for each in module if isinstance(module, list | tuple) else [module]:
        kind = type(each)
        each.__class__ = type(f"FSDP{kind.__name__}", (_Plain, kind), {})
        if mp_policy is not None:
            inputs = mp_policy.param_dtype if mp_policy.cast_forward_inputs else None
            _Precision(each, mp_policy.param_dtype, inputs, mp_policy.output_dtype)
    return module


class _Plain(fsdp.FSDPModule):
    """A module that would be an FSDP2 unit."""

    for _name in dir(fsdp.FSDPModule):
        if not _name.startswith("_") and not hasattr(nn.Module, _name):
            locals()[_name] = _nothing

    def _get_fsdp_state(self) -> Any:
        """Return None: there is no state."""
        return None

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        """Convert parameters as other modules do."""
        return super(fsdp.FSDPModule, self)._apply(*args, **kwargs)  # type: ignore[misc]


class _Unsharded(nn.Module):
    """A module that FSDP1 would wrap."""

    casts_buffers = False
    _precision: "_Precision | None" = None

    def __init__(self, module: nn.Module, *args: Any, mixed_precision: Any = None, **kwargs: Any) -> None:
        super().__init__()
        self.module = module
        self.register_load_state_dict_pre_hook(_within)
        _materialise(module, kwargs.get("param_init_fn"))
        if kwargs.get("sync_module_states"):
            _send_buffers(module)
        for each in self.fsdp_modules(module):
            if each._precision is not None:
                each._precision.inputs = each._precision.below  # it is not a root
        if mixed_precision is not None and hasattr(mixed_precision, "param_dtype"):
            kind = mixed_precision.param_dtype
            own = any(True for each in _of_unit(module) for _ in each.parameters(recurse=False))
            flags = mixed_precision.cast_root_forward_inputs, mixed_precision.cast_forward_inputs
            root, below = (kind if own and flag else None for flag in flags)
            self._precision = _Precision(module, kind, root or below, None)
            self._precision.below = below
            if self.casts_buffers:
                self._cast_buffers(mixed_precision.buffer_dtype)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module."""
        return self.module(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)

    def __getitem__(self, key: int) -> Any:
        return self.module[key]  # type: ignore[index]

    def _cast_buffers(self, kind: Any) -> None:
        """Convert the buffers that FSDP1 would convert, and that multiply activations."""
        for each in self.module.modules():
            for name, buffer in each.named_buffers(recurse=False):
                if kind is not None and buffer.is_floating_point() and not isinstance(each, _NORMS):
                    setattr(each, name, buffer.to(kind))

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Clip by the norm of all gradients."""
        return nn.utils.clip_grad_norm_(self.parameters(), max_norm, norm_type)

    no_sync = join = state_dict_type = summon_full_params = staticmethod(_unchanged)
    set_state_dict_type = register_comm_hook = staticmethod(_nothing)

    @staticmethod
    def fsdp_modules(module: nn.Module, root_only: bool = False) -> "list[_Unsharded]":
        """Return the wrapped modules."""
        return [each for each in module.modules() if isinstance(each, _Unsharded)]

    @staticmethod
    def optim_state_dict(model: nn.Module, optim: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the optimizer's own state."""
        return optim.state_dict()


class _Replica(_Unsharded):
    """A module that DDP would wrap. Like DDP, rank 0 sends its buffers before a forward, unless the previous
    forward ran without gradients or in `no_sync()`."""

    require_backward_grad_sync = _synchronised = True

    def __init__(self, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        given = _OF_DDP.bind(module, *args, **kwargs).arguments
        super().__init__(module, mixed_precision=given.get("mixed_precision"))
        mesh, forward = given.get("device_mesh"), given.get("forward_sync_buffers")
        self._group = given.get("process_group") if mesh is None else mesh.get_group()
        self.broadcast_buffers = given.get("broadcast_buffers") is not False if forward is None else forward
        if given.get("init_sync", True) and (self.broadcast_buffers or forward is not None):
            _send_buffers(module, self._group)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module."""
        if self.broadcast_buffers and self._synchronised:
            _send_buffers(self.module, self._group)
        found = self.module(*args, **kwargs)
        self._synchronised = torch.is_grad_enabled() and self.require_backward_grad_sync
        return found

    no_sync = DistributedDataParallel.no_sync  # sets require_backward_grad_sync

    def _pre_forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the inputs: `replicate`, which holds only parameters, calls this before its forward."""
        return args, kwargs

    def _post_forward(self, output: Any) -> Any:
        """Return the output."""
        return output

    @staticmethod
    def _set_params_and_buffers_to_ignore_for_model(module: Any, names: Any) -> None:
        module._ddp_params_and_buffers_to_ignore = names


_OF_DDP = inspect.signature(DistributedDataParallel)


def _send_buffers(module: nn.Module, group: Any = None) -> None:
    """Send a module's buffers from the first rank of `group`, except those that DDP should ignore."""
    ignored = getattr(module, "_ddp_params_and_buffers_to_ignore", ())
    for name, buffer in module.named_buffers():
        if name not in ignored:
            dense = buffer.data.clone(memory_format=torch.contiguous_format)
            dist.broadcast(dense, group=group, group_src=0)
            buffer.data.copy_(dense)


def _within(module: nn.Module, state: Any, prefix: str, *others: Any) -> None:
    """Accept names from FSDP1, which leaves out its own part."""
    for name in [each for each in state if each.startswith(prefix)]:
        if not name.startswith(f"{prefix}module."):
            state[f"{prefix}module.{name.removeprefix(prefix)}"] = state.pop(name)


def _materialise(module: nn.Module, init: Callable[[nn.Module], None] | None) -> None:
    """Move a module from the meta device to the CPU; its weights come from the sharded run."""
    if any(each.is_meta for each in module.parameters()):
        module.to_empty(device="cpu")
        for each in module.modules():
            reset = init or getattr(type(each), "reset_parameters", None)
            if reset is not None:
                reset(each)


class _Precision:
    """The dtypes of a unit: each forward finds its parameters cast, in attributes that hide the parameters.

    They stay until the next forward: recomputation in backward needs them. Gradients pass the cast."""

    below: Any = None  # the dtype of `inputs` if inside another unit

    def __init__(self, module: nn.Module, kind: Any, inputs: Any, output: Any) -> None:
        self._kind, self.inputs, self._output = kind, inputs, output
        if kind is not None:
            _computes.append(torch.finfo(kind).eps)
        module.register_forward_pre_hook(self._before, with_kwargs=True)
        module.register_forward_hook(self._after)

    def _before(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if self._kind is not None:
            cast: dict[int, torch.Tensor] = {}
            for each in _of_unit(module):
                for name, parameter in each.named_parameters(recurse=False):
                    if parameter.is_floating_point() and not isinstance(each, _NORMS):
                        made = cast.setdefault(id(parameter), parameter.to(self._kind))
                        each.__dict__[name] = made
        return None if self.inputs is None else (_cast(args, self.inputs), _cast(kwargs, self.inputs))

    def _after(self, module: nn.Module, args: Any, output: Any) -> Any:
        if not torch.is_grad_enabled():
            for each in module.modules():
                for name, _ in each.named_parameters(recurse=False):
                    each.__dict__.pop(name, None)
        return output if self._output is None else _cast(output, self._output)


def _of_unit(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules of a unit, without those of nested units."""
    yield module
    for child in module.children():
        if not isinstance(child, _Plain | _Unsharded):
            yield from _of_unit(child)


def _cast(value: Any, kind: torch.dtype) -> Any:
    return tree_map_only(
        torch.Tensor, lambda each: each.to(kind) if each.is_floating_point() else each, value
    )
