"""Settings of how a model's code is written (`norm`, `rotary`, `loss`), and of recomputation.

These settings change neither parameters nor, but for rounding, results; `rotary` alone pairs other elements
of a head, which is the same model with its weights in another order.
"""

from __future__ import annotations

from torch import nn

from fsdpbench.base.errors import BenchError
from fsdpbench.base.settings import Settings, Value
from fsdpbench.base.settings.values import is_mixed, spread
from fsdpbench.workloads import Workload
from fsdpbench.workloads.library_model import LIBRARY
from fsdpbench.workloads.losses import LINEAR_LOSSES, ComputesTokenLoss, use_linear_loss

_FIELDS = {"norm": "norms", "rotary": "rotary"}
"""Settings whose values are those of a field of the shape."""
_IN_FP32 = {"fp32": True, "lean": False}


def has_token_loss(workload: Workload) -> bool:
    """Return whether the model predicts words of a vocabulary."""
    return "vocab" in workload.shape or workload.family == LIBRARY


def code_of_model(workload: Workload, settings: Settings) -> dict[str, Value]:
    """Return the fields of the shape that the settings replace, among those that the shape has."""
    values: dict[str, Value] = {
        field: getattr(settings, name)
        for name, field in _FIELDS.items()
        if getattr(settings, name) != "model"
    }
    if settings.loss in _IN_FP32:
        values["fp32_loss"] = _IN_FP32[settings.loss]
    return {field: value for field, value in values.items() if field in workload.shape}


def refuse_model_code(workload: Workload, settings: Settings) -> dict[str, str]:
    """Refuse values without code in the model: setting -> reason."""
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
    """Refuse values for each block or unit that are not as many as there are: setting -> reason."""
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
    """Refuse settings that exclude an lm head inside of the loss: setting -> reason."""
    refused = {}
    if settings.tp > 1:
        refused["loss"] = (
            f"{settings.loss} multiplies with the whole lm head, of which tp gives each rank a part"
        )
    if settings.loss == "fused" and workload.shape.get("logit_cap"):
        refused["loss"] = "fused knows the gradient of plain logits, and this model caps them: use chunked"
    if settings.compile_loss:
        refused["compile_loss"] = f"loss={settings.loss} has the lm head inside: leave compile_loss out"
    return refused


def write_loss_as_asked(model: nn.Module, settings: Settings) -> None:
    """Have `model` compute lm head and loss together where the settings say so. Raises `BenchError`."""
    if settings.loss not in LINEAR_LOSSES:
        return
    inner = next((module for module in model.modules() if isinstance(module, ComputesTokenLoss)), None)
    if inner is None:
        raise BenchError(f"loss={settings.loss}: this model's loss is not `token_loss`; leave loss out")
    use_linear_loss(inner, settings.loss)
