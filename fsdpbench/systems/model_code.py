"""Settings that choose a model's code (`norm`, `rotary`, `loss`, `attention`), and checks of recomputation.

These settings change neither parameters nor, except for rounding, results. Only `rotary` pairs other elements
of a head, which is equivalent to the same model with permuted weights.

On real GPUs, `sdpa_kernel` selects the kernel of `scaled_dot_product_attention`; torch activates flash
attention 3 if its package is installed. On simulated GPUs, `efficient` and `math` run their own operators;
all others run the flash operator with their own rates.
"""

import importlib.util

from fsdpbench.base.configuration.config import Config
from fsdpbench.base.errors import error_text
from fsdpbench.base.settings import Settings, Value
from fsdpbench.base.settings.values import is_mixed, spread
from fsdpbench.sim.model.profile import ProfileError, load_profile
from fsdpbench.workloads import Workload
from fsdpbench.workloads.library import LIBRARY

_FIELDS = {"norm": "norms", "rotary": "rotary"}
"""Settings that set a field of the shape to their value."""
_IN_FP32 = {"fp32": True, "lean": False}
LINEAR_LOSSES = ("chunked", "fused")
"""Values of `loss` whose loss includes the lm head."""
IN_ANY_DTYPE = ("efficient", "math")
"""Attention kernels that also support fp32."""
_FA3_PACKAGE = "flash_attn_interface"


def has_token_loss(workload: Workload) -> bool:
    """Return whether the model predicts tokens of a vocabulary."""
    return "vocab" in workload.shape or workload.family == LIBRARY


def code_of_model(workload: Workload, settings: Settings) -> dict[str, Value]:
    """Return the shape fields that the settings override, if the shape has them."""
    values: dict[str, Value] = {
        field: getattr(settings, name)
        for name, field in _FIELDS.items()
        if getattr(settings, name) != "model"
    }
    if settings.loss in _IN_FP32:
        values["fp32_loss"] = _IN_FP32[settings.loss]
    return {field: value for field, value in values.items() if field in workload.shape}


def refuse_model_code(workload: Workload, settings: Settings) -> dict[str, str]:
    """Refuse values for which the model has no code: setting -> reason."""
    refused = _refuse_other_counts(workload, settings)
    asked = {name for name in ("norm", "rotary", "loss") if getattr(settings, name) != "model"}
    if workload.family == LIBRARY:
        refused |= dict.fromkeys(asked, f"the modules of {LIBRARY} are as they are")
        if settings.wrap.startswith("every-") and settings.wrap != "every-1":
            refused["wrap"] = f"models of {LIBRARY} read their single blocks: use block"
        if workload.shape["towers"] and settings.activation_checkpointing != "none":
            refused["activation_checkpointing"] = "not supported beside towers: use none"
        return refused
    for name, field in _FIELDS.items():
        if name in asked and field not in workload.shape:
            refused[name] = f"the {workload.family} models here have one way to write it"
    if "loss" in asked and not has_token_loss(workload):
        refused["loss"] = f"{workload.name} has no loss of tokens"
    if settings.loss in LINEAR_LOSSES and "loss" not in refused:
        refused |= _refuse_linear_loss(workload, settings)
    if settings.checkpoint_first is not None and settings.activation_checkpointing == "none":
        refused["checkpoint_first"] = "it belongs to activation_checkpointing, which is off (`none`)"
    return refused


def _refuse_other_counts(workload: Workload, settings: Settings) -> dict[str, str]:
    """Refuse values per block or unit whose number differs from the model's: setting -> reason."""
    values, refused = settings.to_dict(), {}
    if (
        settings.wrap.startswith("every-")
        and is_mixed(settings.wrap)
        and workload.units(settings.wrap) is None
    ):
        lists = " and ".join(map(str, workload.stacks()))
        return {"wrap": f"units of these sizes do not make up the {lists} blocks of {workload.name}"}
    for name, given in values.items():
        if name == "wrap" or not is_mixed(given):
            continue
        there = workload.units("block" if name == "activation_checkpointing" else settings.wrap)
        if there is None:
            refused[name] = f"units of wrap={settings.wrap} are not counted: use block or every-K"
        elif (said := len(spread(str(given)))) != there:
            refused[name] = f"it names {said}, and {workload.name} has {there}: make the numbers add up to it"
    if refused or not is_mixed(settings.activation_checkpointing):
        return refused
    if settings.checkpoint_first is not None:
        refused["checkpoint_first"] = "activation_checkpointing says it for each block: leave it out"
    return refused


def _refuse_linear_loss(workload: Workload, settings: Settings) -> dict[str, str]:
    """Refuse settings that do not work with an lm head inside the loss: setting -> reason."""
    refused = {}
    if settings.tp > 1:
        refused["loss"] = error_text("model_code.whole_head", settings.loss)
    if settings.loss == "fused" and workload.shape.get("logit_cap"):
        refused["loss"] = "fused knows the gradient of plain logits, and this model caps them: use chunked"
    if settings.compile_loss:
        refused["compile_loss"] = f"loss={settings.loss} has the lm head inside: leave compile_loss out"
    return refused


def slides(workload: Workload) -> bool:
    """Return whether some layers use a sliding window, which needs a mask."""
    return bool("S" in str(workload.shape.get("layer_pattern")) and workload.shape.get("window"))


def refuse_attention(config: Config, workload: Workload) -> dict[str, str]:
    """Refuse an attention kernel that device, model or dtype do not support, or whose rates are unknown."""
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
    elif kernel not in IN_ANY_DTYPE and config.settings.param_dtype == "fp32":
        why = f"{kernel} computes in 16 bits: take efficient or math, or param_dtype=bf16"
    elif kernel not in IN_ANY_DTYPE and (workload.family == "t5" or slides(workload)):
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
