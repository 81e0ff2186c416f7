"""The plugin in pytest sessions of its own: budgets, baselines, failures, and that it is light."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed.fsdp  # noqa: F401 - before sessions in this process, which forget what they import

import fsdpbench.cli.pytest_plugin.runs
import fsdpbench.engine.devices.sim  # noqa: F401
from fsdpbench.answers.check.records.baseline import torch_minor

pytest_plugins = ["pytester"]

EXAMPLE = Path(__file__).parents[3] / "docs" / "examples" / "ci-repo"
TRAINING = """
import os, time
import pytest, torch, torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

def train(layers=2, reshard=None, steps=7):
    dist.init_process_group("nccl")
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(layers))).cuda()
    for layer in model:
        fully_shard(layer, reshard_after_forward=reshard)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(steps):
        model(torch.randn(8, 256, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    print("trained", os.environ.get("OF_THE_TEST"))
"""


def session(pytester: pytest.Pytester, tests: str, *words: str) -> pytest.RunResult:
    """A session in this process, whose imports and fork server it shares."""
    pytester.makepyfile(test_it=TRAINING + tests)
    return pytester.runpytest_inprocess("-p", "no:cacheprovider", *words)


def test_a_run_is_judged_by_marks_and_baselines(pytester: pytest.Pytester) -> None:
    result = session(
        pytester,
        """
@pytest.mark.fsdp_budget(all_gathers=2, peak_gib=1)
def test_over(simulated_cluster, pytestconfig, request):
    run = simulated_cluster(gpus=16, nodes=4)(train)
    assert (run.all_gathers, run.reduce_scatters, run.retries) == (4, 2, 0)
    assert run.step_ms > run.exposed_ms > 0 and run.trace.exists()
    with pytest.raises(AssertionError, match="there is no baseline yet.*--fsdpbench-update"):
        run.check_baseline()
    pytestconfig.option.fsdpbench_update = True
    run.check_baseline()
    file = request.path.with_name("baselines") / "test_it.test_over.json"
    before = file.stat().st_mtime_ns
    run.check_baseline()
    assert file.stat().st_mtime_ns == before, "nothing but the date has changed"
    pytestconfig.option.fsdpbench_update = False
    run.check_baseline()
    kernels = f'"kernels": {run.kernels:.0f}'
    assert kernels in file.read_text()
    file.write_text(file.read_text().replace(kernels, f'"kernels": {run.kernels - 1:.0f}')
                    .replace("calls=2, ", "calls=1, "))
    with pytest.raises(AssertionError) as worse:
        run.check_baseline()
    print(worse.value)
""",
    )
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            "over its budget: 1 of 2 figures*",
            "cause: 2 more all-gathers a step*",
            "*worse  all_gather_count  2  4  +100.00%",
            "  test_it.py:10: `fully_shard(layer, reshard_after_forward=reshard)`: calls=2*",
            "worse than *test_it.test_over.json; the baseline, then the run:",
            "cause: 1 more kernels a step *",
            "what shapes a step: test_it.py:10: `fully_shard(layer, *)`: calls=1, * -> calls=2, *",
            "if the change is meant: pytest --fsdpbench-update 'test_it.py::test_over'",
        ]
    )


def test_a_failure_has_its_type_message_and_line(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OF_THE_TEST", "seen")
    result = session(
        pytester,
        """
class OwnError(Exception):
    pass

def fail(text):
    print("before", os.environ["OF_THE_TEST"])
    raise OwnError(text)

def test_fails(simulated_cluster):
    simulated_cluster(gpus=8)(fail, "a reason")

def ranks(offset):
    dist.init_process_group("gloo")  # the group exists: let pass
    assert torch.accelerator.current_accelerator() is None or torch.cuda.is_available()
    total = torch.tensor(dist.get_rank() + offset)
    dist.all_reduce(total)
    return dist.get_rank(), total

def test_ranks(gloo_ranks):
    (first, total), (second, same) = gloo_ranks(2)(ranks, offset=1)
    assert (first, second) == (0, 1) and total.item() == same.item() == 3
""",
    )
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(
        [
            '>       simulated_cluster(gpus=8)(fail, "a reason")',
            "E  *FailedRunError: rank 0: OwnError: a reason, at test_it.py:*: raise OwnError(text)",
            "E * test_it.fail on 8 simulated GPUs (a100-80gb); logs: *",
            "before seen",
        ]
    )
    assert "runs.py" not in "".join(result.outlines), "the traceback ends at the test's line"


def test_what_cannot_be_is_refused_before_anything_runs(pytester: pytest.Pytester) -> None:
    result = session(
        pytester,
        """
def test_local(simulated_cluster):
    def inside(): pass
    simulated_cluster(gpus=8)(inside)

@pytest.mark.parametrize("options", [{"gpu": 8}, {"gpus": 12}, {"gpus": 8, "nodes": 3}, {"hardware": "h1"},
                                     {"timeout": "soon"}, {"gpus": 8, "check_ranks": 9}], ids=str)
def test_option(simulated_cluster, options):
    simulated_cluster(**options)(train)

@pytest.mark.fsdp_budget(peak_gib=1)
def test_without_a_run():
    pass

@pytest.mark.parametrize("n", [0, 65, "2", True])
def test_number(gloo_ranks, n):
    gloo_ranks(n)(train)
""",
    )
    result.assert_outcomes(failed=12)
    result.stdout.fnmatch_lines(
        [
            "E  *UsageError: test_local.<locals>.inside cannot be handed to a process of its own *",
            "E  *UsageError: unknown argument of simulated_cluster 'gpu'. Did you mean gpus*",
            "E  *UsageError: gpus 12 does not fill nodes of 8 GPUs: use 8 or 16, or another gpus_per_node",
            "E  *UsageError: Invalid value for 'gpus_per_node': '8 / 3': not a whole number*",
            "E  *UsageError: unknown hardware 'h1'*",
            "E  *UsageError: Invalid value for 'timeout': 'soon' is not a finite number.",
            "E  *UsageError: check_ranks 9: from 2 to the 8 ranks that there are",
            "fsdp_budget: this test made no simulated run, so its budget checked nothing.*",
            "E  *UsageError: gloo_ranks(0): a whole number from 1 to 64",
        ]
    )


CANNOT_BE = {
    "peak_gb=1": "unknown figure 'peak_gb'. Did you mean peak_gib*",
    "": "a budget without a figure checks nothing; write fsdp_budget(peak_gib=40)",
    "40": "unknown figure '40'*",
    "peak_gib=-1": "peak_gib=-1 can be no bound: negative",
    "overlap=1.5": "overlap=1.5 can be no bound: above 1, which cannot be",
    "step_ms=0": "step_ms=0 can be no bound: impossibly small",
    "kernels=True": "kernels=True can be no bound: no number",
    "kernels=None": "kernels=None can be no bound: no number",
    "peak_gib=1, peak_reserved_bytes=5": "*=5 can be no bound: peak_reserved_bytes has another bound",
    "limiter_waits=1": "unknown figure 'limiter_waits'*",
}


def test_a_budget_that_cannot_be_is_an_error_of_collection(pytester: pytest.Pytester) -> None:
    for number, mark in enumerate(CANNOT_BE):
        text = f"import pytest\n@pytest.mark.fsdp_budget({mark})\ndef test(): pass"
        (pytester.path / f"test_{number}.py").write_text(text)
    result = pytester.runpytest_inprocess("-p", "no:cacheprovider")
    result.assert_outcomes(errors=len(CANNOT_BE))
    lines = [
        f"test_{number}.py::test: fsdp_budget: {words}" for number, words in enumerate(CANNOT_BE.values())
    ]
    result.stdout.fnmatch_lines(lines)


def test_the_example_passes_and_its_baseline_is_of_today(pytester: pytest.Pytester) -> None:
    shutil.copytree(EXAMPLE, pytester.path / "ci-repo")
    os.chdir(pytester.path / "ci-repo")
    (baseline,) = Path("tests", "baselines").iterdir()
    known = torch_minor() in json.loads(baseline.read_text())["sets"]
    result = pytester.runpytest_inprocess("-p", "no:cacheprovider", *["--fsdpbench-update"][known:])
    result.assert_outcomes(passed=2)


WITHOUT_TORCH = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise ModuleNotFoundError("No module named 'torch'", name="torch")
sys.meta_path.insert(0, Refuse())
"""
"""A `sitecustomize`, for all processes: points run in others than the session."""
SEEN = """
import sys
import pytest
class Seen:
    def pytest_collection_finish(self):
        heavy = {"torch", "numpy", "pandas", "msgspec", "click", "rich", "jinja2", "scipy", "plotly"}
        names = {name.partition(".")[0] for name in sys.modules}
        ours = [name for name in sys.modules if name.startswith("fsdpbench")]
        print("IMPORTED", sorted(names & heavy), *sorted(ours))
sys.exit(pytest.main(sys.argv[1:], plugins=[Seen()]))
"""


def test_without_torch_the_plugin_is_silent_and_light(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        test_it="def test(): pass\n\ndef test_asks(simulated_cluster): simulated_cluster(gpus=8)(test)"
    )
    pytester.makepyfile(sitecustomize=WITHOUT_TORCH)
    environment = {**os.environ, "PYTHONPATH": str(pytester.path)}
    words = ["-p", "no:cacheprovider", "--strict-markers", "-W", "error", "-s"]
    words += [f"-pno:{name}" for name in ("benchmark", "hypothesispytest", "anyio")]
    result = subprocess.run(
        [sys.executable, "-c", SEEN, *words], capture_output=True, text=True, timeout=60, env=environment
    )
    assert "1 failed, 1 passed" in result.stdout, result.stdout + result.stderr
    assert "No module named 'torch'" in result.stdout
    (imported,) = [line for line in result.stdout.splitlines() if line.startswith("IMPORTED")]
    ours = ("", ".base", ".base.interruption", ".cli", ".cli.pytest_plugin", ".cli.pytest_plugin.hooks")
    assert imported == " ".join(["IMPORTED []", *(f"fsdpbench{name}" for name in ours)])


@pytest.mark.campaign
def test_workers_of_xdist_write_whole_baselines(pytester: pytest.Pytester) -> None:
    tests = """
@pytest.mark.parametrize("layers", [2, 3])
def test_layers(simulated_cluster, layers):
    simulated_cluster(gpus=8)(train, layers=layers).check_baseline()
"""
    pytester.makepyfile(test_it=TRAINING + tests)
    words = ("-p", "no:cacheprovider", "-n", "2")
    pytester.runpytest_subprocess(*words, "--fsdpbench-update").assert_outcomes(passed=2)
    assert len([json.loads(path.read_text()) for path in Path("baselines").iterdir()]) == 2
    pytester.makepyfile(test_it=(TRAINING + tests).replace("reshard=None", "reshard=False"))
    result = pytester.runpytest_subprocess(*words)
    result.assert_outcomes(failed=2)
    result.stdout.fnmatch_lines(
        ["E * what shapes a step: test_it.py:10: *calls=2, reshard_after_forward=false*"]
    )


@pytest.mark.campaign
def test_what_hangs_is_ended_and_named(pytester: pytest.Pytester) -> None:
    result = session(
        pytester,
        """
def alone(rank):
    if dist.get_rank() == rank:
        dist.barrier()
    return os.getpid()

def test_ranks(gloo_ranks):
    gloo_ranks(2, timeout=4)(alone, 1)

def sleep():
    time.sleep(3600)

def test_sleeps(simulated_cluster):
    simulated_cluster(gpus=8, timeout=1)(sleep)
""",
    )
    result.assert_outcomes(failed=2)
    result.stdout.fnmatch_lines(
        [
            "E  *timeout: ran past 4 s: *rank 1 stood in barrier (*.py:*), from alone (test_it.py:*)",
            "E *ranks that had returned: 0",
            "E  *timeout: ran past 1 s: stood in sleep (test_it.py:*)",
        ]
    )
