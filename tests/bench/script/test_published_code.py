"""Published forms of a Llama as a script take as long as the bench's model with settings of their names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[3] / "docs/examples/llama_as_published.py"
SHAPE = "layers=4,d_model=2048,d_ff=5632,heads=16,kv_heads=4,vocab=32000,max_seq=4096"
FORMS = {
    "as they are": ("", ""),
    "torchtitan": ("--norm composed --rotary complex --clip 1", "norm=composed rotary=complex clip=1"),
    "foundation-model-stack": (
        "--norm composed --rotary matrices --checkpoint-first 2",
        "norm=composed rotary=matrices activation_checkpointing=full checkpoint_first=2",
    ),
}


def result_of(fsdpbench: Any, folder: Path, *words: str) -> dict[str, Any]:
    sim = ("--device", "sim", "--hardware", "h100-80gb", "--gpus", "8")
    result: dict[str, Any] = fsdpbench.json("run", "--json", *sim, "-o", str(folder), *words)
    assert result["status"] == "ok", result["cause"]
    return result


@pytest.mark.plain_cases("torchtitan")
@pytest.mark.parametrize("form", FORMS)
def test_script_and_settings_take_the_same_time(fsdpbench: Any, tmp_path: Path, form: str) -> None:
    flags, settings = FORMS[form]
    script = result_of(
        fsdpbench, tmp_path / "script", "--script", str(SCRIPT), "--", "--layers", "4", *flags.split()
    )
    given = [word for setting in settings.split() for word in ("--set", setting)]
    model = ("--model", "llama", "--shape", SHAPE, "--system", "torch-fsdp2", "--batch", "1")
    bench = result_of(fsdpbench, tmp_path / "bench", *model, *given)
    assert script["step_time_s"] == pytest.approx(bench["step_time_s"], rel=0.01)
    for kind in ("all_gather", "reduce_scatter"):
        ours, theirs = script["communication"][kind], bench["communication"][kind]
        assert (ours["count"], ours["bytes"]) == (theirs["count"], theirs["bytes"])
