"""Settings written as arguments of the call that wraps a model, by system: the `code` of the rows."""

from typing import Any

from fsdpbench.base.settings.setting import Write
from fsdpbench.base.settings.values import is_mixed

OURS = ("impl-fsdp1", "impl-fsdp2")
FLAT = ("impl-fsdp1", "torch-fsdp1")
TORCH_DTYPES = {"bf16": "torch.bfloat16", "fp16": "torch.float16", "fp32": "torch.float32"}
_TIMES = {"pre": "BackwardPrefetch.BACKWARD_PRE", "post": "BackwardPrefetch.BACKWARD_POST"}


def argument(setting: str, name: str | None = None) -> Write:
    """Return a function that writes `name=VALUE` (default: the setting's name), or nothing if the system
    lacks the setting. The words `none` and `off` become Python's `None` and `False`."""

    def write(settings: Any) -> str | None:
        value = getattr(settings, setting)
        if is_mixed(value):  # set by a separate call for each unit
            return None
        plain = {"none": None, "off": False}.get(value, value) if isinstance(value, str) else value
        return None if value is None else f"{name or setting}={plain!r}"

    return write


def strategy(settings: Any) -> str:
    """Write FSDP1's sharding strategy."""
    return f"sharding_strategy=ShardingStrategy.{settings.strategy}"


def prefetch_time(settings: Any) -> str:
    """Write when FSDP1 prefetches in backward."""
    return f"backward_prefetch={_TIMES.get(settings.backward_prefetch, 'None')}"


def forward_prefetch(settings: Any) -> str:
    """Write whether torch's FSDP1 prefetches in forward."""
    return f"forward_prefetch={bool(settings.forward_prefetch)}"


def limiter(settings: Any) -> str:
    """Write whether torch's FSDP1 limits all-gathers."""
    return f"limit_all_gathers={settings.limit_all_gathers != 'off'}"


def policy(settings: Any) -> str:
    """Write FSDP2's dtypes: of parameters and of the reduction."""
    reduce = settings.reduce_dtype or settings.param_dtype
    param = "None" if settings.param_dtype == "fp32" else TORCH_DTYPES[settings.param_dtype]
    reduced = "None" if reduce == settings.param_dtype else TORCH_DTYPES[reduce]
    return f"mp_policy=MixedPrecisionPolicy(param_dtype={param}, reduce_dtype={reduced})"


def mixed_precision(settings: Any) -> str:
    """Write FSDP1's dtypes: of parameters, of the reduction and of buffers."""
    reduce = settings.reduce_dtype or settings.param_dtype
    kinds = {"param": settings.param_dtype, "reduce": reduce, "buffer": settings.buffer_dtype}
    if list(kinds.values()) == ["fp32", "fp32", None]:
        return "mixed_precision=None"
    dtypes = [f"{kind}_dtype={TORCH_DTYPES[name]}" for kind, name in kinds.items() if name]
    return f"mixed_precision=MixedPrecision({', '.join(dtypes)})"


def offload(policy: str) -> Write:
    """Return a function that writes this policy if shards are offloaded."""
    return lambda settings: policy if settings.cpu_offload else None
