"""What torch's own FSDP is reported for, as docs/races-in-torch.md says; ours is not."""

from __future__ import annotations

from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[3] / "docs" / "examples" / "races"


KINDS = {
    "writes_before_backward": "race",
    "writes_on_host": "read_before_ready",
    "prefetches_after_evaluation": "read_before_ready",
    "drops_behind_a_hook": "use_after_free",
    "drops_metadata": "use_after_free",
    "scales_on_host": "read_before_ready",
}


@pytest.mark.simulated
@pytest.mark.campaign
def test_what_is_known_of_torch_is_found_there_alone() -> None:
    import program_matrix
    import trained_models

    assert KINDS.keys() == program_matrix.KNOWN.keys()
    for name, kind in KINDS.items():
        case = program_matrix.KNOWN[name][0]
        counts = trained_models.run(case)["counts"]
        assert counts.pop(kind) > 0, name
        assert not any(counts.values()), name
        ours = trained_models.Case(case.system.replace("torch", "impl"), case.program, case.arguments)
        if ours in program_matrix.REFUSED:
            continue
        assert not any(trained_models.run(ours)["counts"].values()), name


@pytest.mark.simulated
@pytest.mark.campaign
def test_gradients_that_belong_to_no_output_are_refused() -> None:
    import program_matrix
    import trained_models

    for case in program_matrix.REFUSED:
        with pytest.raises(RuntimeError, match=r"between (its )?forward and (its )?backward"):
            trained_models.run(case)


@pytest.mark.campaign
@pytest.mark.simulated
def test_every_program_that_is_known_is_found() -> None:
    import program_matrix
    import trained_models

    for cases in program_matrix.KNOWN.values():
        for case in cases:
            assert trained_models.run(case)["findings"], case.name


MENDS = {
    "write_before_backward.py": ("    # Missing: streams of gathers", "    torch.cuda.synchronize()  #"),
    "write_offloaded.py": ("# Missing: torch.cuda.synchronize()", "torch.cuda.synchronize()"),
    "hook_on_a_stream.py": (
        "lambda gradient: gradient.mul_(0.5)",
        "lambda gradient: (gradient.record_stream(stream), gradient.mul_(0.5))",
    ),
}


@pytest.mark.campaign
@pytest.mark.parametrize("name", MENDS)
def test_examples_race_until_they_are_mended(name: str, tmp_path: Path) -> None:
    import subprocess
    import sys

    whole = (EXAMPLES / name).read_text(encoding="utf-8")
    before, after = MENDS[name]
    assert before in whole
    for index, text in enumerate((whole, whole.replace(before, after))):
        script = tmp_path / f"script_{index}.py"
        script.write_text(text, encoding="utf-8")
        command = f"run --script {script} --gpus 8 --sanitize -o {tmp_path / str(index)}".split()
        ended = subprocess.run(
            [sys.executable, "-m", "fsdpbench", *command],
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        assert ended.returncode == (4, 0)[index], ended.stderr
        assert ("no race in" in ended.stderr) == bool(index)
