"""`fsdpbench explain`: why memory ran out, and changes that fit; `expect`: is a measured speed normal."""

from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from fsdpbench.base.errors import UsageError, error_text
from fsdpbench.base.reading import UnreadableError, one_line, read_bytes, read_standard_input
from fsdpbench.cli.output import show_as, tell
from fsdpbench.cli.requests.options import setting_options, target_options
from fsdpbench.cli.requests.script_request import config_asked_for, script_options
from fsdpbench.cli.values import MOST_JOBS, PlaceForFile, SectionedCommand, help_all_option, whole
from fsdpbench.launch import fork_server

if TYPE_CHECKING:
    from fsdpbench.answers.explain import Advice
    from fsdpbench.base.configuration.config import Config
    from fsdpbench.lab.expect import Measured
    from fsdpbench.reports.readers.oom_log import OomReport
    from fsdpbench.reports.result import Result

_LONGEST_TEXT = 64 << 20
_STDIN = "-"
_WAITING = "waiting for the message on standard input (Ctrl-D ends it, Ctrl-C gives up)"
_TRACE = (".json.gz", ".json", ".gz")


@click.command("explain", cls=SectionedCommand)
@help_all_option
@click.option("--from", "source", metavar="FILE")
@target_options
@script_options
@click.option("-o", "--output", type=PlaceForFile())
@click.option("--jobs", type=whole(most=MOST_JOBS))
@click.option("--no-changes", is_flag=True)
@setting_options(many=False)
def command(assignments: tuple[str, ...], as_json: bool, **options: Any) -> None:
    """Explain why memory ran out, and find the smallest changes that fit, with their cost in speed.

    \b
    fsdpbench explain oom.txt                     a message or a log (- reads stdin)
    fsdpbench explain runs/NAME                   the configuration of a run folder that ran out
    fsdpbench explain memory.pickle               a memory snapshot (torch.cuda.memory._dump_snapshot)
    fsdpbench explain --model gpt-2.8b --gpus 8 --batch 24
    fsdpbench explain --script train.py --gpus 8 --from oom.txt -- --batch 8

    With only a message, nothing is simulated.
    """
    explanation = Explanation()
    source: str | None = options.pop("source")
    arguments: tuple[str, ...] = options["script_arguments"]
    if source is None and arguments and not options["script"] and not options["module"]:
        if len(arguments) > 1:
            raise UsageError(f"explain takes one FILE, not {len(arguments)}: {' '.join(arguments)}")
        source, options["script_arguments"] = arguments[0], ()
    config: Config | None = None
    hardware: str | None = options["hardware"]
    if source is not None:
        config, hardware = _read(source, hardware, explanation)
    asked = config_asked_for({**options, "hardware": hardware}, assignments)
    if asked is not None and asked.device == "sim":
        hardware = asked.hardware  # includes the network that the user stated
    config = asked or config
    advice = None if config is None else _advice(config, hardware, options, explanation)
    if not explanation.texts:
        raise UsageError(error_text("explain.no_source"))
    if options["output"] is not None:
        from fsdpbench.answers.explain.text import write_page

        write_page(options["output"], explanation.texts, advice)
        tell(f"wrote {options['output']}")
    show_as({"schema": 1, **explanation.parts}, "\n\n".join(explanation.texts), as_json=as_json)


def _advice(
    config: "Config", hardware: str | None, options: dict[str, Any], explanation: "Explanation"
) -> "Advice":
    """Simulate changes of a configuration and add them to `explanation`. Raises `BenchError`."""
    fork_server.start("sim")
    from fsdpbench.answers.explain import advise
    from fsdpbench.answers.explain.text import as_dict, describe_advice
    from fsdpbench.sweep.prediction import as_probe
    from fsdpbench.sweep.trials import jobs_for

    config = as_probe(config, hardware, options["timeout"], "explained")
    config = replace(config, sanitize=False, jitter=None)
    jobs, ran_out = options["jobs"] or jobs_for("sim"), bool(explanation.texts)
    advice = advise(config, jobs, tell, search=not options["no_changes"], ran_out=ran_out)
    explanation.add("simulation", as_dict(advice), describe_advice(advice))
    return advice


@dataclass
class Explanation:
    """An explanation being built. parts: JSON by name (message, snapshot, simulation). texts: to print."""

    parts: dict[str, object] = field(default_factory=dict)
    texts: list[str] = field(default_factory=list)

    def add(self, name: str, part: object, *texts: str) -> None:
        """Add a part: its JSON, and the texts to print."""
        self.parts[name] = part
        self.texts += texts


def _read(source: str, hardware: str | None, explanation: Explanation) -> "tuple[Config | None, str | None]":
    """Explain a file. Return its configuration if it has one, and `hardware` (default: the profile of the GPU
    in the file). Raises `UsageError`."""
    from fsdpbench.reports.analysis.out_of_memory import describe_report, describe_snapshot, read_oom_snapshot
    from fsdpbench.reports.analysis.snapshots import SUFFIXES

    path = Path(source)
    if source != _STDIN and not path.exists():
        raise UsageError(f"{source}: no such file or folder (- reads stdin)")
    if source != _STDIN and (path.is_dir() or path.suffix == ".json"):
        return _measured_config(path, recorded(path), hardware, explanation)
    if path.suffix in SUFFIXES:
        found = read_oom_snapshot(path)
        texts = [describe_snapshot(each) for each in found]
        texts = texts or ["The snapshot holds no memory and no history."]
        explanation.add("snapshot", [each.to_dict() for each in found], *texts)
    else:
        report = _read_message(source)
        explanation.add("message", report.to_dict(), describe_report(report))
    return None, hardware


