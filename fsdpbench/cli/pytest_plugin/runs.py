"""Functions and scripts of a test on ranks in processes of their own, and what came of them."""

from __future__ import annotations

import os
import pickle
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from fsdpbench.base.configuration.config import Config
    from fsdpbench.base.configuration.script_source import FunctionFailure, FunctionSource, ScriptSource
    from fsdpbench.base.errors import BenchError, UsageError
    from fsdpbench.launch.pool import PointPool
    from fsdpbench.reports.result import Result
    from fsdpbench.sweep.trials import Trial

__tracebackhide__ = True  # a test's failure ends at its own line
_MOST_RANKS = 64
_OF_LAUNCHER = re.compile(r"E\d{4} .*torch/distributed/elastic/")
_OPTIONS = (
    *("gpus", "hardware", "gpus_per_node", "nodes", "software", "timeout", "steps_by", "to_the_end"),
    *("check_ranks", "sanitize"),
)


class FailedRunError(Exception):
    """A function or a script that did not come to its end.

    status: `error`, `oom`, `timeout`, `crash`, `race` or `rank_mismatch`. kind: the name of the exception's
    type, empty where it raised none. place: the last of its own lines, `train.py:12`. folder: of its logs.
    rank: the one that failed.
    """

    def __init__(self, text: str, status: str, folder: Path, failure: FunctionFailure | None, rank: int):
        super().__init__(text)
        self.status, self.folder, self.rank = status, folder, rank
        self.kind = failure.kind if failure else ""
        self.message = failure.message if failure else text
        self.place = _place(failure) if failure else ""


@dataclass(frozen=True)
class State:
    """The plugin in one pytest process. `new_folder()` makes an empty one."""

    config: pytest.Config
    new_folder: Callable[[], Path]

    @property
    def item(self) -> pytest.Item:
        """The test that runs, or for which a fixture is set up."""
        return self.config.stash[CURRENT]

    @property
    def updates(self) -> bool:
        """Whether baselines are written."""
        return bool(self.config.getoption("fsdpbench_update"))


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
    state: State = field(repr=False, compare=False)

    def figure(self, name: str) -> float:
        """Return a figure by its name in a budget, in the unit of that name; NaN: not known."""
        from fsdpbench.cli.pytest_plugin.budgets import figure_of

        return figure_of(self.result, name)

    def check_budget(self, **limits: object) -> None:
        """Raise `AssertionError` with figures and cause where the run exceeds a limit."""
        from fsdpbench.cli.pytest_plugin.budgets import checked_limits, over_budget

        text = over_budget(self.name, self.result, checked_limits(limits))
        if text:
            raise AssertionError(text)

    def check_baseline(self, name: str = "", allow: Mapping[str, float] | None = None) -> None:
        """Compare with the committed figures beside the test module, as `fsdpbench check` does. Raise
        `AssertionError` with figures and cause where one is worse, or cannot be judged.

        name: of the file, if a test has several. allow: relative changes that are none, by figure.
        """
        from fsdpbench.cli.pytest_plugin.baselines import compare_with_baseline

        text = compare_with_baseline(self, name, allow or {})
        if text:
            raise AssertionError(text)


CURRENT = pytest.StashKey[pytest.Item]()
RUNS = pytest.StashKey[list[SimulatedRun]]()
"""The simulated runs of a test."""


@dataclass(frozen=True)
class SimulatedCluster:
    """Simulated GPUs, which run a function with its arguments, or a script with its words.

    Raises `UsageError` for options that cannot be.
    """

    state: State
    options: Mapping[str, object]

    def __call__(
        self, program: Callable[..., object] | str | Path, *args: Any, **kwargs: Any
    ) -> SimulatedRun:
        """Run it as rank 0 of the cluster. Raises `FailedRunError`."""
        from fsdpbench.base.errors import BenchError
        from fsdpbench.cli.requests.script_request import config_of_source
        from fsdpbench.engine.results.store import Store, point_folder_name
        from fsdpbench.sweep.runner import run_sweep
        from fsdpbench.sweep.trials import Progress

        folder = self.state.new_folder()
        try:
            options = _cluster_options(self.options)
            source = _source(program, args, kwargs, folder, self.state.config.rootpath, options)
            config = replace(config_of_source(source, options), sanitize=bool(options.get("sanitize")))
        except BenchError as error:
            raise _refused(error) from None
        store = Store.open_or_create(folder / "run")

        def run(pool: PointPool) -> Trial:
            store.write_space({"schema": 1, "model": config.model, "system": [config.system]}, [config])
            return run_sweep(store, [config], Progress(), jobs=1, again=True, pool=pool).ran[0]

        with store.locked():
            result = _uninterrupted(run).result
        place = store.folder / point_folder_name(config)
        _print_output(place)
        if result.status != "ok":
            raise _failed(config, result, place, source.function)
        made = _simulated_run(config, result, place, self.state)
        self.state.item.stash[RUNS].append(made)
        return made


