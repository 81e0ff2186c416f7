"""Systems on one workload from the command line: the docs' own plugin, and one that computes wrongly."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

DOCS = Path(__file__).parents[3] / "docs" / "systems.md"
SHAPE = "layers=2,d_model=32,heads=2,vocab=64,max_seq=16"
MODEL = ("--model", "gpt", "--shape", SHAPE, "--gpus", "2", "--param-dtype", "fp32", "--batch", "2")
WRONG = """
from fsdpbench.systems import NO_SHARDING, System
class Unreduced(System):
    name = "unreduced"
    summary = "every rank trains on its own: fast, and wrong"
    shards = False
    absent = NO_SHARDING
    def wrap(self, context):
        return context.build_model()
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory, package: Any) -> Path:
    """The example of the docs as it stands there, installed, and a system that forgets to reduce."""
    text = DOCS.read_text()
    example = re.search(r"```python\n(.*?)```", text, re.DOTALL)
    entry = re.search(r"^(ddp-big-buckets) = \"(.*)\"$", text, re.MULTILINE)
    assert example is not None
    assert entry is not None
    code = [line for line in example[1].splitlines() if line.strip() and not line.startswith("#")]
    assert len(code) <= 20
    modules = {"my_systems.py": example[1], "wrong_systems.py": WRONG}
    entries = {entry[1]: entry[2], "unreduced": "wrong_systems:Unreduced"}
    folder: Path = package(tmp_path_factory.mktemp("plugin"), modules, entries)
    return folder


@pytest.fixture
def swept(site: Path, fsdpbench: Any, forgotten: None, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Sweeps where `site` is on the path: what they say."""
    monkeypatch.syspath_prepend(str(site))
    for name in ("my_systems", "wrong_systems"):
        monkeypatch.delitem(sys.modules, name, raising=False)

    def sweep(folder: Path, *words: str) -> str:
        done = fsdpbench("sweep", *MODEL, *words, "-o", str(folder))
        assert done.returncode == 0, done.stderr
        printed: str = done.stdout
        return printed

    return sweep


@pytest.mark.campaign
def test_on_real_ranks_ratios_have_a_spread_and_a_wrong_system_is_flagged(
    swept: Callable[..., str], tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    systems = ("--system", "torch-ddp,ddp-big-buckets,unreduced", "--repeat", "2")
    printed = swept(folder, *systems, "--device", "cpu")
    assert "Throughput against torch-ddp, each system's best on the same work, over 2 rounds:" in printed
    lines = {line.split()[0]: line for line in printed.splitlines() if re.search(r"\d\.\d\dx", line)}
    assert set(lines) == {"torch-ddp", "ddp-big-buckets", "unreduced"}
    assert "1.00x" in lines["torch-ddp"]
    assert re.search(r"\(\d+\.\d\d to \d+\.\d\d\)", lines["ddp-big-buckets"])
    assert "losses equal" in lines["ddp-big-buckets"]
    assert "losses differ" in lines["unreduced"]
    assert "unreduced computes something else than torch-ddp: its loss in step " in printed
    assert "ddp-big-buckets computes something else" not in printed
    assert "unreduced computes something else" in (folder / "report.html").read_text()
    results = [json.loads(path.read_text()) for path in folder.glob("*-????????/result.json")]
    losses = {result["config"]["system"]: result["loss"] for result in results}
    steps = min(map(len, losses.values()))
    assert losses["ddp-big-buckets"][:steps] == pytest.approx(losses["torch-ddp"][:steps], rel=1e-5)
    assert losses["unreduced"][0] == pytest.approx(losses["torch-ddp"][0], rel=1e-5)


def test_the_same_plugin_runs_on_simulated_gpus(swept: Callable[..., str], tmp_path: Path) -> None:
    printed = swept(
        tmp_path / "run", "--system", "torch-ddp,ddp-big-buckets", "--device", "sim", "--compile", "false"
    )
    assert "Throughput against torch-ddp, each system's best on the same work:" in printed
    assert re.search(r"^ddp-big-buckets +\d\.\d\dx", printed, re.MULTILINE)
    assert "losses" not in printed, "simulated tensors have no values"
