"""Matrix products that come out alike on every CPU, for tests that compare two layouts of the same numbers.

MKL picks a kernel by the CPU and by where its operands lie in memory, and kernels add up in different
orders. So our FSDP and torch's, whose parameters lie at different addresses, differ in the last bits on one
CPU and not on the next, and optimizers that divide by a gradient's size make such bits large.
``FSDPBENCH_PRODUCTS`` chooses:

- ``exact``: sums are taken in float64 and rounded once. Two kernels then agree to the bit (but for about one
  element in 1e8), so comparisons may be as tight as the algorithm is. All ranks of ``rank_pool`` compute so.
- ``noise-SEED``: as another CPU might round. Each product gets the error of a random order of its sum,
  ``eps / 2 * normal * sqrt(sum of the squares of its summands)``, a function of the operands' shapes, strides
  and offsets in their cache lines. What passes under a few seeds does not hang on the last bits.

With this folder on ``PYTHONPATH`` Python loads this file at its start, in every process of a test.
"""

from __future__ import annotations

import os
import warnings
import zlib

VARIABLE = "FSDPBENCH_PRODUCTS"
_CACHE_LINE = 64
_kept: list[object] = []


def install(mode: str) -> None:
    """Replace the CPU's products of floats in this process and its forks.

    Raises:
        ValueError: for a mode that does not exist.
    """
    import torch

    if _kept:
        return
    if mode != "exact" and not mode.startswith("noise-"):
        raise ValueError(f"{VARIABLE} is {mode!r}: 'exact' or 'noise-SEED'")

    def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return _summed(a, b).to(a.dtype)

    def addmm(
        bias: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, beta: float = 1, alpha: float = 1
    ) -> torch.Tensor:
        wide = _summed(a, b) * alpha
        return (wide + bias * beta if beta else wide).to(a.dtype)

    def _summed(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """The product in the precision that it is summed in."""
        if not a.is_floating_point():
            return _plain(a, b)
        if mode == "exact":
            return _plain(a.double(), b.double())
        precision = torch.promote_types(a.dtype, torch.float32)  # low precisions are summed in fp32
        wide_a, wide_b = a.to(precision), b.to(precision)
        spread = _plain(wide_a.square(), wide_b.square()).sqrt() * (torch.finfo(precision).eps / 2)
        place = (mode, *((t.shape, t.stride(), t.dtype, t.data_ptr() % _CACHE_LINE) for t in (a, b)))
        generator = torch.Generator().manual_seed(zlib.crc32(repr(place).encode()))
        return _plain(wide_a, wide_b) + spread * torch.randn(
            spread.shape, generator=generator, dtype=precision
        )

    def _plain(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """By the CPU's own kernel: the variants with ``out`` are not replaced."""
        out = a.new_empty((*a.shape[:-1], b.shape[-1]))
        return torch.mm(a, b, out=out) if a.dim() == 2 else torch.bmm(a, b, out=out)

    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of replaced kernels
        for name, function in {"mm": product, "bmm": product, "addmm": addmm}.items():
            library.impl(name, function, "CPU", allow_override=True)
    _kept.append(library)


# Ranks load this file once more, under a name of its own, and choose for themselves.
if __name__ == "sitecustomize" and os.environ.get(VARIABLE):
    install(os.environ[VARIABLE])
