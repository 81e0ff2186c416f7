"""Parallel training on real ranks does what the unsharded model does with all batches at once."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdpbench.base.configuration.config import Config, Degrees, Measurement
from fsdpbench.base.settings import Settings
from fsdpbench.engine.measuring.soak import TrainingLoop
from fsdpbench.sweep.planning import make_config, make_target, not_applicable, without_absent
from fsdpbench.systems import BuildContext, get_system
from fsdpbench.systems.narrow import workload_of
from fsdpbench.systems.parallel.tensor import _side_by_side
from fsdpbench.workloads import Workload
from fsdpbench.workloads.decoder.experts import Mixture
from fsdpbench.workloads.lora_layers import AdaptedProjection
from fsdpbench.workloads.tensor_plan import HasTensorPlan

RANKS, STEPS, SEQ = 4, 2, 16
SMALL = {"layers": 2, "d_model": 16, "heads": 4, "vocab": 32, "max_seq": SEQ}
DECODER = {**SMALL, "d_ff": 24, "kv_heads": 2}
MIXTURE = {**DECODER, "experts": 4, "expert_d_ff": 8, "experts_per_token": 2, "moe_pattern": "M"}
GEMMA = {"qk_norm": True, "post_norms": True, "norm": "rms-offset", "tied": True, "logit_cap": 30.0}
PHI = {"fused_projections": True, "parallel": True, "norm": "layer", "qkv_bias": True, "mlp_bias": True}
QWEN = {"qk_norm": True, "rope": "yarn:factor=4;original=8", "head_width": 8, "tied": True}
SHARED = {"shared_d_ff": 12, "shared_gate": True, "renormalised": False}
OSS = {"sinks": True, "attention": "explicit", "window": 6, "layer_pattern": "SF", "qkv_bias": True}
OSS |= {"expert_bias": True, "router_bias": True, "router_load": "skewed", "head_bias": True}
T5 = {
    **{name: SMALL[name] for name in ("layers", "d_model", "heads", "vocab", "max_seq")},
    "d_kv": 8,
    "d_ff": 24,
}

CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "gpt-tied-tp2": ("gpt", {**SMALL, "tied": True}, {"tp": 2}),
    "llama-tp2": ("llama", DECODER, {"tp": 2, "grad_accum": 2, "activation_checkpointing": "full"}),
    "llama-of-meta-tp2": ("llama", {**DECODER, "rotary": "complex", "norms": "composed"}, {"tp": 2}),
    "gemma-tp2": ("decoder", {**DECODER, **GEMMA}, {"tp": 2, "wrap": "every-2"}),
    "phi-tp2-replicas": ("decoder", {**DECODER, **PHI}, {"tp": 2, "strategy": "NO_SHARD"}),
    "llama-tp4": ("llama", {**DECODER, "kv_heads": 4}, {"tp": 4}),
    "mixture-ep2": ("decoder", MIXTURE, {"ep": 2, "activation_checkpointing": "full"}),
    "mixture-ep4-skewed": ("decoder", {**MIXTURE, "router_load": "skewed", "expert_bias": True}, {"ep": 4}),
    "shared-ep2-capacity": ("decoder", {**MIXTURE, **SHARED, "capacity": 0.7}, {"ep": 2}),
    "shared-tp2": ("decoder", {**MIXTURE, **SHARED, "router_load": "skewed"}, {"tp": 2}),
    "oss-tp2-ep2": ("decoder", {**MIXTURE, **OSS}, {"tp": 2, "ep": 2, "activation_checkpointing": "full"}),
    "some-dense-tp2-ep4": ("decoder", {**MIXTURE, "moe_pattern": "DM", "capacity": 1.5}, {"tp": 2, "ep": 4}),
    "mixture-tp2-ep2-replicas": ("decoder", MIXTURE, {"tp": 2, "ep": 2, "strategy": "NO_SHARD"}),
    "llama-tp2-lora": ("llama", DECODER, {"tp": 2, "lora": 4, "activation_checkpointing": "full"}),
    "gpt-tp2-lora": ("gpt", SMALL, {"tp": 2, "lora": 4, "lora_targets": "attention"}),
    "phi-tp4-lora": ("decoder", {**DECODER, **PHI, "kv_heads": 4, "output_bias": True}, {"tp": 4, "lora": 2}),
    "shared-tp2-lora": ("decoder", {**MIXTURE, **SHARED}, {"tp": 2, "lora": 4}),
    "llama-cp2": ("llama", {**DECODER, "rotary": "complex"}, {"cp": 2, "activation_checkpointing": "full"}),
    "decoder-cp4": ("decoder", {**DECODER, **QWEN}, {"cp": 4, "grad_accum": 2}),
    "gpt-cp2-replicas": ("gpt", SMALL, {"cp": 2, "strategy": "NO_SHARD"}),
    "mixture-cp2": ("decoder", {**MIXTURE, **SHARED, "router_load": "skewed"}, {"cp": 2}),
    "llama-tp2-cp2": ("llama", {**DECODER, "rotary": "complex"}, {"tp": 2, "cp": 2, "grad_accum": 2}),
    "gpt-tied-tp2-cp2": (
        "gpt",
        {**SMALL, "tied": True},
        {"tp": 2, "cp": 2, "activation_checkpointing": "full"},
    ),
    "mixture-cp2-ep2": ("decoder", {**MIXTURE, **SHARED, "router_load": "skewed"}, {"cp": 2, "ep": 2}),
    "mixture-cp4-ep4": ("decoder", {**MIXTURE, "capacity": 1.5}, {"cp": 4, "ep": 4}),
    "mixture-tp2-cp2-ep2": ("decoder", {**MIXTURE, **QWEN}, {"tp": 2, "cp": 2, "ep": 2}),
    "some-dense-tp2-cp2-ep4": ("decoder", {**MIXTURE, "moe_pattern": "DM"}, {"tp": 2, "cp": 2, "ep": 4}),
    "llama-cp4-lora": ("llama", DECODER, {"cp": 4, "lora": 4, "activation_checkpointing": "full"}),
    "llama-tp2-cp2-lora": ("llama", DECODER, {"tp": 2, "cp": 2, "lora": 4}),
    "t5-tp2": ("t5", T5, {"tp": 2, "activation_checkpointing": "full"}),
    "t5-v1.1-tp4": ("t5", {**T5, "gated": True, "tied": False}, {"tp": 4, "grad_accum": 2}),
    "umt5-tp2-replicas": ("t5", {**T5, "bias_each_layer": True}, {"tp": 2, "strategy": "NO_SHARD"}),
    "t5-explicit-tp2": ("t5", {**T5, "attention": "explicit"}, {"tp": 2, "wrap": "every-2"}),
    "mixture-ep2-replicas": ("decoder", MIXTURE, {"ep": 2, "strategy": "HYBRID_SHARD", "shard_size": 2}),
}


def configured(system: str, family: str, shape: dict[str, Any], settings: dict[str, Any]) -> Config:
    target = make_target(
        model=family,
        shape=shape,
        device="cpu",
        hardware=None,
        gpus=RANKS,
        gpus_per_node=None,
        data=None,
        measurement=Measurement(1, 1, 0, timeout_s=60.0),
    )
    plain = {"batch": 2, "param_dtype": "fp32", "reduce_dtype": "fp32", "optimizer": "sgd"}
    config = make_config(target, system, Settings.of(**{**plain, **settings}), target.workload())
    assert not not_applicable(without_absent(config))
    return without_absent(config)


def data(config: Config, workload: Workload, group: int) -> Any:
    device = torch.device("cpu")
    return workload.batches(config.settings.batch, SEQ, 0, group, device, world_size=RANKS)


def alone(config: Config, workload: Workload, model: nn.Module) -> list[float]:
    """Train `model` on the batches of all groups, their mean the loss of a step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    groups = [data(config, workload, group) for group in range(Degrees.of(config).data)]
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        batches = [next(group) for group in groups for _ in range(config.settings.grad_accum)]
        for batch in batches:
            loss = model(*batch) / len(batches)
            loss.backward()
            losses.append(loss.item() * len(batches))
        optimizer.step()
    return losses


