"""`ci/measure_cpu_systems.py` reads each run of a repeated sweep once."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

SCRIPT = Path(__file__).parents[3] / "ci" / "measure_cpu_systems.py"


def write(folder: Path, system: str, step: float, **more: Any) -> None:
    folder.mkdir(parents=True)
    result = {"status": "ok", "step_time_s": step, "config": {"system": system}, **more}
    (folder / "result.json").write_text(json.dumps(result))


def test_the_runs_of_a_repeated_sweep_are_counted_once(tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("measure_cpu_systems", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    # As the store leaves them: the first run's result is the whole one, further runs lie beside it.
    write(tmp_path / "ours-0123abcd", "ours", 1.5, repeats={"step_time_s": [1.0, 2.0]})
    write(tmp_path / "ours-0123abcd.run2", "ours", 2.0)
    write(tmp_path / "theirs-89abcdef", "theirs", 3.0)
    write(tmp_path / "failed-89abcdef", "failed", 0.0, status="crash")
    assert script.read_step_times(tmp_path) == {"ours": [1.0, 2.0], "theirs": [3.0]}
