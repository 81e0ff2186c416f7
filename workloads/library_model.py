"""Models of the library `transformers` (`library.py`), built from its own modules.

Only the package's code runs: references to other code (`auto_map`) are dropped unread, and nothing is
downloaded. A block is an element of the model's outermost lists of modules.

FLOPs are counted by the formulas of `torch.utils.flop_counter` while one forward runs on the meta device.
Scans of state spaces and of linear attention are not counted. The library runs scans with kernels of other
packages (mamba-ssm, flash-linear-attention), or else as Python loops over tokens. On the meta device and on
simulated GPUs, a scan is one operator each way, which reads its arguments and writes its result. It has no
price, so results list it among the unknown operators.
"""

import functools
import importlib
import inspect
import math
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial, wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import flop_registry

from fsdpbench.base.torch_internals import TorchDispatchMode
from fsdpbench.workloads.base import BlockFlops, ForwardFlops
from fsdpbench.workloads.blocks import run_checkpointed
from fsdpbench.workloads.checkpointing import ActivationCheckpointing
from fsdpbench.workloads.library import LIBRARY, LibraryShape, check_sizes, library, model_type_of, unpacked
from fsdpbench.workloads.losses import ComputesTokenLoss, token_loss
from fsdpbench.workloads.shape import ShapeError, WorkloadError

_FOREIGN = re.compile(r"auto_map|trust_remote_code|quantization_config|(torch_)?dtype|\w*_implementation\w*")
"""Keys, at any depth, that name external code or kernels, or how a checkpoint is stored."""
_HEADS = ("AutoModelForSeq2SeqLM", "AutoModelForMaskedLM", "AutoModelForCausalLM")
_WHOLE = ("AutoModelForImageTextToText", "AutoModelForMultimodalLM")
_LIKE = ("value", "hidden_states")
"""Names of the argument that has the result's shape; the first one present counts."""
_WITH_VALUES = ("cpu", "cuda")
_ATEN = torch.ops.aten
_PRODUCTS = (_ATEN.mm, _ATEN.addmm, _ATEN.convolution)

_LIBRARY = torch.library.Library("fsdpbench_workloads", "FRAGMENT")

for _schema, _shapes in (
    ("scan(Tensor like, Tensor[] others) -> Tensor", lambda like, others: like.new_empty(like.shape)),
    (
        "scan_backward(Tensor gradient, Tensor[] inputs) -> Tensor[]",
        lambda gradient, inputs: [torch.empty_like(each) for each in inputs],
    ),
):
    _LIBRARY.define(_schema)
    _LIBRARY.impl(_schema.split("(")[0], _shapes, "Meta")


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, like: Tensor, *others: Tensor) -> Tensor:
        ctx.save_for_backward(like, *others)
        result: Tensor = torch.ops.fsdpbench_workloads.scan(like, others)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        wanted = [
            each for each, is_wanted in zip(ctx.saved_tensors, ctx.needs_input_grad, strict=True) if is_wanted
        ]
        made = iter(torch.ops.fsdpbench_workloads.scan_backward(gradient, wanted))
        return tuple(next(made) if is_wanted else None for is_wanted in ctx.needs_input_grad)


def fuse_scans(model: nn.Module) -> None:
    """Make the code of `model` run scans as one operator if tensors have no values."""
    for name in {type(module).__module__ for module in model.modules()}:
        scope = vars(sys.modules[name])
        for own, function in list(scope.items()):
            is_scan, with_state = _scans(own)
            if is_scan and inspect.isfunction(function) and not hasattr(function, "is_fused_scan"):
                scope[own] = _fused(function, with_state=with_state)


def _scans(name: str) -> tuple[bool, bool]:
    """Return whether the library's function of this name scans a sequence, and whether it returns a state."""
    with_state = bool(name.partition("chunk_")[2].partition("delta_")[2]) or name.endswith(
        "rwkv_linear_attention"
    )
    return with_state or name.endswith(("selective_scan", "chunk_scan")), with_state


