"""The stand-in for `torch._dynamo`: who trains imports no compiler, who compiles gets the real one."""

from __future__ import annotations

import pytest
import torch

pytestmark = pytest.mark.simulated


_FSDP2 = pytest.param(
    "fsdp2",
    marks=pytest.mark.skipif(
        torch.__version__ < "2.12", reason="its fully_shard imports torch._dynamo.compiled_autograd"
    ),
)


@pytest.mark.parametrize("system", [_FSDP2, "fsdp1", "ddp"])
def test_training_does_not_import_the_compiler(system: str) -> None:
    import sys

    from device_training import build, start

    start()
    build(system, 8, model={"checkpointing": True})()

    assert "torch._dynamo.eval_frame" not in sys.modules


def test_looking_through_all_modules_does_not_either() -> None:
    import sys

    from device_training import start

    start()
    for module in list(sys.modules.values()):
        assert getattr(module, "__warningregistry__", None) is not module

    assert "torch._dynamo.eval_frame" not in sys.modules


def test_compiling_on_the_cpu_takes_the_real_one_and_its_settings() -> None:
    from device_training import start

    start()
    torch._dynamo.config.recompile_limit = 3
    compiled = torch.compile(lambda value: value * 2 + 1, backend="eager")

    assert compiled(torch.ones(3)).tolist() == [3.0, 3.0, 3.0]
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert torch._dynamo.config.recompile_limit == 3
    assert torch._dynamo.disable.__module__ == "torch._dynamo.decorators"
