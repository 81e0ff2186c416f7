"""The workload of a configuration: the model that it names, with the adapters that its settings ask for."""

from __future__ import annotations

from fsdpbench.configuration.config import Config
from fsdpbench.configuration.settings import Settings
from fsdpbench.sim.software import load_software
from fsdpbench.systems.dtypes import TORCH_DTYPES
from fsdpbench.workloads import Workload, get_workload, llama
from fsdpbench.workloads.lora import Lora, LoraWorkload


def adapted(workload: Workload, settings: Settings) -> Workload:
    """`workload`, or with `lora` its fine-tuning; the frozen part is in `param_dtype`.

    Raises `WorkloadError` for a family or layers that have no adapters.
    """
    if not settings.lora:
        return workload
    frozen = TORCH_DTYPES[settings.param_dtype]
    four_bit = settings.lora_base == "4bit"
    return LoraWorkload(workload, Lora(settings.lora, settings.lora_targets, frozen, four_bit))


def workload_of(config: Config) -> Workload:
    """The workload that `config` trains; what its shape does not give is as its software has it."""
    workload = get_workload(config.model, shape=dict(config.shape_given) or None)
    of_software = load_software(config.software).of_llamas if config.software else {}
    if of_software and workload.family == llama.FAMILY:
        workload = get_workload(config.model, shape={**of_software, **config.shape_given})
    return adapted(workload, config.settings)
