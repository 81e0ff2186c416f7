"""Lowering of a graph of the simulated device by Inductor, as if for its GPU.

FlexAttention becomes one operator, instead of the template that Inductor would tune. The program's own
`mask_mod`, evaluated on a grid of positions, gives the computed share of the score matrix. Tensors that it
captures have no values here and count as zeros, so each document is as long as the sequence.
"""

import re
from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import sympy
import torch
from torch.utils.flop_counter import register_flop_formula

from fsdpbench.base.errors import error_text
from fsdpbench.base.torch_internals import (
    PythonWrapperCodegen,
    TritonScheduling,
    compiler_config,
    detect_fake_mode,
    flex_permute_strides,
    inductor_compile_fx,
    inductor_config,
    inductor_virtualized,
    unset_fake_temporarily,
)
from fsdpbench.sim.torch_device.compile.cuda_graphs import why_not_captured
from fsdpbench.sim.torch_device.compile.plan import Launch, of_compiler
from fsdpbench.sim.torch_device.compile.pretended import pretended_gpu, properties
from fsdpbench.sim.torch_device.compile.refusals import refuse_graph, refused
from fsdpbench.sim.torch_device.flops import of_attention, of_attention_backward
from fsdpbench.sim.torch_device.tensors import is_on_device, is_simulated

_GPU = ("cuda", 0)
_OFF = ("benchmark_harness", "triton.autotune_at_compile_time", "max_autotune", "max_autotune_gemm")
SETTINGS = {"compile_threads": 1, **dict.fromkeys(_OFF, False)}
_POINTS = 512
"""Maximum number of query and of key positions at which a mask is evaluated."""
_BLOCK = 128
"""Rows and columns of a block, which is computed unless the mask removes all of it (torch's default)."""
_FORWARD = (
    "flex_attention(Tensor query, Tensor key, Tensor value, Tensor[] captured, float density)"
    " -> (Tensor, Tensor, Tensor)"
)
_BACKWARD = (
    "flex_attention_backward(Tensor query, Tensor key, Tensor value, Tensor grad, Tensor[] captured,"
    " float density) -> Tensor[]"
)
_LIBRARIES: list[torch.library.Library] = []


def lower(gm: Any, example_inputs: Sequence[Any], captures: bool = False, **about: Any) -> Any:
    """Compile one graph (forward or backward, fake inputs) for Inductor; return the callable graph.

    Sizes may be symbols. `captures`: as a CUDA graph. Raises `CompileRefusedError`, naming the construct, for
    graphs that cannot be simulated.
    """
    replace_flex_attention(gm)
    refuse_graph(gm.graph)
    inputs = _retarget(gm, example_inputs)
    static = tuple(about.get("static_input_idxs") or ()) if captures else None
    with (
        pretended_gpu(PlanScheduling, PlanWrapper.capturing(static)),
        inductor_config.patch(SETTINGS),
        compiler_config.patch(cache_key_tag=cache_tag(captures)),
    ):
        return inductor_compile_fx.compile_fx_inner(gm, inputs, **about)


def _retarget(gm: Any, inputs: Sequence[Any]) -> list[Any]:
    """Replace the device in a graph by the GPU; return the (fake) inputs on the GPU."""
    gpu = torch.device(*_GPU)
    mode = detect_fake_mode(inputs)

    def moved(value: Any) -> Any:
        return gpu if isinstance(value, torch.device) and is_simulated(value) else value

    for node in gm.graph.nodes:
        node.args = torch.fx.node.map_aggregate(node.args, moved)
        node.kwargs = torch.fx.node.map_aggregate(node.kwargs, moved)
    gm.recompile()
    if mode is None:
        return list(inputs)
    with mode, torch.no_grad():
        return [
            torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=gpu)
            if isinstance(value, torch.Tensor) and is_on_device(value)
            else value
            for value in inputs
        ]


def cache_tag(captures: bool) -> str:
    """Return what plans depend on besides the graph, torch and its settings: sources, the GPU, enabled
    attention kernels, capture."""
    sdp = torch.backends.cuda
    on = sdp.flash_sdp_enabled(), sdp.mem_efficient_sdp_enabled(), sdp.cudnn_sdp_enabled()
    return f"simulated {of_compiler()} {properties()} {on}{' captured' if captures else ''}"


_NAMES = """
from fsdpbench.sim.torch_device.compile.plan import *
plan = Plan()
empty_strided_cuda = empty_strided
reinterpret_tensor = reinterpret
assert_size_stride = check_sizes
assert_alignment = copy_if_misaligned = aligned
"""
_WRITTEN = re.compile(r"(in_)?out_ptr|ws_ptr")
_ORDINARY = ("attention", "convolution")
"""Library fallbacks that Inductor uses on every GPU; they are not reported as fallbacks."""


class _Call(NamedTuple):
    """A launch in the wrapper: kernel, scheduled node, names of arguments, positions of written ones."""

    kernel: str
    node: Any
    args: tuple[str, ...]
    writes: tuple[int, ...]


