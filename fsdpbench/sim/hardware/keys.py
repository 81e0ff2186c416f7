"""Every figure of a hardware or software profile: its unit, what is physically possible, what is usual.

A figure outside its range is refused wherever it comes from: a file, a flag, a calibration. One that is more
than ten times as far out as any packaged profile is a warning in the result. `docs/reference/profile-keys.md`
shows this table; tests compare it with the dataclasses and with the packaged profiles.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from fsdpbench.errors import UsageError

_FAR = 10.0


class ProfileError(UsageError):
    """A hardware or software profile that is unknown, unreadable or inconsistent; the message names file and
    key."""


@dataclass(frozen=True)
class Key:
    """A figure: ``name`` is the dotted key, without the names that a user chooses and positions in lists.

    ``least`` to ``most`` is possible, ``low`` to ``high`` is what packaged profiles have.
    """

    name: str
    unit: str
    least: float
    most: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"from {self.least:,g} to {self.most:,g} {self.unit}"

    def is_far(self, value: float) -> bool:
        """Whether no packaged profile has a figure near it."""
        return value * _FAR < self.low or value > self.high * _FAR


_SHARE, _TIME = ("(share)", 0.001, 1), ("us", 0, 1e5)
_ROWS = (
    ("gpus_per_node", "GPUs", 1, 1024, 4, 8),
    ("memory.capacity_gib", "GiB", 0.1, 8192, 39, 278),
    ("memory.context_mib", "MiB", 0, 65536, 550, 1500),
    ("memory.nccl_mib_per_communicator", "MiB", 0, 65536, 2400, 2400),
    ("memory.bandwidth_gb_s", "GB/s", 10, 1e5, 864, 8000),
    ("compute.sm_count", "multiprocessors", 1, 4096, 108, 188),
    ("compute.peak_tflops.bf16", "TFLOPS", 0.1, 1e5, 312, 2500),
    ("compute.peak_tflops.fp16", "TFLOPS", 0.1, 1e5, 312, 2500),
    ("compute.peak_tflops.tf32", "TFLOPS", 0.1, 1e5, 156, 1250),
    ("compute.peak_tflops.fp32", "TFLOPS", 0.1, 1e5, 19.5, 120),
    ("compute.clock_spread", "(share)", 0, 0.1, 0, 0.012),
    ("compute.fp32_lanes", "lanes a multiprocessor", 1, 1024, 64, 128),
    ("compute.issue_share", *_SHARE, 0.75, 0.75),
    ("gemm.tiles.rows", "rows", 1, 4096, 64, 256),
    ("gemm.tiles.columns", "columns", 1, 4096, 64, 256),
    ("gemm.tiles.efficiency", *_SHARE, 0.25, 1),
    ("gemm.sustained", *_SHARE, 0.55, 0.91),
    ("gemm.under_load", *_SHARE, 0.788, 0.977),
    ("gemm.weight_grad", *_SHARE, 0.64, 0.7),
    ("gemm.memory_efficiency", *_SHARE, 0.61, 0.815),
    ("gemm.prologue_k", "elements", 0, 1e5, 0, 242),
    ("gemm.wave_quantisation", "(share)", 0, 1, 0, 0.65),
    ("gemm.floor_us", *_TIME, 1.7, 3.8),
    ("attention.forward_tflops", "TFLOPS", 0.1, 1e5, 140, 1850),
    ("attention.backward_tflops", "TFLOPS", 0.1, 1e5, 121, 1360),
    ("attention.under_load", *_SHARE, 0.84, 0.977),
    ("attention.head_dim_64", *_SHARE, 0.57, 1),
    ("attention.memory_efficiency", *_SHARE, 0.18, 0.75),
    ("attention.wave_quantisation", "(share)", 0, 1, 0, 1),
    ("attention.floor_us", *_TIME, 7.8, 18.3),
    ("bandwidth.efficiency.pointwise", *_SHARE, 0.79, 0.79),
    ("bandwidth.efficiency.copy", *_SHARE, 0.66, 0.66),
    ("bandwidth.efficiency.memcpy", *_SHARE, 0.8, 0.8),
    ("bandwidth.efficiency.reduction", *_SHARE, 0.72, 0.72),
    ("bandwidth.efficiency.optimizer", *_SHARE, 0.8, 0.8),
    ("bandwidth.efficiency.gather", *_SHARE, 0.66, 0.66),
    ("bandwidth.floor_us", *_TIME, 2.2, 2.5),
    ("bandwidth.fused_gain", "(factor)", 0.1, 10, 1, 1.1),
    ("cpu.operator_us", *_TIME, 7, 7),
    ("cpu.view_us", *_TIME, 2.5, 2.5),
    ("cpu.launch_us", *_TIME, 4, 4),
    ("cpu.autograd_node_us", *_TIME, 2, 2),
    ("cpu.module_call_us", *_TIME, 4, 4),
    ("cpu.hook_us", *_TIME, 4, 4),
    ("cpu.collective_us", *_TIME, 80, 80),
    ("cpu.event_us", *_TIME, 1.5, 1.5),
    ("cpu.stream_us", *_TIME, 1.5, 1.5),
    ("cpu.synchronize_us", *_TIME, 5, 5),
    ("cpu.cuda_malloc_us", *_TIME, 290, 290),
    ("cpu.cuda_malloc_us_per_gib", "us a GiB", 0, 1e7, 5000, 5000),
    ("cpu.cuda_free_us", *_TIME, 290, 290),
    ("cpu.cuda_free_us_per_gib", "us a GiB", 0, 1e7, 70000, 70000),
    ("nvlink.base_us", *_TIME, 3.8, 8.2),
    ("nvlink.per_rank_us", *_TIME, 0.87, 1.5),
    ("nvlink.peak_gb_s", "GB/s", 0.01, 1e5, 2.2, 716),
    ("nvlink.curve_ranks", "GPUs", 1, 1024, 4, 8),
    ("nvlink.ranks_exponent", "(exponent)", 0, 2, 0, 0.17),
    ("nvlink.points.bytes", "bytes", 1, 1e12, 49000, 9.4e8),
    ("nvlink.points.gb_s", "GB/s", 0.001, 1e5, 0.68, 716),
    ("nic.gb_s_per_node", "GB/s", 0.01, 1e5, 50, 800),
    ("nic.efficiency", *_SHARE, 0.75, 0.98),
    ("nic.base_us", *_TIME, 20, 20),
    ("nic.tree_share", *_SHARE, 0.9, 0.9),
    ("nic.protocols.nvlink_hop_us", *_TIME, 1, 3.4),
    ("nic.protocols.nic_hop_us", *_TIME, 2.7, 14),
    ("nic.protocols.bandwidth_share", *_SHARE, 0.25, 1),
    ("nic.protocols.most_gb_s", "GB/s", 0.01, 1e6, 20, 1e6),
    ("contention.compute_slowdown", "(factor)", 1, 10, 1.3, 1.4),
    ("contention.communication_slowdown", "(factor)", 1, 10, 1.15, 1.2),
    ("contention.kernel_share", "(share)", 0, 1, 0, 0.5),
    ("host_link.gb_s", "GB/s", 0.001, 1e4, 24, 225),
    ("host_link.latency_us", *_TIME, 8, 10),
    ("host_link.memory_gb_s", "GB/s", 0.01, 1e4, 38, 57),
    ("libraries.switch_from", "GPUs (0: never)", 0, 1024, 0, 6),
    ("libraries.products.peak_tflops", "TFLOPS", 0.1, 1e5, 312, 15000),
    ("libraries.products.operand_bytes", "bytes", 0.25, 16, 0.56, 2),
    ("libraries.products.tiles.rows", "rows", 1, 4096, 64, 256),
    ("libraries.products.tiles.columns", "columns", 1, 4096, 64, 256),
    ("libraries.products.tiles.efficiency", *_SHARE, 0.22, 1),
    ("libraries.products.sustained", *_SHARE, 0.34, 0.94),
    ("libraries.products.memory_efficiency", *_SHARE, 0.25, 1),
    ("libraries.products.prologue_k", "elements", 0, 1e5, 0, 414),
    ("libraries.products.wave_quantisation", "(share)", 0, 1, 0, 0.91),
    ("libraries.products.floor_us", *_TIME, 1.3, 14),
    ("libraries.products.quantise", "times", 0, 100, 0, 4.5),
    ("libraries.products.cache_mib", "MiB", 0.1, 65536, 40, 128),
    ("libraries.products.cache_gain", "(factor)", 1, 100, 1, 3),
    ("libraries.attention.forward_tflops", "TFLOPS", 0.1, 1e5, 140, 1970),
    ("libraries.attention.head_dim_64", "(factor)", 0.001, 2, 0.57, 1.07),
    ("libraries.attention.memory_efficiency", *_SHARE, 0.18, 0.97),
    ("libraries.attention.wave_quantisation", "(share)", 0, 1, 0, 1),
    ("libraries.attention.floor_us", *_TIME, 4.8, 18.3),
    ("libraries.factors.axes", "elements", 1e-3, 1e9, 1, 65536),
    ("libraries.factors.factors", "(factor)", 0.05, 20, 0.65, 3),
    ("libraries.collectives.ranks", "GPUs", 2, 1024, 2, 8),
    ("libraries.collectives.points.bytes", "bytes", 1, 1e12, 512, 5.4e8),
    ("libraries.collectives.points.us", "us", 0.01, 1e9, 5.1, 650_000),
    ("software.attention.forward_rate", "(factor)", 0.001, 10, 0.86, 1.5),
    ("software.attention.backward_rate", "(factor)", 0.001, 10, 0.57, 1.6),
    ("software.trainer.metrics", "metrics", 0, 1000, 0, 2),
    ("software.trainer.host_us", "us", 0, 1e8, 0, 1e6),
)
KEYS: Mapping[str, Key] = {row[0]: Key(*row) for row in _ROWS}
_COLUMNS = {
    "gemm.tiles": ("rows", "columns", "efficiency"),
    "libraries.products.tiles": ("rows", "columns", "efficiency"),
    "nvlink.points": ("bytes", "gb_s"),
    "libraries.collectives.points": ("bytes", "us"),
}
"""Lists of lists that have a key for each position."""


def require(condition: bool, key: str, value: object, rule: str) -> None:
    """Raise `ProfileError` that names a key and its value unless it keeps the rule."""
    if not condition:
        raise ProfileError(f"{key} = {value!r}: {rule}")


def check_figures(profile: object) -> None:
    """Raise `ProfileError` for the first figure of a profile that is not possible."""
    for key, name, value in figures(profile):
        require(key.least <= value <= key.most, name, value, f"must be {key}")


def far_figures(profile: object) -> list[str]:
    """The figures that are far from those of every packaged profile, one sentence each."""
    return [
        f"{name} = {value:g} {key.unit} is far from every packaged profile ({key.low:,g} to {key.high:,g})"
        for key, name, value in figures(profile)
        if key.is_far(value)
    ]


def figures(value: object, name: str = "", row: str = "") -> Iterator[tuple[Key, str, float]]:
    """Every figure in a profile or a part of it: its row, its own dotted name, its value; the least and the
    greatest of a list.

    A class whose figures stand elsewhere in the table says where (``table``). Raises `ProfileError` for a
    figure without a row.
    """
    if dataclasses.is_dataclass(value):
        row = getattr(value, "table", row)
        for spec in dataclasses.fields(value):
            yield from figures(getattr(value, spec.name), _join(name, spec.name), _join(row, spec.name))
    elif isinstance(value, Mapping):
        for each, item in value.items():
            yield from figures(item, _join(name, each), _join(row, each))
    elif isinstance(value, tuple):
        if (columns := _COLUMNS.get(row)) is not None:
            for column, values in zip(columns, zip(*value, strict=True), strict=True):
                yield from _extremes(values, f"{name}[{{}}].{column}", KEYS[f"{row}.{column}"])
        elif value and isinstance(value[0], float):
            yield from _extremes(value, f"{name}[{{}}]", KEYS[row])
        else:
            for index, item in enumerate(value):
                yield from figures(item, f"{name}[{index}]", row)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        if row not in KEYS:
            near = difflib.get_close_matches(row, KEYS, n=1)
            raise ProfileError(f"unknown key {name}{f'; did you mean {near[0]}?' if near else ''}")
        yield KEYS[row], name, value


def _extremes(values: tuple[float, ...], name: str, key: Key) -> Iterator[tuple[Key, str, float]]:
    for value in {min(values), max(values)}:
        yield key, name.format(values.index(value)), value


def _join(place: str, name: str) -> str:
    return f"{place}.{name}" if place else name
