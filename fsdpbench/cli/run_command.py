"""`fsdpbench run`: one configuration, one result."""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fsdpbench.cli.options import given_settings, setting_options, single_settings, target_options
from fsdpbench.cli.script_notes import script_notes
from fsdpbench.cli.script_request import script_config, script_options
from fsdpbench.errors import ExitCode, UsageError
from fsdpbench.launch import fork_server
from fsdpbench.settings import Settings

if TYPE_CHECKING:
    from fsdpbench.config import Config


@click.command("run")
@target_options
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Folder (default runs/single).")
@script_options
@click.option(
    "--jitter",
    metavar="SEED",
    help="Simulated GPUs: noise and late ranks (a seed, or seed=1,kernels=0.02,arrival_us=20,straggler=0).",
)
@setting_options(many=False)
def command(assignments: tuple[str, ...], as_json: bool, **options: Any) -> None:
    """Run one configuration, or a training script of your own (--script), and print its result."""
    fork_server.start("sim" if options.get("script") or options.get("module") else options.get("device"))
    from fsdpbench.cli.progress import describe_result
    from fsdpbench.records import Status

    config = script_config(options, assignments)
    folder = options.get("output") or Path("runs") / "single"
    if config is not None:
        config = _with_jitter(config, options.get("jitter"))
        print(f"{config.name}: {config.gpus} simulated GPUs", file=sys.stderr)
        result = _run(config, folder)
        _tell_notes(result)
    else:
        result = _run_model(assignments, options, folder)
    if as_json:
        print(json.dumps(result, indent=1))
    else:
        print(describe_result(result))
    if not Status(result["status"]).is_answer:
        raise click.exceptions.Exit(int(ExitCode.SOME_FAILED))


def _run_model(assignments: tuple[str, ...], options: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The configuration that model and settings name."""
    from fsdpbench.cli.request import target_of
    from fsdpbench.planning import make_config, not_applicable, without_absent
    from fsdpbench.result import not_applicable_result

    if not options.get("model"):
        raise UsageError(
            "which model? --model gpt-2.8b, for example; `fsdpbench list models` lists them. "
            "For a training script of your own: --script train.py"
        )
    given = single_settings(given_settings(options, assignments))
    target, choice = target_of(options)
    system = options.get("system") or "impl-fsdp2"
    config = make_config(target, system, Settings.of(**given), target.workload())
    reasons = not_applicable(config, given)
    if reasons:
        return not_applicable_result(config, reasons)
    config = _with_jitter(without_absent(config), options.get("jitter"))
    print(f"{config.name}: on {config.device} ({choice.reason})", file=sys.stderr)
    return _run(config, folder)


def _with_jitter(config: Config, text: str | None) -> Config:
    """Raises `UsageError` for a text that says no jitter, and where nothing is simulated."""
    from fsdpbench.sim.jitter import JitterError, JitterSettings

    if text is None:
        return config
    if config.device != "sim":
        raise UsageError("--jitter is for simulated GPUs; real ones have their own")
    try:
        return replace(config, jitter=JitterSettings.parse(text))
    except JitterError as error:
        raise UsageError(f"--{error}") from None


def _tell_notes(result: dict[str, Any]) -> None:
    """What a reader should know of the measurement of a script, and where its output is."""
    for note in (result.get("script") or {}).get("notes", ()):
        print(f"note: {note}", file=sys.stderr)
    for line in script_notes(result):
        print(f"note: {line}", file=sys.stderr)
    unknown = result.get("unknown_operators")
    if unknown:
        print(f"note: costed by their bytes alone: {', '.join(unknown)}", file=sys.stderr)
    print(f"the script's output: {Path(result['folder']) / 'stdout.log'}", file=sys.stderr)


def _run(config: Config, folder: Path) -> dict[str, Any]:
    """Run `config` in a store of its own kind, so that `report` and `analyze` read it as they read a
    sweep."""
    from fsdpbench.cli.progress import SilentProgress
    from fsdpbench.provenance import content_key
    from fsdpbench.store import Store, point_folder_name
    from fsdpbench.sweep.runner import run_sweep

    store = Store.open_or_create(folder)
    with store.locked():
        store.write_space({"schema": 1, "model": config.model, "system": [config.system]}, [config])
        shutil.rmtree(folder / point_folder_name(config), ignore_errors=True)
        run_sweep(store, [config], SilentProgress(), jobs=1)
    point = store.finished()[content_key(config)]
    return {**point.result, "folder": str(point.folder)}
