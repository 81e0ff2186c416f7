"""Tensor subclasses that say what is gathered (``fsdp_pre_all_gather``, ``fsdp_post_all_gather``)."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
from fsdp_cases import (
    STEPS,
    Model,
    assert_close,
    assert_same_outcome,
    full_dtensors,
    loss_of,
    read_fully_shard,
    shard_model,
    tokens_of,
    train,
)
from torch import nn
from torch.distributed import fsdp as torch_fsdp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils._pytree import tree_map_only

from fsdpbench import impl
from fsdpbench.impl.runtime.hooks import stage_of


class Held(torch.Tensor):
    """A tensor around another one, of its own class through every operator."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, strides=inner.stride(), dtype=inner.dtype, device=inner.device
        )

    def __init__(self, inner: torch.Tensor) -> None:
        self.inner = inner

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["inner"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, torch.Tensor], *_: Any) -> Any:
        return cls(inner["inner"])

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        plain = tree_map_only(Held, lambda held: held.inner, (args, kwargs))
        result = tree_map_only(torch.Tensor, cls, function(*plain[0], **plain[1]))
        return return_and_correct_aliasing(function, args, kwargs, result)


def quantise(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scale = rows.abs().amax(dim=-1, keepdim=True).clamp(min=1e-12) / 127
    return (rows / scale).round().to(torch.int8), scale


class Quantised(Held):
    """Gathered as 8-bit integers and a scale a row: two dtypes, and torch's newer signature."""

    seen: ClassVar[list[Any]] = []

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: nn.Module, mp_policy: Any
    ) -> Any:
        self.seen.append((mesh.size(), outer_size, outer_stride, type(module), mp_policy.param_dtype))
        return quantise(self.inner), ("note", outer_size)

    def fsdp_post_all_gather(
        self, outputs: Any, metadata: Any, param_dtype: torch.dtype, *, out: torch.Tensor | None = None
    ) -> Any:
        assert metadata[0] == "note"
        values, scales = outputs
        if out is None:
            made = (values.float() * scales).to(param_dtype)
            return made, (made,)
        with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(out):
            out.copy_((values.float() * scales)[: out.shape[0]])
        return None


class HalfPrecision(Held):
    """Gathered in bf16, torch's older signature; computed with as it was gathered."""

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        return (self.inner.to(torch.bfloat16),), None

    def fsdp_post_all_gather(
        self, outputs: Any, metadata: Any, param_dtype: torch.dtype, *, out: torch.Tensor | None = None
    ) -> Any:
        if out is None:
            return outputs[0], ()
        assert out.untyped_storage().data_ptr() == outputs[0].untyped_storage().data_ptr()
        return None


def extended(kind: type[Held], width: int = 16, seed: int = 0) -> Model:
    """The matrices of the blocks as subclasses, the rest plain."""
    torch.manual_seed(seed)
    model = Model(blocks=2, width=width)
    for block in model.blocks:
        for linear in (block.up, block.down):
            linear.weight = nn.Parameter(kind(linear.weight.detach()))  # type: ignore[operator]
    return model


def case_like_torch(rank: int, *, kind: str, steps: int, mesh: tuple[int, ...], **arguments: Any) -> None:
    outcomes = []
    names = ("replicate", "shard")[-len(mesh) :]
    offloads = arguments.pop("offloads", False)
    for side, api in (("impl", impl), ("torch", torch_fsdp)):
        if offloads:
            arguments["offload_policy"] = api.CPUOffloadPolicy(pin_memory=False)
        Quantised.seen.clear()
        device_mesh = init_device_mesh("cpu", mesh, mesh_dim_names=names)
        model = shard_model(side, extended(globals()[kind]), mesh=device_mesh, **arguments)
        outcomes.append((train(model, rank, *read, steps=steps), list(Quantised.seen)))
    assert_same_outcome(outcomes[0][0], outcomes[1][0])
    assert outcomes[0][1] == outcomes[1][1]


def read_gradients(model: nn.Module) -> Any:
    return read_fully_shard[0](model)


def read_parameters(model: nn.Module) -> Any:
    whole = full_dtensors(model, False)
    return {k: v.inner if isinstance(v, Held) else v for k, v in whole.items()}


read = (read_gradients, read_parameters)
BF16 = (torch.bfloat16, torch.float32)


@pytest.mark.parametrize(
    ("kind", "arguments"),
    [
        ("Quantised", {}),
        ("Quantised", {"policy": BF16}),
        ("HalfPrecision", {"policy": BF16}),
        ("HalfPrecision", {"policy": BF16, "reshard_after_forward": False}),
        ("HalfPrecision", {"policy": BF16, "offloads": True}),
    ],
)
@STEPS
def test_training_equals_torch(two_ranks, kind: str, arguments: dict[str, Any], steps: int) -> None:
    two_ranks.run(case_like_torch, kind=kind, steps=steps, mesh=(2,), **arguments)


