"""The workload of a configuration, values that its software refuses, and the setting `linear_dtype` (matrix
products in 8 or 4 bits)."""

import functools

from fsdpbench.base.configuration.config import PARALLEL, Config
from fsdpbench.base.errors import error_text
from fsdpbench.base.settings import SETTINGS, Settings
from fsdpbench.sim.model.profile import load_profile
from fsdpbench.sim.model.software import CURRENT, OF_GPTS, OUTSIDE_OF_GRAPHS, SoftwareProfile, load_software
from fsdpbench.systems.model_code import code_of_model
from fsdpbench.workloads import Workload, WorkloadError, get_workload
from fsdpbench.workloads.families import gpt_workload, llama_workload
from fsdpbench.workloads.library import CONTENT, LIBRARY, LibraryWorkload, packed
from fsdpbench.workloads.lora import Lora, LoraWorkload
from fsdpbench.workloads.tensor_plan import ROUTERS, HasProducts

_NAME = "linear_dtype"
_WIDE = SETTINGS[_NAME].default
_TABLES = {"fp8": ("fp8",), "mxfp8": ("fp8", "nvfp4"), "nvfp4": ("nvfp4",)}
"""Tables of product rates that a chip's profile must have; only chips with nvfp4 support mxfp8."""
_MULTIPLES = {"fp8": 16, "mxfp8": 32, "nvfp4": 16}
"""Both dimensions of a layer and the tokens of a microbatch must be multiples of these, as torch requires."""


def refuse_narrow(config: Config) -> dict[str, str]:
    """Refuse products in 8 or 4 bits that `config` does not allow: setting -> reason."""
    kind = config.settings.linear_dtype
    if kind == _WIDE:
        return {}
    why = _of_other_settings(config.settings) or _of_device(config, kind)
    if why is None:
        try:
            _check_narrow(workload_of(config), kind, config.settings.batch, config.settings.seq)
        except WorkloadError as error:
            why = str(error)
    return {} if why is None else {_NAME: why}


def refuse_narrow_gathers(config: Config) -> dict[str, str]:
    """Refuse settings that exclude all-gathers of fp8 weights under FSDP2: setting -> reason."""
    settings, raf = config.settings, config.settings.reshard_after_forward
    if settings.linear_dtype != "fp8":
        return {}
    why = None
    if isinstance(raf, int) and not isinstance(raf, bool):
        why = "FSDP2 reshards to a smaller group only what it gathers itself: reshard_after_forward=true"
    elif settings.symmetric_memory:
        why = "a gather of fp8 in symmetric memory was not tried: leave symmetric_memory out"
    elif settings.cpu_offload:
        why = "weights gathered in fp8 are scaled where they are kept: leave cpu_offload out"
    elif settings.graph != "none":
        why = "gathers of fp8 take other memory in each step, which no graph captures: leave graph out"
    elif settings.optimizer == "muon" or settings.optimizer_dtype is not None:
        why = "only torch's own AdamW and SGD step weights gathered in fp8: leave muon and bf16 out"
    return {} if why is None else {_NAME: why}


def _of_other_settings(settings: Settings) -> str | None:
    if settings.linear_dtype == "nvfp4" and settings.compile:
        return "Inductor lowers no product with nvfp4's swizzled scales: leave compile out"
    if settings.lora:
        return "frozen layers with adapters stay in param_dtype or lora_base: leave lora out"
    if settings.implementation != "own":
        return "the library's own layers stay as they are: leave implementation out"
    for name in PARALLEL:
        if getattr(settings, name) > 1:
            return f"layers of 8 or 4 bits beside {name} are not built: leave {name} at 1"
    return None


def _of_device(config: Config, kind: str) -> str | None:
    if config.device == "cuda" and kind != "fp8":
        return f"torch alone has no casts to {kind} for GPUs: take fp8, simulate it, or --device cpu"
    if config.device != "sim":
        return None
    if config.software is not None:
        return f"software {config.software} is not known to have them: leave --software out"
    assert config.hardware is not None
    profile = load_profile(config.hardware)
    missing = [table for table in _TABLES[kind] if table not in profile.narrow_peak_flops]
    if not missing:
        return None
    fit = "h100-80gb, h200 or b200" if kind == "fp8" else "b200, b300, gb200, gb300 or rtx-pro-6000"
    return f"{profile.name} has no products in {kind} (no table in its profile): --hardware {fit}"


