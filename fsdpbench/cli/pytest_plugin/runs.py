"""Functions and scripts of a test, run on ranks in separate processes, and their results."""

import os
import pickle
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import click
import pytest

from fsdpbench.base import interruption
from fsdpbench.base.configuration.config import Config
from fsdpbench.base.configuration.script_source import FunctionSource
from fsdpbench.base.errors import BenchError, PicklableError, UsageError, error_text, unknown
from fsdpbench.base.reading import MIB, read_tail
from fsdpbench.base.writing import write_whole
from fsdpbench.cli.commands.run import command
from fsdpbench.cli.pytest_plugin import judging
from fsdpbench.cli.requests.script_request import script_config
from fsdpbench.launch.pool import PointPool
from fsdpbench.reports.result import Result
from fsdpbench.sweep.trials import run

__tracebackhide__ = True  # pytest shows the test's own line as the place of a failure
Test = Callable[[], pytest.Item]
NewFolder = Callable[[str], Path]
_MOST_RANKS = 64
_OF_LAUNCHER = re.compile(r"[EW]\d{4} .*torch/(?:distributed/elastic|multiprocessing)/")
_OPTIONS = (
    *("gpus", "hardware", "gpus_per_node", "nodes", "nic_gb_s", "software", "timeout", "steps_by"),
    *("to_the_end", "check_ranks", "sanitize"),
)


class FailedRunError(PicklableError):
    """A function or script that failed. `status`: as in `result.json`; `folder`: contains the logs."""

    def __init__(self, text: str, status: str, folder: Path):
        super().__init__(text)
        self.status, self.folder = status, folder


@dataclass(frozen=True)
class SimulatedRun:
    """A run on simulated GPUs. Counts and times are means per step; NaN: unknown. peak_gib: reserved memory.
    exposed_ms: communication not hidden by computation; overlap: hidden share. folder: logs and results."""

    name: str
    step_ms: float
    peak_gib: float
    allocated_gib: float
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
    test: Test = field(repr=False, compare=False)

    def check_budget(self, **limits: object) -> None:
        """Raise `AssertionError` with figures and cause if the run exceeds a limit."""
        if text := judging.over_budget(self.name, self.result, judging.checked_limits(limits)):
            raise AssertionError(text)

    def check_baseline(self, name: str = "", allow: Mapping[str, float] | None = None) -> None:
        """Raise `AssertionError` with figures and cause if a figure is worse than in the baseline file of the
        test, or cannot be judged. `name`: of the file, if a test has several; `allow`: allowed relative
        change by figure."""
        if text := judging.compare_with_baseline(self.name, self.result, self.test(), name, allow or {}):
            raise AssertionError(text)


def simulate(
    test: Test, new_folder: NewFolder, options: Any, program: Any, *args: Any, **named: Any
) -> SimulatedRun:
    """Run a function with its arguments, or a script with its words, as rank 0 of the simulated GPUs that
    `options` describe. Raises `FailedRunError`, or `UsageError` for an impossible cluster."""
    folder = new_folder("fsdpbench")
    asked = _asked_for(program, args, named, folder, test().config.rootpath, options)
    result = _run(asked, folder)
    figures = {each: judging.figure_of(result, each) for each in judging.SHORT}
    trace = folder / str(result.traces[0]) if result.traces else None
    return SimulatedRun(asked.name, **figures, trace=trace, folder=folder, result=result, test=test)


def run_on_gloo(
    root: Path, new_folder: NewFolder, options: Any, program: Any, *args: Any, **named: Any
) -> list[Any]:
    """Run a function on CPU ranks; return its value on each. `options`: ranks, timeout (seconds), and whether
    to map "cuda" to the CPU. Raises `FailedRunError`, or `UsageError`."""
    ranks, timeout, cuda = options
    if isinstance(ranks, bool) or not isinstance(ranks, int) or not 1 <= ranks <= _MOST_RANKS:
        raise UsageError(f"gloo_ranks({ranks!r}): a whole number from 1 to {_MOST_RANKS}")
    folder = new_folder("fsdpbench")
    asked = _asked_for(program, args, named, folder, root, {"gpus": 1, "timeout": timeout})
    if asked.script is None or asked.script.function is None:
        raise UsageError(f"gloo_ranks runs functions; for the script {program}: fsdpbench prove")
    script = replace(asked.script, function=replace(asked.script.function, maps_cuda=cuda))
    _run(replace(asked, device="cpu", gpus=ranks, gpus_per_node=ranks, script=script), folder)
    return [pickle.loads((folder / f"value{rank}.pickle").read_bytes()) for rank in range(ranks)]