@dataclass(frozen=True)
class GlooRanks:
    """`count` real CPU ranks, which run a function."""

    state: State
    count: int
    timeout: float
    cuda: bool

    def __call__(self, function: Callable[..., object], *args: Any, **kwargs: Any) -> list[Any]:
        """Return what the function returned on each rank. Raises `FailedRunError`."""
        from fsdpbench.base.errors import BenchError, UsageError
        from fsdpbench.cli.requests.script_request import config_of_source
        from fsdpbench.sweep.trials import run

        folder = self.state.new_folder()
        try:
            if type(self.count) is not int or not 1 <= self.count <= _MOST_RANKS:
                raise UsageError(f"gloo_ranks({self.count!r}): a whole number from 1 to {_MOST_RANKS}")
            source = _source(function, args, kwargs, folder, self.state.config.rootpath, {})
            if source.function is None:
                raise UsageError(f"gloo_ranks runs functions; for the script {function}: fsdpbench prove")
            source = replace(source, function=replace(source.function, maps_cuda=self.cuda))
            config = config_of_source(source, {"gpus": 1, "timeout": self.timeout})
            config = replace(config, device="cpu", gpus=self.count, gpus_per_node=self.count)
        except BenchError as error:
            raise _refused(error) from None
        place = folder / "ranks"
        place.mkdir()

        def run_ranks(pool: PointPool) -> Trial:
            with pool:
                return next(iter(run([(config, place)], pool)))

        trial = _uninterrupted(run_ranks)
        _print_output(place)
        paths = [source.function.value_path(rank) for rank in range(self.count)]
        if trial.result.status != "ok" or not all(path.exists() for path in paths):
            raise _failed(config, trial.result, place, source.function)
        return [pickle.loads(path.read_bytes()) for path in paths]


def _refused(error: BenchError) -> UsageError:
    """Return an error of the command line with its flags as arguments."""
    from fsdpbench.base.errors import UsageError

    return UsageError(re.sub(r"--([a-z][a-z-]+)", lambda flag: flag[1].replace("-", "_"), str(error)))


def _uninterrupted(run: Callable[[PointPool], Trial]) -> Trial:
    """Run in a pool of one with this process's environment; an interruption ends it, not pytest."""
    from fsdpbench.base import interruption
    from fsdpbench.launch.pool import PointPool

    try:
        return run(PointPool(1, environment=dict(os.environ)))
    except interruption.Interrupted:
        interruption.forget()
        raise KeyboardInterrupt from None


def _source(
    program: object, args: tuple[Any, ...], kwargs: Mapping[str, Any], folder: Path, root: Path, options: Any
) -> ScriptSource:
    """Return what runs: a script by its path, or a function whose arguments are written into `folder`. Raises
    `UsageError`."""
    from fsdpbench.base.configuration.script_source import FunctionSource, ScriptSource, StepsBy, spread_ranks
    from fsdpbench.base.errors import UsageError
    from fsdpbench.base.files.whole_files import write_whole

    count = options.get("check_ranks")
    ranks = () if not count else spread_ranks(options["gpus"], None if count is True else count)
    by, to_the_end = StepsBy(options.get("steps_by") or "optimizer"), bool(options.get("to_the_end"))
    if isinstance(program, str | Path):
        if kwargs or not all(isinstance(word, str) for word in args):
            raise UsageError(f"{program}: the arguments of a script are texts, as on its command line")
        return ScriptSource.read(Path(program), args, by, to_the_end=to_the_end, check_ranks=ranks)
    module, name, path = _found_again(program)
    call = folder / "call.pickle"
    try:
        write_whole(call, pickle.dumps((args, kwargs)))
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise UsageError(f"the arguments of {name} cannot be handed to its process: {error}") from None
    source = ScriptSource.read(Path(path), (), by, to_the_end=to_the_end, check_ranks=ranks)
    return replace(source, function=FunctionSource(name, module, str(call), str(root)))


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
    if local:
        why = f"it is defined inside {outer}()"
    elif "<lambda>" in name:
        why = "a lambda has no name"
    else:
        why = (
            "it is bound to an object"
            if hasattr(function, "__self__")
            else "its module names another object so"
        )
    raise UsageError(
        f"{name} cannot run in a process of its own: {why}. Define a function at the top of a module, and "
        "hand over as arguments what it needs: cluster(train, batch=4)"
    )