class PlanWrapper(PythonWrapperCodegen):
    """Inductor's wrapper of one graph, with a plan instead of compiled kernels.

    The wrapper is Inductor's Python program that calls a graph's kernels and allocates and frees its buffers.
    Reuse, order of frees and operator calls stay. Its names denote the simulated device, each launch passes
    its index in the plan, and the plan follows as data, so Inductor's disk cache holds both. `static`:
    positions of inputs with fixed addresses, if the graph is captured as a CUDA graph.
    """

    static: tuple[int, ...] | None = None

    @classmethod
    def capturing(cls, static: tuple[int, ...] | None) -> "type[PlanWrapper]":
        """Return the wrapper class for a graph that is captured (None: not captured)."""
        return cls if static is None else type(cls.__name__, (cls,), {"static": static})

    def __init__(self) -> None:
        self._calls: list[_Call] = []
        self._fallbacks: list[str] = []
        super().__init__()

    @classmethod
    def create(cls, is_subgraph: bool, *about: Any) -> "PlanWrapper":
        if is_subgraph:
            raise refused(error_text("lowering.subgraph"))
        return cls()

    def write_header(self) -> None:
        super().write_header()
        self.header.splice(_NAMES, strip=True)

    def write_args(self, input_names: list[str]) -> None:
        super().write_args(input_names)
        if self.static is not None:
            self.prefix.writeline(f"plan.take_inputs([{', '.join(input_names)}])")

    def write_triton_header_once(self) -> None:
        self.write_get_raw_stream_header_once()

    def define_user_defined_triton_kernel(self, *args: Any, **kwargs: Any) -> Any:
        raise refused("a Triton kernel of the program", "leave it outside of the compiled part")

    def generate_fallback_kernel(self, node: Any) -> None:
        name = str(node.op_overload)
        if "." in name and not any(word in name for word in _ORDINARY):  # otherwise it wraps an operator
            self._fallbacks.append(name)
        super().generate_fallback_kernel(node)

    def generate_kernel_call(self, kernel_name: str, call_args: Sequence[Any], **about: Any) -> None:
        if not about.get("triton", True):  # a host kernel, which is compiled and run normally
            super().generate_kernel_call(kernel_name, call_args, **about)
            return
        names = list((about.get("triton_meta") or {}).get("signature", ()))
        writes = tuple(place for place, name in enumerate(names) if _WRITTEN.match(name))
        node = inductor_virtualized.graph.scheduler.current_node
        self._calls.append(_Call(kernel_name, node, tuple(map(str, call_args)), writes))
        types = about.pop("arg_types", None)
        super().generate_kernel_call(
            kernel_name,
            [str(len(self._calls) - 1), *call_args],
            arg_types=None if types is None else [int, *types],
            **about,
        )

    def generate_after_suffix(self, result: Any) -> None:
        super().generate_after_suffix(result)
        launches = ", ".join(map(repr, self._launches()))
        externs = [node for node in inductor_virtualized.graph.scheduler.nodes if node.is_extern()]
        extern_bytes = sum(node.get_read_write_buffers_sizes() for node in externs)
        result.writeline(f"plan.complete([{launches}], {extern_bytes}, {self._fallbacks!r})")
        if self.static is not None:
            result.writeline(f"plan.capture({self.static!r}, {why_not_captured(self.static)!r})")

    def _launches(self) -> list[Launch]:
        """Give each launch the bytes of its node, shared by argument sizes if the node has several."""
        inputs = inductor_virtualized.graph.graph_inputs.values()
        varies = any(isinstance(value, sympy.Expr) for value in inputs)
        of_node: dict[int, list[int]] = {}
        for index, call in enumerate(self._calls):
            of_node.setdefault(id(call.node), []).append(index)
        nbytes = [0] * len(self._calls)
        for indices in of_node.values():
            total = self._calls[indices[0]].node.get_read_write_buffers_sizes()
            weights = [max(1, _size_of(self._calls[index].args)) for index in indices]
            left = total
            for index, weight in zip(indices[:-1], weights[:-1], strict=True):
                nbytes[index] = total * weight // sum(weights)
                left -= nbytes[index]
            nbytes[indices[-1]] = left
        launches = []
        for call, size in zip(self._calls, nbytes, strict=True):
            category = call.kernel.split("_")[1] if call.kernel.startswith("triton_") else ""  # e.g. `poi`
            of_args = _size_of(call.args) if varies else 0
            launches.append(Launch(call.kernel, category, size, call.writes, of_args))
        return launches


def _size_of(names: Sequence[str]) -> int:
    """Return the bytes of those arguments of a kernel that are buffers."""
    graph = inductor_virtualized.graph
    found = [graph.try_get_buffer(name) for name in names if name.isidentifier()]
    sizes = graph.sizevars
    return sum(
        sizes.optimization_hint(buffer.get_numel(), fallback=0) * buffer.get_dtype().itemsize
        for buffer in found
        if buffer is not None
    )