def _run(config: Config, folder: Path) -> Result:
    """Run `config` and print its output. An interruption ends only the run. Raises `FailedRunError`."""
    pool = PointPool(1)
    pool.environment = dict(os.environ)
    try:
        with pool:
            result = next(iter(run([(config, folder)], pool))).result
    except interruption.Interrupted:
        interruption.forget()
        raise KeyboardInterrupt from None
    for name, stream in (("stdout.log", sys.stdout), ("stderr.log", sys.stderr)):
        lines = read_tail(folder / name, MIB).splitlines(True)
        stream.writelines(line for line in lines if not _OF_LAUNCHER.match(line))
    if result.status == "ok":
        return result
    cause = f"{result.message}" if result.status == "error" else f"{result.status}: {result.message}"
    where = f"simulated GPUs ({config.hardware})" if config.device == "sim" else "CPU ranks over gloo"
    left = [str(rank) for rank in range(config.gpus) if (folder / f"value{rank}.pickle").exists()]
    lines = [cause, f"{config.model} on {config.gpus} {where}; logs: {folder}"]
    lines += [f"ranks that had returned: {', '.join(left)}"] if left else []
    raise FailedRunError("\n  ".join(lines), str(result.status), folder)


def _asked_for(
    program: Any, args: Any, named: Mapping[str, Any], folder: Path, root: Path, options: Mapping[str, Any]
) -> Config:
    """Return the configuration: a script by its path, or a function of the project at `root`, written with
    its arguments into `folder`. `options`: flags of `fsdpbench run --script`. Raises `UsageError`."""
    function = None if isinstance(program, str | Path) else getattr(program, "func", program)
    if function is None and (named or not all(isinstance(word, str) for word in args)):
        raise UsageError(f"{program}: the arguments of a script are texts, as on its command line")
    module = str(getattr(function, "__module__", ""))
    path = program if function is None else getattr(sys.modules.get(module), "__file__", None)
    if not path:
        raise UsageError(f"{program!r} is neither a function of a file nor the path of a script")
    words = [
        *_flags(options),
        f"--script={os.path.realpath(path)}",
        "--",
        *(args if function is None else ()),
    ]
    try:
        asked = command.make_context("simulated_cluster", words).params
        config = script_config(asked, ())
    except (BenchError, click.UsageError) as error:
        text = error.format_message() if isinstance(error, click.UsageError) else str(error)
        raise UsageError(re.sub(r"--([a-z-]+)", lambda flag: flag[1].replace("-", "_"), text)) from None
    assert config is not None
    config = replace(config, sanitize=bool(asked["sanitize"]))
    if function is None or config.script is None:
        return config
    name = str(getattr(function, "__qualname__", type(function).__qualname__))
    try:
        write_whole(folder / "call.pickle", pickle.dumps((program, (args, named))))
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise UsageError(error_text("runs.not_pickled", name, error)) from None
    script = replace(config.script, function=FunctionSource(name, module, str(folder), str(root)))
    return replace(config, script=script, model=script.name)


def _flags(options: Mapping[str, Any]) -> list[str]:
    """Return options as command-line words. Raises `UsageError`."""
    for name in options.keys() - set(_OPTIONS):
        raise unknown("argument of simulated_cluster", name, _OPTIONS, "pytest --fixtures")
    given = {name: value for name, value in options.items() if value is not None and value is not False}
    if "nodes" in given:
        gpus, nodes = given.get("gpus"), given.pop("nodes")
        fits = isinstance(nodes, int) and isinstance(gpus, int) and nodes > 0 and gpus % nodes == 0
        given.setdefault("gpus_per_node", gpus // nodes if fits else f"{gpus!r} / {nodes!r}")
    flags = {f"--{name.replace('_', '-')}": value for name, value in given.items()}
    return [flag if value is True else f"{flag}={value}" for flag, value in flags.items()]