def software_of(config: Config) -> SoftwareProfile:
    """Return the software profile of `config`, by default that of the installed software."""
    return _load(config.software or CURRENT)


def chosen_software(given: str | None, own: str, device: str) -> str | None:
    """Return the software for a configuration: `given`, or else its system's `own`. The installed software is
    named only if it replaces another."""
    if device != "sim":
        return given
    chosen = given or own
    return None if chosen == own == CURRENT else chosen


def refused_by_software(config: Config) -> dict[str, str]:
    """Refuse values that the software of `config` does not support: setting -> reason."""
    if config.software is None:
        return {}
    software, refused = software_of(config), {}
    of_gpts = software.changed(OF_GPTS)
    if of_gpts and workload_of(config).family != gpt_workload.FAMILY:
        changed = ", ".join(of_gpts)
        refused["model"] = f"software {software.name} ({changed}) is of GPTs, not of {config.model}"
    family = workload_of(config).family
    if (software.of_llamas or software.operators.fused_rotary) and family != llama_workload.FAMILY:
        refused["model"] = f"software {software.name} is of Llamas, not of {config.model}"
    by_operator = "op" in str(config.settings.activation_checkpointing)
    if by_operator and not software.checkpointing.by_operator:
        refused["activation_checkpointing"] = error_text("narrow.by_operator", software.name)
    if config.settings.compile and not software.changes_only(OUTSIDE_OF_GRAPHS):
        refused["compile"] = f"the compiler is the installed one, not that of software {software.name}"
    return refused


_load = functools.cache(load_software)


def adapted(workload: Workload, settings: Settings) -> Workload:
    """Return `workload`, or its version from the library's modules, or with `lora` its fine-tuning, whose
    frozen parameters are in `param_dtype` or 4 bits.

    Raises `WorkloadError` if the family or its layers have no adapters.
    """
    if settings.implementation == LIBRARY or workload.family == LIBRARY:
        if settings.lora:
            raise WorkloadError(error_text("narrow.lora", LIBRARY))
        if workload.family == LIBRARY:
            return workload
        if workload.library_config is None:
            raise WorkloadError(error_text("narrow.no_file", LIBRARY, workload.name))
        return LibraryWorkload.from_values(workload.name, {CONTENT: packed(workload.library_config)})
    if not settings.lora:
        return workload
    four_bit = settings.lora_base == "4bit"
    return LoraWorkload(workload, Lora(settings.lora, settings.lora_targets, settings.param_dtype, four_bit))


def workload_of(config: Config) -> Workload:
    """Return the workload that `config` trains. For its code, settings override the shape, which overrides
    the software."""
    workload = get_workload(config.model, shape=dict(config.shape_given) or None)
    of_software = load_software(config.software).of_llamas if config.software else {}
    if workload.family != llama_workload.FAMILY:
        of_software = {}
    of_settings = code_of_model(workload, config.settings)
    if of_software or of_settings:
        workload = get_workload(config.model, shape={**of_software, **config.shape_given, **of_settings})
    return adapted(workload, config.settings)


def _check_narrow(workload: Workload, kind: str, batch: int, seq: int | None) -> None:
    """Raise `WorkloadError`, which names the layer, if a layer cannot be multiplied in `kind`."""
    if not isinstance(workload, HasProducts):
        raise WorkloadError(error_text("narrow.family", workload.name, workload.family, kind))
    if workload.shape.get("experts") and "M" in str(workload.shape.get("moe_pattern")):
        raise WorkloadError(f"experts' products of groups are not built in {kind}: take a dense model")
    multiple = _MULTIPLES[kind]
    products = [product for layer in range(workload.block_count) for product in workload.products(layer)]
    for product in products:
        sizes = product.inputs, product.outputs
        if product.name not in ROUTERS and any(size % multiple for size in sizes):
            layer = product.name, workload.name, *sizes
            raise WorkloadError(error_text("narrow.multiples", *layer, kind, multiple))
    tokens = workload.tokens(batch, seq) or 0
    if tokens % multiple:
        raise WorkloadError(error_text("narrow.tokens", tokens, kind, multiple))