class PlanScheduling(TritonScheduling):
    """Inductor's fusion, splitting and naming. It generates kernel sources only for their names."""

    def _emit_kernel_to_wrapper(
        self, wrapper: "PlanWrapper", kernel: Any, src_code: str, kernel_name: str, *about: Any
    ) -> None:
        wrapper.define_kernel(kernel_name, f"plan.kernel({kernel_name!r})", "")


def _forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    captured: Sequence[torch.Tensor],
    density: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the output, and the logarithm of the sum and the maximum of each row of scores."""
    rows = [query.new_empty(query.shape[:3], dtype=torch.float32) for _ in range(2)]
    return flex_permute_strides(query.new_empty((*query.shape[:3], value.shape[3])), query.stride()), *rows


def _backward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    grad: torch.Tensor,
    captured: Sequence[torch.Tensor],
    density: float,
) -> list[torch.Tensor]:
    """Return the gradients of queries, keys, values and captured tensors."""
    made = [flex_permute_strides(each.new_empty(each.shape), each.stride()) for each in (query, key, value)]
    return made + [torch.empty_like(each, memory_format=torch.contiguous_format) for each in captured]


def _register() -> None:
    """Register both operators."""
    library = torch.library.Library("fsdpbench", "FRAGMENT")
    _LIBRARIES.append(library)
    library.define(_FORWARD)
    library.define(_BACKWARD)
    library.impl("flex_attention", _forward, "Meta")
    library.impl("flex_attention_backward", _backward, "Meta")
    ours: Any = torch.ops.fsdpbench
    register_flop_formula(ours.flex_attention)(
        lambda query, key, value, *rest, **about: of_attention(query, key, value)
    )
    register_flop_formula(ours.flex_attention_backward)(
        lambda query, key, value, grad, *rest, **about: of_attention_backward(grad, query, key, value)
    )


# On import: cached code from an earlier process calls the operators without lowering a graph.
_register()


def replace_flex_attention(gm: torch.fx.GraphModule) -> None:
    """Replace FlexAttention's nodes in a graph by the operators, in place."""
    for node in list(gm.graph.nodes):
        name = getattr(node.target, "__name__", "") if node.op == "call_function" else ""
        if name not in ("flex_attention", "flex_attention_backward"):
            continue
        backward = name.endswith("backward")
        query, key, value = node.args[:3]
        mask: Any = node.args[9 if backward else 4]
        given, of_mask = node.args[-2:]
        density = _density(gm, mask, of_mask, query, key)
        captured = [each for each in given if isinstance(_meta(each), torch.Tensor)]
        grad = (node.args[5],) if backward else ()
        ours: Any = torch.ops.fsdpbench
        operator = (ours.flex_attention_backward if backward else ours.flex_attention).default
        with gm.graph.inserting_before(node):
            made = gm.graph.call_function(operator, (query, key, value, *grad, captured, density))
        made.meta = dict(node.meta)
        for user in list(node.users) if backward else ():
            for part in list(user.users) if user.args[1] == 3 else ():  # gradients of captured tensors
                part.args = (made, 3 + part.args[1])
        node.replace_all_uses_with(made)
        gm.graph.erase_node(node)
    gm.graph.lint()
    gm.recompile()


def _meta(argument: Any) -> Any:
    """Return the fake value of a node's argument, or None."""
    return getattr(argument, "meta", {}).get("val")


def _density(gm: Any, mask: Any, captured: Sequence[Any], query: torch.fx.Node, key: torch.fx.Node) -> float:
    """Return the share of the score matrix that a mask keeps."""
    lengths = [int(node.meta["val"].shape[2]) for node in (query, key)]
    with unset_fake_temporarily(), torch.device("cpu"):
        rows, columns = (torch.linspace(0, n - 1, min(n, _POINTS)).long() for n in lengths)
        others = [
            torch.zeros([int(n) for n in meta.shape], dtype=meta.dtype)
            if isinstance(meta := _meta(each), torch.Tensor)
            else each
            for each in captured
        ]
        zero = torch.zeros((), dtype=torch.long)
        asked = getattr(gm, mask[-1].target)
        for node in asked.graph.nodes:
            node.kwargs = {**node.kwargs, **({"device": zero.device} if "device" in node.kwargs else {})}
        asked.recompile()
        allowed = asked(zero, zero, rows[:, None], columns[None, :], *others)
        blocks = [(each // _BLOCK).unique(return_inverse=True)[1] for each in (rows, columns)]
        computed = torch.zeros([int(each.max()) + 1 for each in blocks])
        places = blocks[0][:, None], blocks[1][None, :]
        computed.index_put_(places, allowed.expand(len(rows), len(columns)).float(), accumulate=True)
        return float((computed > 0).float().mean()) or 1 / prod(lengths)