def ordered(model: nn.Module, workload: Workload, tp: int) -> None:
    """The outputs of fused layers in the order that tensor parallelism gives them."""
    if tp > 1 and isinstance(workload, HasTensorPlan):
        blocks = [module for module in model.modules() if isinstance(module, workload.block_classes)]
        for index, block in enumerate(blocks):
            for name, widths in workload.tensor_plan().of(index).columns.items():
                _side_by_side(block.get_submodule(name), widths, tp)


def by_share(model: nn.Module, tp: int, cp: int) -> None:
    """Which token meets which experts is given by its place among those of a rank: mixtures take the shares
    of the sequence one by one, those of tp within those of cp."""
    for mixture in [module for module in model.modules() if isinstance(module, Mixture)]:
        forward = mixture.forward
        mixture.forward = lambda x, of=forward: in_shares(of, x, tp, cp)  # type: ignore[method-assign]


def in_shares(forward: Any, x: torch.Tensor, tp: int, cp: int) -> torch.Tensor:
    def of_tp(share: torch.Tensor) -> torch.Tensor:
        return torch.cat([forward(part) for part in share.chunk(tp, 1)], 1)

    if cp == 1:
        return of_tp(x)
    parts = x.chunk(2 * cp, 1)  # a rank has one of the head and one of the tail
    pairs = [of_tp(torch.cat((parts[rank], parts[-1 - rank]), 1)).chunk(2, 1) for rank in range(cp)]
    return torch.cat([head for head, _ in pairs] + [tail for _, tail in reversed(pairs)], 1)


