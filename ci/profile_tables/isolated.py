"""Prices of operators that run alone, to be compared with measured ones."""

from __future__ import annotations

import dataclasses

from fsdpbench.sim.model.chips import OPERATOR_CHIPS
from fsdpbench.sim.model.kernel_costs import KernelCosts, LibraryCosts
from fsdpbench.sim.model.network import Network, curve_seconds
from fsdpbench.sim.model.profile import HardwareProfile, load_profile, profile_names
from profile_tables.measured import ATTENTION, COLLECTIVE, Measured

_TYPES = {"bfloat16": "bf16", "fp8": "fp8", "nvfp4": "nvfp4"}


def profile_of(gpu: str) -> HardwareProfile | None:
    """Return the packaged profile of a chip as tables name it, or None."""
    name = gpu.lower().replace("_", "-")
    name = OPERATOR_CHIPS[name].profile if name in OPERATOR_CHIPS else name
    return load_profile(name) if name in profile_names() else None


class IsolatedPrices:
    """Durations of measured operators that run alone, as benchmarks of one operator measure them.

    The measured library's table prices them; without one, or with `tables` False, the prices of training runs
    without `under_load`, the slow-down of products in training.
    """

    def __init__(self, profile: HardwareProfile, tables: bool = True) -> None:
        self._profile = profile
        self._tables = tables
        self._kernels = KernelCosts(
            dataclasses.replace(
                profile,
                gemm=dataclasses.replace(profile.gemm, under_load=1.0),
                attention=dataclasses.replace(profile.attention, under_load=1.0),
            )
        )
        # At least as large as any group inside one node.
        self._network = Network(profile, 1 << 20, 1 << 20)

    def microseconds(self, row: Measured) -> float:
        """Return the price of a measured operator in us."""
        if row.kind == COLLECTIVE:
            return self._collective(row)
        return self._attention(row) if row.kind == ATTENTION else self._product(row)

    def _libraries(self, row: Measured) -> LibraryCosts:
        return LibraryCosts(self._profile, [row.library] if self._tables else [])

    def _collective(self, row: Measured) -> float:
        kind = str(row.columns["op"]).replace("alltoall", "all_to_all")
        nbytes, ranks = row.number("bytes"), row.number("gpus")
        if self._tables and row.library in self._profile.libraries:
            seconds = curve_seconds(self._profile.libraries[row.library], kind, nbytes, ranks)
            if seconds is not None:
                return seconds * 1e6
        return self._network.collective_ns(kind, nbytes, range(ranks)) / 1e3

    def _product(self, row: Measured) -> float:
        m, n, k = map(row.number, ("m", "n", "k"))
        dtype = _TYPES[row.dtype]
        seconds = self._libraries(row).product(m, n, k, dtype)
        return self._kernels.gemm_ns(m, n, k, 1, dtype) / 1e3 if seconds is None else seconds * 1e6

    def _attention(self, row: Measured) -> float:
        batch, heads, kv_heads, length, size = map(
            row.number, ("batch", "heads", "kv_heads", "seq", "head_dim")
        )
        seconds = self._libraries(row).attention_forward(batch, heads, kv_heads, length, size)
        if seconds is not None:
            return seconds * 1e6
        return (
            self._kernels.attention_forward_ns(batch, heads, length, length, size, True, "bf16", kv_heads)
            / 1e3
        )
