"""Functions and scripts of a test on ranks in processes of their own, and what came of them."""

from __future__ import annotations

import os
import pickle
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from fsdpbench.base.configuration.config import Config
    from fsdpbench.launch.pool import PointPool
    from fsdpbench.reports.result import Result
    from fsdpbench.sweep.trials import Trial

__tracebackhide__ = True  # a test's failure ends at its own line
_MOST_RANKS = 64
_OF_LAUNCHER = re.compile(r"E\d{4} .*torch/distributed/elastic/")
_OPTIONS = (
    *("gpus", "hardware", "gpus_per_node", "nodes", "nic_gb_s", "software", "timeout", "steps_by"),
    *("to_the_end", "check_ranks", "sanitize"),
)


class FailedRunError(Exception):
    """A function or script that failed. status: `error`, `oom`, `timeout`, `crash`, `race`, `rank_mismatch`."""

    def __init__(self, text: str, status: str, folder: Path):
        super().__init__(text)
        self.status, self.folder = status, folder


@dataclass(frozen=True)
class SimulatedRun:
    """A run on simulated GPUs. Counts and times are of a mean step on one GPU; NaN: not known.

    peak_gib: reserved memory. exposed_ms: communication that no computation hides; overlap: the share that
    it hides. trace: for `fsdpbench analyze` and Perfetto. folder: of its logs and its `result.json`.
    """

    name: str
    step_ms: float
    peak_gib: float
    all_gathers: float
    reduce_scatters: float
    all_reduces: float
    copies: float
    kernels: float
    retries: float
    exposed_ms: float
    overlap: float
    trace: Path | None
    folder: Path
    result: Result = field(repr=False)
    pytest: pytest.Config = field(repr=False, compare=False)

    def check_budget(self, **limits: object) -> None:
        """Raise `AssertionError` with figures and cause where the run exceeds a limit."""
        from fsdpbench.cli.pytest_plugin.budgets import checked_limits, over_budget

        if text := over_budget(self.name, self.result, checked_limits(limits)):
            raise AssertionError(text)

    def check_baseline(self, name: str = "", allow: Mapping[str, float] | None = None) -> None:
        """Compare with the committed figures beside the test module, as `fsdpbench check` does. Raise
        `AssertionError` with figures and cause where one is worse, or cannot be judged.

        name: of the file, if a test has several. allow: relative changes that are none, by figure.
        """
        from fsdpbench.cli.pytest_plugin.baselines import compare_with_baseline

        updates = bool(self.pytest.getoption("fsdpbench_update"))
        item = self.pytest.stash[CURRENT]
        if text := compare_with_baseline(self.name, self.result, item, name, allow or {}, updates):
            raise AssertionError(text)


CURRENT = pytest.StashKey[pytest.Item]()
"""The test that runs, or for which a fixture is set up."""
RUNS = pytest.StashKey[list[SimulatedRun]]()


def simulate(
    pytest_config: pytest.Config,
    folder: Path,
    options: Mapping[str, object],
    program: Callable[..., object] | str | Path,
    *args: Any,
    **named: Any,
) -> SimulatedRun:
    """Run a function with its arguments, or a script with its words, as rank 0 of simulated GPUs. `folder`:
    empty. Raises `FailedRunError`, or `UsageError` for a cluster that cannot be."""
    from fsdpbench.cli.pytest_plugin.budgets import SHORT, figure_of
    from fsdpbench.engine.results.store import Store, point_folder_name
    from fsdpbench.sweep.runner import run_sweep
    from fsdpbench.sweep.trials import Progress

    config = _config(program, args, named, folder, pytest_config.rootpath, options)
    store = Store.open_or_create(folder / "run")

    def run(pool: PointPool) -> Trial:
        store.write_space({"schema": 1, "model": config.model, "system": [config.system]}, [config])
        return run_sweep(store, [config], Progress(), jobs=1, again=True, pool=pool).ran[0]

    with store.locked():
        result = _uninterrupted(run).result
    place = store.folder / point_folder_name(config)
    _print_output(place)
    if result.status != "ok":
        raise _failed(config, result, place, f"simulated GPUs ({config.hardware})")
    figures = {each: figure_of(result, each) for each in SHORT if each in SimulatedRun.__dataclass_fields__}
    trace = place / str(result.traces[0]) if result.traces else None
    made = SimulatedRun(
        config.name, **figures, trace=trace, folder=place, result=result, pytest=pytest_config
    )
    pytest_config.stash[CURRENT].stash[RUNS].append(made)
    return made


def run_on_gloo(
    root: Path, folder: Path, count: int, timeout: float, cuda: bool, function: Any, *args: Any, **named: Any
) -> list[Any]:
    """Run a function of the project at `root` on `count` CPU ranks; return their values. `folder`: empty.
    Raises `FailedRunError`, or `UsageError`."""
    from fsdpbench.base.errors import UsageError
    from fsdpbench.sweep.trials import run

    if type(count) is not int or not 1 <= count <= _MOST_RANKS:
        raise UsageError(f"gloo_ranks({count!r}): a whole number from 1 to {_MOST_RANKS}")
    config = _config(function, args, named, folder, root, {"gpus": 1, "timeout": timeout})
    if config.script is None or config.script.function is None:
        raise UsageError(f"gloo_ranks runs functions; for the script {function}: fsdpbench prove")
    source = replace(config.script, function=replace(config.script.function, maps_cuda=cuda))
    config = replace(config, device="cpu", gpus=count, gpus_per_node=count, script=source)
    place = folder / "ranks"
    place.mkdir()

    def run_ranks(pool: PointPool) -> Trial:
        with pool:
            return next(iter(run([(config, place)], pool)))

    result = _uninterrupted(run_ranks).result
    _print_output(place)
    values = {rank: Path(f"{config.script.function.call}.{rank}") for rank in range(count)}
    left = [rank for rank, path in values.items() if path.exists()]
    if result.status != "ok" or len(left) < count:
        had = f"; ranks that had returned: {', '.join(map(str, left)) or 'none'}"
        raise _failed(config, result, place, f"CPU ranks over gloo{had}")
    return [pickle.loads(path.read_bytes()) for path in values.values()]