@pytest.mark.campaign
def test_with_replicas_equal_torch(four_ranks) -> None:
    four_ranks.run(case_like_torch, kind="Quantised", steps=3, mesh=(2, 2), policy=BF16)


def case_alone(rank: int) -> None:
    """One rank computes with what the subclass makes of its values, too; torch can do that for one input."""
    case_like_torch(rank, kind="HalfPrecision", steps=3, mesh=(1,), policy=BF16)
    model: Any = shard_model("impl", extended(Quantised), mesh=init_device_mesh("cpu", (1,)))
    plain: Any = extended(Held).blocks[0].up.weight
    values, scale = quantise(plain.inner)
    with torch.no_grad():
        model(tokens_of(rank, 0))
    model.blocks[0].unshard()
    assert torch.equal(model.blocks[0].up.weight, values * scale)


def test_one_rank_equals_torch(one_rank) -> None:
    one_rank.run(case_alone)


def case_uneven_rows(rank: int) -> None:
    """15 rows on two ranks: an input of the tensor's own shape is padded, others are refused on all ranks."""
    mesh = init_device_mesh("cpu", (2,))
    plain = extended(Held, width=15).blocks[0].down.weight.inner
    model: Any = shard_model("impl", extended(HalfPrecision, width=15), mesh=mesh, policy=BF16)
    loss_of(model, tokens_of(rank, 0)).backward()
    for _ in range(2):
        model.blocks[0].unshard()
        assert torch.equal(model.blocks[0].down.weight, plain.to(torch.bfloat16))
        model.blocks[0].reshard()
    assert model.blocks[0].down.weight.grad.shape == (15, 60)
    model = shard_model("impl", extended(Quantised, width=15), mesh=mesh)
    with pytest.raises(AssertionError, match=r"'down.weight' of shape \(15, 60\) does not divide by 2"):
        model.blocks[0].unshard()


def case_other_dim(rank: int) -> None:
    """Columns of a subclass: each rank's input goes beside the other's."""
    found = []
    for dim in (0, 1):
        mesh = init_device_mesh("cpu", (2,))
        choose = {"shard_placement_fn": (lambda p: Shard(1) if p.ndim == 2 else None)} if dim else {}
        model = shard_model("impl", extended(HalfPrecision), mesh=mesh, policy=BF16, **choose)
        found.append(train(model, rank, *read, steps=2))
    assert_same_outcome(*found)


def case_memory_is_freed(rank: int) -> None:
    model: Any = shard_model("impl", extended(Quantised), mesh=init_device_mesh("cpu", (2,)))
    model.blocks[0].unshard()
    unsharded = model.blocks[0].up.weight
    size = unsharded.untyped_storage().size()
    assert size == unsharded.numel() * 4
    model.blocks[0].reshard()
    assert unsharded.untyped_storage().size() == 0
    units = stage_of(model.blocks[0]).units  # type: ignore[union-attr]
    assert {type(unit.gather).__name__ == "ByExtensions" for unit in units} == {True, False}
    model.blocks[0].unshard()
    assert model.blocks[0].up.weight is unsharded
    assert unsharded.untyped_storage().size() == size


def case_state_dicts(rank: int) -> None:
    """Sharded and full state dicts, torch's to ours and back."""
    mesh = init_device_mesh("cpu", (2,))
    for first, second in (("torch", "impl"), ("impl", "torch")):
        for full in (False, True):
            options = StateDictOptions(full_state_dict=full)
            source: Any = shard_model(first, extended(Quantised), mesh=mesh)
            target: Any = shard_model(second, extended(Quantised, seed=1), mesh=mesh)
            loss_of(target, tokens_of(rank, 0)).backward()
            if not full:
                set_model_state_dict(target, get_model_state_dict(source, options=options), options=options)
            else:
                target.load_state_dict(source.state_dict())
            assert_close(read_parameters(target), read_parameters(source), 0)
            assert loss_of(target, tokens_of(rank, 1)).item() == loss_of(source, tokens_of(rank, 1)).item()


class TwoMatrices(nn.Module):
    """Each computes in its own dtype."""

    def __init__(self, kinds: tuple[type[Held] | None, ...]) -> None:
        super().__init__()
        self.dtypes = [torch.bfloat16 if kind is HalfPrecision else torch.float32 for kind in kinds]
        self.layers = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in kinds)
        for layer, kind in zip(self.layers, kinds, strict=True):
            if kind is not None:
                layer.weight = nn.Parameter(kind(layer.weight.detach().clone()))  # type: ignore[operator]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer, dtype in zip(self.layers, self.dtypes, strict=True):
            x = layer(x.to(dtype))
        return x


