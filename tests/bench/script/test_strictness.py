"""Faults of a script that CUDA refuses are refused in its simulation, in CUDA's words."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from conftest import RunScript

FAULTS = """
import numpy
import torch.distributed as dist
import torch.nn.functional as F

dist.init_process_group("nccl")
x, c = torch.zeros(4, 4, device="cuda"), torch.zeros(4, 4)
ten = torch.tensor([10]).cuda()
faults = [
    (lambda: x + c, RuntimeError, "found at least two devices, cuda:0 and cpu!"),
    (lambda: F.linear(x, c), RuntimeError, "mat2 is on cpu, different from other tensors on cuda:0"),
    (lambda: F.linear(x.bfloat16(), x), RuntimeError, "but got: c10::BFloat16 != float"),
    (lambda: F.conv2d(x[None, None], c[None, None]), RuntimeError, "Input type (torch.cuda.FloatTensor)"),
    (lambda: x.numpy(), TypeError, "can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() to"),
    (lambda: numpy.asarray(x), TypeError, "can't convert cuda:0 device"),
    (lambda: x.pin_memory(), RuntimeError, "cannot pin 'torch.cuda.FloatTensor' only dense CPU tensors"),
    (lambda: x[ten], torch.AcceleratorError, "device-side assert triggered"),
    (lambda: F.embedding(ten, x), torch.AcceleratorError, "Index 10 is out of bounds"),
    (lambda: F.cross_entropy(x[:1], ten), torch.AcceleratorError, "device-side assert triggered"),
    (lambda: x.gather(0, ten[None]), torch.AcceleratorError, "device-side assert triggered"),
    (lambda: dist.all_reduce(c), RuntimeError, "No backend type associated with device type cpu"),
    (lambda: dist.all_gather_into_tensor(c.cuda(), x), ValueError, "world_size times input tensor size"),
]
for fault, kind, words in faults:
    try:
        fault()
    except kind as error:
        assert words in str(error), str(error)
    else:
        raise AssertionError(words)
x[torch.tensor([3]).cuda()], F.cross_entropy(x[:1], torch.tensor([-100]).cuda()), x + c[0, 0]
group = dist.new_group(backend="gloo")
dist.all_reduce(c, group=group)
assert x.__dlpack_device__()[0] == 2 and numpy.from_dlpack(c).shape == (4, 4)
train(2)
"""


def test_a_script_s_faults_are_refused(run_probe: RunScript) -> None:
    run = run_probe(FAULTS)
    assert run.result["status"] == "ok", run.cause


def test_the_cause_names_the_script_s_device(run_probe: RunScript) -> None:
    """Also where torch's C++ wrote it; a mix of devices is no missing part of CUDA."""
    run = run_probe("torch.nn.Parameter(torch.zeros(2, device='cuda')).grad = torch.zeros(2)")
    assert run.result["status"] == "error"
    assert "to a tensor with device type 'cuda'" in run.cause
    run = run_probe("torch.zeros(2, 2, device='cuda') @ torch.zeros(2, 2)")
    assert "mat2 is on cpu, different from other tensors on cuda:0" in run.cause
    assert "not mapped" not in run.cause