def whole(parameters: Iterable[nn.Parameter]) -> list[torch.Tensor]:
    return [
        getattr(parameter, "full_tensor", lambda p=parameter: p)().detach().clone()  # type: ignore[misc]
        for parameter in parameters
    ]


def mean_of_group(losses: list[float], rank: int, ranks: int) -> list[float]:
    gathered = [torch.zeros(len(losses)) for _ in range(RANKS)]
    dist.all_gather(gathered, torch.tensor(losses))
    first = rank // ranks * ranks
    return torch.stack(gathered[first : first + ranks]).mean(0).tolist()


def drawn(layer: AdaptedProjection) -> None:
    """Adapters that change something from the start, so that both of their matrices learn."""
    for parameter in (layer.lora_a, layer.lora_b):
        nn.init.normal_(parameter, std=0.2)


def train(rank: int, record: dict[str, Any]) -> tuple[float, float]:
    """The largest error of a parameter's change, relative to that change, and of this rank's losses."""
    config = Config.from_dict(record)
    AdaptedProjection._reset_adapter = drawn  # type: ignore[method-assign]
    workload, system = workload_of(config), get_system(config.system)
    context = BuildContext(config, workload, torch.device("cpu"), deferred=False)
    model = system.wrap(context)
    losses: list[float] = []
    loop = TrainingLoop(
        config, system, model, system.make_optimizer(model, config),
        data(config, workload, Degrees.of(config).data_rank(rank)), torch.device("cpu"),
        lambda loss: losses.append(loss.item() * config.settings.grad_accum),
    )  # fmt: skip
    for _ in range(STEPS):
        loop.step()
    if config.settings.cp > 1:  # each of a group has the loss of its own tokens
        losses = mean_of_group(losses, rank, Degrees.of(config).group)
    reference = context.build_model()
    before = copy.deepcopy(reference)
    by_share(reference, config.settings.tp, config.settings.cp)
    expected = alone(config, workload, reference)
    for each in (reference, before):
        ordered(each, workload, config.settings.tp)
    each, per_step = config.settings.grad_accum, len(expected) // STEPS
    first = Degrees.of(config).data_rank(rank) * each
    of_mine = [expected[step * per_step + first + i] for step in range(STEPS) for i in range(each)]
    errors = [
        (float((new - old).norm()), float((new - got).norm()))
        for new, old, got in zip(
            whole(reference.parameters()), whole(before.parameters()), whole(model.parameters()), strict=True
        )
    ]
    return (
        max(error / (change + 1e-7) for change, error in errors),
        max(abs(a - b) for a, b in zip(losses, of_mine, strict=True)),
    )


def runs() -> Iterator[Any]:
    """Each case under both; torch divides twice what one rank holds beside replicas, and is refused there."""
    one_mesh = pytest.mark.skipif(torch.__version__ < "2.12", reason="its units have one mesh: ep is refused")
    for case, (_, _, settings) in CASES.items():
        yield pytest.param("impl-fsdp2", case, id=f"{case}-impl-fsdp2")
        if not case.endswith("ep2-replicas"):
            marks = [one_mesh] if "ep" in settings else []
            yield pytest.param("torch-fsdp2", case, id=f"{case}-torch-fsdp2", marks=marks)


@pytest.mark.plain_cases(
    "gpt-tied-tp2-impl",
    "mixture-ep2-impl",
    "oss-tp2-ep2-impl",
    "decoder-cp4-impl",
    "t5-tp2-torch",
    "some-dense-tp2-cp2-ep4-impl",
)
@pytest.mark.parametrize(("system", "case"), list(runs()))
def test_training_is_that_of_the_unsharded_model(four_ranks: Any, system: str, case: str) -> None:
    record = configured(system, *CASES[case]).to_dict()
    for change, loss in four_ranks.run_everywhere(train, timeout=180, record=record):
        assert change < 1e-3
        assert loss < 1e-4
