"""This project's FSDP in a script: `fsdpbench.impl` imported instead of torch's, nothing else changed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from conftest import RunScript

EXAMPLES = Path(__file__).parents[3] / "docs" / "examples"
SIZES = ("--layers", "4", "--width", "768", "--length", "512", "--batch", "4")


@pytest.mark.parametrize(
    "script", ["train_fsdp2.py", pytest.param("train_fsdp1.py", marks=pytest.mark.campaign)]
)
def test_it_takes_the_time_and_memory_of_torch_s(script: str, run_script: RunScript, tmp_path: Path) -> None:
    theirs = run_script(EXAMPLES / script, *SIZES)
    source = (EXAMPLES / script).read_text()
    ours = source.replace("from torch.distributed.fsdp import", "from fsdpbench.impl import").replace(
        "from torch.distributed.fsdp.wrap import", "from fsdpbench.impl import"
    )
    assert ours.count("from fsdpbench.impl import") == source.count("from torch.distributed.fsdp")
    (tmp_path / "small_gpt.py").write_text((EXAMPLES / "small_gpt.py").read_text())
    (tmp_path / script).write_text(ours)
    run = run_script(tmp_path / script, *SIZES)
    assert run.result["status"] == "ok", run.cause
    # The same products on the same network; the host's part is ours, and torch's is longer.
    near = 0.08
    assert run.result["step_time_s"] == pytest.approx(theirs.result["step_time_s"], rel=near)
    allocated = theirs.result["peak_memory_bytes"]["allocated"]
    assert run.result["peak_memory_bytes"]["allocated"] == pytest.approx(allocated, rel=0.01)
    for kind in ("all_gather", "reduce_scatter"):
        found, wanted = run.result["communication"][kind], theirs.result["communication"][kind]
        assert found["bytes"] == pytest.approx(wanted["bytes"], rel=0.01)


def test_the_default_mesh_is_the_device_s(run_probe: RunScript) -> None:
    run = run_probe(
        """
        import torch.distributed as dist
        from fsdpbench.impl import fully_shard
        dist.init_process_group("nccl")
        model = fully_shard(torch.nn.Linear(64, 64).cuda())
        assert model.weight.device_mesh.device_type == "cuda"
        shared = torch.from_dlpack(torch.zeros(8, device="cuda")[4:])
        assert shared.untyped_storage().nbytes() == 16 and shared.storage_offset() == 0
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(7):
            model(torch.ones(4, 64, device="cuda")).sum().backward()
            optimizer.step()
        """
    )
    assert run.result["status"] == "ok", run.cause
