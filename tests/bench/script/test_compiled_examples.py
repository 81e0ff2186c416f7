"""The scripts in docs/examples with compiled blocks; eager, they are in `test_examples.py`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from conftest import RunScript

COMPILING = Path(__file__).parent / "compiled_examples.py"
SMALL = ("--layers", "2", "--width", "192", "--length", "128", "--vocab", "1000", "--batch", "2")
OF_GPT = ("train_fsdp2.py", "train_fsdp1.py")
LLAMA = "transformers.models.llama.modeling_llama:LlamaDecoderLayer"


def ran(run: Any, *scripts: str) -> dict[str, Any]:
    """What was compiled, of a run in which all of these ran to their ends."""
    assert run.result["status"] == "ok", run.cause
    assert [line for line in run.output.splitlines() if line.startswith("ran ")] == [
        f"ran {script}" for script in scripts
    ]
    assert run.result["compiled"] is True
    found: dict[str, Any] = run.result["compilation"]
    assert found["kernels"] > 0
    assert (found["fallbacks"], "refused" in found, "past_recompile_limit" in found) == ({}, False, False)
    return found


def test_the_gpts_compile_without_a_break(run_script: RunScript) -> None:
    """One process, so that the compiler is imported once: forward and backward of FSDP2's blocks; Dynamo
    skips FSDP1's, whose units are flat parameters (no `use_orig_params`)."""
    programs = [word for script in OF_GPT for word in ("--", script, *SMALL, "--steps", "2")]
    run = run_script(COMPILING, "small_gpt:Block", *programs[1:], to_the_end=True)
    found = ran(run, *OF_GPT)
    assert found["graph_breaks"] == {}
    assert found["graphs"] == 2


@pytest.mark.campaign
def test_ddp_compiles_under_autocast(run_script: RunScript) -> None:
    run = run_script(
        COMPILING, "small_gpt:Block", "train_ddp_amp.py", *SMALL, "--steps", "2", to_the_end=True
    )
    assert ran(run, "train_ddp_amp.py")["graph_breaks"] == {}


@pytest.mark.campaign
@pytest.mark.parametrize("fsdp", ["fsdpbench.impl", "torch.distributed.fsdp"])
def test_t5_compiles(fsdp: str, run_script: RunScript, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("shard the parameters, gather them for each unit. " * 200)
    blocks = "fsdpbench.workloads.families.t5:T5EncoderBlock,fsdpbench.workloads.families.t5:T5DecoderBlock"
    arguments = ("--fsdp", fsdp, "--text", str(text), "--validation-text", str(text), "--steps", "4")
    run = run_script(COMPILING, blocks, "train_t5.py", *arguments, to_the_end=True)
    assert ran(run, "train_t5.py")["graph_breaks"] == {}


@pytest.mark.campaign
@pytest.mark.parametrize(
    ("script", "package", "block"),
    [
        ("train_accelerate.py", "accelerate", LLAMA),
        ("train_transformers.py", "accelerate", LLAMA),
        ("train_peft.py", "peft", LLAMA),
        ("train_lightning.py", "lightning", "torch.nn.modules.transformer:TransformerEncoderLayer"),
    ],
)
def test_examples_of_libraries_compile(script: str, package: str, block: str, run_script: RunScript) -> None:
    """Breaks are of the libraries' own; that something compiles and trains is asked here."""
    pytest.importorskip(package)
    ran(run_script(COMPILING, block, script, to_the_end=True), script)