def _uninterrupted(run: Callable[[PointPool], Trial]) -> Trial:
    """Run in a pool of one with this process's environment; an interruption ends it, not pytest."""
    from fsdpbench.base import interruption
    from fsdpbench.launch.pool import PointPool

    pool = PointPool(1)
    pool.environment = dict(os.environ)
    try:
        return run(pool)
    except interruption.Interrupted:
        interruption.forget()
        raise KeyboardInterrupt from None


def _config(
    program: Any, args: Sequence[Any], named: Mapping[str, Any], folder: Path, root: Path, options: Any
) -> Config:
    """Return what runs: a script by its path, or a function of the project at `root`, whose arguments are
    written into `folder`. Raises `UsageError`."""
    import click

    from fsdpbench.base.configuration.script_source import FunctionSource
    from fsdpbench.base.errors import BenchError, UsageError
    from fsdpbench.base.files.whole_files import write_whole
    from fsdpbench.cli.commands.run import command
    from fsdpbench.cli.requests.script_request import script_config

    is_script = isinstance(program, str | Path)
    if is_script and (named or not all(isinstance(word, str) for word in args)):
        raise UsageError(f"{program}: the arguments of a script are texts, as on its command line")
    module, name, path = ("", "", str(program)) if is_script else _found_again(program)
    words = [*_flags(options), f"--script={path}", "--", *(args if is_script else ())]
    try:
        asked = command.make_context("simulated_cluster", words).params
        config = script_config(asked, ())
    except (BenchError, click.UsageError) as error:
        text = error.format_message() if isinstance(error, click.UsageError) else str(error)
        raise UsageError(re.sub(r"--([a-z-]+)", lambda flag: flag[1].replace("-", "_"), text)) from None
    assert config is not None
    assert config.script is not None
    config = replace(config, sanitize=bool(asked["sanitize"]))
    if is_script:
        return config
    call = folder / "call.pickle"
    try:
        write_whole(call, pickle.dumps((args, named)))
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise UsageError(f"the arguments of {name} cannot be handed to its process: {error}") from None
    source = replace(config.script, function=FunctionSource(name, module, str(call), str(root)))
    return replace(config, script=source, model=source.name)


def _found_again(function: object) -> tuple[str, str, str]:
    """Return module, name and file by which another process finds a function. Raises `UsageError` for one
    that none finds."""
    from fsdpbench.base.errors import UsageError

    name, module = getattr(function, "__qualname__", ""), str(getattr(function, "__module__", ""))
    if not name or not callable(function):
        raise UsageError(f"{function!r} is neither a function nor the path of a script")
    found: object = sys.modules.get(module)
    path = getattr(found, "__file__", None)
    for part in name.split("."):
        found = getattr(found, part, None)
    if found is function and path is not None:
        return module, name, os.path.realpath(path)
    outer, local, _ = name.partition(".<locals>.")
    why = f"it is defined inside {outer}()" if local else f"{module} has no function of that name"
    raise UsageError(
        f"{name} cannot run in a process of its own: {why}. Define a function at the top of a module, and "
        "hand over as arguments what it needs: cluster(train, batch=4)"
    )


def _flags(options: Mapping[str, object]) -> list[str]:
    """Return options as words of the command line. Raises `UsageError`."""
    from fsdpbench.base.errors import UsageError, unknown

    for name in options.keys() - set(_OPTIONS):
        raise unknown("argument of simulated_cluster", name, _OPTIONS, "pytest --fixtures")
    given = {name: value for name, value in options.items() if value is not None and value is not False}
    gpus, nodes = given.get("gpus"), given.pop("nodes", None)
    if nodes is not None:
        if type(nodes) is not int or type(gpus) is not int or nodes < 1 or gpus % nodes:
            raise UsageError(f"simulated_cluster: gpus={gpus!r} cannot be on nodes={nodes!r} of equal size")
        given.setdefault("gpus_per_node", gpus // nodes)
    flags = {f"--{name.replace('_', '-')}": value for name, value in given.items()}
    return [flag if value is True else f"{flag}={value}" for flag, value in flags.items()]


def _print_output(folder: Path) -> None:
    """Print what the processes printed, for pytest to capture."""
    for name, stream in (("stdout.log", sys.stdout), ("stderr.log", sys.stderr)):
        path = folder / name
        lines = path.read_text("utf-8", errors="replace").splitlines(True) if path.exists() else []
        stream.writelines(line for line in lines if not _OF_LAUNCHER.match(line))


def _failed(config: Config, result: Result, folder: Path, where: str) -> FailedRunError:
    cause = f"{result.message}" if result.status == "error" else f"{result.status}: {result.message}"
    text = f"{cause}\n  {config.model} on {config.gpus} {where}\n  logs: {folder}"
    return FailedRunError(text, str(result.status), folder)
