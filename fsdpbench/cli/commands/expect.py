"""`fsdpbench expect`: is a measured speed normal for its configuration, and what would explain it if not."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fsdpbench.base.errors import UsageError
from fsdpbench.cli.output import show_as, tell
from fsdpbench.cli.requests.options import setting_options, target_options
from fsdpbench.cli.requests.script_request import config_asked_for, script_options
from fsdpbench.cli.values import MOST_JOBS, whole
from fsdpbench.launch import fork_server

if TYPE_CHECKING:
    from fsdpbench.base.configuration.config import Config
    from fsdpbench.lab.expect import Measured

_TRACE = (".json.gz", ".json", ".gz")


@click.command("expect")
@click.option("--measured", metavar="SPEED")
@click.option("--from", "source", metavar="RUN")
@target_options
@script_options
@click.option("--jobs", type=whole(most=MOST_JOBS))
@setting_options(many=False)
def command(assignments: tuple[str, ...], as_json: bool, **options: Any) -> None:
    """Say whether a measured speed is normal for its configuration, and what would explain it if not.

    \b
    fsdpbench expect --model llama3-8b --gpus 16 --hardware h100-80gb --measured 21.3s
    fsdpbench expect --from runs/mine
    fsdpbench expect --from trace.json.gz --model gpt-2.8b --gpus 8 --hardware a100-80gb

    The configuration is simulated. If the speed is outside of the 90 % interval, parts of the machine and
    settings are changed until the simulated step takes as long as the measured one. It needs no GPU.
    """
    from fsdpbench.lab.expect import expect, lines, parse_measured, record
    from fsdpbench.sweep.prediction import as_probe
    from fsdpbench.sweep.trials import jobs_for

    measured = None if options["measured"] is None else parse_measured(options["measured"])
    fork_server.start("sim")
    config: Config | None = None
    hardware: str | None = options["hardware"]
    if options["source"] is not None:
        if measured is not None:
            raise UsageError("--measured and --from both name a speed; give one")
        measured, config, hardware = _from_run(Path(options["source"]), hardware)
    if measured is None:
        raise UsageError("which speed was measured? --measured 21.3s, or --from a run's folder or a trace")
    if options.get("device") not in (None, "sim", "auto"):
        raise UsageError("--device: the configuration is simulated; --hardware says on which GPUs")
    asked = config_asked_for({**options, "device": "sim", "hardware": hardware}, assignments)
    if asked is not None:
        hardware = asked.hardware  # with the network that was stated
    config = asked or config
    if config is None:
        raise UsageError("of which configuration? Name it with --model, --hf-config or --script")
    config = as_probe(config, hardware, options["timeout"], "expected of it")
    found = expect(config, measured, options["jobs"] or jobs_for("sim"), tell)
    show_as(record(found), "\n".join(lines(found)), as_json=as_json)


def _from_run(path: Path, hardware: str | None) -> tuple[Measured, Config | None, str | None]:
    """Return the speed of a run, its configuration where the run holds it, and `hardware`, by default the
    profile like its GPU. Raises `UsageError`."""
    from fsdpbench.lab.calibrate.from_results import runs_of_results
    from fsdpbench.lab.expect import Measured, SpeedUnit

    if not path.exists():
        raise UsageError(f"--from {path}: no such file or folder")
    if path.is_file() and path.name != "result.json" and path.name.endswith(_TRACE):
        return Measured(_traced_step_s(path), SpeedUnit.SECONDS), None, hardware
    runs = runs_of_results([path], "cuda")
    if len(runs) > 1:
        raise UsageError(f"--from {path}: {len(runs)} runs; name the folder of one")
    hardware = hardware or runs[0].chip
    if not hardware:
        raise UsageError(f"--from {path}: no profile is like its GPU; name one with --hardware")
    return Measured(runs[0].value, SpeedUnit.SECONDS), runs[0].config, hardware


def _traced_step_s(path: Path) -> float:
    """Return the median step of a trace in s. Raises `UsageError` if it has none."""
    import statistics

    from fsdpbench.reports.analysis import analyze
    from fsdpbench.reports.readers import TraceError

    try:
        (rank,) = analyze([path]).ranks
    except TraceError as error:
        raise UsageError(str(error)) from None
    steps = [step.duration for step in rank.steps]
    if not steps:
        raise UsageError(f"--from {path}: the trace marks no steps (ProfilerStep#N); give --measured")
    return statistics.median(steps) / 1e9
