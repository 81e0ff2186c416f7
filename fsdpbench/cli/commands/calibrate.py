"""`fsdpbench calibrate`: write a hardware profile from measurements of a machine, or from measured runs."""

import dataclasses
import datetime
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from fsdpbench.base.errors import UsageError
from fsdpbench.base.numbers import MOST_GPUS
from fsdpbench.cli.output import show, show_json, tell
from fsdpbench.cli.values import PossiblePath, whole
from fsdpbench.engine.devices.detection import number_of_launcher, profile_like, visible_gpus
from fsdpbench.reports.result import Result

if TYPE_CHECKING:
    from fsdpbench.lab.calibrate.from_results import Factor, Fit, MeasuredRun


@click.command("calibrate")
@click.option("-o", "--output", type=PossiblePath(dir_okay=False), required=True)
@click.option("--name")
@click.option("--base")
@click.option("--device", type=click.Choice(["cuda", "sim"]), default="cuda", show_default=True)
@click.option("--hardware")
@click.option("--gpus", type=whole(most=MOST_GPUS), default=1)
@click.option("--quick", is_flag=True)
@click.option("--from-result", "results", multiple=True, type=PossiblePath())
@click.option("--from-trace", "traces", multiple=True, type=PossiblePath())
@click.option("--fit")
@click.option("--nccl-tests", "measured", multiple=True, type=PossiblePath(dir_okay=False))
@click.option("--json", "as_json", is_flag=True)
def command(
    output: Path,
    name: str | None,
    base: str | None,
    device: str,
    hardware: str | None,
    gpus: int,
    quick: bool,
    results: tuple[Path, ...],
    traces: tuple[Path, ...],
    fit: str | None,
    measured: tuple[Path, ...],
    as_json: bool,
) -> None:
    """Measure this machine's GPUs and write a hardware profile for `--hardware FILE`.

    \b
    fsdpbench calibrate -o mine.toml

    One GPU is enough for kernels, host and memory. To measure collectives too, start it with
    `torchrun --nproc-per-node 8 -m fsdpbench calibrate ...` on one or several nodes.

    \b
    fsdpbench calibrate --from-result runs/mine --fit network -o mine.toml
    fsdpbench calibrate --from-trace trace.json.gz -o mine.toml

    need no GPU: a measured run says how fast the network, or computation, really is; a trace, its kernels.

    \b
    fsdpbench calibrate --nccl-tests gather-2.txt --nccl-tests gather-16.txt --base h100-80gb -o mine.toml

    needs no GPU either: it fits bandwidth and latency of the network to the output of NVIDIA's nccl-tests.
    """
    _check_output(output)
    if fit is not None and not results:
        raise UsageError("--fit is of --from-result")
    if traces or measured:
        if results or (traces and measured) or name is not None or quick or device != "cuda":
            given = "--from-trace" if traces else "--nccl-tests"
            raise UsageError(f"{given} takes -o, --base and --json alone")
        fit_to = calibrate_from_traces if traces else calibrate_from_nccl_tests
        fit_to(traces or measured, output, base, as_json)
        return
    if results:
        if name is not None or quick:
            raise UsageError("--name and --quick are of a measurement; with --from-result the file names it")

        calibrate_from_results(results, output, device=device, base=base, fit=fit, as_json=as_json)
        return
    from fsdpbench.lab.calibrate.calibration import calibrate
    from fsdpbench.lab.calibrate.machine import base_for, cuda_machine, simulated_machine
    from fsdpbench.launch.elastic import rehearse_launched

    if device == "cuda" and not visible_gpus():
        raise UsageError("--device cuda: no GPU is visible here; --device sim --hardware NAME tries it out")
    if device == "sim" and hardware is None:
        raise UsageError("--device sim needs --hardware: the profile to measure")
    if device == "cuda":
        rehearse_launched()
    with _process_group(device):
        machine = cuda_machine() if device == "cuda" else simulated_machine(hardware or "", gpus)
        base_profile = base_for(machine, base or hardware)
        is_first = machine.rank == 0  # only rank 0 reports
        report = (lambda line: tell(f"measuring {line}")) if is_first else (lambda line: None)
        found = calibrate(machine, base_profile, name or output.stem, quick=quick, report=report)
    if machine.rank != 0:
        return
    found.write(output)
    fit = ", ".join(f"{part} {100 * error:.1f} %" for part, error in found.errors.items())
    tell(f"{output}: {len(found.measured)} figures measured, {len(found.assumed)} from {found.base}")
    tell(f"mean error of the fits: {fit}")
    if as_json:
        record = {"schema": 1, "file": str(output), "base": found.base, "fit_errors": found.errors}
        record |= {"measured": list(found.measured), "assumed": list(found.assumed)}
        show_json(record)


