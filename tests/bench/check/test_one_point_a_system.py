"""Sweeps of `ci/` that compare systems have one configuration of each, whatever the default preset varies."""

from __future__ import annotations

import importlib.util
import re
from collections import Counter
from pathlib import Path
from typing import Any

CI = Path(__file__).parents[3] / "ci"


def counted(fsdpbench: Any, *words: str) -> dict[str, int]:
    """The configurations of each system that these words of a sweep ask for."""
    points = fsdpbench.json("plan", *words, "--no-predict", "--json")["points"]
    return dict(Counter(point["config"]["system"] for point in points))


def test_cpu_ranks(fsdpbench: Any) -> None:
    spec = importlib.util.spec_from_file_location("measure_cpu_systems", CI / "measure_cpu_systems.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    _, *words = script.SWEEP.split()
    for shape in script.MODELS.values():
        more = ["--shape", shape, "--system", ",".join(script.SYSTEMS), "--seq", "128", "--batch", "4"]
        assert counted(fsdpbench, *words, *more) == dict.fromkeys(script.SYSTEMS, 1)


def test_a_gpu(fsdpbench: Any) -> None:
    text = (CI / "gpu.sh").read_text()
    fixed = " ".join(re.findall(r"^fixed\+?=\((.*)\)$", text, re.MULTILINE)).split()
    words = ["--model", "gpt-tiny", "--device", "sim", "--gpus", "2", "--batch", "2", *fixed]
    counts = counted(fsdpbench, *words)
    assert len(counts) == 4
    assert set(counts.values()) == {1}
