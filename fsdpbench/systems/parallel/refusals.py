"""Refusals of parallelism, by setting, each with a remedy."""

from fsdpbench.base.configuration.config import PARALLEL, Config, Degrees, shard_size_of
from fsdpbench.base.errors import error_text
from fsdpbench.systems.model_code import slides
from fsdpbench.systems.narrow import workload_of
from fsdpbench.workloads import WorkloadError
from fsdpbench.workloads.library import LIBRARY
from fsdpbench.workloads.tensor_plan import HasTensorPlan


def refuse_parallel(config: Config) -> dict[str, str]:
    """Refuse `tp`, `cp` or `ep` that model, ranks or other settings do not allow: setting -> reason."""
    degrees = Degrees.of(config)
    asked = [name for name in PARALLEL if getattr(degrees, name) > 1]
    if not asked:
        return {}
    for name in asked:
        if config.settings.compile:
            return {name: "compiled blocks are not parallelised beside FSDP: leave compile out"}
        if config.settings.cpu_offload:
            return {name: "offloaded shards are not parallelised beside FSDP: leave cpu_offload out"}
        if config.settings.optimizer == "muon" or config.settings.optimizer_dtype is not None:
            return {name: "only torch's own AdamW and SGD step what is cut twice: leave muon and bf16 out"}
        if config.soak is not None and (config.soak.lengths is not None or degrees.cp > 1):
            return {name: error_text("refusals.lengths")}
        if config.settings.lora and name == "ep":
            return {"ep": "adapters are beside tp and cp alone: leave lora or ep out"}
        if config.settings.lora and name == "tp" and config.settings.lora_base == "4bit":
            return {"tp": "layers packed into 4 bits cannot be cut: set lora_base=param, or leave tp out"}
        if workload_of(config).family == LIBRARY:
            return {name: f"modules of {LIBRARY} have no plan here: leave {name} out"}
    refused = _refuse_tensor(config, degrees) | _refuse_experts(config, degrees)
    return refused | _refuse_context(config, degrees)


def _refuse_context(config: Config, degrees: Degrees) -> dict[str, str]:
    if degrees.cp == 1:
        return {}
    if config.device == "cuda":
        return {"cp": "ring attention was never run on a GPU: simulate it, or take CPU ranks (--device cpu)"}
    if config.gpus % degrees.group:
        beside = f" of {degrees.cp} x {degrees.tp} (cp x tp)" if degrees.tp > 1 else f" of {degrees.cp}"
        return {"cp": f"{config.gpus} ranks cannot be divided into groups{beside}"}
    workload = workload_of(config)
    if not workload.is_causal:
        return {"cp": f"the family {workload.family} is not causal throughout: decoder, gpt and llama are"}
    shape = workload.shape
    if shape.get("attention") == "explicit" or slides(workload):
        return {"cp": error_text("refusals.mask", workload.name)}
    if shape.get("attention_dropout") or (workload.family != "decoder" and shape.get("dropout")):
        return {"cp": "torch's ring attention drops nothing: set the shape's dropout of attention to 0"}
    if config.settings.param_dtype == "fp32" and config.device == "sim":
        return {"cp": "torch's ring attention is that of flash kernels: param_dtype=bf16 or fp16"}
    seq = workload.resolve_seq(config.settings.seq) or 0
    if seq % (2 * degrees.cp):
        return {"cp": f"a sequence of {seq} tokens does not divide into 2 x {degrees.cp} parts: change seq"}
    return {}


def _refuse_experts(config: Config, degrees: Degrees) -> dict[str, str]:
    if degrees.ep == 1:
        return {}
    workload = workload_of(config)
    experts = int(workload.shape.get("experts", 0))
    if not experts or "M" not in str(workload.shape.get("moe_pattern")):
        return {"ep": f"{workload.name} has no experts: leave it at 1, or take mixtral-8x7b"}
    if experts % degrees.ep:
        return {"ep": f"{experts} experts cannot be shared evenly by {degrees.ep} ranks"}
    sharing = shard_size_of(config) * degrees.tp
    if sharing % degrees.ep:
        return {"ep": error_text("refusals.experts", degrees.ep, sharing)}
    raf = config.settings.reshard_after_forward
    if isinstance(raf, int) and not isinstance(raf, bool):
        return {"ep": "experts have a mesh of their own: reshard_after_forward takes true or false here"}
    return {}


def _refuse_tensor(config: Config, degrees: Degrees) -> dict[str, str]:
    if degrees.tp == 1:
        return {}
    if config.gpus % degrees.tp:
        return {"tp": f"{config.gpus} ranks cannot be divided into groups of {degrees.tp}"}
    workload = workload_of(config)
    if not isinstance(workload, HasTensorPlan):
        return {"tp": f"the family {workload.family} has no plan; decoder, gpt, llama and t5 have one"}
    try:
        workload.tensor_plan().check(degrees.tp, workload.name)
    except WorkloadError as error:
        return {"tp": str(error)}
    seq = workload.resolve_seq(config.settings.seq) or 0
    if seq % degrees.group:
        return {"tp": f"a sequence of {seq} tokens cannot be shared by {degrees.group} ranks: change seq"}
    return {}
