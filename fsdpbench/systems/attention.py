"""The kernel of `scaled_dot_product_attention`, where a configuration names it.

Real GPUs: `sdpa_kernel`; flash attention 3 is activated in torch, FlexAttention takes the function's place.
Simulated GPUs: the operators of `efficient` and `math`; all others are the flash operator at their own rates.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
import torch.compiler.config as compiler_config
from torch import Tensor
from torch.nn import attention
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, flex_attention, sdpa_kernel

from fsdpbench.base.configuration.config import Config
from fsdpbench.base.torch_internals import replaced
from fsdpbench.sim.model.profile import ProfileError, load_profile
from fsdpbench.workloads import Workload

_OTHERS = {"efficient": SDPBackend.EFFICIENT_ATTENTION, "math": SDPBackend.MATH}
_FA3_PACKAGE = "flash_attn_interface"


def slides(workload: Workload) -> bool:
    """Return whether layers have a sliding window, which is a mask."""
    return bool("S" in str(workload.shape.get("layer_pattern")) and workload.shape.get("window"))


def refuse_attention(config: Config, workload: Workload) -> dict[str, str]:
    """Refuse a kernel that device, model or dtype cannot have, or of which no figure is known."""
    kernel = config.settings.attention
    reason = "" if kernel == "auto" else _why_not(kernel, config, workload)
    return {"attention": reason} if reason else {}


def _why_not(kernel: str, config: Config, workload: Workload) -> str:
    shape = workload.shape
    if workload.is_convolutional or shape.get("attention") == "explicit":
        return f"{workload.name} calls no kernel of attention: leave it at auto"
    if config.settings.cp > 1:
        return "torch's ring attention (cp) chooses its own kernel: leave it at auto"
    if config.device == "cpu" and kernel != "math":
        return f"{kernel} is a kernel of GPUs: CPU ranks have auto and math"
    if kernel not in _OTHERS and config.settings.param_dtype == "fp32":
        return f"{kernel} computes in 16 bits: take efficient or math, or param_dtype=bf16"
    if kernel not in _OTHERS and (workload.family == "t5" or slides(workload)):
        return f"{workload.name} has a mask, which {kernel} is not given: take efficient or math"
    if kernel in ("flash3", "flex") and (shape.get("attention_dropout") or shape.get("dropout")):
        return f"{kernel} drops nothing: set the shape's dropout of attention to 0"
    if kernel == "flash3" and config.device == "cuda" and importlib.util.find_spec(_FA3_PACKAGE) is None:
        return f"flash3 needs the package {_FA3_PACKAGE} (flash attention 3), which is not installed"
    try:
        if config.device == "sim":
            load_profile(str(config.hardware)).with_attention(kernel)
    except ProfileError as error:
        return str(error)
    return ""


@contextmanager
def attention_as_asked(config: Config) -> Iterator[None]:
    """Have `scaled_dot_product_attention` run the kernel that the configuration names, and no other."""
    kernel, real = config.settings.attention, config.device != "sim"
    if kernel == "auto":
        yield
    elif kernel == "flex" and real:
        with replaced(F, scaled_dot_product_attention=_flex):
            yield
    else:
        if kernel == "flash3" and real:
            attention.activate_flash_attention_impl("FA3")
        flash = SDPBackend.CUDNN_ATTENTION if kernel == "cudnn" and real else SDPBackend.FLASH_ATTENTION
        # Caches of compiled graphs on disk do not know of it.
        with compiler_config.patch(cache_key_tag=kernel), sdpa_kernel(_OTHERS.get(kernel, flash)):
            yield


def _flex(query: Tensor, key: Tensor, value: Tensor, *places: Any, **options: Any) -> Any:
    """Return attention of (batch, heads, length, size) tensors by FlexAttention; no mask, no dropout."""
    given = dict(zip(("attn_mask", "dropout_p", "is_causal"), places, strict=False)) | options
    if given.pop("attn_mask", None) is not None or given.pop("dropout_p", 0.0):
        raise ValueError("attention=flex is given no mask and no dropout: take another kernel")
    sizes = query.shape[-2], key.shape[-2], str(query.device)
    mask = _causal(*sizes) if given.pop("is_causal", False) else None
    return _compiled()(query, key, value, block_mask=mask, **given)


@cache
def _compiled() -> Any:
    return torch.compile(flex_attention.flex_attention, dynamic=False)


@cache
def _causal(queries: int, keys: int, device: str) -> Any:
    earlier = lambda batch, head, query, key: query >= key  # noqa: E731
    return flex_attention.create_block_mask(earlier, None, None, queries, keys, device=device)
