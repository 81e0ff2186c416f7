"""The recommendation and the findings, in words."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import ModuleType

from fsdpbench.reports.pages import best_lines, best_sentence, findings, load_run


def change(run: Path, name: str, **figures: object) -> None:
    """Overwrite figures of the configuration called `name`."""
    (path,) = (path for path in run.glob("*/result.json") if path.parent.name.rpartition("-")[0] == name)
    path.write_text(json.dumps(json.loads(path.read_text()) | figures))


def test_the_lines_name_the_best_its_figures_and_what_mattered(sweep: Path) -> None:
    do, gives, mattered = best_lines(load_run(sweep))
    assert do == "Run impl-fsdp2 (not yet run on several GPUs)."
    assert gives == (
        "Simulated on a100-80gb, it gives 109,764 tokens/s/GPU (MFU 59.8 %, 52.0 of 80.0 GiB); "
        "+0.0 % against where the sweep began."
    )
    assert mattered.startswith("What matters most: fp32 compute instead of bf16: −58 % [−")
    assert "no backward prefetch instead of pre" in mattered, "that of wrap may be none"


def test_a_search_began_nowhere(copy: Path) -> None:
    """Its record lists the best first."""
    assert "against where the sweep began" in best_lines(load_run(copy))[1]
    (copy / "tune.json").write_text("{}")
    assert "the sweep began" not in best_sentence(load_run(copy))


def test_figures_of_a_gpu_are_not_called_simulated(copy: Path) -> None:
    for path in copy.glob("*/result.json"):
        path.write_text(json.dumps(json.loads(path.read_text()) | {"device": "cuda"}))
    assert best_lines(load_run(copy))[1].startswith("It gives ")


def test_out_of_memory_is_explained_by_the_values_it_comes_with(sweep: Path) -> None:
    assert "5 configurations ran out of memory; always with wrap=root and param_dtype=fp32." in findings(
        load_run(sweep)
    )


def test_retries_and_failures_are_said(copy: Path) -> None:
    change(
        copy, "impl-fsdp1-block-none-bf16-2", status="timeout", cause={"message": "300 s passed", "log": None}
    )
    told = findings(load_run(copy))
    assert any(line.startswith("6 configurations had allocator retries, up to 2 a step") for line in told)
    assert "1 configuration gave no figures: 1 timeout; each row says why." in told


def test_nothing_finished_says_how_all_ended(synthetic: ModuleType, tmp_path: Path) -> None:
    run = synthetic.write_sweep(tmp_path / "run", traces=False, limit=3)
    for path, status in zip(sorted(run.glob("*/result.json")), ("oom", "oom", "crash"), strict=True):
        path.write_text(json.dumps(synthetic.failed_result(status)))
    assert best_sentence(load_run(run)) == "None of the 3 configurations finished: 2 out of memory, 1 crash."


def test_one_configuration_alone_is_compared_with_nothing(synthetic: ModuleType, tmp_path: Path) -> None:
    run = synthetic.write_sweep(tmp_path / "run", traces=False, limit=1)
    sentence = best_sentence(load_run(run))
    assert "began" not in sentence
    (row,) = (path.name for path in run.iterdir() if path.is_dir())
    (run / "sweep.toml").write_text(f"points = {json.dumps([row])}")
    assert "began" not in best_sentence(load_run(run))
    assert "mattered" not in sentence


def test_an_empty_run_says_so(tmp_path: Path) -> None:
    (tmp_path / "sweep.toml").write_text('points = ["a-00000001"]\n')
    view = load_run(tmp_path)
    assert best_sentence(view) == "No configuration has finished yet."
    assert findings(view) == ["1 configuration has not run yet; the same command runs the rest."]


def test_settings_that_change_nothing_are_said_to_change_nothing(copy: Path) -> None:
    for path in copy.glob("*/result.json"):
        result = json.loads(path.read_text())
        if result["status"] == "ok":
            path.write_text(json.dumps(result | {"tokens_per_s_per_gpu": 1000.0}))
    assert best_lines(load_run(copy))[2].startswith("No setting changed throughput clearly")


def test_unlike_environments_are_said(copy: Path) -> None:
    assert not any("environments" in line for line in findings(load_run(copy)))
    change(copy, "impl-fsdp1-block-none-bf16-2", environment={"versions": {"torch": "2.11.0"}})
    assert "The configurations come from 2 environments, listed below." in findings(load_run(copy))


def test_the_best_is_compared_with_where_the_space_begins(copy: Path) -> None:
    (other,) = copy.glob("impl-fsdp1-every-2-none-bf16-off-????????")
    (copy / "sweep.toml").unlink()
    assert "began" not in best_sentence(load_run(copy))
    names = [other.name, *(path.name for path in copy.iterdir() if path.is_dir() and path != other)]
    (copy / "sweep.toml").write_text(f"points = {json.dumps(names)}")
    do, gives, _ = best_lines(load_run(copy))
    assert "; +" in gives
    assert gives.endswith(" against where the sweep began.")
    assert do.startswith("Run impl-fsdp2 with wrap block, backward prefetch pre")


def test_chance_is_told_for_measured_figures_only(copy: Path) -> None:
    assert not any("chance" in line or "spread" in line for line in findings(load_run(copy)))
    for path in copy.glob("*/result.json"):
        measured = {
            "step_times_s": [1.0, 1.1],
            "spread": 0.05,
            "warmup_stable": "block-pre" not in path.parent.name,
        }
        path.write_text(json.dumps(json.loads(path.read_text()) | {"device": "cuda", "measured": measured}))
    told = findings(load_run(copy))
    assert "Each configuration ran once: how much runs differ by chance is not known." in told
    assert "6 configurations had not settled after the warm-up." in told
    repeats = {"runs": 5, "failed": 0, "step_time_s": [1.0, 1.02], "spread": 0.013}
    change(copy, "impl-fsdp1-block-pre-bf16-2", repeats=repeats)
    assert any("spread by up to 1.3 % over 5 runs" in line for line in findings(load_run(copy)))


def test_the_first_line_says_compiled(sweep: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(sweep, tmp_path / "run"))
    assert "compiled" not in best_sentence(load_run(run)), "nothing says it"
    for path in run.glob("*/result.json"):
        path.write_text(json.dumps(json.loads(path.read_text()) | {"compiled": True}))
    assert ", compiled (" in best_lines(load_run(run))[0]
