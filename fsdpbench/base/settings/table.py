"""The settings of a configuration: a row each, which says everything that is known of it.

A row's name is the flag (`--backward-prefetch`), the key in TOML, JSON and `--set key=value`, and the column
of the store. The row holds default, values, what it means, why its default is that, its parser; then what its
values trade, how it is written as code, and which presets sweep it. Flags, `list settings`, spaces,
`explain`, `--advise`, verdicts and code to paste all read it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from fsdpbench.base.errors import UsageError, unknown
from fsdpbench.base.numbers import LARGEST_INTEGER
from fsdpbench.base.settings import code
from fsdpbench.base.settings.setting import LESS, Setting, Trade, plain_text, row, saves, speeds, wins
from fsdpbench.base.settings.values import (
    Value,
    checkpointing,
    dtype,
    flag,
    for_each,
    joined_names,
    one_of,
    positive,
    whole,
    words_or,
    wrap,
)

_STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2")

_BF16 = "param_dtype=torch.bfloat16, reduce_dtype=torch.float32"


@dataclass(frozen=True)
class Settings:
    """One value of every setting. Build it with `Settings.of(...)`, which checks names and values."""

    # fmt: off
    seq: int | None = row(None, words_or({"model": None, "none": None}, whole(1)),
        "Sequence length in tokens.",
        "`model`: the model's maximum.",
        takes="tokens a sample (at least 1), or model", example=("2048", "4096"),
        default_words="the model's maximum", in_script=True)
    batch: int = row(10, whole(1),
        "Samples for each rank and microbatch; with tp or cp, for a group of tp x cp ranks.",
        "10 samples of 2048 tokens nearly fill 80 GB with gpt-2.8b; settings matter when memory is full.",
        takes="samples (at least 1)", example=("4", "8"), in_script=True,
        sweep={"memory": (4, 8, 16), "memory/cpu": (2, 4), "accumulation": (4,), "accumulation/cpu": (),
            "wide": (4, 2, 8, 12, 16), "wide/cpu": (1, 2, 4)},
        trades=(
            speeds(None, "more work for each byte that is sent and each kernel that is launched",
                risk="the optimization changes with it",
                fsdp2="DataLoader(batch_size=...): a larger batch on each GPU",
                against=("cpu_late", "queued", "transfer", "exposed_reduction", "cpu_bound"), shown="more"),
            saves(None, "half the activations", risk="accumulate gradients to keep the samples a step",
                fsdp2="DataLoader(..., batch_size=half of it)", shown="half", variation="half-batch"),
        ))
    grad_accum: int = row(1, whole(1),
        "Microbatches in each step.",
        "No accumulation.",
        takes="microbatches (at least 1)", example=("1", "4"), in_script=True,
        sweep={"accumulation": (1, 2, 4, 8)})
    grad_sync: str = row("every", one_of("every", "last"),
        "Reduce gradients after every microbatch or only after the last one.",
        "What FSDP does outside `no_sync`.",
        in_script=True)
    strategy: str = row("FULL_SHARD", one_of(*_STRATEGIES),
        "What is sharded, and over which ranks.",
        "Shards parameters, gradients and optimizer state.",
        never_null=True,
        sweep={"default/cpu": ("FULL_SHARD", "SHARD_GRAD_OP"), "memory": ("FULL_SHARD", "SHARD_GRAD_OP"),
            "accumulation": ("FULL_SHARD", "SHARD_GRAD_OP"),
            "hybrid": ("FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"),
            "wide": ("FULL_SHARD", "SHARD_GRAD_OP")},
        trades=(
            saves("FULL_SHARD", "shards parameters too, over all ranks",
                of=("SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"),
                also=(("shard_size", None),)),
        ), code=dict.fromkeys(code.FLAT, code.strategy))
    shard_size: int | None = row(None, words_or({"node": None, "none": None}, whole(1)),
        "Ranks that share one copy of the model (hybrid strategies).",
        "`node`: shard inside a node, replicate across nodes.",
        takes="ranks (at least 1), or node")
    wrap: str = row("block", wrap,
        "Which modules become an FSDP unit.",
        "Most scripts make each block a unit.",
        takes="block, every-K, by unit (`every-1:2+every-2:15`), size:N, root, or names joined by + "
        "(`block+lm_head`)",
        never_null=True,
        sweep={"default": ("block", "every-4"), "default/cpu": ("block", "root"),
            "wide": ("block", "every-2", "every-4")},
        trades=(
            saves("block", "smaller units: less is gathered at a time",
                of=lambda wrap: str(wrap).startswith(("root", "every-", "size:")),
                fsdp2="for block in blocks: fully_shard(block), then fully_shard(model)",
                fsdp1="auto_wrap_policy=ModuleWrapPolicy({Block})", variation="wrap-blocks",
                against=("first_of_step", "root_only")),
            speeds("every-2", "fewer, larger collectives",
                fsdp2="for a, b in zip(blocks[::2], blocks[1::2]): fully_shard([a, b])",
                variation="wrap-pairs",
                against=("cpu_late", "cpu_bound")),
        ))
    reshard_after_forward: bool | int | str | None = row(None,
            words_or({"auto": None, "none": None, "true": True, "false": False},
            lambda text: for_each(flag)(text) if ":" in text else whole(2)(text)),
        "Free a unit's parameters after its forward (a number: keep them sharded over that many ranks).",
        "`auto`: as the strategy defines it.",
        takes="auto, true, false, a number of ranks, or by unit (`true:20+false:12`)",
        trades=(
            saves(True, "frees a unit's parameters after its forward", of=(False,),
                fsdp2="reshard_after_forward=True", fsdp1="sharding_strategy=ShardingStrategy.FULL_SHARD",
                variation="reshard"),
            speeds(False, "keeps parameters from forward to backward: one all-gather less",
                fsdp2="reshard_after_forward=False", fsdp1="sharding_strategy=ShardingStrategy.SHARD_GRAD_OP",
                variation="keep", against=("transfer",)),
        ))
    keep_last_unsharded: bool = row(False, flag,
        "Keep the parameters of the last unit gathered between forward and backward.",
        "`false`: treat all units the same; `true` saves an all-gather, as backward starts with this unit.")
    backward_prefetch: str | None = row("pre", one_of("pre", "post", "none"),
        "When the next unit's all-gather is issued in backward.",
        "Best overlap in the FSDP paper (Fig 6b).",
        sweep={"wide": ("pre", "post", "none")},
        trades=(
            saves("none", "one unit less is gathered in backward", of=("pre", "post")),
            speeds("pre", "gathers the next unit beside the backward of this one",
                fsdp2="module.set_modules_to_backward_prefetch([...]), where its own order is not enough",
                fsdp1="backward_prefetch=BackwardPrefetch.BACKWARD_PRE", variation="backward-prefetch",
                against=("no_prefetch_backward",)),
        ),
        code={**dict.fromkeys(code.FLAT, code.prefetch_time),
            "impl-fsdp2": code.argument("backward_prefetch")})
    backward_prefetch_depth: int | str | None = row(1, for_each(whole(1)),
        "Number of units whose all-gather is issued ahead in backward.",
        "As PyTorch's FSDP.",
        takes="units (at least 1), or by unit (`1:20+2:12`)", example=("1", "2"),
        trades=(
            speeds(2, "gathers further ahead in backward",
                fsdp2="layer.set_modules_to_backward_prefetch([the two layers before it]) (fully_shard)",
                against=("queued",)),
        ),
        code=dict.fromkeys(code.OURS, code.argument("backward_prefetch_depth")))
    forward_prefetch: int | str | None = row(0, words_or({"off": 0, "none": 0}, for_each(whole(0))),
        "Number of units whose all-gather is explicitly issued ahead in forward.",
        "Not needed unless the CPU is the bottleneck: it issues all-gathers early anyway.",
        takes="units (0: off), or by unit (`0:20+1:12`)", example=("0", "1"),
        sweep={"default": (0, 1), "default/cpu": (), "wide": (0, 1)},
        trades=(
            saves(0, "one unit less is gathered in forward", of=bool),
            speeds(1, "gathers the next unit beside the forward of this one",
                fsdp2="for a, b in pairwise(blocks): a.set_modules_to_forward_prefetch([b])",
                fsdp1="forward_prefetch=True", variation="prefetch", against=("no_prefetch", "cpu_late")),
        ),
        code={**dict.fromkeys(code.OURS, code.argument("forward_prefetch", "forward_prefetch_depth")),
            "torch-fsdp1": code.forward_prefetch})
    limit_all_gathers: int | str | None = row(2, words_or({"off": "off", "false": "off", "0": "off",
            "auto": "auto"}, whole(1)),
        "Rate limiter: gathered units that may be in memory at the same time.",
        "The FSDP paper's choice.",
        takes="off, a number of units, auto",
        sweep={"memory": (2, "off"), "wide": (2, 3, "off")},
        trades=(
            saves(2, "two units' buffers at a time", of=("off", "auto"), fsdp1="limit_all_gathers=True",
                against=("alloc_retries",)),
            speeds(4, "more all-gathers in flight",
                fsdp1="limit_all_gathers=False (True: two in flight); fully_shard has no limiter",
                against=("rate_limiter",)),
            speeds("off", "no wait for memory of earlier all-gathers", fsdp1="limit_all_gathers=False",
                against=("event",)),
        ),
        code={**dict.fromkeys(code.OURS, code.argument("limit_all_gathers")), "torch-fsdp1": code.limiter})
    memory_handover: str | None = row(None, words_or({"auto": None, "none": None},
            one_of("record_stream", "events")),
        "How memory of one stream becomes free for another.",
        "`auto`: the default of the system.",
        takes="auto, record_stream, events",
        trades=(
            wins("events", "hands memory over as soon as it was read",
                fsdp2="fully_shard instead of FullyShardedDataParallel: it needs no record_stream",
                against=("rate_limiter", "event", "alloc_retries")),
        ),
        code=dict.fromkeys(code.OURS, code.argument("memory_handover")))
    layout: str | None = row(None, words_or({"auto": None, "none": None}, one_of("grouped", "packed")),
        "How parameters are arranged in the collectives of `impl-fsdp2`.",
        "`auto`: each large parameter has its own collective, without copies; packed on the CPU.",
        takes="auto, grouped, packed", code={"impl-fsdp2": code.argument("layout")})
    symmetric_memory: bool = row(False, flag,
        "Gather parameters in symmetric memory, by copy engines (`set_symm_mem_for_comm`; inside a node).",
        "Not all GPUs and networks have it; what it saves is contention with computation.")
    param_dtype: str = row("bf16", dtype,
        "Dtype of gathered parameters and of computation.",
        "The most common choice.",
        trades=(
            wins("bf16", "halves activations", of=("fp32",), risk="computes in bf16",
                fsdp2=f"mp_policy=MixedPrecisionPolicy({_BF16})",
                fsdp1=f"mixed_precision=MixedPrecision({_BF16})",
                variation="bf16", against=("transfer",)),
        ),
        code={**dict.fromkeys(code.FLAT, code.mixed_precision),
            **dict.fromkeys(("impl-fsdp2", "torch-fsdp2"), code.policy)})
    reduce_dtype: str | None = row("fp32", dtype,
        "Dtype of the gradient reduction.",
        "Sums over many ranks stay accurate; bf16 halves the bytes.",
        sweep={"default": ("fp32", "bf16"), "default/cpu": ()},
        trades=(
            wins("bf16", "halves reduction buffers", of=("fp32",), risk="changes the sums' rounding",
                fsdp2="mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)",
                fsdp1="mixed_precision=MixedPrecision(reduce_dtype=torch.bfloat16)",
                against=("exposed_reduction",)),
        ))
    buffer_dtype: str | None = row(None, words_or({"auto": None, "none": None}, dtype),
        "Dtype of module buffers.",
        "`auto`: buffers keep their dtype.",
        takes="auto, bf16, fp16, fp32")
    activation_checkpointing: str = row("none", checkpointing,
        "Which activations are recomputed.",
        "Recomputation adds up to a third of the FLOPs; use it if memory is short.",
        takes="none, full, every-K, op, op-every-K, or by block (`full:20+none:12`)", in_script=True,
        sweep={"default": ("none", "op", "full"), "default/cpu": (), "memory": ("none", "full"),
            "scaling": ("none",), "wide": ("none", "full")},
        trades=(
            saves("every-2", "recomputes every other block", of=("none",)),
            saves("op", "keeps products and attention, recomputes the rest", of=("none",)),
            saves("full", "recomputes every block", of=lambda checkpointing: checkpointing != "full",
                fsdp2="before each block is wrapped: "
                "block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)",
                variation="checkpoint", against=("alloc_retries",)),
        ))
    checkpoint_first: int | None = row(None, words_or({"all": None, "none": None}, whole(1)),
        "With activation_checkpointing, recompute only in the first N blocks.",
        "`all`: if some blocks have room for their activations, fewer FLOPs are repeated.",
        takes="all, or a number of blocks (at least 1)", in_script=True)
    activation_offload: bool | str = row(False, for_each(flag),
        "Keep what each unit saves for backward in host memory; it returns one unit ahead in backward.",
        "The link to the host limits the step unless units compute long for what they save.",
        takes="true, false, or by unit (`true:1+false:3`)",
        trades=(
            saves(True, "what units save for backward waits on the host", of=(False,)),
        ))
    cpu_offload: bool = row(False, flag,
        "Keep shards, gradients and optimizer state in host memory.",
        "Slow; for models that do not fit otherwise.",
        never_null=True,
        trades=(
            saves(True, "shards, gradients and optimizer live on the host", of=(False,)),
            speeds(False, "keeps the shards on the GPU", fsdp2="without offload_policy=CPUOffloadPolicy()",
                fsdp1="without cpu_offload=CPUOffload(...)", variation="no-offload",
                against=("memory_copies",)),
        ),
        code={**dict.fromkeys(code.FLAT, code.offload("cpu_offload=CPUOffload(offload_params=True)")),
            "impl-fsdp2": code.offload("offload_policy=CPUOffloadPolicy()"),
            "torch-fsdp2": code.offload('offload_policy=CPUOffloadPolicy(pin_memory=DEVICE != "cpu")')})
    optimizer: str = row("adamw", one_of("adamw", "adamw-foreach", "adamw-loop", "sgd", "muon"),
        "The optimizer (adamw: fused where the device has it; muon: matrices of blocks, adamw: the rest).",
        "The most common choice.",
        in_script=True,
        trades=(
            wins("adamw", "fused: no temporaries in the optimizer's step", of=("adamw-foreach", "adamw-loop"),
                fsdp2="the optimizer's fused=True", variation="fused"),
        ))
    optimizer_dtype: str | None = row(None, words_or({"auto": None, "none": None}, one_of("bf16")),
        "Dtype of AdamW's moments (bf16: rounded stochastically).",
        "`auto`: that of the parameters, as torch's AdamW does.",
        takes="auto, bf16", in_script=True,
        trades=(
            Trade("bf16", "halves AdamW's moments", of=(None,), memory=LESS,
                risk="they are rounded stochastically"),
        ))
    linear_dtype: str = row("bf16", one_of("bf16", "fp8", "mxfp8", "nvfp4"),
        "Number format of the blocks' matrix products, forward and backward (bf16: as param_dtype).",
        "`bf16`: nothing is rounded further; 8 and 4 bits need GPUs for them, and pay for casts.",
        in_script=True, never_null=True)
    clip: float | None = row(None, words_or({"off": None, "none": None}, positive),
        "Clip the norm of all gradients before the optimizer's step.",
        "`off`: clipping reads all gradients once or twice more and adds one small all-reduce.",
        takes="off, or the largest norm (a number above 0)", in_script=True)
    zero_grad: str = row("release", one_of("release", "fill"),
        "After each step: release gradients, or keep their memory and fill it with zeros.",
        "PyTorch's default since 2.0; before, it was `fill`.",
        in_script=True,
        trades=(
            Trade("release", "frees gradients between steps", of=("fill",), memory=LESS,
                fsdp2="zero_grad(set_to_none=True)", variation="none-grads"),
        ))
    lora: int = row(0, words_or({"off": 0, "none": 0}, whole(0)),
        "LoRA: train adapters of this rank beside the linear layers of a frozen model.",
        "`off`: train all parameters.",
        takes="off, or a rank (at least 1)", default_words="off", in_script=True, never_null=True)
    lora_targets: str = row("all", joined_names,
        "Which linear layers of the blocks get adapters.",
        "Adapters in all linear layers learn most for the same memory.",
        takes="all, attention, or names of layers joined by +", in_script=True, never_null=True)
    lora_base: str = row("param", one_of("param", "4bit"),
        "Number format of the frozen linear layers in memory: as param_dtype, or 4 bits (QLoRA).",
        "`param`: nothing is rounded.",
        in_script=True, never_null=True)
    tp: int = row(1, whole(1),
        "Tensor parallelism: ranks that share each layer and the sequence between layers.",
        "FSDP alone, until one GPU's share of a layer or of the activations is too large.",
        takes="ranks (at least 1)", example=("1", "2"), never_null=True,
        trades=(
            speeds(None, "fewer ranks share a layer: less is exchanged inside of it",
                against=("exposed_between_layers",), shown="less"),
        ))
    cp: int = row(1, whole(1),
        "Context parallelism: ranks that share each sequence, attention included.",
        "Only for sequences whose activations fit no GPU.",
        takes="ranks (at least 1)", example=("1", "2"), never_null=True)
    ep: int = row(1, whole(1),
        "Expert parallelism: ranks that share the experts of a layer and send tokens to each other.",
        "FSDP alone gathers all experts of a layer.",
        takes="ranks (at least 1)", example=("1", "2"), never_null=True)
    attention: str = row("auto", one_of("auto", "flash2", "flash3", "cudnn", "efficient", "flex", "math"),
        "Kernel of attention: flash attention 2 or 3, cuDNN, memory-efficient, FlexAttention, math.",
        "`auto`: what torch takes by itself on that chip. `math` keeps all scores in memory.",
        in_script=True, never_null=True,
        trades=(
            wins("auto", "keeps no scores in memory", of=("math",), fsdp2="no sdpa_kernel(SDPBackend.MATH)"),
            speeds("auto", "the kernel that torch takes on this chip", of=("efficient", "flex")),
        ))
    norm: str = row("model", one_of("model", "fused", "composed"),
        "RMSNorm variant: fused (one kernel) or composed (single operators in fp32).",
        "`model`: as its shape or its software says.",
        in_script=True)
    rotary: str = row("model", one_of("model", "halves", "complex", "matrices"),
        "Rotary embedding variant: halves (as transformers), complex (as TorchTitan) or matrices.",
        "`model`: as its shape or its software says.",
        in_script=True)
    loss: str = row("model", one_of("model", "fp32", "lean", "chunked", "fused"),
        "Loss of a token model: fp32, lean (logits in their dtype), or chunked or fused (never all logits).",
        "`model`: as its shape says. `chunked` recomputes logits in backward, `fused` needs no second time.",
        in_script=True,
        trades=(Trade("fused", "never holds all logits", of=("model", "fp32", "lean"), memory=LESS),))
    implementation: str = row("own", one_of("own", "transformers"),
        "Which library's model code to use with --hf-config.",
        "`own`: needs no library.",
        in_script=True)
    compile: bool = row(False, flag,
        "Use torch.compile on each block.",
        "Most training runs eager.",
        in_script=True, sweep={"default": (False, True), "default/cpu": ()},
        trades=(
            Trade(True, "fewer, larger kernels", time=LESS, risk="the first step takes longer",
                fsdp2="before each block is wrapped: block.compile()", variation="compile",
                against=("cpu_bound",)),
        ))
    compile_loss: bool = row(False, flag,
        "With compile, compile the loss of a model of tokens too.",
        "Scripts that compile blocks leave the loss as it is; TorchTitan compiles both.",
        in_script=True)
    graph: str = row("none", one_of("none", "step"),
        "Run the step as one CUDA graph (simulated GPUs only).",
        "`none`: launch every kernel; a step with a rate limiter or `.item()` cannot be captured.")
    seed: int = row(0, whole(0, LARGEST_INTEGER),
        "Seed of the weights and the data.",
        "Any fixed number gives repeatable runs.",
        takes="a number (at least 0)", example=("0", "1"))
    # fmt: on

    @classmethod
    def of(cls, **values: Any) -> Settings:
        """Return defaults, overridden by `values` (texts or typed values). Raises `UsageError`."""
        read: dict[str, Any] = {name: setting_named(name).read(value) for name, value in values.items()}
        return cls(**read)

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Settings:
        """Read settings as `to_dict` wrote them; `None` stays `None` (a setting that the system lacks).

        What a record is too old to have ran with its default. Raises `UsageError`.
        """
        missing = _FIRST - record.keys()
        if missing:
            raise UsageError(f"a recorded configuration lacks the settings {', '.join(sorted(missing))}")
        return cls(**{name: record[name] for name in SETTINGS if name in record})

    def to_dict(self) -> dict[str, Value]:
        """Return all values by name."""
        return {name: getattr(self, name) for name in SETTINGS}  # `asdict` copies what needs no copy

    @property
    def recomputed(self) -> str:
        """Return what backward recomputes, as workloads take it: `full`, `full:8` (blocks), `none+head`."""
        first = "" if self.checkpoint_first is None else f":{self.checkpoint_first}"
        return f"{self.activation_checkpointing}{first}{'+head' if self.loss == 'chunked' else ''}"

    def changed(self, **values: Value) -> Settings:
        """Return a copy with these values."""
        return dataclasses.replace(self, **values)  # type: ignore[arg-type]


SETTINGS: dict[str, Setting] = {
    field.name: dataclasses.replace(field.metadata["row"], name=field.name)
    for field in dataclasses.fields(Settings)
}
_FIRST = frozenset(
    {
        *("seq", "batch", "grad_accum", "grad_sync", "strategy", "shard_size", "wrap"),
        *("reshard_after_forward", "backward_prefetch", "backward_prefetch_depth", "forward_prefetch"),
        *("limit_all_gathers", "memory_handover", "param_dtype", "reduce_dtype", "buffer_dtype"),
        *("activation_checkpointing", "cpu_offload", "optimizer", "zero_grad", "compile", "seed"),
    }
)
"""The settings of the first release: every record has them."""


def setting_named(name: str) -> Setting:
    """Return the setting of that name (dashes count as underscores). Raises `UsageError` with near names."""
    setting = SETTINGS.get(name.replace("-", "_"))
    if setting is None:
        raise unknown("setting", name, SETTINGS, "fsdpbench list settings")
    return setting


def all_trades() -> Iterator[tuple[Setting, Trade]]:
    """Yield every trade with its setting, in the table's order."""
    for setting in SETTINGS.values():
        for trade in setting.trades:
            yield setting, trade


def varied(variation: str) -> Trade:
    """Return the trade that a variation of a script makes. Raises `KeyError`."""
    return {trade.variation: trade for _, trade in all_trades()}[variation]


def read_list(name: str, given: object) -> list[Value]:
    """Read one setting's values from a comma-separated text or a TOML value or list, without repeats."""
    setting = setting_named(name)
    items = given if isinstance(given, list) else str(given).split(",") if isinstance(given, str) else [given]
    values = (setting.read(item) for item in items)
    return list({(type(value), value): value for value in values}.values())


def show_value(value: Value | float) -> str:
    """Return a setting's value as people type it."""
    return plain_text(value) if value is not None else "-"
