"""Recorded deferred initialisation: bit-equal to plain initialisation, one unit at a time."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fsdp_cases import our_full, recorded
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from fsdpbench import impl

SEED = 7


class Layer(nn.Module):
    """Initialised as users do it: by the layers, then once more, by views, by what was drawn."""

    def __init__(self, width: int, index: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.gain = nn.Parameter(torch.linspace(0.5, 1.5, width) * (1 + index))
        self.register_buffer("mask", torch.tril(torch.ones(3, 3)))
        nn.init.trunc_normal_(self.up.weight, std=0.02)
        nn.init.orthogonal_(self.down.weight)
        with torch.no_grad():
            self.up.weight[1:3].mul_(4)
            self.down.bias.copy_(self.up.bias[::2] * self.gain)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x)))) * self.gain


class Net(nn.Module):
    """Layers, of which the second depends on the first, and the third is a copy of the second."""

    def __init__(self, width: int = 12, tied: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, width, padding_idx=3)
        self.layers = nn.ModuleList(Layer(width, index) for index in range(2))
        self.layers.append(copy.deepcopy(self.layers[1]))
        self.norm = nn.BatchNorm1d(width)
        self.head = nn.Linear(width, 20, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        self.apply(self.initialise)
        with torch.no_grad():
            self.layers[1].up.weight.copy_(self.layers[0].up.weight * 2)
            self.layers[0].gain.add_(self.layers[1].gain.mean().item())

    @staticmethod
    def initialise(module: nn.Module) -> None:
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.normal_(module.bias, std=0.1)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def plain(make: Callable[[], nn.Module]) -> tuple[nn.Module, torch.Tensor]:
    """The model, and what is drawn after it."""
    torch.manual_seed(SEED)
    return make(), torch.rand(3)


def deferred(make: Callable[[], nn.Module]) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(SEED)
    with impl.deferred_init():
        model = make()
    return model, torch.rand(3)


def assert_equal_states(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert list(actual) == list(expected)
    for name, value in expected.items():
        assert actual[name].dtype == value.dtype, name
        assert torch.equal(actual[name], value), name


# -- without FSDP ----------------------------------------------------------------------------------------


class Odd(nn.Module):
    """Operations beyond the usual ones."""

    def __init__(self) -> None:
        super().__init__()
        own = torch.Generator().manual_seed(3)
        self.own = nn.Parameter(torch.rand(9, generator=own))
        self.random = nn.Parameter(torch.multinomial(torch.rand(9), 4).float())
        self.drawn = nn.Parameter(torch.bernoulli(torch.full((6,), 0.3)))
        self.scaled = nn.Parameter(torch.randn(4) * torch.tensor([1.0, 2.0, 3.0, 4.0]))
        self.like = nn.Parameter(torch.arange(5, device=self.scaled.device).float())
        self.mask = torch.triu(torch.ones(3, 3))
        self.rates = torch.linspace(0, 1, 4).tolist()
        self.where = nn.Parameter(torch.randn(8).abs().nonzero().float())
        self.replaced = nn.Linear(3, 3)
        self.replaced.weight.data = torch.randn(3, 3)
        if self.scaled.sum() > 0:
            self.replaced.bias.data.fill_(1)
        else:
            self.replaced.bias.data.fill_(-1)
        self.from_itself = nn.Parameter(torch.randn(3, 2))
        self.from_itself.data.fill_(self.from_itself.data[1, 1])
        self.in_part = nn.Parameter(torch.empty(3, 2).normal_())
        self.in_part.data[:1, :1].expand(3, 2).fill_(2)  # one element, in as many places as there are
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(3, 2))
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2)
        self.lstm = nn.LSTM(3, 4)
        self.double()


@pytest.mark.parametrize("make", [Net, Odd])
def test_equals_plain_initialisation(make: Any) -> None:
    expected, drawn = plain(make)
    model, drawn_too = deferred(make)
    after = torch.get_rng_state()
    assert torch.equal(drawn, drawn_too)
    assert all(p.device.type == "meta" for p in model.parameters())
    impl.materialise_deferred(model)
    assert torch.equal(torch.get_rng_state(), after)
    assert_equal_states(model.state_dict(), expected.state_dict())
    if isinstance(model, Odd):
        assert torch.equal(model.mask, torch.triu(torch.ones(3, 3)))
        assert model.rates == torch.linspace(0, 1, 4).tolist()
    else:
        assert model.head.weight is model.embed.weight


def test_parts_in_any_order() -> None:
    expected, _ = plain(Net)
    model, _ = deferred(Net)
    for part in (model.layers[2], model.head, model.layers[0], model):
        impl.materialise_deferred(part)
    wanted = expected.state_dict()
    assert_equal_states({name: model.state_dict()[name] for name in wanted}, wanted)


def test_deferred_tensors_pass_for_tensors_with_data() -> None:
    with impl.deferred_init():
        weight = nn.Linear(2, 2).weight
        assert not weight.is_meta
        assert weight.device.type == "cpu"
        assert weight.is_cpu
        assert not weight.is_cuda
        assert "0." in repr(weight)


def test_written_after_its_recording_is_refused() -> None:
    model, _ = deferred(lambda: nn.Linear(2, 2))
    nn.init.ones_(model.bias)
    with pytest.raises(ValueError, match=r"'bias' of Linear was written after deferred_init\(\) ended"):
        impl.materialise_deferred(model)


def test_real_tensors_are_copied_when_they_are_used() -> None:
    real = torch.ones(3)

    def make() -> nn.Module:
        module = nn.Module()
        module.weight = nn.Parameter(torch.zeros(3) + real)
        real.add_(torch.full((3,), 2.0))
        return module

    model, _ = deferred(make)
    assert real.tolist() == [3.0, 3.0, 3.0]
    impl.materialise_deferred(model)
    assert model.weight.tolist() == [1.0, 1.0, 1.0]


# -- under FullyShardedDataParallel ------------------------------------------------------------------------


def wrap(model: nn.Module, originals: bool, **arguments: Any) -> Any:
    return impl.FullyShardedDataParallel(
        model,
        auto_wrap_policy=impl.ModuleWrapPolicy({Layer}),
        use_orig_params=originals,
        device_id=torch.device("cpu"),
        **arguments,
    )


def case_sharded(rank: int, *, originals: bool, strategy: str) -> None:
    """Equal values on all ranks, equal training; values that depend on another unit are recomputed."""
    models = []
    for build in (plain, deferred):
        with recorded("impl") as collectives:
            made = build(Net)[0]
            models.append(wrap(made, originals, sharding_strategy=impl.ShardingStrategy[strategy]))
        assert not collectives
    assert_equal_states(models[1].state_dict(), models[0].state_dict())
    losses = []
    for model in models:
        losses.append(model(torch.arange(8) + rank).square().mean())
        losses[-1].backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    assert torch.equal(*losses)
    assert_equal_states(our_full(models[1], False), our_full(models[0], False))


@pytest.mark.parametrize("originals", [False, True], ids=["flat", "original"])
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
def test_sharded(two_ranks, strategy: str, originals: bool) -> None:
    two_ranks.run(case_sharded, originals=originals, strategy=strategy)


class Live(TorchDispatchMode):
    """Counts the bytes of storages with data that are alive, after every operation."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: dict[int, StorageWeakRef] = {}
        self.peak = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = function(*args, **(kwargs or {}))
        for value in torch.utils._pytree.tree_leaves(output):
            if isinstance(value, torch.Tensor) and value.device.type != "meta":
                storage = value.untyped_storage()
                self._seen[storage._cdata] = StorageWeakRef(storage)
        self._seen = {key: seen for key, seen in self._seen.items() if not seen.expired()}
        self.peak = max(self.peak, sum(map(self._bytes_now, self._seen.values())))
        return output

    @staticmethod
    def _bytes_now(seen: StorageWeakRef) -> int:
        storage = torch.UntypedStorage._new_with_weak_ptr(seen.cdata)
        return 0 if storage is None else storage.nbytes()


