"""Faults of FSDP training of 2024 to 2026, rebuilt as small programs: which part finds each, and that their
mended twins are silent. The table is written to ci/measured/prove.txt and docs/prove-faults.md: the rows of
programs that were run, the others stay."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from fsdpbench.answers.prove.parts import Request, prove
from fsdpbench.answers.prove.verdict import Part, Proof, Verdict
from fsdpbench.cli.requests.script_request import script_config
from fsdpbench.launch import fork_server

ROOT = Path(__file__).resolve().parents[3]
FAULTS = Path(__file__).parent / "faults"
MEASURED = ROOT / "ci" / "measured" / "prove.txt"
PAGE = ROOT / "docs" / "prove-faults.md"
HEAD = """<!-- Made by pytest -n 0 -m campaign tests/bench/prove/test_corpus.py: do not edit. -->
# Faults that prove finds

Faults of real FSDP training, rebuilt as small programs in
[tests/bench/prove/faults](../tests/bench/prove/faults), on 4 simulated GPUs and 4 CPU ranks. Each program has
a corrected twin, on which every part is silent.

"""
SHARED = ("common", "saving")
PROGRAMS = sorted(path.stem for path in FAULTS.glob("*.py") if path.stem not in SHARED)
SAVING = {
    "checkpoint_without_optimizer", "loader_starts_again", "checkpoint_of_rank_0", "loads_not_strict",
    "schedule_not_saved", "schedule_begins_again",
}  # fmt: skip
PLACE = re.compile(r"\w+\.py:\d+")
TABLE = ["| program | fault | found by | line |", "|---|---|---|---|"]
NOT_FOUND = set[str]()
"""Faults kept that no part finds: the script does the same without sharding."""


def proof_of(name: str, *arguments: str, parts: tuple[Part, ...] = (), ranks: int = 4) -> Proof:
    """Prove a program on 4 simulated GPUs and CPU ranks."""
    fork_server.start("cpu")
    chosen = parts or (Part.GRADIENTS, Part.RACES, Part.RANKS, *([Part.RESUME] if name in SAVING else []))
    options = {"script": FAULTS / f"{name}.py", "gpus": "4", "script_arguments": arguments}
    config = script_config(options, ())
    assert config is not None
    return prove(Request(config, frozenset(chosen), (ranks, 2) if name in SAVING else (ranks,)))


def test_the_corpus_is_large_and_all_but_few_are_found() -> None:
    assert len(PROGRAMS) >= 24
    assert len(NOT_FOUND) <= 4
    table = MEASURED.read_text()
    rows = [line.split(" | ")[0].strip("| `") for line in table.splitlines() if line.startswith("| `")]
    assert rows == PROGRAMS
    assert PAGE.read_text() == HEAD + table


@pytest.mark.parametrize("name", ["hybrid_one_shard"])
def test_gradients_name_the_fault_and_its_twin_is_silent(name: str) -> None:
    (found,) = proof_of(name, parts=(Part.GRADIENTS,), ranks=2).parts
    assert found.verdict is Verdict.FINDING
    assert f"{name}.py:" in found.findings[0]
    assert "16 of 16 parameters" in found.findings[0]
    (mended,) = proof_of(name, "mended", parts=(Part.GRADIENTS,), ranks=2).parts
    assert mended.verdict is Verdict.OK, mended


START = """import torch, torch.distributed as dist
from torch import nn
dist.init_process_group("nccl")
model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
"""
TRAIN = """
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(5):
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
"""
NOT_COMPARED = {
    "an optimizer that adds gradients of other optimizers' steps": """
optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in model]
model = nn.parallel.DistributedDataParallel(model)
for step in range(5):
    for optimizer in optimizers:
        model(torch.ones(2, 4) + dist.get_rank()).sum().backward()
        optimizer.step()
""",
    "tensor parallelism": """
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
mesh = init_device_mesh("cuda", (dist.get_world_size(),))
model = parallelize_module(model, mesh, {"0": ColwiseParallel()})
""",
    "pipeline parallelism": """
from torch.distributed.pipelining import PipelineStage
stage = PipelineStage(model, dist.get_rank(), dist.get_world_size(), torch.device("cpu"))
"""
    + TRAIN,
    "powerSGD_hook, which changes gradients by intention,": """
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
model = nn.parallel.DistributedDataParallel(model)
hook = default_hooks.bf16_compress_wrapper(powerSGD_hook.powerSGD_hook)
model.register_comm_hook(powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2), hook)
"""
    + TRAIN,
    "a wrapper of fsdpbench.impl": "from fsdpbench.impl import fully_shard\nfully_shard(model)\n" + TRAIN,
    "an optimizer that steps in backward": """
for each in model.parameters():
    each.register_post_accumulate_grad_hook(
        lambda p, inner=torch.optim.SGD([each], lr=0.1): inner.step()
    )
"""
    + TRAIN,
}


@pytest.mark.campaign
@pytest.mark.parametrize("kind", NOT_COMPARED)
def test_what_has_no_reference_is_refused(kind: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(START + NOT_COMPARED[kind])
    fork_server.start("cpu")
    config = script_config({"script": script, "gpus": "4"}, ())
    assert config is not None
    (found,) = prove(Request(config, frozenset({Part.GRADIENTS}), (2,))).parts
    assert found.verdict is Verdict.UNKNOWN
    assert f"{kind} is not compared" in found.summary


def test_a_script_of_which_no_gradient_was_seen_is_not_called_right(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    loop = """
weight = torch.ones(4, device="cuda", requires_grad=True)
optimizer = torch.optim.SGD([weight], lr=0.1)
for step in range(5):
    loss = (nn.ReLU()(torch.rand(4, device="cuda")) * weight).sum()
    (weight.grad,) = torch.autograd.grad(loss, weight)
    optimizer.step()
"""
    script.write_text(START + loop)
    fork_server.start("cpu")
    config = script_config({"script": script, "gpus": "4"}, ())
    assert config is not None
    (found,) = prove(Request(config, frozenset({Part.GRADIENTS}), (2,))).parts
    assert found.verdict is not Verdict.OK
    assert "no gradient of a parameter was seen" in found.summary


@pytest.fixture(scope="module")
def rows() -> Iterator[dict[str, str]]:
    """Rows of the table by program, written when all programs asked for were run."""
    lines = MEASURED.read_text().splitlines()
    found = {line.split("`")[1]: line for line in lines if line.startswith("| `")}
    yield found
    table = [*TABLE, *(found[name] for name in PROGRAMS if name in found)]
    MEASURED.write_text("\n".join(table) + "\n")
    PAGE.write_text(HEAD + MEASURED.read_text())


@pytest.mark.campaign
@pytest.mark.parametrize("name", PROGRAMS)
def test_which_part_finds_which(name: str, rows: dict[str, str]) -> None:
    proof, twin = proof_of(name), proof_of(name, "mended")
    by = [each for each in proof.parts if each.verdict is Verdict.FINDING]
    first = by[0].findings[0] if by else ""
    text = ast.get_docstring(ast.parse((FAULTS / f"{name}.py").read_text())) or ""
    line = PLACE.search(first)
    place = f"`{line[0]}`" if line else ""
    parts = ", ".join(each.part.value for each in by) or "not found"
    rows[name] = f"| `{name}` | {' '.join(text.split())} | {parts} | {place} |"
    assert by or name in NOT_FOUND
    assert all(each.verdict is Verdict.OK for each in twin.parts), twin.as_text()
