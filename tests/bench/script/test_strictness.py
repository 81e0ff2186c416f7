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


SCALED = """
one, e4m3, e5m2 = torch.ones((), device="cuda"), torch.float8_e4m3fn, torch.float8_e5m2
bf16 = {"out_dtype": torch.bfloat16}

def eight(rows, columns, dtype=e4m3):
    return torch.zeros(rows, columns, device="cuda").to(dtype)

def four(rows, columns):
    packed = torch.zeros(rows, columns // 2, dtype=torch.uint8, device="cuda")
    return packed.view(torch.float4_e2m1fn_x2)

def scales(count, dtype):
    return torch.empty(count, dtype=dtype, device="cuda")

a, b = eight(64, 128), eight(96, 128).t()
rows, columns = torch.ones(64, 1, device="cuda"), torch.ones(1, 96, device="cuda")
mx, nv = scales(512, torch.float8_e8m0fnu), scales(1024, torch.float8_e4m3fn)
square = eight(128, 128)
faults = [
    (lambda: torch._scaled_mm(a, b.contiguous(), one, one, **bf16), "mat2 must be col_major"),
    (lambda: torch._scaled_mm(eight(128, 64).t(), b, one, one, **bf16), "self must be row_major"),
    (lambda: torch._scaled_mm(eight(64, 72), eight(96, 72).t(), one, one, **bf16), "divisible by 16"),
    (lambda: torch._scaled_mm(a, eight(90, 128).t(), one, one, **bf16), "(128x90) must be divisible by 16"),
    (lambda: torch._scaled_mm(a, eight(96, 64).t(), one, one, **bf16), "multiplied (64x128 and 64x96)"),
    (lambda: torch._scaled_mm(a.float(), b, one, one, **bf16), "mat1 to be Float8 or Float4_x2"),
    (lambda: torch._scaled_mm(a.to(e5m2), b.to(e5m2), one, one, **bf16), "two Float8_e5m2 matrices"),
    (lambda: torch._scaled_mm(a, b, one.double(), one, **bf16), "scaling"),
    (lambda: torch._scaled_mm(a, b, rows[:32], columns, **bf16), "scale_a should be (64, 1)"),
    (lambda: torch._scaled_mm(a, b, rows, columns, out_dtype=torch.float16), "Only bf16"),
    (lambda: torch._scaled_mm(a, b, one, one, bias=columns[0], **bf16), "Bias must be either Half"),
    (lambda: torch._scaled_mm(square, square.t(), mx[:511], mx, **bf16), "scale_a should have 512 elements"),
    (lambda: torch._scaled_mm(square, square.t(), nv, nv, **bf16), "float8_e4m3fn for torch.float8_e4m3fn"),
]
for fault, words in faults:
    try:
        fault()
    except (RuntimeError, ValueError) as error:
        assert words in str(error), str(error)
    else:
        raise AssertionError(words)
assert torch._scaled_mm(a, b, one, one, **bf16).dtype is torch.bfloat16
assert torch._scaled_mm(a.to(e5m2), b, rows, columns, **bf16).shape == (64, 96)
into = torch.empty(64, 96, device="cuda", dtype=torch.bfloat16)
torch._scaled_mm(a, b, one, one, out=into, **bf16)
assert torch._scaled_mm(square, square.t(), mx, mx, **bf16).shape == (128, 128)
assert torch._scaled_mm(four(128, 128), four(128, 128).t(), nv, nv, **bf16).shape == (128, 128)
train(2)
"""


def test_scaled_products_are_checked_as_cuda_checks_them(run_probe: RunScript) -> None:
    run = run_probe(SCALED, gpus=1, hardware="b200")
    assert run.result["status"] == "ok", run.cause
