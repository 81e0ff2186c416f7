"""The reference sends DDP's buffers before the same forwards as torch's DDP, and the same buffers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fsdpbench.script.real_ranks import unsharded


@pytest.fixture(scope="module", autouse=True)
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    store = Path(tmp_path_factory.mktemp("store")) / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


FORWARDS = ("trains", "no_sync", "by attribute", "evaluates", "without gradients", "replaces a buffer")
OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"broadcast_buffers": True},
    {"broadcast_buffers": False},
    {"init_sync": False},
    {"forward_sync_buffers": False},
    {"forward_sync_buffers": True, "broadcast_buffers": False},
)


def net() -> nn.Module:
    inside = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    inside.register_buffer("wide", torch.ones(3, 2).t())
    return inside


def forward(model: Any, kind: str) -> None:
    """Run a forward, and a backward where it has one."""
    quiet = model.no_sync() if kind == "no_sync" else contextlib.nullcontext()
    model.train(kind != "evaluates")
    if kind == "replaces a buffer":
        model.module.register_buffer("more", torch.ones(2))
    model.require_backward_grad_sync = kind != "by attribute"
    with quiet, torch.set_grad_enabled(kind not in ("evaluates", "without gradients")):
        loss = model(torch.randn(4, 3)).sum()
    if loss.requires_grad:
        loss.backward()
    model.require_backward_grad_sync = True


@given(
    kinds=st.lists(st.sampled_from(FORWARDS), min_size=1, max_size=8),
    options=st.sampled_from(OPTIONS),
    ignored=st.sampled_from(((), ("wide",), ("1.running_mean",))),
)
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_buffers_are_sent_as_ddp_sends_them(
    kinds: list[str], options: dict[str, Any], ignored: tuple[str, ...]
) -> None:
    known = unsharded._OF_DDP.parameters
    options = {name: value for name, value in options.items() if name in known}
    sent: dict[type, list[object]] = {DistributedDataParallel: [], unsharded._Replica: []}
    for kind, found in sent.items():
        inside = net()
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(inside, ignored)
        with pytest.MonkeyPatch.context() as patch:

            def ddp(
                model: Any, buffers: list[torch.Tensor], *others: Any, found: list[object] = found
            ) -> None:
                found.append([tuple(each.shape) for each in buffers])

            def ours(module: nn.Module, group: Any = None, found: list[object] = found) -> None:
                names = getattr(module, "_ddp_params_and_buffers_to_ignore", ())
                found.append(
                    [tuple(each.shape) for name, each in module.named_buffers() if name not in names]
                )

            patch.setattr(DistributedDataParallel, "_distributed_broadcast_coalesced", ddp)
            patch.setattr(unsharded, "_send_buffers", ours)
            model: Any = kind(inside, **options)
            found.clear()  # DDP sends what it begins with by another function
            for each in kinds:
                forward(model, each)
                found.append(each)
    assert sent[unsharded._Replica] == sent[DistributedDataParallel]


def test_buffers_are_sent_whole_and_without_a_new_version() -> None:
    inside = net()
    before = {name: (each.clone(), each._version) for name, each in inside.named_buffers()}
    unsharded._send_buffers(inside)
    for name, (value, version) in before.items():
        buffer = inside.get_buffer(name)
        assert torch.equal(buffer, value)
        assert buffer._version == version
