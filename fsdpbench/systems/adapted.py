"""The workload of a configuration: the model that it names, with the adapters that its settings ask for."""

from __future__ import annotations

from fsdpbench.configuration.config import Config
from fsdpbench.configuration.settings import Settings
from fsdpbench.sim.software import load_software
from fsdpbench.systems.dtypes import TORCH_DTYPES
from fsdpbench.systems.model_code import code_of_model
from fsdpbench.workloads import Workload, WorkloadError, get_workload
from fsdpbench.workloads.adapters.lora import Lora, LoraWorkload
from fsdpbench.workloads.families import llama
from fsdpbench.workloads.library_model import LIBRARY, LibraryWorkload


def adapted(workload: Workload, settings: Settings) -> Workload:
    """`workload`, or the library's own modules of it, or with `lora` its fine-tuning; what is frozen is in
    `param_dtype` or 4 bits.

    Raises `WorkloadError` for a family or layers that have no adapters.
    """
    if settings.implementation == LIBRARY:
        if settings.lora:
            raise WorkloadError(
                f"lora: adapters are put beside our own layers, not the library's "
                f"(implementation={LIBRARY}); with peft it is a script (docs/models.md)"
            )
        return LibraryWorkload(workload, workload.library_config)
    if not settings.lora:
        return workload
    frozen = TORCH_DTYPES[settings.param_dtype]
    four_bit = settings.lora_base == "4bit"
    return LoraWorkload(workload, Lora(settings.lora, settings.lora_targets, frozen, four_bit))


def workload_of(config: Config) -> Workload:
    """The workload that `config` trains. Its code is as the settings say, else as the shape says, else as its
    software has it."""
    workload = get_workload(config.model, shape=dict(config.shape_given) or None)
    of_software = load_software(config.software).of_llamas if config.software else {}
    if workload.family != llama.FAMILY:
        of_software = {}
    of_settings = code_of_model(workload, config.settings)
    if of_software or of_settings:
        workload = get_workload(config.model, shape={**of_software, **config.shape_given, **of_settings})
    return adapted(workload, config.settings)
