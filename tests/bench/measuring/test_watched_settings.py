"""Settings that a system never reads had no effect, and a result names them; our own read all of theirs."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from fsdpbench.base.configuration.config import Config, Measurement
from fsdpbench.base.settings import SETTINGS, Settings
from fsdpbench.cli.terminal.progress import describe_result
from fsdpbench.engine.worker import unread_settings, watched
from fsdpbench.reports.result import Result, Status
from fsdpbench.systems import BuildContext, System

# One value a setting that is not the default, with what it needs beside it.
GIVEN: tuple[dict[str, Any], ...] = (
    {"grad_accum": 2, "grad_sync": "last"},
    {"strategy": "SHARD_GRAD_OP"},
    {"strategy": "HYBRID_SHARD", "shard_size": 4},
    {"wrap": "root"},
    {"reshard_after_forward": "false"},
    {"keep_last_unsharded": "true"},
    {"backward_prefetch": "post"},
    {"backward_prefetch_depth": 2},
    {"forward_prefetch": 1},
    {"limit_all_gathers": "off"},
    {"memory_handover": "events"},
    {"layout": "packed"},
    {"param_dtype": "fp32"},
    {"reduce_dtype": "fp32"},
    {"buffer_dtype": "bf16"},
    {"activation_checkpointing": "full"},
    {"activation_checkpointing": "full", "checkpoint_first": 2},
    {"activation_offload": "true"},
    {"cpu_offload": "true"},
    {"optimizer": "sgd"},
    {"optimizer_dtype": "bf16"},
    {"compile": "true"},
)


class Careless(System):
    """A system of another package that looks at few settings."""

    name = "careless"
    summary = "it reads the wrapping alone"
    absent = {"reduce_dtype": "it has none"}  # noqa: RUF012

    def wrap(self, context: BuildContext) -> nn.Module:
        model = context.build_model()
        return model if context.config.settings.wrap == "block" else nn.Sequential(model)


class Careful(Careless):
    """It holds the reduction of gradients back."""

    def microbatch(self, model: nn.Module, *, sync: bool) -> AbstractContextManager[object]:
        return nullcontext()


def config(**settings: Any) -> Config:
    return Config(
        model="gpt-tiny", shape={}, system="careless", device="sim", hardware=None, gpus=2, gpus_per_node=2,
        settings=Settings.of(**settings), measurement=Measurement.default_for("sim"),
    )  # fmt: skip


def read(system: System, asked: Config) -> None:
    """What the bench has a system do with its configuration."""
    settings = asked.settings
    _ = settings.wrap, settings.batch, settings.optimizer, settings.optimizer_dtype
    system.forward_context(asked, None)  # type: ignore[arg-type]


def test_what_was_not_read_is_named() -> None:
    asked = watched(config(wrap="root", backward_prefetch="post", reduce_dtype="bf16", batch=3, lora=4))
    read(Careless(), asked)
    assert unread_settings(Careless(), asked) == ["backward_prefetch"]


def test_defaults_are_expected_to_have_no_effect() -> None:
    asked = watched(config())
    assert unread_settings(Careless(), asked) == []


def test_reduction_that_nothing_holds_back() -> None:
    asked = watched(config(grad_accum=2, grad_sync="last"))
    assert asked.settings.grad_sync == "last"
    assert unread_settings(Careless(), asked) == ["grad_sync"]
    assert unread_settings(Careful(), asked) == []


def test_watched_settings_are_the_settings() -> None:
    plain = config(wrap="root", reshard_after_forward=4)
    asked = watched(plain)
    assert {name: getattr(asked.settings, name) for name in SETTINGS} == plain.settings.to_dict()
    assert asked.to_dict() == plain.to_dict()


def test_the_terminal_names_them() -> None:
    result = Result(status=Status.OK, step_time_s=0.1, unread_settings=["layout", "wrap"])
    assert describe_result(result).endswith("no effect: the system never read layout, wrap")


@pytest.mark.campaign
@pytest.mark.parametrize("given", GIVEN, ids=lambda given: "-".join(given))
@pytest.mark.parametrize("system", ["impl-fsdp2", "impl-fsdp1", "torch-fsdp2", "torch-fsdp1", "torch-ddp"])
def test_our_own_systems_read_all_they_have(system: str, given: dict[str, Any], tmp_path: Path) -> None:
    words = ["--model", "gpt-tiny", "--gpus", "8", "--system", system, "-o", str(tmp_path)]
    for name, value in given.items():
        words += [f"--{name.replace('_', '-')}", str(value)]
    done = subprocess.run(
        [sys.executable, "-m", "fsdpbench", "run", *words], capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    if "not_applicable" in done.stderr + done.stdout:
        assert any(f" {name}: " in done.stderr + done.stdout for name in given)
        return
    (found,) = tmp_path.glob("*/result.json")
    result = json.loads(found.read_text())
    assert result["status"] == "ok"
    assert "unread_settings" not in result
