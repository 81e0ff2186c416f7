"""Watches of a script's steps on a real rank: they record gradients, weights and losses for comparison."""

import collections
import contextlib
import functools
import gc
import random
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.function import FunctionCtx
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.nn import functional as differentiable
from torch.distributed.tensor import parallel
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data import DistributedSampler

from fsdpbench.base.errors import PicklableError
from fsdpbench.script.interposing import around
from fsdpbench.script.model_blocks import roots
from fsdpbench.script.own_files import OwnFiles
from fsdpbench.script.real_ranks import pieces
from fsdpbench.script.real_ranks.loss_divisors import Divided, divided
from fsdpbench.script.real_ranks.sending import SENDS, sends_all_of_one, sent
from fsdpbench.script.steps import MeasuredAllError

_REDUCTIONS = ("all_reduce", "reduce", "reduce_scatter", "reduce_scatter_tensor", "reduce_scatter_single")
_EXCHANGES = ("all_to_all", "all_to_all_single")
_LOSSY = re.compile(r"torch\.distributed\.algorithms\..*\.(?!default_hooks|debugging_hooks)\w+_hooks?")
_FEW = 0.02  # share of a scaler's factor up to which a norm is one of unscaled gradients
_SMALL = 1024
"""Elements up to which a tensor counts as norms and counts rather than gradients."""
_GATHERS = ("all_gather", "all_gather_into_tensor", "all_gather_object")
_NUMBERS = (bool, int, float, tuple, torch.Tensor)
OTHER = "the optimizer's tensor of no module, number"
"""The beginning of such a tensor's name."""
MOST_STEPS = 9
"""Steps to wait at most for an optimizer that has not stepped."""
_HOOKS = (
    (nn.parallel.DistributedDataParallel, "register_comm_hook"),
    (FullyShardedDataParallel, "register_comm_hook"),
    (FSDPModule, "set_custom_reduce_scatter"),
)


@dataclass(frozen=True)
class Wrapping:
    """The line that wrapped a parameter (`train.py:12`), and how."""

    place: str = ""
    how: str = ""


@dataclass
class StepRecord:
    """One rank's step. `held`: weights before it, and gradients after the last backward; `clipped`: gradients
    as the optimizer read them, None after the last step; `place`: the line of `optimizer.step()`; `loader`:
    the line of the first `DataLoader`. In the reference: `mean` of all ranks' gradients, `bound`, the
    mean of their magnitudes, and `local` gradients of each microbatch."""

    held: Mapping[str, pieces.Held]
    clipped: Mapping[str, pieces.Piece | None] | None = None
    unclipped: Mapping[str, pieces.Piece | None] = field(default_factory=dict)
    """Gradients before torch clips them by their norm."""
    losses: list[float] = field(default_factory=list)
    divided: list[Divided] = field(default_factory=list)
    """The divisors of the loss of each backward."""
    summands: int = 1
    """Samples or tokens of a microbatch: the summands of a gradient."""
    inputs: str = ""
    place: str = ""
    loader: str = ""
    optimized: frozenset[str] = frozenset()
    wrapping: Mapping[str, Wrapping] = field(default_factory=dict)
    mean: dict[str, torch.Tensor] = field(default_factory=dict)
    bound: dict[str, torch.Tensor] = field(default_factory=dict)
    local: list[dict[str, torch.Tensor]] = field(default_factory=list)
    low: float = 0.0
    """The machine epsilon of the coarsest dtype in which gradients are reduced or kept."""
    computes: float = 0.0
    """The machine epsilon of the coarsest dtype in which layers compute."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    reduces: bool = False
    """Whether an optimizer has called a reduction in its step, so far."""
    splits: bool = False
    """Whether the script or `torch.distributed.nn` ran all-to-all in backward, or reduced over some ranks."""
    grouped: bool = False
    """Whether the script has process groups of some ranks, or a mesh of several dimensions."""
    added: list[torch.Tensor | None] = field(default_factory=list)
    """Results of the script's own all-reduces of few numbers, between backward and the optimizer's step."""
    gathers: bool = False
    """Whether the script gathers something between backward and the optimizer's step."""
    hook: str = ""
    """The line where the script gave a wrapper its own way to communicate gradients, "" if it did not."""
    waits: bool = False
    """Whether an optimizer has not stepped yet."""
    by_hand: bool = False
    """Whether the script itself has reduced tensors of several elements in or after a backward."""
    votes: str = ""
    """The line where the script reduced or gathered whole numbers instead of gradients."""
    seed: int = 0  # set when the first optimizer was created
    order: tuple[int, int] | None = None  # seed and epoch of the sampler that shuffles for training
    dropped: str = ""  # the line that sends a tensor and loses its gradient
    silent: frozenset[str] = frozenset()
    """The script's autograd functions that send tensors in forward, and none in backward."""
    follows: bool = False  # in the reference: whether such a gradient was not zero
    changed: frozenset[str] = frozenset()  # weights that the last step changed
    scaled_clip: str = ""  # the line that clips scaled gradients
    facts: dict[str, object] = field(default_factory=dict)  # must be equal on all ranks
    settings: Mapping[str, object] = field(default_factory=dict)
    """Whether each parameter trains, and the numeric settings of its optimizer's group."""
    largest: list[float] = field(default_factory=list)
    """Single numbers of which an all-reduce returned the largest of all ranks."""
    kept: Mapping[str, str] = field(default_factory=dict)  # digests of values kept besides parameters
    made: str = ""  # the line that created the first optimizer