def _cluster_options(given: Mapping[str, object]) -> dict[str, Any]:
    """Return options as those of the command line. Raises `UsageError`."""
    from fsdpbench.base.errors import UsageError, unknown

    options: dict[str, Any] = {"gpus": 8, **given}
    for name in options.keys() - set(_OPTIONS):
        raise unknown("argument of simulated_cluster", name, _OPTIONS, "pytest --fixtures")
    for name in ("gpus", "gpus_per_node", "nodes"):
        number = options.get(name)
        if number is not None and (type(number) is not int or number < 1):
            raise UsageError(f"simulated_cluster: {name}={number!r} is not a whole number above 0")
    nodes, gpus = options.pop("nodes", None), options["gpus"]
    if nodes is not None:
        if gpus % nodes or options.get("gpus_per_node") not in (None, gpus // nodes):
            raise UsageError(f"simulated_cluster: {gpus} GPUs on {nodes} nodes of equal size cannot be")
        options["gpus_per_node"] = gpus // nodes
    return options


def _print_output(folder: Path) -> None:
    """Print what the processes printed, for pytest to capture."""
    for name, stream in (("stdout.log", sys.stdout), ("stderr.log", sys.stderr)):
        path = folder / name
        lines = path.read_text("utf-8", errors="replace").splitlines(True) if path.exists() else []
        stream.writelines(line for line in lines if not _OF_LAUNCHER.match(line))


def _failed(config: Config, result: Result, folder: Path, function: FunctionSource | None) -> FailedRunError:
    """Return the failure of the rank that failed first, with its line."""
    import msgspec

    from fsdpbench.base.configuration.script_source import FunctionFailure

    paths = {rank: function.failure_path(rank) for rank in range(config.gpus)} if function else {}
    left = {rank: path for rank, path in paths.items() if path.exists()}
    first = min(left, key=lambda rank: left[rank].stat().st_mtime_ns, default=0)
    failure = msgspec.json.decode(left[first].read_bytes(), type=FunctionFailure) if left else None
    cause = result.message or str(result.status)
    status = str(result.status)
    lines = [cause if status in ("error", "oom") else f"{status}: {cause}"]
    if function is not None and status == "timeout":
        lines += [f"  rank {rank} had returned" for rank in paths if function.value_path(rank).exists()]
    if failure is not None and status == "error":
        message = f": {failure.message}" if failure.message else ""
        lines = [f"rank {first}: " * (config.device == "cpu") + failure.kind + message]
    if failure is not None and failure.file:
        lines.append(f"  at {_place(failure)}: {failure.text}")
    where = "CPU ranks over gloo" if config.device == "cpu" else f"simulated GPUs ({config.hardware})"
    lines.append(f"  {config.model} on {config.gpus} {where}; logs: {folder}")
    return FailedRunError("\n".join(lines), status, folder, failure, first)


def _place(failure: FunctionFailure) -> str:
    return f"{os.path.basename(failure.file)}:{failure.line}" if failure.file else ""


def _simulated_run(config: Config, result: Result, folder: Path, state: State) -> SimulatedRun:
    from fsdpbench.cli.pytest_plugin.budgets import SHORT, figure_of

    traces = result.traces or []
    figures = {each: figure_of(result, each) for each in SHORT if each in SimulatedRun.__dataclass_fields__}
    trace = folder / str(traces[0]) if traces else None
    return SimulatedRun(name=config.name, **figures, trace=trace, folder=folder, result=result, state=state)
