"""Checks of sizes, dimensions and indices that torch's meta kernels do not make.

A GPU finds indices out of range while its kernel runs, and a later call raises the error. Simulated tensors
have no values, except two kinds of indices: host indices of a device tensor, and single numbers that came
from the host (`known_values.py`).
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NoReturn

import torch

from fsdpbench.sim.torch_device.strict.words import (
    Arguments,
    error_text,
    refuse_broadcast,
    scalar_type,
    sizes,
)
from fsdpbench.sim.torch_device.tensors import meta_twin

Rule = Callable[[Arguments], None]


def _dimension(arguments: Arguments) -> None:
    """Require `dim` to be a dimension of the tensor."""
    tensor, dim = arguments["self"], arguments["dim"]
    count = max(tensor.dim(), 1)
    if isinstance(dim, int) and not -count <= dim < count:
        raise IndexError(error_text("dimension", -count, count - 1, dim))


def _addend(arguments: Arguments, *, first: str, second: str) -> None:
    """Require that `self` expands to the product of two matrices or of two batches of them."""
    addend, a, b = arguments["self"], arguments[first], arguments[second]
    if a.dim() == b.dim() and a.dim() >= 2:
        shape = (*a.shape[:-1], b.shape[-1])
        torch.empty(addend.shape, dtype=addend.dtype, device="meta").expand(shape)


def _convolution(arguments: Arguments) -> None:
    """Require groups, channels and bias to match the weight."""
    x, weight, bias = arguments["input"], arguments["weight"], arguments["bias"]
    transposed, groups = bool(arguments["transposed"]), arguments["groups"]
    _refuse_dimensions(x, weight, arguments["stride"])
    kind = "Given transposed=1" if transposed else f"Given groups={groups}"
    if weight.shape[0] % groups:
        raise RuntimeError(error_text("convolution.groups", groups, groups, sizes(weight)))
    wanted = weight.shape[0] if transposed else weight.shape[1] * groups
    if x.shape[1] != wanted:
        raise RuntimeError(
            error_text("convolution.channels", kind, sizes(weight), sizes(x), wanted, x.shape[1])
        )
    outputs = weight.shape[1] * groups if transposed else weight.shape[0]
    if isinstance(bias, torch.Tensor) and tuple(bias.shape) != (outputs,):
        given = "Given transposed=1, weight" if transposed else "Given weight"
        raise RuntimeError(error_text("convolution.bias", given, sizes(weight), outputs, sizes(bias)))


def _refuse_dimensions(x: torch.Tensor, weight: torch.Tensor, stride: list[int]) -> None:
    if weight.dim() < 3:
        raise RuntimeError("weight should have at least three dimensions")
    spatial = weight.dim() - 2
    if len(stride) not in (1, spatial):
        raise RuntimeError(error_text("convolution.stride", spatial, list(stride)))
    if x.dim() != weight.dim():
        raise RuntimeError(
            error_text("convolution.dimensions", weight.dim(), weight.dim(), sizes(weight), x.dim(), sizes(x))
        )


def _classes(arguments: Arguments) -> None:
    """Require one class per vector of scores."""
    scores, target = arguments["self"], arguments["target"]
    if scores.dim() == 1 and target.dim() == 1 and target.shape[0] != 1:
        raise ValueError(f"For 1D input, 1D target must have size 1, but got target size: {target.shape[0]}")


def _vectors(arguments: Arguments) -> None:
    """Require batch norm's statistics to be vectors."""
    for name in ("running_mean", "running_var"):
        tensor = arguments.get(name)
        if isinstance(tensor, torch.Tensor) and tensor.dim() != 1:
            raise RuntimeError(f"TensorAccessor expected 1 dims but tensor has {tensor.dim()}")


def _index_add(arguments: Arguments) -> None:
    tensor, index, source = arguments["self"], arguments["index"], arguments["source"]
    if index.dim() > 1:
        raise IndexError(error_text("index_add.vector", index.dim(), scalar_type(index), sizes(index)))
    if tensor.dim() == 0 or source.dim() == 0:
        return
    dim = arguments["dim"] % tensor.dim()
    others = [[size for at, size in enumerate(t.shape) if at != dim] for t in (tensor, source)]
    if others[0] != others[1]:
        raise RuntimeError(error_text("index_add.shape", sizes(tensor), sizes(source)))


def _index(arguments: Arguments) -> None:
    """Require masks to match, before their true elements are counted."""
    place = 0
    for index in arguments["indices"]:
        is_mask = _is_mask(index)
        if is_mask:
            refuse_mask(arguments["self"], index, place)
        place += index.dim() if is_mask else 1