def record_path(folder: Path, rank: int, step: int) -> Path:
    """Return the path of a rank's record of a step."""
    return folder / f"step{step}_rank{rank}.pt"


class NotComparedError(PicklableError, NotImplementedError):
    """Raised for a kind of script that has no reference without sharding here."""

    def __init__(self, kind: str) -> None:
        super().__init__(f"{kind} is not compared with a run without sharding")


class Watch:
    """The steps of a script, which ends after `steps` steps of its first optimizer with `MeasuredAllError`.
    When the first optimizer is created, seeds are set to `seed`, or if that is 0, from the script's seed or,
    without one, the rank: random numbers drawn before depend on how weights were initialized."""

    def __init__(self, own_files: OwnFiles, folder: Path, rank: int, steps: int) -> None:
        self.count = 0
        self.folder, self.rank, self.steps = folder, rank, steps
        self.record = StepRecord({})
        self._own_files, self._names = own_files, pieces.Names()
        self.seed, self._unset = 0, torch.initial_seed()
        self._orders = dict[int, tuple[int, int]]()  # of samplers
        self.epochs: Path | None = None  # file for whether the second repeats the first
        self._sampler = self._reads = 0  # last to begin an epoch; and before the first backward
        self._models, self._optimizers = list[nn.Module](), list[torch.optim.Optimizer]()
        self._leading: torch.optim.Optimizer | None = None
        self._leaders = list[torch.optim.Optimizer]()
        """Optimizers that were the first to step after some backward."""
        self._waiting = set[int]()  # parameters whose optimizers have not stepped
        self._made = ""
        self._others = dict[str, nn.Parameter]()  # optimizers' tensors outside modules
        self._reached = dict[str, nn.Parameter]()  # those that got a gradient in a backward
        self._kept = set[int]()  # parameters with gradients before the first backward of a step
        self._depth = self._since = 0  # running backwards; backwards since the last forward
        self._begins, self._steps = True, False
        self._begun: Mapping[str, pieces.Held] = {}
        self._stepping = self._reduces = self._reduces_by_hand = False
        self._votes = ""
        self._silent, self._answering = dict[str, str](), set[str]()
        self._receives = False  # whether the script hands a gradient to a backward, as a stage does
        for name in SENDS:
            around(dist, name, functools.partial(_sending, self))
        for name in (*_REDUCTIONS, *_EXCHANGES, *_GATHERS):
            if hasattr(dist, name):  # `reduce_scatter_single` is new in torch 2.13
                around(dist, name, self._calling)
        around(DistributedSampler, "__iter__", self._beginning)
        around(torch.autograd, "backward", self._around_backward)
        around(torch.optim.Optimizer, "__init__", self._making)
        register_optimizer_step_pre_hook(self._before_step)
        register_optimizer_step_post_hook(self._after_step)
        register_module_forward_pre_hook(self._forward)

    def begin(self) -> None:
        """Prepare the first forward of a step."""

    def backward(self, run: Callable[[], None]) -> None:
        """Run a backward, and record the gradients after it."""
        run()
        self.record.held = self.held()

    def wrapping(self) -> Mapping[str, Wrapping]:
        """Return the line that wrapped each parameter."""
        return {}

    def held(self) -> dict[str, pieces.Held]:
        """Return this rank's parameters."""
        others = {name: pieces.held_tensor(each) for name, each in self._reached.items()}
        return pieces.held_parameters(optimized(*self._optimizers), self._names) | others

    def _making(self, original: Callable[..., Any], optimizer: Any, *args: Any, **kwargs: Any) -> None:
        original(optimizer, *args, **kwargs)
        if not self._optimizers:
            known = torch.initial_seed()
            self.seed = self.seed or 1000 + (self.rank if known == self._unset else known % 2**62)
            torch.manual_seed(self.seed)
            random.seed(self.seed)
        self._optimizers.append(optimizer)
        self._waiting |= optimized(optimizer).keys()
        if len(self._optimizers) == 1:
            self.held()  # learn names before a block leaves its list
            self._made = self._own_files.line() or ""
        inside = {id(each) for root in roots() for each in root.parameters()}
        for key, each in optimized(optimizer).items():
            if key not in inside and each.is_leaf and each.requires_grad:
                name = f"{OTHER} {len(self._others) + 1}"
                self._others[name] = each
                each.register_post_accumulate_grad_hook(functools.partial(self._reached.__setitem__, name))
        self._models += roots()  # the script's references may end before its end is recorded

    def _beginning(self, original: Callable[..., Any], sampler: Any) -> Any:
        self._sampler = id(sampler)
        if sampler.shuffle:
            order = sampler.seed, sampler.epoch
            if self.epochs is not None and self._reads == self._sampler:
                pieces.keep(self._orders[self._reads] == order, self.epochs)
                raise MeasuredAllError
            self._orders[self._sampler] = order
        return original(sampler)

    def _calling(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        name, frame = original.__name__, sys._getframe(2)
        caller = frame.f_code.co_filename
        self._reduces |= self._stepping and name not in _GATHERS
        if self.record.losses and name in _REDUCTIONS:
            # Only gradients count, which are not single numbers.
            tensors = [each for each in (*args, *kwargs.values()) if isinstance(each, torch.Tensor)]
            kinds = {each.dtype for each in tensors if each.numel() > 1 and each.is_floating_point()}
            self.record.low = max([self.record.low, *(torch.finfo(kind).eps for kind in kinds)])
        _note_sent(self, original, *args, **kwargs)
        part = kwargs.get("group") is not None and kwargs["group"].size() < dist.get_world_size()
        if self._depth and (part or name in _EXCHANGES):
            self.record.splits |= caller == differentiable.__file__ or self._own_files.has(caller)
        is_loss = name == "all_reduce" and args and args[0].grad_fn is not None and args[0].numel() == 1
        if is_loss and torch.is_grad_enabled():
            args = (args[0].detach().clone(), *args[1:])  # its gradient would be lost
        if self._own_files.has(caller) and (self.record.losses or self._stepping):
            self._by_hand(name, *args, *kwargs.values())
        with torch.no_grad():
            done = original(*args, **kwargs)
        is_largest = name == "all_reduce" and dist.ReduceOp.MAX in (*args[1:2], kwargs.get("op"))
        if done is not None and (self._depth or is_largest):
            done.wait()  # gradients are read after the backward
        content: Any = args[0] if args else kwargs.get("tensor")
        if is_largest and content.numel() == 1:
            self.record.largest.append(float(content))
        if self.adds(name, frame):
            small = content.numel() <= _SMALL
            if done is not None and small:
                done.wait()
            self.record.added.append(content.detach().clone() if small else None)
        self.record.gathers |= self.adds(name, frame, _GATHERS)
        return done

    def _by_hand(self, name: str, *arguments: Any) -> None:
        """Note that the script itself sends tensors; a vote of signs sends whole numbers, 8 per byte."""
        sent = [each.detach() for each in arguments if isinstance(each, torch.Tensor)][-1:]
        largest = max((each.numel() for each in optimized(*self._optimizers).values()), default=1)
        for each in sent:
            self._reduces_by_hand |= name in _REDUCTIONS and each.numel() > 1
            large = 1 < largest <= 8 * each.numel() and not self._depth
            if large and torch.equal(each, each.double().round().to(each.dtype)):
                self._votes = self._own_files.line() or "?"

    def adds(self, name: str, caller: FrameType, names: Sequence[str] = ("all_reduce",)) -> bool:
        """Return whether a call is one of the collectives `names`, by the script itself, after a backward."""
        own = name in names and self._own_files.has(caller.f_code.co_filename)
        return own and bool(self.record.losses) and not self._depth

    def _forward(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        if not torch.is_grad_enabled() or self._depth or not self._optimizers:
            return
        self._since = 0
        if self._begins:
            if self.count >= self.steps and (not self._waiting or self.count >= MOST_STEPS):
                self.finish()
                raise MeasuredAllError
            self._begins = False
            self.begin()
        if torch.is_autocast_enabled("cpu"):
            eps = torch.finfo(torch.get_autocast_dtype("cpu")).eps
            self.record.computes = max(self.record.computes, eps)
        tensors = [each for each in inputs if isinstance(each, torch.Tensor)]
        if tensors and len(self.record.inputs) <= len(self.record.losses) * 8:
            with contextlib.suppress(RuntimeError):  # tensors of torch.func have no storage
                self.record.inputs += pieces.digest_of(tensors[0])
            last = 1 if tensors[0].is_floating_point() and tensors[0].ndim > 1 else 0
            self.record.summands = max(1, *tensors[0].shape[: tensors[0].ndim - last])

    def _around_backward(self, original: Callable[..., Any], tensors: Any, *args: Any, **kwargs: Any) -> None:
        if self._depth:  # of a reentrant checkpoint
            return original(tensors, *args, **kwargs)
        self._depth += 1
        try:
            first = tensors if isinstance(tensors, torch.Tensor) else next(iter(tensors))
            if not self.record.losses and len(self._optimizers) > 1:
                self._kept = {
                    key for key, each in optimized(*self._optimizers).items() if _has_gradient(each)
                }
            self.record.losses.append(float(first.detach().float().sum()))
            lines = f"{self._own_files.line() or ''} {self._own_files.lines()} {self._since}"
            given = next(iter(args), kwargs.get("grad_tensors"))
            factor = float(given) if isinstance(given, torch.Tensor) and given.numel() == 1 else 1.0
            self._receives |= isinstance(given, torch.Tensor) and given.unique().numel() > 1
            self.record.divided.append(divided(first, lines, factor))
            self._reads = self._reads or self._sampler or -1
            self.record.order = self._orders.get(self._reads)
            self._since += 1
            self.backward(lambda: original(tensors, *args, **kwargs))
        finally:
            self._depth -= 1
        return None

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """Read gradients before a step; if the step has a closure, after the closure's backward."""
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            self._with_gradients(optimizer)
            return None
        calls = [closure]

        def called() -> Any:
            if not calls:
                raise NotComparedError("an optimizer that calls its closure again")
            loss = calls.pop()()
            self._with_gradients(optimizer)
            return loss

        return ((args[0], called), kwargs) if len(args) > 1 else (args, {**kwargs, "closure": called})

    def _with_gradients(self, optimizer: Any) -> None:
        self._stepping, self._random = True, torch.get_rng_state()
        if self._depth:
            raise NotComparedError("an optimizer that steps in backward")
        self._waiting -= optimized(optimizer).keys()
        leading = self._leading in (None, optimizer) or bool(self.record.losses)
        if self._steps or not leading:  # inside the leading optimizer's step, or after it
            return
        self._lead(optimizer)
        self._steps = True
        held = self.held()
        self._waiting &= {each.identity for each in held.values()}  # without those that a wrapper replaced
        self.record.held = {
            name: replace(each, weight=self._begun.get(name, each).weight)
            for name, each in (self.record.held or held).items()
        }
        self.record.clipped = {name: each.gradient for name, each in held.items()}
        groups = collections.ChainMap(*map(_group_settings, self._optimizers))
        self.record.optimized = frozenset(name for name, each in held.items() if each.identity in groups)
        self.record.wrapping, self.record.place = self.wrapping(), self._own_files.line() or ""
        self.record.reduces, self.record.waits = self._reduces, bool(self._waiting)
        self.record.by_hand, self.record.votes = self._reduces_by_hand, self._votes
        self.record.seed, self.record.made = self.seed, self._made
        silent = sorted(self._silent.keys() - self._answering)
        self.record.silent = frozenset(silent)
        lines = [self.record.dropped, *map(self._silent.__getitem__, silent)]
        self.record.dropped = "" if self._receives else next(filter(None, lines), "")
        self.record.settings = {name: (each.trains, groups.get(each.identity)) for name, each in held.items()}
        self.settle()
        pieces.keep(self.record, record_path(self.folder, self.rank, self.count))
        self.stepping()

    def _lead(self, optimizer: torch.optim.Optimizer) -> None:
        """Attribute a step to an optimizer. Several may alternate, as in a GAN, each after a backward."""
        self._leading = optimizer
        if optimizer not in self._leaders:
            self._leaders.append(optimizer)
        if len(self._leaders) > 1 and self._kept & optimized(optimizer).keys():
            raise NotComparedError("an optimizer that adds gradients of other optimizers' steps")

    def settle(self) -> None:
        """Adjust the record of a step before it is written."""

    def stepping(self) -> None:
        """Prepare the optimizer's step, after the record is written."""

    def _after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self._stepping:  # not if an optimizer has not called its closure
            torch.set_rng_state(self._random)  # a shard takes fewer random numbers than the whole
        self._stepping = False
        if optimizer is self._leading:
            self.count += 1
            self._begins, self._steps = True, False
            self.record = StepRecord({})
            self.stepped()

    def stepped(self) -> None:
        """React to the end of a step."""

    def finish(self) -> None:
        """Write the weights after the last step."""
        last = StepRecord(self.held(), reduces=self._reduces, votes=self._votes, changed=self.record.changed)
        pieces.keep(last, record_path(self.folder, self.rank, self.count))


def _sending(watch: Watch, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    _note_sent(watch, original, *args, **kwargs)
    return original(*args, **kwargs)


def _note_sent(watch: Watch, original: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """Note what is sent without its gradient: by an autograd function, if its backward sends nothing."""
    kind, inside = function_of(watch._own_files, sys._getframe(1))
    if inside is None:
        if not watch._depth and sent(original, *args, **kwargs):
            watch.record.dropped = watch.record.dropped or watch._own_files.line() or ""
    elif watch._depth:
        watch._answering.add(kind)
    elif inside.f_code.co_name == "forward" and sends_all_of_one(inside, original, *args, **kwargs):
        watch._silent.setdefault(kind, watch._own_files.line() or "")


def function_of(own_files: OwnFiles, frame: FrameType | None) -> tuple[str, FrameType | None]:
    """Return name and frame of the script's autograd function that runs, None without one."""
    while frame is not None:
        is_own = own_files.has(frame.f_code.co_filename)
        first = next(iter(frame.f_locals.values()), None) if is_own else None
        if isinstance(first, FunctionCtx):
            return type(first).__name__, frame
        frame = frame.f_back
    return "", None


def optimized(*optimizers: torch.optim.Optimizer | None) -> dict[int, nn.Parameter]:
    """Return the optimizers' parameters, by `id`."""
    groups = [group for each in optimizers if each is not None for group in each.param_groups]
    return {id(parameter): parameter for group in groups for parameter in group["params"]}


def _group_settings(optimizer: torch.optim.Optimizer) -> dict[int, str]:
    """Return the numeric settings of each parameter's group, by the parameter's `id`."""
    found = dict[int, str]()
    for group in optimizer.param_groups:
        numbers = [(key, group[key]) for key in sorted(group) if isinstance(group[key], _NUMBERS)]
        found |= dict.fromkeys(map(id, group["params"]), f"{type(optimizer).__name__} {numbers}")
    return found


def _has_gradient(parameter: nn.Parameter) -> bool:
    gradient: Any = parameter.grad
    return gradient is not None and bool(getattr(gradient, "_local_tensor", gradient).to_dense().any())


class ShardedWatch(Watch):
    """The watch of the script as it is, or with torch's reductions instead of its own (`plain`). `Calls` of
    `script/observed` knows the lines that wrapped parameters."""

    def __init__(self, own_files: OwnFiles, folder: Path, rank: int, steps: int, plain: bool) -> None:
        from fsdpbench.script.observed.calls import Calls

        self._grouped, self._hook, self._plain = False, "", plain
        for owner, name in _HOOKS:
            around(owner, name, self._hooking)
        around(parallel, "parallelize_module", _refusing)
        around(torch.func, "functional_call", self._with_other_weights)
        around(dist, "new_group", self._grouping)
        around(DeviceMesh, "__init__", self._meshing)
        for clips in (nn.utils, nn.utils.clip_grad, FullyShardedDataParallel):
            around(clips, "clip_grad_norm_", self._clipping)
        scaler = torch.amp.GradScaler
        for kind, name in ((scaler, "scale"), (scaler, "unscale_"), (ShardedGradScaler, "unscale_")):
            around(kind, name, self._scaling)
        around(torch.optim.lr_scheduler.ReduceLROnPlateau, "step", self._following_metric)
        self._metric, self._factor = "", 0.0  # the factor of a scaler, until gradients are unscaled
        self._calls = Calls(own_files)
        self._known: dict[str, Wrapping] = {}
        super().__init__(own_files, folder, rank, steps)

    def _clipping(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        most = float(args[1] if len(args) > 1 else kwargs["max_norm"])
        if most < _FEW * self._factor:
            self.record.scaled_clip = self._own_files.line() or ""
        if not self.record.unclipped:
            self.record.unclipped = {name: each.gradient for name, each in self.held().items()}
        return original(*args, **kwargs)

    def _scaling(self, original: Callable[..., Any], scaler: Any, *args: Any, **kwargs: Any) -> Any:
        done = original(scaler, *args, **kwargs)
        self._factor = scaler.get_scale() if original.__name__ == "scale" else 0.0
        return done

    def _following_metric(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        self._metric = f"{float(args[1] if len(args) > 1 else kwargs['metrics']):.4g}"
        original(*args, **kwargs)

    def _with_other_weights(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._begins and self._optimizers and torch.is_grad_enabled():
            raise NotComparedError("a step that begins with functional_call, and its own weights,")
        return original(*args, **kwargs)

    def _grouping(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        every = range(dist.get_world_size())
        self._grouped |= len((args[0] if args else kwargs.get("ranks")) or every) < len(every)
        return original(*args, **kwargs)

    def _hooking(self, original: Callable[..., Any], module: Any, *args: Any, **kwargs: Any) -> None:
        hook = kwargs["hook"] if "hook" in kwargs else args[-1]
        inside = [cell.cell_contents for cell in getattr(hook, "__closure__", None) or ()]
        names = [str(getattr(each, "__module__", None) or "torch") for each in (hook, *inside)]
        for name in filter(_LOSSY.fullmatch, names):
            raise NotComparedError(f"{name.rpartition('.')[2]}, which changes gradients by intention,")
        own = any(not name.startswith("torch") for name in names)
        self._hook = (self._own_files.line() or "") if own else self._hook
        if not own or not self._plain:
            original(module, *args, **kwargs)

    def _meshing(self, original: Callable[..., Any], mesh: DeviceMesh, *args: Any, **kwargs: Any) -> None:
        original(mesh, *args, **kwargs)
        self._grouped |= mesh.ndim > 1

    def begin(self) -> None:
        """Keep the weights of this moment: forwards, and code between them, may change them."""
        self.record.grouped, self.record.hook, self._begun = self._grouped, self._hook, self.held()
        self.record.kept = _digests(pieces.kept_beside(self._own_files, sys._getframe(1)))
        self._factor = 0.0

    def stepped(self) -> None:
        """Note what the step changed."""
        both = [(name, each.weight.values, self._begun.get(name)) for name, each in self.held().items()]
        changed = (name for name, now, old in both if old and not torch.equal(now, old.weight.values))
        self.record.changed = frozenset(changed)

    def backward(self, run: Callable[[], None]) -> None:
        """Note modules in evaluation mode, and buffers that the first forward did not change; then run it."""
        if len(self.record.losses) == 1:
            every = [each for root in roots() for each in root.modules()]
            trained = [each for each in every if any(p.requires_grad for p in each.parameters(recurse=False))]
            buffers = {} if self.count else pieces.kept_beside(self._own_files, None)
            now = _digests({name: each for name, each in buffers.items() if each.numel() > 1})
            kept = dict(now.items() & self.record.kept.items())
            self.record.facts = {"the mode of modules": any(each.training for each in trained), **kept}
            self.record.facts |= {"what ReduceLROnPlateau is given": self._metric}
        super().backward(run)

    def wrapping(self) -> Mapping[str, Wrapping]:
        """Return the line that wrapped each parameter with FSDP2 or DDP, or its FSDP1 unit."""
        for kind in {base for each in gc.get_objects() for base in type(each).__mro__}:
            of = str(kind.__module__)
            if issubclass(kind, nn.Module) and of.startswith("fsdpbench.impl"):
                raise NotComparedError("a wrapper of fsdpbench.impl")
            if of.startswith("torch.distributed.pipelining") and kind.__name__.endswith("Stage"):
                raise NotComparedError("pipeline parallelism")
        wrappers, found = self._calls.wrappers, self._known
        wrappers.look(self.count)
        if self._calls.first_loader is not None:
            self.record.loader = self._calls.first_loader.short
        for name, held in self.held().items():
            if wrapped := wrappers.of(held.identity):
                found[name] = Wrapping(wrapped.place.short, f"wrapped by {wrapped.api}")
            elif ignoring := wrappers.ignoring(held.identity):
                if self.record.splits and held.trains:
                    raise NotComparedError("parallelism by hand of parameters that a wrapper ignores")
                found[name] = Wrapping(ignoring.place.short, f"{ignoring.api} ignores them")
        return dict(found)


def _digests(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Return digests by name; those of several equal numbers, as before a first step, begin with `=`."""
    plain = {name: each.unique().numel() < min(2, each.numel()) for name, each in tensors.items()}
    return {name: "=" * plain[name] + pieces.digest_of(each) for name, each in tensors.items()}


def _refusing(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    raise NotComparedError("tensor parallelism")