def _check_output(output: Path) -> None:
    if output.suffix != ".toml":
        raise UsageError(f"-o {output}: a profile's file ends in .toml")
    if not output.parent.is_dir():
        raise UsageError(f"-o {output}: there is no folder {output.parent}")


@contextmanager
def _process_group(device: str) -> Iterator[None]:
    """Create an NCCL process group of torchrun's ranks; none for one process or a simulation."""
    import torch
    import torch.distributed as dist

    if device == "cuda" and number_of_launcher("WORLD_SIZE", 1) > 1:
        local = number_of_launcher("LOCAL_RANK", 0)
        torch.cuda.set_device(local)
        timeout = datetime.timedelta(seconds=120)
        dist.init_process_group("nccl", timeout=timeout, device_id=torch.device("cuda", local))
    try:
        yield
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def calibrate_from_nccl_tests(paths: Sequence[Path], output: Path, base: str | None, as_json: bool) -> None:
    """Fit the network of the packaged profile `base` to tables of nccl-tests and write the profile."""
    from fsdpbench.lab.calibrate.machine import packaged
    from fsdpbench.lab.calibrate.nccl_tests import points_of_files
    from fsdpbench.lab.calibrate.network_fit import fit_network

    before = packaged(base, "--nccl-tests needs --base: the profile whose network is replaced")
    found = fit_network(points_of_files(paths), before)
    found.write(output, before.name)
    if as_json:
        show_json(found.record(output, before))
    else:
        for line in (f"{output}: {base} with the measured network", *found.lines(before)):
            show(line)


def calibrate_from_traces(paths: Sequence[Path], output: Path, base: str | None, as_json: bool) -> None:
    """Fit the packaged profile `base` (default: that of the traces' GPU) to traces, and write it."""
    from fsdpbench.lab.calibrate.from_trace import fit_trace, read_samples
    from fsdpbench.lab.calibrate.machine import packaged

    samples = read_samples(paths)
    base = base or profile_like(samples.device, samples.memory)
    device = f"a simulated {samples.device}" if samples.simulated else samples.device or "a GPU without name"
    base = packaged(base, f"--from-trace: it is of {device}; name the nearest profile by --base").name
    source = f"fitted to a trace of {device} by fsdpbench calibrate, {datetime.date.today().isoformat()}"
    found, figures, summary = fit_trace(samples, base, output.stem, source)
    found.write(output)
    if as_json:
        record = {"schema": 1, "file": str(output), "base": base, "summary": summary}
        show_json(record | {"figures": [dataclasses.asdict(each) for each in figures]})
        return
    show(f"{'figure':32}{base:>12}  {'trace':>10}{'kernels':>9}{'spread':>8}")
    for line in (*map(str, figures), f"{output}: {summary}"):
        show(line)


