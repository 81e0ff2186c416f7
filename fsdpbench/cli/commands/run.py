"""`fsdpbench run`: run one configuration, a script, or a soak (`--soak`), and print one result."""

import contextlib
import hashlib
import itertools
import json
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fsdpbench.base.errors import ExitCode, UsageError, error_text
from fsdpbench.base.reading import one_line
from fsdpbench.cli.output import show_as, tell, terminal_width
from fsdpbench.cli.requests import options as common
from fsdpbench.cli.requests.script_request import script_config, script_options
from fsdpbench.cli.terminal import notes as remarks
from fsdpbench.cli.values import PossiblePath, SectionedCommand, grouped, help_all_option, whole
from fsdpbench.launch import fork_server

if TYPE_CHECKING:
    from fsdpbench.base.configuration.config import Config
    from fsdpbench.engine.results.store import Store
    from fsdpbench.reports.result import Result


_TIMEOUT_S = 3600.0
"""Time limit in seconds of a soak without --timeout."""
_WITH_SOAK = ("seq_lengths", "eval_every", "eval_steps")


soak_options = grouped(
    click.option("--soak", type=whole(), metavar="STEPS"),
    click.option("--seq-lengths", metavar="LENGTHS"),
    click.option("--eval-every", type=whole(), metavar="STEPS"),
    click.option("--eval-steps", type=whole(), metavar="BATCHES"),
)
"""`--soak`, `--seq-lengths`, `--eval-every`: many steps of different lengths (docs/lengths.md)."""


def with_soak(config: "Config", options: Mapping[str, Any]) -> "Config":
    """Return `config` with the soak in `options`, untraced. Raises `UsageError` if --soak is missing."""
    from fsdpbench.base.configuration.soak import LengthSettings, SoakSettings

    if options.get("soak") is None:
        for name in _WITH_SOAK:
            if options.get(name) is not None:
                raise UsageError(error_text("run.with_soak", name.replace("_", "-")))
        return config
    if options.get("eval_steps") is not None and options.get("eval_every") is None:
        raise UsageError("--eval-steps says how many batches; --eval-every says when, as in --eval-every 50")
    lengths = options.get("seq_lengths")
    asked = {name: options[name] for name in ("eval_every", "eval_steps") if options.get(name) is not None}
    soak = SoakSettings(
        steps=options["soak"], lengths=None if lengths is None else LengthSettings.parse(lengths), **asked
    )
    measurement = replace(config.measurement, warmup_steps=0, traced_steps=0)
    if options.get("timeout") is None:
        measurement = replace(measurement, timeout_s=_TIMEOUT_S)
    return replace(config, soak=soak, measurement=measurement)


_FOLDERS = Path("runs")
_LONGEST_NAME = 80
_POLL_S = 0.2


@click.command("run", cls=SectionedCommand)
@help_all_option
@common.target_options
@click.option("-o", "--output", type=PossiblePath())
@script_options
@click.option("--jitter", metavar="SEED")
@click.option("--advise", is_flag=True)
@common.sanitize_option
@soak_options
@common.setting_options(many=False)
def command(assignments: tuple[str, ...], as_json: bool, **options: Any) -> None:
    """Run one configuration, or a training script of your own (--script), and print its result.

    \b
    fsdpbench run --model gpt-2.8b --gpus 8 --batch 4
    fsdpbench run --script train.py --gpus 64 --hardware h100-80gb --advise -- --batch 8
    """
    device = "sim" if options.get("script") or options.get("module") else options.get("device")
    fork_server.start(device, common.asks_to_compile(options, assignments))
    from fsdpbench.cli.terminal.progress import describe_result
    from fsdpbench.engine.results.records import Status

    advice = None
    config = script_config(options, assignments)
    if options["advise"] and config is None:
        raise UsageError("--advise belongs to --script; for a model of the bench: `tune` or `sweep`")
    if config is not None:
        config = with_soak(config, options)
        config = _with_jitter(config, options.get("jitter"))
        config = replace(config, sanitize=bool(options.get("sanitize")))
        tell(f"{config.name}: {config.gpus} simulated GPUs")
        result = _run(config, options.get("output"))
        _tell_notes(result)
        if options["advise"]:
            advice = _advice(config, result)
    else:
        result = _run_model(assignments, options)
    network = result.machine.get("node_network")
    notes = [f"network: {network}"] if network else []
    notes += [f"doubtful: {doubt}" for doubt in result.warnings]
    for line in (*notes, *remarks.buffer_notes(result), *remarks.soak_notes(result)):
        tell(one_line(line))
    for line in remarks.sanitizer_notes(result, terminal_width()):
        tell(one_line(line))
    content = result.to_dict() | ({} if advice is None else advice[0])
    texts = [describe_result(result), *remarks.describe_script(result), *(advice or ())[1:]]
    show_as(content, "\n".join(texts), as_json=as_json, indent=1)
    if options.get("output") is None and result.folder:
        tell(f"its page: fsdpbench report {Path(result.folder).parent}")
    if result.status is Status.OOM and advice is None:
        tell(f"why, and what fits: fsdpbench explain {result.folder}")
    if not result.status.is_answer:
        raise click.exceptions.Exit(int(ExitCode.SOME_FAILED))


