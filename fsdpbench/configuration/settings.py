"""The settings of a configuration: one name each, everywhere.

The same name is the flag (`--backward-prefetch`), the key in TOML and `--set key=value`, the key in JSON
and the column of the store. A setting's row in `SETTINGS` says what it means, which values it takes, and why
its default is what it is; `fsdpbench list settings` prints the table.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_args

from fsdpbench.configuration.numbers import LARGEST_INTEGER
from fsdpbench.configuration.setting import Setting, plain_text
from fsdpbench.configuration.setting_values import (
    Value,
    checkpointing,
    dtype,
    flag,
    joined_names,
    one_of,
    whole,
    words_or,
    wrap,
)
from fsdpbench.errors import UsageError, unknown

_STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2")

_TABLE: tuple[Setting, ...] = (
    Setting(
        "seq",
        None,
        "tokens a sample (at least 1), or model",
        "Sequence length.",
        "`model`: the length of the published model.",
        words_or({"model": None, "none": None}, whole(1)),
    ),
    Setting(
        "batch",
        10,
        "samples (at least 1)",
        "Samples for each rank and microbatch; with tp or cp, for a group of tp x cp ranks.",
        "10 samples of 2048 tokens nearly fill 80 GB with gpt-2.8b; settings matter when memory is full.",
        whole(1),
    ),
    Setting(
        "grad_accum",
        1,
        "microbatches (at least 1)",
        "Microbatches in each step.",
        "No accumulation.",
        whole(1),
    ),
    Setting(
        "grad_sync",
        "every",
        "every, last",
        "Reduce gradients after every microbatch or only after the last one.",
        "What FSDP does outside `no_sync`.",
        one_of("every", "last"),
    ),
    Setting(
        "strategy",
        "FULL_SHARD",
        ", ".join(_STRATEGIES),
        "What is sharded, and over which ranks.",
        "Shards parameters, gradients and optimizer state.",
        one_of(*_STRATEGIES),
    ),
    Setting(
        "shard_size",
        None,
        "ranks (at least 1), or node",
        "Ranks that share one copy of the model (hybrid strategies).",
        "`node`: shard inside a node, replicate across nodes.",
        words_or({"node": None, "none": None}, whole(1)),
    ),
    Setting(
        "wrap",
        "block",
        "block, every-K, size:N, root, class names joined by +",
        "Which modules become an FSDP unit.",
        "Most scripts make each block a unit.",
        wrap,
    ),
    Setting(
        "reshard_after_forward",
        None,
        "auto, true, false, or a number of ranks",
        "Free a unit's parameters after its forward (a number: keep them sharded over that many ranks).",
        "`auto`: as the strategy defines it.",
        words_or({"auto": None, "none": None, "true": True, "false": False}, whole(2)),
    ),
    Setting(
        "keep_last_unsharded",
        False,
        "true, false",
        "Keep the parameters of the last unit gathered between forward and backward.",
        "`false`: treat all units the same; `true` saves an all-gather, as backward starts with this unit.",
        flag,
    ),
    Setting(
        "backward_prefetch",
        "pre",
        "pre, post, none",
        "When the next unit's all-gather is issued in backward.",
        "Best overlap in the FSDP paper (Fig 6b).",
        one_of("pre", "post", "none"),
    ),
    Setting(
        "backward_prefetch_depth",
        1,
        "units (at least 1)",
        "Number of units whose all-gather is issued ahead in backward.",
        "As PyTorch's FSDP.",
        whole(1),
    ),
    Setting(
        "forward_prefetch",
        0,
        "units (0: off)",
        "Number of units whose all-gather is explicitly issued ahead in forward.",
        "Not needed unless the CPU is the bottleneck: it issues all-gathers early anyway.",
        words_or({"off": 0, "none": 0}, whole(0)),
    ),
    Setting(
        "limit_all_gathers",
        2,
        "off, a number of units, auto",
        "Rate limiter: gathered units that may be in memory at the same time.",
        "The FSDP paper's choice.",
        words_or({"off": "off", "false": "off", "0": "off", "auto": "auto"}, whole(1)),
    ),
    Setting(
        "memory_handover",
        None,
        "auto, record_stream, events",
        "How memory of one stream becomes free for another.",
        "`auto`: the default of the system.",
        words_or({"auto": None, "none": None}, one_of("record_stream", "events")),
    ),
    Setting(
        "layout",
        None,
        "auto, grouped, packed",
        "How parameters are arranged in the collectives of `impl-fsdp2`.",
        "`auto`: each large parameter has its own collective, without copies; packed on the CPU.",
        words_or({"auto": None, "none": None}, one_of("grouped", "packed")),
    ),
    Setting(
        "param_dtype",
        "bf16",
        "bf16, fp16, fp32",
        "Dtype of gathered parameters and of computation.",
        "The most common choice.",
        dtype,
    ),
    Setting(
        "reduce_dtype",
        "fp32",
        "bf16, fp16, fp32",
        "Dtype of the gradient reduction.",
        "Sums over many ranks stay accurate; bf16 halves the bytes.",
        dtype,
    ),
    Setting(
        "buffer_dtype",
        None,
        "auto, bf16, fp16, fp32",
        "Dtype of module buffers.",
        "`auto`: buffers keep their dtype.",
        words_or({"auto": None, "none": None}, dtype),
    ),
    Setting(
        "activation_checkpointing",
        "none",
        "none, full, every-K, op, op-every-K",
        "Which activations are recomputed.",
        "Recomputation adds up to a third of the FLOPs; use it if memory is short.",
        checkpointing,
    ),
    Setting(
        "activation_offload",
        False,
        "true, false",
        "Keep what each unit saves for backward in host memory; it returns one unit ahead in backward.",
        "The link to the host limits the step unless units compute long for what they save.",
        flag,
    ),
    Setting(
        "cpu_offload",
        False,
        "true, false",
        "Keep shards, gradients and optimizer state in host memory.",
        "Slow; for models that do not fit otherwise.",
        flag,
    ),
    Setting(
        "optimizer",
        "adamw",
        "adamw, adamw-foreach, adamw-loop, sgd, muon",
        "The optimizer (adamw: fused where the device has it; muon: matrices of blocks, adamw: the rest).",
        "The most common choice.",
        one_of("adamw", "adamw-foreach", "adamw-loop", "sgd", "muon"),
    ),
    Setting(
        "optimizer_dtype",
        None,
        "auto, bf16",
        "Dtype of AdamW's moments (bf16: rounded stochastically).",
        "`auto`: that of the parameters, as torch's AdamW does.",
        words_or({"auto": None, "none": None}, one_of("bf16")),
    ),
    Setting(
        "zero_grad",
        "release",
        "release, fill",
        "After each step: release gradients, or keep their memory and fill it with zeros.",
        "PyTorch's default since 2.0; before, it was `fill`.",
        one_of("release", "fill"),
    ),
    Setting(
        "lora",
        0,
        "off, or a rank (at least 1)",
        "LoRA: train adapters of this rank beside the linear layers of a frozen model.",
        "`off`: train all parameters.",
        words_or({"off": 0, "none": 0}, whole(0)),
    ),
    Setting(
        "lora_targets",
        "all",
        "all, attention, or names of layers joined by +",
        "Which linear layers of the blocks get adapters.",
        "Adapters in all linear layers learn most for the same memory.",
        joined_names,
    ),
    Setting(
        "lora_base",
        "param",
        "param, 4bit",
        "How the frozen linear layers of the blocks are in memory: in param_dtype, or in 4 bits (QLoRA).",
        "`param`: nothing is rounded.",
        one_of("param", "4bit"),
    ),
    Setting(
        "tp",
        1,
        "ranks (at least 1)",
        "Tensor parallelism: ranks that share each layer and the sequence between layers.",
        "FSDP alone, until one GPU's share of a layer or of the activations is too large.",
        whole(1),
    ),
    Setting(
        "cp",
        1,
        "ranks (at least 1)",
        "Context parallelism: ranks that share each sequence, attention included.",
        "Only for sequences whose activations fit no GPU.",
        whole(1),
    ),
    Setting(
        "ep",
        1,
        "ranks (at least 1)",
        "Expert parallelism: ranks that share the experts of a layer and send tokens to each other.",
        "FSDP alone gathers all experts of a layer.",
        whole(1),
    ),
    Setting(
        "implementation",
        "own",
        "own, transformers",
        "Whose modules a model of a configuration file (--hf-config) is built of.",
        "`own`: needs no library.",
        one_of("own", "transformers"),
    ),
    Setting(
        "compile",
        False,
        "true, false",
        "Use torch.compile on each block.",
        "Most training runs eager.",
        flag,
    ),
    Setting(
        "seed",
        0,
        "a number (at least 0)",
        "Seed of the weights and the data.",
        "Any fixed number gives repeatable runs.",
        whole(0, LARGEST_INTEGER),
    ),
)

SETTINGS: dict[str, Setting] = {setting.name: setting for setting in _TABLE}
_NEWER = frozenset(
    {
        "activation_offload",
        "implementation",
        "keep_last_unsharded",
        "layout",
        "lora",
        "lora_base",
        "lora_targets",
    }
    | {"optimizer_dtype", "tp", "cp", "ep"}
)
"""Settings that older records lack; what they ran is the default."""


@dataclass(frozen=True)
class Settings:
    """One value of every setting. Build it with `Settings.of(...)`, which checks names and values."""

    seq: int | None
    batch: int
    grad_accum: int
    grad_sync: str
    strategy: str
    shard_size: int | None
    wrap: str
    reshard_after_forward: bool | int | None
    keep_last_unsharded: bool
    backward_prefetch: str | None
    backward_prefetch_depth: int | None
    forward_prefetch: int | None
    limit_all_gathers: int | str | None
    memory_handover: str | None
    layout: str | None
    param_dtype: str
    reduce_dtype: str | None
    buffer_dtype: str | None
    activation_checkpointing: str
    activation_offload: bool
    cpu_offload: bool
    optimizer: str
    optimizer_dtype: str | None
    zero_grad: str
    lora: int
    lora_targets: str
    lora_base: str
    tp: int
    cp: int
    ep: int
    implementation: str
    compile: bool
    seed: int

    @classmethod
    def of(cls, **values: Any) -> Settings:
        """Defaults, overridden by `values` (texts or typed values). Raises `UsageError`."""
        read = {name: setting.default for name, setting in SETTINGS.items()}
        for name, value in values.items():
            read[name] = setting_named(name).read(value)
        return cls(**read)  # type: ignore[arg-type]

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Settings:
        """Settings as `to_dict` wrote them; `None` stays `None` (a setting that the system does not have)."""
        missing = SETTINGS.keys() - record.keys() - _NEWER
        if missing:
            raise UsageError(f"a recorded configuration lacks the settings {', '.join(sorted(missing))}")
        values: dict[str, Any] = {name: SETTINGS[name].default for name in _NEWER} | {**record}
        return cls(**{name: values[name] for name in SETTINGS})

    def to_dict(self) -> dict[str, Value]:
        return dataclasses.asdict(self)

    def changed(self, **values: Value) -> Settings:
        return dataclasses.replace(self, **values)  # type: ignore[arg-type]


def setting_named(name: str) -> Setting:
    """The setting of that name (dashes count as underscores). Raises `UsageError` with the nearest names."""
    setting = SETTINGS.get(name.replace("-", "_"))
    if setting is None:
        raise unknown("setting", name, SETTINGS, "fsdpbench list settings")
    return setting


def read_list(name: str, given: object) -> list[Value]:
    """One setting's values from a comma-separated text or a TOML value or list, without repeats."""
    setting = setting_named(name)
    items = given if isinstance(given, list) else str(given).split(",") if isinstance(given, str) else [given]
    values = (setting.read(item) for item in items)
    return list({(type(value), value): value for value in values}.values())


def show_value(value: Value | float) -> str:
    """A setting's value as people type it."""
    return plain_text(value) if value is not None else "-"


def _check_table() -> None:
    fields = [field.name for field in dataclasses.fields(Settings)]
    assert fields == list(SETTINGS), "Settings and SETTINGS must list the same names in the same order"
    assert all(isinstance(setting.default, get_args(Value)) for setting in _TABLE)


_check_table()
