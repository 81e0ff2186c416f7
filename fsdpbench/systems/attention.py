"""The kernel of `scaled_dot_product_attention`, where a configuration names it.

Real GPUs: `sdpa_kernel`; flash attention 3 is activated in torch where its package is installed.
Simulated GPUs: the operators of `efficient` and `math`; all others are the flash operator at their own rates.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager

from torch.nn import attention
from torch.nn.attention import SDPBackend, sdpa_kernel

from fsdpbench.base.configuration.config import Config
from fsdpbench.base.torch_internals import compiler_config
from fsdpbench.sim.model.profile import ProfileError, load_profile
from fsdpbench.workloads import Workload

_OTHERS = {"efficient": SDPBackend.EFFICIENT_ATTENTION, "math": SDPBackend.MATH}
_FA3_PACKAGE = "flash_attn_interface"


def slides(workload: Workload) -> bool:
    """Return whether layers have a sliding window, which is a mask."""
    return bool("S" in str(workload.shape.get("layer_pattern")) and workload.shape.get("window"))


def refuse_attention(config: Config, workload: Workload) -> dict[str, str]:
    """Refuse a kernel that device, model or dtype cannot have, or of which no figure is known."""
    kernel, shape, device, why = config.settings.attention, workload.shape, config.device, ""
    if kernel == "auto":
        return {}
    if workload.is_convolutional or shape.get("attention") == "explicit":
        why = f"{workload.name} calls no kernel of attention: leave it at auto"
    elif config.settings.cp > 1:
        why = "torch's ring attention (cp) chooses its own kernel: leave it at auto"
    elif device == "cpu" and kernel != "math":
        why = f"{kernel} is a kernel of GPUs: CPU ranks have auto and math"
    elif kernel == "flex" and device == "cuda":
        why = "the models here call scaled_dot_product_attention: on real GPUs a script calls flex_attention"
    elif kernel not in _OTHERS and config.settings.param_dtype == "fp32":
        why = f"{kernel} computes in 16 bits: take efficient or math, or param_dtype=bf16"
    elif kernel not in _OTHERS and (workload.family == "t5" or slides(workload)):
        why = f"{workload.name} has a mask, which {kernel} is not given: take efficient or math"
    elif kernel in ("flash3", "flex") and (shape.get("attention_dropout") or shape.get("dropout")):
        why = f"{kernel} drops nothing: set the shape's dropout of attention to 0"
    elif kernel == "flash3" and device == "cuda" and importlib.util.find_spec(_FA3_PACKAGE) is None:
        why = f"flash3 needs the package {_FA3_PACKAGE} (flash attention 3), which is not installed"
    elif device == "sim":
        try:
            load_profile(str(config.hardware)).with_attention(kernel)
        except ProfileError as error:
            why = str(error)
    return {"attention": why} if why else {}


@contextmanager
def attention_as_asked(config: Config) -> Iterator[None]:
    """Have `scaled_dot_product_attention` run the kernel that the configuration names, and no other."""
    kernel, real = config.settings.attention, config.device != "sim"
    if kernel == "auto":
        yield
    else:
        if kernel == "flash3" and real:
            attention.activate_flash_attention_impl("FA3")
        flash = SDPBackend.CUDNN_ATTENTION if kernel == "cudnn" and real else SDPBackend.FLASH_ATTENTION
        # Caches of compiled graphs on disk do not know of it.
        with compiler_config.patch(cache_key_tag=kernel), sdpa_kernel(_OTHERS.get(kernel, flash)):
            yield