def _advice(config: "Config", result: "Result") -> tuple[dict[str, object], str] | None:
    """Return advice, or after out of memory the changes that fit, as JSON and text; None without figures."""
    from fsdpbench.answers.advise import advise_script, fitting_mix
    from fsdpbench.answers.advise.text import as_dict, describe_advice, describe_fitting, entry
    from fsdpbench.sweep.trials import jobs_for

    if result.status == "oom":
        from fsdpbench.answers import explain
        from fsdpbench.answers.explain import text

        measurement = replace(config.measurement, traced_steps=0)
        explained = explain.advise(replace(config, measurement=measurement), jobs_for("sim"), tell)
        content, words = text.as_dict(explained), text.describe_advice(explained)
        ran = explained.as_it_is, explained.roomy
        mix = None if any(map(explain.grows, ran)) else fitting_mix(config, *ran, jobs_for("sim"), tell)
        if mix is not None:
            content, words = content | {"by_unit": entry(mix)}, f"{words}\n\n{describe_fitting(mix)}"
        return {"explanation": content}, words
    if not result.step_time_s:
        tell("no advice: the script has no figures that variants could be compared with")
        return None
    if len(result.traces or ()) > 1:
        tell("no advice: variants of a pipeline are not simulated; compare runs with other arguments instead")
        return None
    found = advise_script(config, result, jobs_for("sim"), tell)
    return {"advice": as_dict(found)}, describe_advice(found)


def _run_model(assignments: tuple[str, ...], options: dict[str, Any]) -> "Result":
    """Run the configuration that `options` and `assignments` name. Raises `UsageError` without a model."""
    from fsdpbench.cli.requests.request import single_config
    from fsdpbench.engine.results.result import not_applicable_result
    from fsdpbench.sweep.planning import not_applicable, without_absent

    if not options.get("model") and not options.get("hf_config"):
        raise UsageError(error_text("run.no_model"))
    given = common.single_settings(common.given_settings(options, assignments))
    config, choice, assumed = single_config(options, given)
    config = with_soak(config, options)
    reasons = not_applicable(config, given)
    if reasons:
        return not_applicable_result(config, reasons)
    config = _with_jitter(without_absent(config), options.get("jitter"))
    tell(f"{config.model}, {config.system}: on {config.device} ({choice.reason}){assumed}")
    return _run(config, options.get("output"))


def _with_jitter(config: "Config", text: str | None) -> "Config":
    """Return `config` with the jitter in `text`. Raises `UsageError` for invalid text or a real device."""
    from fsdpbench.base.configuration.config import JitterSettings

    if text is None:
        return config
    if config.device != "sim":
        raise UsageError("--jitter is for simulated GPUs; real ones have their own")
    return replace(config, jitter=JitterSettings.parse(text))


def _tell_notes(result: "Result") -> None:
    """Print notes on the measurement of a script, and the location of its output."""
    for note in result.script.notes if result.script else ():
        tell(f"note: {one_line(note)}")
    for line in remarks.script_notes(result):
        tell(f"note: {one_line(line)}")
    if unknown := result.unknown_operators:
        share = result.script.unknown_share if result.script else {}
        named = [f"{name} ({share[name]:.1%} of a step)" if name in share else name for name in unknown]
        tell(one_line(f"note: costed by their bytes alone: {', '.join(named)}"))
    beside = "; its traceback beside it" if result.at("cause.log") == "stderr.log" else ""
    place = Path(str(result.folder)) / "stdout.log"
    tell(f"the script's output (simulated tensors print zeros{beside}): {place}")


def _run(config: "Config", output: Path | None) -> "Result":
    """Run `config` in a run folder, which `report` and `analyze` read like a sweep's folder."""
    from fsdpbench.cli.terminal.progress import WaitingProgress
    from fsdpbench.engine.results.store import point_folder_name
    from fsdpbench.sweep.runner import run_sweep

    with _locked(output, config) as store:
        store.write_space({"schema": 1, "model": config.model, "system": [config.system]}, [config])
        summary = run_sweep(
            store, [config], WaitingProgress(config.measurement.timeout_s), jobs=1, again=True
        )
    return summary.ran[0].result.replaced(folder=str(store.folder / point_folder_name(config)))


def own_name(config: "Config") -> str:
    """Return the folder name of a run without `-o`, unique to `config`."""
    said = json.dumps(config.identity(), sort_keys=True, default=str)
    name = re.sub(r"[^\w.+-]", "-", config.name)[:_LONGEST_NAME]
    return f"{name}-{hashlib.sha256(said.encode()).hexdigest()[:6]}"


@contextlib.contextmanager
def _locked(output: Path | None, config: "Config") -> "Iterator[Store]":
    """Lock the run folder: `output`, after waiting for it, or the first free folder named after `config`."""
    from fsdpbench.base.files.folder_lock import FolderTakenError
    from fsdpbench.engine.results.store import Store

    with contextlib.ExitStack() as held:
        for attempt in itertools.count(1):
            name = own_name(config) + (f"-{attempt}" if attempt > 1 else "")
            folder = output or _FOLDERS / name
            store = Store.open_or_create(folder)
            try:
                held.enter_context(store.locked())
                break
            except FolderTakenError as taken:
                if attempt == 1 and output is not None:
                    tell(f"{str(taken).split(';')[0]}; waiting until it ends")
                if output is not None:
                    time.sleep(_POLL_S)
        yield store
