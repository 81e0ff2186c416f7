"""What a proof puts around torch's calls has the names of their parameters."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fsdpbench.base.configuration.script_source import ScriptSource
from fsdpbench.script.own_files import OwnFiles
from fsdpbench.script.real_ranks import checkpoints, watching
from fsdpbench.sim.torch_device.patches.dynamo import passing_to


@pytest.mark.parametrize("resumes", [False, True])
def test_saving_and_loading_are_wrapped_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, resumes: bool
) -> None:
    wrapped: dict[str, Any] = {}

    def around(owner: Any, name: str, call: Any) -> None:
        passing_to(call)(getattr(owner, name))  # raises where a name differs; torch stays as it is
        wrapped[name] = call

    for module in (checkpoints, watching):
        monkeypatch.setattr(module, "around", around)
    for each in ("step_pre", "step_post"):
        monkeypatch.setattr(watching, f"register_optimizer_{each}_hook", lambda _: None)
    monkeypatch.setattr(watching, "register_module_forward_pre_hook", lambda _: None)
    source = ScriptSource("/nowhere/train.py", (), "0" * 16)
    watch = checkpoints.CheckpointWatch(OwnFiles(source), tmp_path, 0, 2, resumes)
    assert {"save", "async_save", "load", "backward", "__init__", "all_reduce"} <= set(wrapped)

    not_built = nn.Module()
    not_built.weight_without_values = nn.Parameter(torch.empty(3, device="meta"))

    def main() -> None:
        model = nn.Module()
        model.weight_of_main = nn.Parameter(torch.ones(3))
        wrapped["__init__"](lambda *_: None, torch.optim.SGD(model.parameters()), [model.weight_of_main])

    main()  # the script lets its model go before its end is written down
    gc.collect()
    watch.finish()
    (state,) = checkpoints.read_states(tmp_path, 0, 1)
    assert "weight_of_main" in state.weights
    assert "weight_without_values" not in state.weights, not_built
