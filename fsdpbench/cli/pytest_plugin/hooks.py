"""Hooks and fixtures for pytest. Every pytest imports this; torch and the bench are imported for a run."""

from collections.abc import Callable, Generator
from functools import partial
from typing import Any

import pytest

_CURRENT, _RUNS = pytest.StashKey[pytest.Item](), pytest.StashKey[list[Any]]()
"""Stash keys: the test that runs or is being set up, and its `SimulatedRun`s."""
_MARK = "fsdp_budget"
_WAY_OUT = "Run its training with simulated_cluster; for a run that tests share: run.check_budget(...)"
Factory = Callable[..., Callable[..., Any]]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that writes baselines."""
    words = "write the baselines of run.check_baseline() instead of comparing with them"
    parser.getgroup("fsdpbench").addoption("--fsdpbench-update", action="store_true", help=words)


def pytest_configure(config: pytest.Config) -> None:
    """Register the mark `fsdp_budget`."""
    bounds = "bounds of every simulated run of the test, by figure (docs/how-to/pytest.md)"
    config.addinivalue_line("markers", f"{_MARK}(peak_gib=, step_ms=, all_gathers=, ...): {bounds}")


@pytest.hookimpl(wrapper=True)
def pytest_pycollect_makeitem() -> Generator[None, object, object]:
    """Report invalid budgets as collection errors."""
    made = yield
    for item in made if isinstance(made, list) else [made]:
        if isinstance(item, pytest.Item) and any(item.iter_markers(_MARK)):
            _limits(item)
    return made


def _limits(item: pytest.Item) -> dict[str, float]:
    """Return the bounds of a test; nearer marks take precedence. Raises `CollectError`."""
    from fsdpbench.base.errors import UsageError
    from fsdpbench.cli.pytest_plugin.judging import checked_limits

    limits: dict[str, float] = {}
    for mark in item.iter_markers(_MARK):
        try:
            limits = checked_limits({**mark.kwargs, **{str(word): word for word in mark.args}}) | limits
        except UsageError as error:
            raise pytest.Collector.CollectError(f"{item.nodeid}: {_MARK}: {error}") from None
    return limits


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Remember the current test: its marks judge its runs, and its baselines have its name."""
    item.config.stash[_CURRENT] = item
    item.stash[_RUNS] = []


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Judge the runs of a passed test by its marks. Fail if there are marks but no run to check."""
    result = yield
    if any(item.iter_markers(_MARK)):
        from fsdpbench.cli.pytest_plugin.judging import over_budget

        limits, runs = _limits(item), item.stash[_RUNS]
        failed = [text for run in runs if (text := over_budget(run.name, run.result, limits))]
        if not runs:
            failed = [f"{_MARK}: this test made no simulated run, so its budget checked nothing. {_WAY_OUT}"]
        if failed:
            pytest.fail("\n\n".join(failed), pytrace=False)
    return result


@pytest.fixture(scope="session")
def simulated_cluster(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Factory:
    """Simulated GPUs: `simulated_cluster(gpus=64, hardware="h100-80gb")(train, batch=4)` runs `train` on them
    in a separate process and returns a `SimulatedRun`. Arguments: nodes, and flags of `run --script` (gpus,
    gpus_per_node, nic_gb_s, software, timeout, steps_by, to_the_end, check_ranks, sanitize)."""
    from fsdpbench.cli.pytest_plugin.runs import simulate

    def run(options: Any, *args: Any, **named: Any) -> Any:
        __tracebackhide__ = True
        made = simulate(
            lambda: pytestconfig.stash[_CURRENT], tmp_path_factory.mktemp, options, *args, **named
        )
        pytestconfig.stash[_CURRENT].stash[_RUNS].append(made)
        return made

    return lambda **options: partial(run, options)


@pytest.fixture(scope="session")
def gloo_ranks(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Factory:
    """Real CPU ranks: `gloo_ranks(2)(gradients, seed=0)` runs `gradients` on two ranks of a gloo group, one
    thread each, and returns their results. timeout: seconds; cuda: map "cuda" and "nccl" to CPU and gloo."""
    from fsdpbench.cli.pytest_plugin.runs import run_on_gloo

    run = partial(run_on_gloo, pytestconfig.rootpath, tmp_path_factory.mktemp)
    return lambda n, timeout=60.0, cuda=False: partial(run, (n, timeout, cuda))
