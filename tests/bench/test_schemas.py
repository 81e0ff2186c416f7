"""What commands print with --json is described by the published schemas: real output, key by key."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
TINY = ("--model", "gpt-tiny", "--gpus", "8", "--device", "sim")
SCRIPT = str(ROOT / "docs" / "examples" / "train_fsdp2.py")
SPREAD = ("--soak", "3", "--seq-lengths", "lognormal:60,0.6")
COMMANDS = {
    "result": (
        ("run", *TINY, "--batch", "2", "-o", "one"),
        ("run", *TINY, "--batch", "2", "--backward-prefetch", "none", "-o", "other"),
        ("run", *TINY, "--batch", "100000"),
        ("run", *TINY, "--batch", "2", *SPREAD),
        ("run", *TINY, "--batch", "2", "--sanitize"),
        ("run", "--script", SCRIPT, "--gpus", "8", "--sanitize", "--check-ranks"),
        ("run", "--model", "gpt-tiny", "--gpus", "2", "--device", "cpu", "--batch", "2"),
    ),
    "sweep": (("sweep", *TINY, "--batch", "2,4", "--system", "impl-fsdp2,torch-fsdp2", "-o", "swept"),),
    "comparison": (("compare", "one", "one"), ("compare", "one", "other")),
    "baseline": (("baseline", "create", "swept", "baseline.json"),),
    "explain": (("explain", str(ROOT / "docs/examples/oom.txt")), ("explain", *TINY, "--batch", "100000")),
    "expect": (("expect", *TINY, "--measured", "1s"), ("expect", *TINY, "--measured", "5%MFU")),
    "prove": (("prove", SCRIPT, "--gpus", "2", "--only", "races,speed"),),
    "upgrade": (
        ("upgrade", SCRIPT, "--python-from", sys.executable, "--python-to", sys.executable, "--gpus", "2"),
    ),
    "plan": (("plan", *TINY, "--batch", "2", "--tokens", "1B", "--price", "2"), ("plan", *TINY)),
    "watch": (("watch", "swept"),),
    "tune": (("tune", *TINY, "--batch", "2,4"),),
    "doctor": (("doctor",),),
    "atlas": (("atlas", "build", "--models", "llama-tiny", "--hardware", "a100-80gb", "--gpus", "8"),),
    "fsdp-paper": (("reproduce", "fsdp-paper", "--only", "2a,104509"),),
}


def test_every_schema_is_named_on_the_page_and_the_other_way_round() -> None:
    page = (ROOT / "docs" / "reference" / "schemas.md").read_text()
    named = set(re.findall(r"schemas/([a-z-]+)\.schema\.json\)", page))
    assert named == {path.name.split(".")[0] for path in (ROOT / "docs/reference/schemas").iterdir()}
    assert set(COMMANDS) | {"analysis"} == named  # analysis: test_analyze_command.py


def test_the_committed_baseline_is_described(matches_schema: Callable[[str, Any], None]) -> None:
    matches_schema("baseline", json.loads((ROOT / "ci" / "baseline.json").read_text()))


@pytest.mark.campaign
@pytest.mark.timeout(900)
def test_real_output_is_described(
    fsdpbench: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    matches_schema: Callable[[str, Any], None],
) -> None:
    monkeypatch.chdir(tmp_path)
    for schema, commands in COMMANDS.items():
        for words in commands:
            done = fsdpbench(*words, "--json")
            content = json.loads(done.stdout)
            matches_schema(schema, content["baseline"] if schema == "baseline" else content)
            for result in content["results"] if schema == "sweep" else ():
                matches_schema("result", {key: result[key] for key in result.keys() - {"name"}})