def _fused(function: Callable[..., Any], with_state: bool) -> Callable[..., Any]:
    signature = inspect.signature(function)

    @wraps(function)
    def scan(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        tensors = {name: each for name, each in given.items() if isinstance(each, Tensor)}
        like = tensors.pop(next(name for name in _LIKE if name in tensors))
        if like.device.type in _WITH_VALUES:
            return function(*args, **kwargs)
        result = _Scan.apply(like, *tensors.values())
        return (result, None) if with_state else result

    scan.is_fused_scan = True  # type: ignore[attr-defined]
    return scan


class _Counter(TorchDispatchMode):
    """Counter of FLOPs by block while operators run; `blocks[n]` lists the blocks of stack n."""

    def __init__(self, stacks: int) -> None:
        super().__init__()
        self.blocks: list[list[BlockFlops]] = [[] for _ in range(stacks)]
        self.rest = self._depth = self._others = 0
        self._experts = 1
        self._products: list[int] = []

    def enter(self, *_: Any) -> None:
        """Begin a block. A block nested in another is part of it."""
        self._depth += 1
        if self._depth == 1:
            self._products, self._others = [], 0

    def leave(self, stack: int) -> None:
        """End a block of a stack."""
        self._depth -= 1
        if not self._depth:
            self.blocks[stack].append(BlockFlops(tuple(self._products), attention=self._others))

    def _found(self, mask: Tensor) -> Tensor:
        """Return a mask's true positions: all in a mask of experts, an equal share in one expert's mask."""
        if mask.dim() == 1:
            self._experts = len(mask)
        rows = mask.numel() if mask.dim() == 1 else max(1, mask.numel() // self._experts)
        return torch.empty(rows, mask.dim(), dtype=torch.int64, device="meta")

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is _ATEN._local_scalar_dense.default:
            # Masks and positions are checked for padding: none. Numbers are positions, e.g. an expert's.
            return args[0].dtype is torch.bool or int(args[0].storage_offset())
        if func is _ATEN.nonzero.default:
            return self._found(args[0])
        out, packet = func(*args, **(kwargs or {})), func.overloadpacket
        if packet is _ATEN._grouped_mm:
            self._others += 2 * math.prod(args[0].shape) * args[1].shape[-1]
        elif packet in flop_registry:
            flops = flop_registry[packet](*args, **(kwargs or {}), out_val=out)
            if packet not in _PRODUCTS:
                self._others += flops  # outside blocks these are rotary positions, which do not count
            elif self._depth:
                self._products.append(flops)
            else:
                self.rest += flops
        return out


def counted(model: nn.Module, stacks: Sequence[nn.ModuleList], batch: int, seq: int) -> ForwardFlops:
    """Return the FLOPs of a forward of `model` on the meta device, over int64 of [batch, seq]."""
    with _Counter(len(stacks)) as counter, torch.no_grad():
        hooks = []
        for number, stack in enumerate(stacks):
            for block in stack:
                hooks.append(block.register_forward_pre_hook(counter.enter))
                hooks.append(block.register_forward_hook(lambda *_, number=number: counter.leave(number)))
        try:
            model(torch.zeros(batch, seq, dtype=torch.int64, device="meta"))
        finally:
            for hook in hooks:
                hook.remove()
    return ForwardFlops(counter.blocks, counter.rest)


@functools.lru_cache(maxsize=4)
def built_on_meta(shape: LibraryShape) -> "LibraryModel":
    """Return the model of `shape` on the meta device. Raises the errors of `LibraryWorkload`."""
    with torch.device("meta"):
        return _build(shape, torch.bfloat16)  # the only dtype with a shape rule for grouped products


def build_checkpointed(shape: LibraryShape, checkpointing: ActivationCheckpointing) -> "LibraryModel":
    """Return the model of `shape` on the current default device, with its blocks checkpointed."""
    model = _build(shape)
    random = any("drop" in name and value for name, value in model.model.config.to_dict().items())
    for stack in stacks(model):
        for index, block in enumerate(stack):
            if checkpointing.applies_to(index):
                own = checkpointing.of_block(index)
                block.forward = partial(_checkpointed, block.forward, own, random)
        checkpointing = checkpointing.after(len(stack))
    return model


def _build(shape: LibraryShape, dtype: torch.dtype = torch.float32) -> "LibraryModel":
    content = unpacked(shape.library_config)
    kind = model_type_of(content)
    check_sizes(content)
    try:
        own = {key: value for key, value in _cleaned(content).items() if key != "model_type"}
        whole = library().CONFIG_MAPPING[kind](**own)
        settings = whole if shape.towers else _of_text(whole, content)
        if not any(type(each) in _mapping(name) for each in (whole, settings) for name in _HEADS + _WHOLE):
            raise ShapeError(f"{LIBRARY} has no model of it that predicts words")
        settings.use_cache = False
        model = LibraryModel(_headed(settings, dtype).train())
        if not stacks(model):
            raise ShapeError("it has no blocks")
        if shape.towers:
            _freeze_towers(model)
        return model
    except (WorkloadError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # a bad configuration may raise anything
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise ShapeError(f"{LIBRARY} cannot build it of these keys: {reason}") from error


def _cleaned(content: Any) -> Any:
    if not isinstance(content, dict):
        return content
    return {key: _cleaned(value) for key, value in content.items() if not _FOREIGN.fullmatch(key)}


def _mapping(name: str) -> Any:
    """Return a mapping from configuration class to model of one of the library's automatic classes."""
    return getattr(library(), name)._model_mapping


def _of_text(settings: Any, content: Mapping[str, Any]) -> Any:
    """Return the settings of a multimodal model's text model, or `settings`."""
    text = getattr(settings, "text_config", None)
    if text is None:
        return settings
    default = getattr(text, "tie_word_embeddings", getattr(settings, "tie_word_embeddings", False))
    text.tie_word_embeddings = content.get("tie_word_embeddings", default)
    return text


def _headed(settings: Any, dtype: torch.dtype) -> Any:
    """Return the library's model with a language head, adding one if the library has no such class."""
    for name in _HEADS + _WHOLE:
        is_other = name in _HEADS and settings.is_encoder_decoder != (name == _HEADS[0])
        if is_other or (name == _HEADS[1] and getattr(settings, "is_decoder", False)):
            continue
        if type(settings) in _mapping(name):
            return getattr(library(), name).from_config(settings, dtype=dtype)
    own = type(settings)
    module = importlib.import_module(own.__module__.replace("configuration_", "modeling_"))
    return _TextModel(
        getattr(module, own.__name__.removesuffix("Config") + "Model")._from_config(settings, dtype=dtype)
    )


def _freeze_towers(model: "LibraryModel") -> None:
    """Train only the text model and its head: inputs are text, so towers get no gradients."""
    text = getattr(model.model.config, "text_config", None)
    inner = next((each for each in model.modules() if getattr(each, "config", None) is text), None)
    trained = {
        id(each)
        for part in (inner, model.model.get_output_embeddings())
        if part
        for each in part.parameters()
    }
    for parameter in model.parameters():
        parameter.requires_grad_(id(parameter) in trained or inner is None)


class _TextModel(nn.Module):
    """A text model of the library with an added head."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.config, self.model = model.config, model
        self.lm_head = nn.Linear(
            model.config.hidden_size, model.config.vocab_size, bias=False, dtype=model.dtype
        )
        self._init_weights = model._init_weights
        if model.config.tie_word_embeddings:
            self.lm_head.weight = model.get_input_embeddings().weight

    def forward(self, **inputs: Any) -> Any:
        found = self.model(**inputs)
        found.logits = self.lm_head(found.last_hidden_state)
        return found


def stacks(model: nn.Module) -> list[nn.ModuleList]:
    """Return the outermost module lists that hold blocks, i.e. not torch's own layers."""
    found: list[nn.ModuleList] = []

    def visit(module: nn.Module) -> None:
        for child in module.children():
            if isinstance(child, nn.ModuleList) and not all(
                type(each).__module__.startswith("torch.") for each in child
            ):
                found.append(child)
            else:
                visit(child)

    visit(model)
    return found


def _checkpointed(
    forward: Callable[..., Any],
    checkpointing: ActivationCheckpointing,
    random: bool,
    *args: Any,
    **kwargs: Any,
) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    return run_checkpointed(partial(forward, **kwargs), *args, checkpointing=checkpointing, random=random)


class LibraryModel(ComputesTokenLoss, nn.Module):
    """A module of the library with the interface of our models: `model(tokens, targets) -> loss`."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        fuse_scans(model)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw the library's initial weights, and recompute the buffers that constructors create."""
        for module in self.model.modules():
            self.model._init_weights(module)

    def forward(self, inputs: Tensor, targets: Tensor | None = None) -> Tensor:
        """Return logits, [batch, seq, vocab], or their loss. A decoder with an encoder reads the same."""
        also = {"decoder_input_ids": inputs} if self.model.config.is_encoder_decoder else {}
        logits: Tensor = self.model(input_ids=inputs, **also).logits
        if targets is None:
            return logits
        return (self.compiled_loss or token_loss)(logits, targets, False)