def calibrate_from_results(
    paths: Sequence[Path], output: Path, *, device: str, base: str | None, fit: str | None, as_json: bool
) -> None:
    """Fit factors to the runs at `paths` (results, folders of results, tables of runs) and write the profile
    to `output`. Raises `UsageError` if the runs do not determine the factors."""
    from fsdpbench.lab.calibrate import from_results
    from fsdpbench.launch import fork_server

    tables = [path for path in paths if path.suffix == ".csv"]
    runs = from_results.runs_of_results([path for path in paths if path not in tables], device)
    runs += [run for path in tables for run in _runs_of_table(path)]
    base = base or from_results.base_of(runs)
    factors = _factors(fit, runs)
    tell(f"fitting {', '.join(factors)} of {base} to {len(runs)} measured run{'s'[: len(runs) > 1]}")
    fork_server.start("sim")
    with tempfile.TemporaryDirectory() as name:
        found = from_results.fit(runs, base, factors, partial(_simulated, runs, Path(name)), Path(name))
    stated = _factors_text(found)
    found.profile.write(
        output, dict(zip(found.profile.keys(), [stated] * 9, strict=False)), f"{base}; {stated}"
    )
    tell(f"{output}: {stated}")
    for run, before, after in zip(runs, found.before, found.after, strict=True):
        tell(f"{run.name}: step time {before:+.1%} off before, {after:+.1%} with it")
    if as_json:
        show_json(_record(found, runs, output))


def _runs_of_table(path: Path) -> "list[MeasuredRun]":
    """Return the runs of a `validate --runs` file that have a measured speed or time."""
    from fsdpbench.lab.calibrate.from_results import MeasuredRun
    from fsdpbench.lab.validation.paper_network import config_of
    from fsdpbench.lab.validation.runs.runs_file import cases_of_file

    found = []
    for case in cases_of_file(path):
        figure = next((figure for figure in case.published if figure.is_time), None)
        if figure is not None:
            value = case.published[figure] * figure.unit
            config = config_of(case)
            found.append(
                MeasuredRun(case.name, config, figure.path[0], value, figure.is_speed, case.hardware)
            )
    return found


def _factors(given: str | None, runs: "Sequence[MeasuredRun]") -> "list[Factor]":
    """Return the factors in `given`; by default the network if a run has several nodes, else computation."""
    from fsdpbench.lab.calibrate.from_results import Factor

    if given is None:
        several = any(run.config.gpus > run.config.ranks_per_node for run in runs)
        return [Factor.NETWORK if several else Factor.COMPUTE]
    words = [word.strip() for word in given.split(",")]
    unknown = [word for word in words if word not in set(Factor)]
    if unknown or len(set(words)) < len(words):
        raise UsageError(f"--fit {given}: name each once, of {', '.join(Factor)}")
    return [Factor(word) for word in words]


def _simulated(runs: "Sequence[MeasuredRun]", folder: Path, hardware: Path) -> list[Result]:
    """Simulate all `runs` in `folder`, on the profile in the file `hardware`."""
    from fsdpbench.engine.results.provenance import content_key
    from fsdpbench.sweep.runner import UNTRACED, simulate
    from fsdpbench.sweep.trials import Progress

    of_sim = partial(dataclasses.replace, device="sim", hardware=str(hardware), measurement=UNTRACED)
    configs = [of_sim(run.config) for run in runs]
    found = simulate(configs, folder / hardware.stem, Progress())
    return [found[content_key(config)] for config in configs]


def _factors_text(found: "Fit") -> str:
    parts = []
    for factor, value in found.profile.factors.items():
        low, high = found.interval(factor)
        parts.append(f"{factor} x{value:.3f} (90 % of cases: x{low:.3f} to x{high:.3f})")
    return "fitted to measured runs: " + ", ".join(parts)


def _record(found: "Fit", runs: "Sequence[MeasuredRun]", output: Path) -> dict[str, object]:
    factors = [
        {
            "name": factor.value,
            "factor": value,
            "interval": list(found.interval(factor)),
            "level": 0.9,
            "sensitivity": found.sensitivity[factor],
        }
        for factor, value in found.profile.factors.items()
    ]
    errors = [
        {"run": run.name, "error_before": before, "error_after": after}
        for run, before, after in zip(runs, found.before, found.after, strict=True)
    ]
    keys = found.profile.keys()
    return {
        "schema": 1,
        "file": str(output),
        "base": found.profile.base,
        "factors": factors,
        "keys": keys,
        "runs": errors,
    }