def _is_mask(index: Any) -> bool:
    return isinstance(index, torch.Tensor) and index.dtype in _MASKS


def _normalised_channels(arguments: Arguments) -> None:
    """Require group norm's weight and bias to be vectors with one element per input channel."""
    x, channels = arguments["input"], arguments["C"]
    weight, bias = arguments["weight"], arguments["bias"]
    for name, tensor in (("weight", weight), ("bias", bias)):
        if isinstance(tensor, torch.Tensor) and (tensor.dim() != 1 or tensor.numel() != channels):
            shape = sizes(weight if isinstance(weight, torch.Tensor) else tensor)
            raise RuntimeError(error_text("group_norm", name, name, shape, sizes(x)))


def _index_select(arguments: Arguments) -> None:
    tensor, index = arguments["self"], arguments["index"]
    if index.dim() > 1:
        raise IndexError("index_select(): Index is supposed to be a vector")
    if tensor.dim() == 0 and index.numel() != 1:
        raise RuntimeError(error_text("index_select.scalar", index.numel()))


def _index_copy(arguments: Arguments) -> None:
    """Raise torch's errors, whose type differs from the meta kernel's."""
    tensor, index, source = arguments["self"], arguments["index"], arguments["source"]
    if index.dim() > 1:
        raise IndexError(f"index_copy_(): Index should have dimension 1 or 0 (got {index.dim()})")
    count = index.numel()
    if source.dim() == 0 and count != 1:
        raise IndexError(f"index_copy_(): When source is scalar, index should have one element (got {count})")
    if source.dim() and tensor.dim() and source.dim() != tensor.dim():
        raise IndexError(error_text("index_copy.dimensions", source.dim(), tensor.dim()))
    if source.dim() and tensor.dim() and source.shape[arguments["dim"]] != count:
        raise IndexError(error_text("index_copy.count", count, source.shape[arguments["dim"]]))
    _same_slices(tensor, source, arguments["dim"])


def _same_slices(tensor: torch.Tensor, source: torch.Tensor, dim: int) -> None:
    """Require equal slices, which meta kernels ignore before torch 2.13."""
    if not (tensor.dim() and source.dim()):
        return
    dim %= tensor.dim()
    into, found = ([*shape[:dim], *shape[dim + 1 :]] for shape in (tensor.shape, source.shape))
    if into != found:
        words = [" ".join(map(str, shape)) for shape in (into, found)]
        raise RuntimeError(error_text("index_copy.slices", words[0], dim, words[1]))


def _argument_of_extremum(arguments: Arguments) -> None:
    """Check the dimension, for which meta kernels raise a `RuntimeError` before torch 2.13."""
    if arguments.get("dim") is not None:
        _dimension(arguments)


def _index_put(arguments: Arguments) -> None:
    """Require values that expand to the indexed part, unless a mask is involved, whose count is unknown."""
    tensor, values = arguments["self"], arguments["values"]
    _index(arguments)
    if any(map(_is_mask, arguments["indices"])):
        return
    # Replace indices, including numbers on the host, by meta tensors without values.
    indices = [
        torch.empty(each.shape, dtype=each.dtype, device="meta") if isinstance(each, torch.Tensor) else each
        for each in arguments["indices"]
    ]
    indexed = torch.ops.aten.index.Tensor(meta_twin(tensor), indices)
    try:
        torch.empty(values.shape, device="meta").expand(indexed.shape)
    except RuntimeError:
        raise RuntimeError(error_text("index_put", sizes(values), sizes(indexed))) from None


def refuse_mask(tensor: torch.Tensor, mask: torch.Tensor, place: int) -> None:
    """Raise an error unless a mask has the sizes of the dimensions that start at `place`."""
    for axis, size in enumerate(mask.shape):
        at = place + axis
        if at >= tensor.dim() or tensor.shape[at] != size:
            raise IndexError(error_text("mask", sizes(mask), axis, sizes(tensor), at))


def _scattered(arguments: Arguments, *, cut: Callable[[torch.Tensor, Arguments], torch.Tensor]) -> None:
    """Require a source with the shape of its target part in the tensor."""
    source = arguments["src"]
    part = cut(torch.empty(arguments["self"].shape, device="meta"), arguments)
    if part.shape != source.shape:
        raise RuntimeError(error_text("select_scatter", sizes(source), sizes(part)))


