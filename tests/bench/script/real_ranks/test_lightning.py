"""The parts of Lightning that are changed when they are imported, in packages laid out as its are."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

from fsdpbench.script.interposing import around_imports
from fsdpbench.script.real_ranks.host_cuda import LIGHTNING, change_lightning

CONNECTOR = """
class Connector:
    def __init__(self, devices, num_nodes=1):
        self._check_device_config_and_set_final_flags(devices=devices, num_nodes=num_nodes)
    def _check_device_config_and_set_final_flags(self, devices, num_nodes):
        self.asked = devices, num_nodes
"""
ACCELERATOR = """
class CUDAAccelerator:
    def setup_device(self, device):
        raise ValueError(device)
"""
STRATEGY = """
class ModelParallelStrategy:
    def __init__(self, data_parallel_size="auto", tensor_parallel_size="auto"):
        self.sizes = data_parallel_size, tensor_parallel_size
"""
LAYOUTS = {
    ("lightning.pytorch", "trainer.connectors.accelerator_connector"),
    ("lightning.fabric", "connector"),
    ("pytorch_lightning", "trainer.connectors.accelerator_connector"),
    ("lightning_fabric", "connector"),
}


@pytest.mark.parametrize(("package", "connector"), sorted(LAYOUTS))
def test_the_ranks_that_are_there_are_taken(
    package: str, connector: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    modules = {connector: CONNECTOR, "accelerators.cuda": ACCELERATOR, "strategies.model_parallel": STRATEGY}
    modules[connector] = f"from {package}.accelerators.cuda import CUDAAccelerator\n{CONNECTOR}"
    for name, text in modules.items():
        path = tmp_path.joinpath(*f"{package}.{name}".split(".")).with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    monkeypatch.setattr(sys, "modules", {**sys.modules})
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    around_imports(LIGHTNING, change_lightning)
    found: dict[str, Any] = {name: importlib.import_module(f"{package}.{name}") for name in modules}
    kind = found[connector].Connector
    assert [kind(8, 8).asked, kind([0, 1, 2]).asked, kind("auto").asked] == [(2, 2)] * 3
    assert kind(1).asked == (1, 1)  # which Lightning refuses among several ranks
    assert found["accelerators.cuda"].CUDAAccelerator().setup_device("cpu") is None
    strategy = found["strategies.model_parallel"].ModelParallelStrategy
    assert [strategy(64, 1).sizes, strategy(32, tensor_parallel_size=2).sizes] == [(4, 1), (2, 2)]
    assert strategy().sizes == ("auto", "auto")