def _read_message(source: str) -> "OomReport":
    """Return the message in a log, or on standard input. Raises `UsageError` if there is none."""
    from fsdpbench.reports.readers.oom_log import read_log

    try:
        if source == _STDIN:
            content_read = read_standard_input(_LONGEST_TEXT, partial(tell, _WAITING))
        else:
            content_read = read_bytes(Path(source), _LONGEST_TEXT, await_writer=True)
    except UnreadableError as error:
        way_out = ": `tail -c 1M` of a log is enough" if "larger" in error.reason else ""
        raise UsageError(f"{error}{way_out}") from None
    text = content_read.decode(errors="replace")
    report = read_log(text)
    if report is None:
        near = next((line for line in text.splitlines() if "out of memory" in line.lower()), None)
        found = "" if near is None else f" (not read: {one_line(near.strip(), 100)})"
        raise UsageError(error_text("explain.unknown_log", source, found))
    return report


def recorded(path: Path) -> "Result":
    """Return the result in a file, or of a configuration in a folder that ran out. Raises `UsageError`."""
    from fsdpbench.base.files.documents import read_json_object
    from fsdpbench.engine.results.store import RESULT_FILE, SWEEP_FILE, Store
    from fsdpbench.reports.result import Result

    if path.is_dir() and (path / SWEEP_FILE).is_file():
        points = [p for p in Store.open(path).points() if p.result.status == "oom"]
        if not points:
            raise UsageError(f"{path}: no configuration in it ran out of memory")
        if len(points) > 1:
            tell(f"{len(points)} configurations ran out of memory; the first is explained. For another one:")
            for point in points[1:4]:
                tell(f"  fsdpbench explain {point.folder}")
        return points[0].result
    if path.is_dir() and not (path / RESULT_FILE).is_file():
        raise UsageError(error_text("explain.no_such_source", path))
    try:
        result = Result.of(read_json_object(path / RESULT_FILE if path.is_dir() else path))
    except msgspec.ValidationError as error:
        raise UsageError(f"{path}: is not a result ({error})") from None
    if result.config is None:
        raise UsageError(f"{path}: it holds no configuration; name a run folder or a result.json")
    return result


def _measured_config(
    path: Path, result: "Result", hardware: str | None, explanation: Explanation
) -> "tuple[Config, str | None]":
    """Return the recorded configuration and the GPUs to simulate it on: `hardware`, or those that it ran on.
    If it ran on real GPUs, explain its message. Raises `UsageError`."""
    from fsdpbench.base.configuration.config import Config
    from fsdpbench.engine.devices.detection import profile_like
    from fsdpbench.reports.analysis.out_of_memory import describe_report
    from fsdpbench.reports.readers.oom_log import read_log

    record, machine = result.config or {}, result.machine
    if record.get("device") == "cuda" and not hardware:
        name, memory = machine.get("name"), machine.get("memory_bytes")
        hardware = profile_like(str(name), memory if isinstance(memory, int) else 0)
        if hardware is None:
            raise UsageError(f"{path}: no profile is like its {name}; name one with --hardware")
    report = read_log(result.message or "")
    if report is not None and record.get("device") == "cuda":
        explanation.add("message", report.to_dict(), describe_report(report))
    try:
        return Config.from_dict(record), hardware
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UsageError(f"{path}: its configuration cannot be read ({error})") from None


@click.command("expect", cls=SectionedCommand)
@help_all_option
@click.option("--measured", metavar="SPEED")
@click.option("--from", "source", metavar="RUN")
@target_options
@script_options
@click.option("--jobs", type=whole(most=MOST_JOBS))
@setting_options(many=False)
def expect_command(assignments: tuple[str, ...], as_json: bool, **options: Any) -> None:
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
        hardware = asked.hardware  # includes the network that the user stated
    config = asked or config
    if config is None:
        raise UsageError("of which configuration? Name it with --model, --hf-config or --script")
    config = as_probe(config, hardware, options["timeout"], "expected of it")
    found = expect(config, measured, options["jobs"] or jobs_for("sim"), tell)
    show_as(record(found), "\n".join(lines(found)), as_json=as_json)


def _from_run(path: Path, hardware: str | None) -> "tuple[Measured, Config | None, str | None]":
    """Return the speed of a run, its configuration if the run has one, and `hardware` (default: the profile
    of its GPU). Raises `UsageError`."""
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
    """Return a GPU trace's median step in seconds. Raises `UsageError` without steps or without a GPU."""
    import statistics

    from fsdpbench.reports.analysis import analyze
    from fsdpbench.reports.readers import TraceError

    try:
        (rank,) = analyze([path]).ranks
    except TraceError as error:
        raise UsageError(str(error)) from None
    if rank.kind != "gpu" or rank.simulated:
        what = "simulated" if rank.simulated else "of a CPU"
        raise UsageError(f"--from {path}: the trace is {what}; no GPU was measured")
    steps = [step.duration for step in rank.steps]
    if not steps:
        raise UsageError(f"--from {path}: the trace marks no steps (ProfilerStep#N); give --measured")
    return statistics.median(steps) / 1e9
