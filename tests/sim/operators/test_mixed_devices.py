"""Tensors of the host beside the device's: refused as CUDA refuses them, taken where CUDA takes them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

pytestmark = pytest.mark.simulated

Pair = Callable[[torch.Tensor, torch.Tensor], Any]
ITERATOR = "Expected all tensors to be on the same device, but found at least two devices, sim:0 and cpu!"
"""`TensorIterator`'s words."""


def _wrapper(argument: str, where: str, others: str, method: str) -> str:
    return (
        f"Expected all tensors to be on the same device, but got {argument} is on {where}, different from "
        f"other tensors on {others} (when checking argument in method wrapper_CUDA_{method})"
    )


# x: 4 x 4 of the device, c: of the host.
REFUSED: dict[str, tuple[Pair, str]] = {
    "add": (lambda x, c: x + c, ITERATOR),
    "add, the host's first": (lambda x, c: c + x, ITERATOR),
    "add, in place": (lambda x, c: x.add_(c), ITERATOR),
    "add to the host": (lambda x, c: c.add_(x), ITERATOR),
    "number of the host as a target": (lambda x, c: c[0, 0].clone().add_(x[0, 0]), ITERATOR),
    "out": (lambda x, c: torch.add(x, x, out=c), ITERATOR),
    "where": (lambda x, c: torch.where(x > 0, x, c), ITERATOR),
    "lists": (lambda x, c: torch._foreach_add_([x, x], [x, c]), ITERATOR),
    "compare": (lambda x, c: x == c, ITERATOR),
    "values": (lambda x, c: x.index_put_((torch.zeros(4, dtype=torch.int64),), c), ITERATOR),
    "linear": (lambda x, c: F.linear(x, c), _wrapper("mat2", "cpu", "sim:0", "mm")),
    "bias": (lambda x, c: F.linear(x, x, c[0]), _wrapper("mat1", "sim:0", "cpu", "addmm")),
    "bmm": (lambda x, c: torch.bmm(x[None], c[None]), _wrapper("mat2", "cpu", "sim:0", "bmm")),
    "mv": (lambda x, c: torch.mv(x, c[0]), _wrapper("vec", "cpu", "sim:0", "_mv")),
    "mm, out": (lambda x, c: torch.mm(x, x, out=c), _wrapper("self", "sim:0", "cpu", "mm_out_out")),
    "cat": (lambda x, c: torch.cat([x, c]), _wrapper("tensors", "cpu", "sim:0", "cat")),
    "stack": (lambda x, c: torch.stack([x, c]), _wrapper("tensors", "cpu", "sim:0", "cat")),
    "embedding": (
        lambda x, c: F.embedding(c[0].long(), x),
        _wrapper("index", "cpu", "sim:0", "_index_select"),
    ),
    "layer norm": (
        lambda x, c: F.layer_norm(x, (4,), c[0], c[0]),
        _wrapper("weight", "cpu", "sim:0", "_native_layer_norm"),
    ),
    "cross entropy": (
        lambda x, c: F.cross_entropy(x, c[0].long()),
        _wrapper("target", "cpu", "sim:0", "nll_loss_forward"),
    ),
    "gather": (lambda x, c: x.gather(0, c.long()), _wrapper("index", "cpu", "sim:0", "gather")),
    "mask": (lambda x, c: x.masked_fill(c > 0, 0.0), "expected self and mask to be on the same device"),
    "index of the device": (
        lambda x, c: c[x.long()],
        "indices should be either on cpu or on the same device",
    ),
    "convolution": (
        lambda x, c: F.conv2d(x[None, None], c[None, None]),
        "Input type (torch.sim.FloatTensor) and weight type (torch.FloatTensor) should be the same",
    ),
    "attention": (
        lambda x, c: F.scaled_dot_product_attention(x[None], c[None], x[None]),
        "Expected query, key, and value to have the same device type",
    ),
    "equal": (lambda x, c: torch.equal(x, c), _wrapper("other", "cpu", "sim:0", "_equal")),
    "allclose": (lambda x, c: torch.allclose(x, c), ITERATOR),
}
TAKEN: dict[str, Pair] = {
    "number": lambda x, c: x + c[0, 0],
    "number first": lambda x, c: c[0, 0] * x,
    "number, in place": lambda x, c: x.add_(c[0, 0]),
    "numbers of where": lambda x, c: torch.where(x > 0, c[0, 0], c[0, 1]),
    "number in a list": lambda x, c: torch._foreach_mul_([x], c[0, 0]),
    "number to fill with": lambda x, c: x.masked_fill(x > 0, c[0, 0]),
    "indices": lambda x, c: x[c[0].long()],
    "row": lambda x, c: x.__setitem__(0, c[0]),
    "copy": lambda x, c: x.copy_(c),
    "copies": lambda x, c: torch._foreach_copy_([x], [c]),
    "shape": lambda x, c: c[:1].expand_as(x),
}


def pair() -> tuple[torch.Tensor, torch.Tensor]:
    from device_training import start

    start()
    return torch.zeros(4, 4, device="sim"), torch.zeros(4, 4)


def test_mixes_are_refused() -> None:
    """Also where a call of the same shapes on one device has been planned before."""
    x, c = pair()
    for name, (run, words) in REFUSED.items():
        run(x.clone(), c.to("sim"))
        with pytest.raises(RuntimeError) as caught:
            run(x, c)
        assert words in str(caught.value), name


def test_what_cuda_takes_is_taken() -> None:
    x, c = pair()
    for run in TAKEN.values():
        run(x, c)


def test_masks_of_the_host_are_positions() -> None:
    """How many they choose is known."""
    x, c = pair()
    c[1, 2] = c[3, 0] = 1
    assert x[c > 0].shape == (2,)
    assert x[c[:, 0] > 0].shape == (1, 4)
    with pytest.raises(IndexError, match="shape of the mask"):
        x[c[:3] > 0]


def test_optimizers_want_their_state_where_the_parameters_are() -> None:
    pair()
    for options in ({}, {"foreach": False}, {"fused": True}):
        parameter = torch.nn.Parameter(torch.zeros(3, device="sim"))
        parameter.grad = torch.zeros(3, device="sim")
        optimizer = torch.optim.AdamW([parameter], **options)
        optimizer.step()
        state = optimizer.state[parameter]
        state["exp_avg"] = state["exp_avg"].cpu()
        with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
            optimizer.step()


def test_the_device_s_tensors_are_no_arrays_and_not_pinned() -> None:
    import numpy

    x, _ = pair()
    for convert in (lambda: x.numpy(), lambda: numpy.asarray(x), lambda: numpy.add(x, 1)):
        with pytest.raises(TypeError, match="device type tensor to numpy"):
            convert()
    with pytest.raises(RuntimeError, match="only dense CPU tensors can be pinned"):
        x.pin_memory()
    assert x.tolist() == [[0.0] * 4] * 4


def test_positions_of_the_host_are_in_range() -> None:
    x, _ = pair()
    assert x[torch.tensor([3, -4])].shape == (2, 4)
    with pytest.raises(torch.AcceleratorError, match="device-side assert triggered"):
        x[torch.tensor([0, 4])]