class Chain(nn.Module):
    """Ten layers, each made of the one before."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(width, index) for index in range(10))
        with torch.no_grad():
            for before, after in zip(self.layers, self.layers[1:], strict=False):
                after.down.weight.copy_(before.down.weight * 0.9)


def bytes_of(module: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in module.parameters())


def case_memory(rank: int) -> None:
    """At no time more than this rank's shards, one unit, and one more that it was made of."""
    with Live() as live:
        model = wrap(deferred(Chain)[0], False)
    whole = plain(Chain)[0]
    shards = bytes_of(model)
    unit = bytes_of(whole.layers[0])
    assert shards <= 0.51 * bytes_of(whole)
    assert live.peak <= shards + 2.6 * unit, (live.peak, shards, unit)
    assert live.peak < 0.8 * bytes_of(whole)
    assert_equal_states(our_full(model, False), dict(whole.named_parameters()))


def test_memory_is_one_unit_and_shards(two_ranks) -> None:
    two_ranks.run(case_memory)


class Pair(nn.Module):
    """Its initialisation needs no memory besides its own."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 128), nn.Linear(128, 64)


def case_independent_memory(rank: int) -> None:
    """Without dependence the peak is the shards and the unit that is being cut."""

    def make() -> nn.Module:
        return nn.Sequential(*(Pair() for _ in range(10)))

    with Live() as live:
        model = impl.FullyShardedDataParallel(
            deferred(make)[0],
            auto_wrap_policy=impl.ModuleWrapPolicy({Pair}),
            device_id=torch.device("cpu"),
        )
    assert live.peak <= bytes_of(model) + 1.01 * bytes_of(Pair())
    assert_equal_states(our_full(model, False), dict(plain(make)[0].named_parameters()))


def test_memory_without_dependence(two_ranks) -> None:
    two_ranks.run(case_independent_memory)


def case_ties_and_ignored(rank: int) -> None:
    tied = deferred(lambda: nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)))[0]
    tied[1].weight = tied[0].weight
    with pytest.raises(ValueError, match=r"tied weights must be in one unit"):
        impl.FullyShardedDataParallel(
            tied, auto_wrap_policy=impl.ModuleWrapPolicy({nn.Linear}), device_id=torch.device("cpu")
        )
    model = deferred(Net)[0]
    wrapped = wrap(model, True, ignored_states=[model.embed.weight])
    assert torch.equal(model.embed.weight, plain(Net)[0].embed.weight)
    assert "embed.weight" not in our_full(wrapped, False)
    with torch.device("meta"):
        meta = nn.Sequential(nn.Linear(2, 2), nn.Module())
        meta[1].weight = nn.Parameter(torch.ones(2))
    with pytest.raises(ValueError, match=r"Module is on the meta device and has no reset_parameters"):
        impl.FullyShardedDataParallel(meta, device_id=torch.device("cpu"))


def test_ties_and_ignored(two_ranks) -> None:
    two_ranks.run(case_ties_and_ignored)
