"""DeepSpeed's ZeRO-3 (package `deepspeed`): an engine around the model, configured by a JSON document.

The engine runs backward and the optimizer step:

    TrainingLoop      backward(loss)        backward(loss)        optimizer.step()
    engine            backward, step        backward              step, which updates the weights
                      (counts a microbatch) (the last one)
"""

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from fsdpbench.base.configuration.config import Config
from fsdpbench.base.files.documents import table_beside
from fsdpbench.systems.base import ABSENT, BuildContext, System, refuse_under

if TYPE_CHECKING:
    import torch
    from torch import nn


class DeepSpeedZero3(System):
    """DeepSpeed's engine with ZeRO stage 3."""

    name = "deepspeed-zero3"
    summary = "DeepSpeed's ZeRO-3 (extra `deepspeed`)"
    devices = frozenset({"cuda", "cpu"})
    package = "deepspeed"
    installation = "pip install 'fsdpbench[deepspeed]'"
    absent = ABSENT["deepspeed-zero3"]

    def refuses(self, config: Config) -> dict[str, str]:
        refused = refuse_under("ZeRO-3", config)
        if config.settings.strategy != "FULL_SHARD":
            refused["strategy"] = "ZeRO-3 shards parameters, gradients and optimizer over all ranks"
        return refused

    def wrap(self, context: BuildContext) -> "nn.Module":
        self.require()
        import deepspeed

        options = zero3_config(context.config)
        # Parameters are partitioned during construction, which is impossible on the meta device.
        with deepspeed.zero.Init(config_dict_or_path=options):
            model = replace(context, deferred=False).build_model()
        optimizer = super().make_optimizer(model, context.config)
        engine: nn.Module
        engine, _, _, _ = deepspeed.initialize(model=model, optimizer=optimizer, config=options)
        return engine

    def make_optimizer(self, model: Any, config: Config) -> Any:
        return _EngineStep(model)

    def backward(self, model: Any, loss: "torch.Tensor", *, is_last: bool) -> None:
        model.backward(loss, scale_wrt_gas=False)  # the loop has already scaled the loss
        if not is_last:
            model.step()  # counts the microbatch


class _EngineStep:
    """The optimizer that the training loop sees: `step` is the engine's, which also clears gradients."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def step(self) -> None:
        self._engine.step()

    def zero_grad(self, set_to_none: bool = True) -> None: ...


def zero3_config(config: Config) -> dict[str, object]:
    """Return DeepSpeed's configuration for `config` (deepspeed.ai, "DeepSpeed Configuration JSON").

    Options that no setting determines keep DeepSpeed's defaults.
    """
    settings = config.settings
    options = table_beside(__file__, "zero3.toml")
    zero = options["zero_optimization"]
    options |= {
        "train_micro_batch_size_per_gpu": settings.batch,
        "gradient_accumulation_steps": settings.grad_accum,
        "bf16": {"enabled": settings.param_dtype == "bf16"},
        # A fixed loss scale: no other system here skips steps whose gradients overflow.
        "fp16": {"enabled": settings.param_dtype == "fp16", "loss_scale": 1.0},
    }
    if settings.reduce_dtype is not None:
        options["communication_data_type"] = settings.reduce_dtype
    if settings.cpu_offload:
        zero["offload_param"] = {"device": "cpu", "pin_memory": True}
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
        options["zero_force_ds_cpu_optimizer"] = False  # use the chosen optimizer, not DeepSpeed's own
    return options