SHAPE_RULES: dict[str, Rule] = {
    **dict.fromkeys(("_softmax", "_log_softmax", "sort"), _dimension),
    "addmm": partial(_addend, first="mat1", second="mat2"),
    "baddbmm": partial(_addend, first="batch1", second="batch2"),
    "convolution": _convolution,
    **dict.fromkeys(("nll_loss_forward", "nll_loss2d_forward"), _classes),
    **dict.fromkeys(("native_batch_norm", "_native_batch_norm_legit", "cudnn_batch_norm"), _vectors),
    "index_add": _index_add,
    **dict.fromkeys(("index", "_unsafe_index"), _index),
    "allclose": lambda a: refuse_broadcast(a["self"].shape, a["other"].shape),
    "native_group_norm": _normalised_channels,
    "index_select": _index_select,
    "index_copy": _index_copy,
    **dict.fromkeys(("argmax", "argmin"), _argument_of_extremum),
    **dict.fromkeys(("index_put", "_index_put_impl", "_unsafe_index_put"), _index_put),
    "slice_scatter": partial(
        _scattered, cut=lambda t, a: torch.ops.aten.slice.Tensor(t, a["dim"], a["start"], a["end"], a["step"])
    ),
    "select_scatter": partial(_scattered, cut=lambda t, a: t.select(a["dim"], a["index"])),
    "diagonal_scatter": partial(_scattered, cut=lambda t, a: t.diagonal(a["offset"], a["dim1"], a["dim2"])),
}


_MASKS = (torch.bool, torch.uint8)
Bounds = tuple[torch.Tensor, int, int, int]
"""An index tensor, its lowest and highest allowed value, and the dimension."""


def refuse_out_of_range(value: int, low: int, high: int, dim: int) -> None:
    """Raise the error of a failed device-side assertion unless `low <= value <= high`."""
    if not low <= value <= high:
        _fail_assertion(value, dim, high + 1)


def _fail_assertion(value: int, dim: int, size: int) -> NoReturn:
    kind = getattr(torch, "AcceleratorError", RuntimeError)
    raise kind(error_text("assertion", value, dim, size))


def on_host_resolved(tensor: torch.Tensor, indices: Sequence[Any]) -> list[Any]:
    """Return the indices of `tensor[...]` with host masks replaced by positions, as CUDA expects them.

    Raises `IndexError` for a mask that does not match, `torch.AcceleratorError` for a position out of range.
    """
    found: list[Any] = []
    for index in indices:
        if not isinstance(index, torch.Tensor) or not index.is_cpu:
            found.append(index)
        elif index.dtype in _MASKS:
            refuse_mask(tensor, index, len(found))
            found += index.nonzero().unbind(1)
        else:
            size = tensor.shape[len(found)] if len(found) < tensor.dim() else 0
            if index.numel() and size:
                for value in (int(index.min()), int(index.max())):
                    refuse_out_of_range(value, -size, size - 1, len(found))
            found.append(index)
    return found


def known_bounds(packet: str, arguments: Arguments) -> Iterator[Bounds]:
    """Yield a call's indices with the bounds of their values."""
    find = _BOUNDS.get(packet)
    if find is not None:
        yield from find(arguments)


def _along_dim(arguments: Arguments) -> Iterator[Bounds]:
    tensor, dim = arguments["self"], arguments["dim"]
    if tensor.dim():
        yield arguments["index"], 0, tensor.shape[dim] - 1, dim


def _each_dim(arguments: Arguments) -> Iterator[Bounds]:
    tensor = arguments["self"]
    for dim, index in enumerate(arguments["indices"]):
        if isinstance(index, torch.Tensor) and not _is_mask(index):
            yield index, -tensor.shape[dim], tensor.shape[dim] - 1, dim


def _class_bounds(arguments: Arguments) -> Iterator[Bounds]:
    tensor, ignored = arguments["self"], arguments["ignore_index"]
    dim = 1 if tensor.dim() > 1 else 0
    yield arguments["target"], min(0, ignored) if ignored < 0 else 0, tensor.shape[dim] - 1, dim


_BOUNDS: dict[str, Callable[[Arguments], Iterator[Bounds]]] = {
    "embedding": lambda a: iter([(a["indices"], 0, a["weight"].shape[0] - 1, 0)]),
    **dict.fromkeys(
        ("index_select", "gather", "scatter", "scatter_add", "index_add", "index_copy"), _along_dim
    ),
    **dict.fromkeys(("index", "index_put", "_index_put_impl"), _each_dim),
    **dict.fromkeys(("nll_loss_forward", "nll_loss2d_forward"), _class_bounds),
}
INDEXING = frozenset(_BOUNDS)
"""Operators that take indices."""
