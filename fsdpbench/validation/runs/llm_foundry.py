"""What llm-foundry's published runs were made with (its benchmark table of MPT-shaped GPTs under FSDP1).

All: no bias, learned positions, tied embedding, one unit a block, two all-gathers in flight, gradients
reduced in every microbatch, Composer's AdamW (`DecoupledAdamW`, a loop over parameters) and the backward
prefetch that Composer has by default (`set_fsdp_default` in `composer/trainer/dist_strategy.py`, 0.17.0).

* Its mode `DEFAULT`, documented as reduction in fp32, hands FSDP no `reduce_dtype` (`get_mixed_precision` in
  `composer/trainer/mosaic_fsdp.py` since 0.13.5). FSDP then reduces gradients as they are, in the parameters'
  dtype (torch 1.13.1: `_post_backward_hook`; later: `_init_param_reduce_dtypes` in `flat_param.py`). So
  `DEFAULT` and `PURE` reduce alike.
* Versions are of the time of each table: A100 in spring 2023 (llm-foundry 0.1 requires torch 1.13.1), H100 in
  autumn 2023 (0.4, torch 2.1, flash attention 2).
"""

from __future__ import annotations

from collections.abc import Mapping

from fsdpbench.configuration.config import ShapeValue
from fsdpbench.configuration.settings import Value

SOURCE = "llm-foundry"
_SYSTEMS = {"a100-40gb": "llm-foundry-0.1", "a100-80gb": "llm-foundry-0.1"}
_LATER = "llm-foundry-0.4"


def system_of(hardware: str) -> str:
    """The software of the table that has runs on `hardware`."""
    return _SYSTEMS.get(hardware, _LATER)


def shape_of(shape: Mapping[str, ShapeValue]) -> dict[str, ShapeValue]:
    """An MPT's shape from the table's columns."""
    return {**shape, "bias": False, "fp32_loss": False}


def settings_of(settings: Mapping[str, Value]) -> dict[str, Value]:
    """What the table's columns and Composer's defaults set."""
    return {
        **settings,
        "reduce_dtype": settings["param_dtype"],
        "backward_prefetch": "post",
        "optimizer": "adamw-loop",
    }