def case_gradients_of_two_dtypes(rank: int) -> None:
    """Extensions of one unit compute in bf16 and in fp32, which torch refuses; as in units of their own."""
    for kinds in ((HalfPrecision, None), (HalfPrecision, Quantised), (HalfPrecision, HalfPrecision)):
        found = []
        for apart in (False, True):
            torch.manual_seed(0)
            model: Any = TwoMatrices(kinds)
            mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
            for layer in model.layers if apart else ():
                impl.fully_shard(layer, mesh=mesh)
            impl.fully_shard(model, mesh=mesh)
            torch.manual_seed(rank)
            for synchronize in (False, True):
                model.set_requires_gradient_sync(synchronize)
                model(torch.randn(4, 8)).float().sum().backward()
            found.append([parameter.grad.to_local() for parameter in model.parameters()])
        for together, reference in zip(*found, strict=True):
            assert together.dtype == torch.float32
            torch.testing.assert_close(together, reference)


@pytest.mark.parametrize("ranks", ["one_rank", "two_ranks"])
def test_gradients_of_two_dtypes(request, ranks: str) -> None:
    request.getfixturevalue(ranks).run(case_gradients_of_two_dtypes)


class Half(Held):
    """One of the two methods is missing."""

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        return (self.inner,), None


def case_converted(rank: int) -> None:
    """``double()`` after wrapping: what extensions are asked for is of the new dtype, as torch's."""
    found = []
    for kind in ("impl", "torch"):
        model: Any = shard_model(kind, extended(Quantised), mesh=init_device_mesh("cpu", (2,)))
        model.double()
        model.blocks[0].unshard()
        found.append(model.blocks[0].up.weight.detach().clone())
    assert found[0].dtype == torch.float64
    assert torch.equal(*found)


def case_refused(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2,))
    linear = nn.Linear(2, 2)
    linear.weight = nn.Parameter(Half(linear.weight.detach()))
    with pytest.raises(AssertionError, match=r"Both fsdp_pre_all_gather and .*'weight', a Half, has only"):
        impl.fully_shard(linear, mesh=mesh)


CASES = [
    case_uneven_rows, case_other_dim, case_memory_is_freed, case_state_dicts, case_converted, case_refused,
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__.removeprefix("case_"))
def test_extensions(two_ranks, case: Any) -> None:
    two_ranks.run(case)


class Doubled(Held):
    """Runs each operator twice, as a tensor around two others does, and stays so when it is gathered."""

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        plain = tree_map_only(Held, lambda held: held.inner, (args, kwargs or {}))
        function(*plain[0], **plain[1])
        return super().__torch_dispatch__(function, types, args, kwargs)

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        return (self.inner,), None

    def fsdp_post_all_gather(
        self, outputs: Any, metadata: Any, param_dtype: torch.dtype, *, out: torch.Tensor | None = None
    ) -> Any:
        return (Doubled(outputs[0]), outputs) if out is None else None


def case_gradients_of_a_subclass(rank: int) -> None:
    found = []
    for api in (impl, torch_fsdp):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
        for layer in model:
            layer.weight = nn.Parameter(Doubled(layer.weight.detach().clone()))
            api.fully_shard(layer, mesh=init_device_mesh("cpu", (2,)))
        api.fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
        torch.manual_seed(rank)
        model(torch.randn(4, 8)).sum().backward()
        found.append([parameter.grad.to_local() for parameter in model.parameters()])  # type: ignore[union-attr]
    for ours, theirs in zip(*found, strict=True):
        assert type(ours) is type(theirs) is torch.Tensor
        torch.testing.assert_close(ours, theirs)


def test_gradients_of_a_subclass(two_ranks) -> None:
    two_ranks.run(case_gradients_of_a_subclass)


def case_extensions_after_wrapping(rank: int) -> None:
    """The flat shard was made without them: told at the next look at the parameters, never ignored."""
    model: Any = impl.fully_shard(nn.Linear(4, 4), mesh=init_device_mesh("cpu", (2,)))
    model.weight._local_tensor.fsdp_pre_all_gather = lambda mesh: None
    with pytest.raises(AssertionError, match=r"Both fsdp_pre_all_gather and .*'weight'"):
        model(torch.ones(1, 4))
    model.weight._local_tensor.fsdp_post_all_gather = lambda *_: None
    with pytest.raises(
        NotImplementedError, match=r"'weight' has all-gather extensions only since.*before it"
    ):
        model(torch.ones(1, 4))


def test_extensions_after_wrapping(two_ranks) -> None:
    two_ranks.run(case_extensions_after_wrapping)
