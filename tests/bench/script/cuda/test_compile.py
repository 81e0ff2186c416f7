"""Scripts that call `torch.compile`, in its three forms."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from conftest import RunScript

COMPILING = """
import torch
class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.linear = torch.nn.LayerNorm(64), torch.nn.Linear(64, 64)
    def forward(self, x):
        return x + torch.nn.functional.gelu(self.linear(self.norm(x)))
@torch.compile(fullgraph=True)
def loss(x):
    return (x.float() ** 2).mean()
model = torch.nn.Sequential(Block(), Block(), Block()).cuda()
model[0].compile()
model[1] = torch.compile(model[1], dynamic=False)
assert model(torch.randn(8, 64, device="cuda")).device.type == "cuda"
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(7):
    loss(model(torch.randn(8, 64, device="cuda"))).backward()
    optimizer.step()
    optimizer.zero_grad()
"""


_WRAPPERS = "torch.distributed.algorithms._checkpoint.checkpoint_wrapper"
CHECKPOINTED = f"from {_WRAPPERS} import checkpoint_wrapper\n" + COMPILING.replace(
    "self.norm(x)", "torch.nn.functional.dropout(self.norm(x), 0.1)"
).replace(
    "model[1] = torch.compile(model[1], dynamic=False)",
    "model[1] = checkpoint_wrapper(model[1]); model[1].compile()",
)


@pytest.mark.campaign
def test_what_is_checkpointed_inside_of_a_compiled_block_is_compiled(run_probe: RunScript) -> None:
    run = run_probe(CHECKPOINTED)
    assert run.result["status"] == "ok", run.cause
    assert run.result["compilation"]["graph_breaks"] == {}
    assert run.result["compilation"]["graphs"] >= 6  # of two blocks and the loss


@pytest.mark.campaign
def test_blocks_and_functions_compile(run_probe: RunScript) -> None:
    run = run_probe(COMPILING)
    assert run.result["status"] == "ok", run.cause
    assert run.result["compiled"] is True
    compilation = run.result["compilation"]
    assert compilation["graphs"] >= 4  # a block's and the loss's, forward and backward
    assert compilation["kernels"] >= 4
    assert compilation["graph_breaks"] == {}
    assert "redirected_files" not in run.result or not run.result["redirected_files"]


FLAT_UNITS = """
import os
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel
dist.init_process_group("nccl")
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
class Block(torch.nn.Linear):
    def forward(self, x):
        return torch.relu(super().forward(x))
block = Block(64, 64)
block.compile()
model = FullyShardedDataParallel(block, device_id=torch.cuda.current_device(), use_orig_params=ORIGINAL)
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(7):
    model(torch.randn(8, 64, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.campaign
@pytest.mark.parametrize("original", [False, True])
def test_what_dynamo_skips_is_not_called_compiled(original: bool, run_probe: RunScript) -> None:
    """Dynamo takes units of FSDP1 only with `use_orig_params=True`."""
    run = run_probe(FLAT_UNITS.replace("ORIGINAL", str(original)))
    assert run.result["status"] == "ok", run.cause
    assert run.result["compiled"] is original
    assert (run.result["compilation"]["graphs"] > 0) is original
    assert any("compiled no graph" in note for note in run.result["script"]["notes"]) is not original
