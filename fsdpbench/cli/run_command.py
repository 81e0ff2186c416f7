"""`fsdpbench run`: one configuration, one result."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import click

from fsdpbench.cli.options import given_settings, setting_options, single_settings, target_options
from fsdpbench.cli.progress import describe_result
from fsdpbench.cli.request import target_of
from fsdpbench.errors import ExitCode, UsageError
from fsdpbench.settings import Settings


@click.command("run")
@target_options
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Folder (default runs/single).")
@setting_options(many=False)
def command(assignments: tuple[str, ...], as_json: bool, **options: Any) -> None:
    """Run one configuration and print its result."""
    from fsdpbench.planning import make_config, not_applicable, without_absent
    from fsdpbench.records import Status
    from fsdpbench.result import not_applicable_result

    if not options.get("model"):
        raise UsageError("which model? --model gpt-2.8b, for example; `fsdpbench list models` lists them")
    given = single_settings(given_settings(options, assignments))
    target, choice = target_of(options)
    system = options.get("system") or "impl-fsdp2"
    config = make_config(target, system, Settings.of(**given), target.workload())
    reasons = not_applicable(config, given)
    if reasons:
        result = not_applicable_result(config, reasons)
    else:
        config = without_absent(config)
        print(f"{config.name}: on {config.device} ({choice.reason})", file=sys.stderr)
        result = _run(config, options.get("output") or Path("runs") / "single")
    if as_json:
        print(json.dumps(result, indent=1))
    else:
        print(describe_result(result))
    if not Status(result["status"]).is_answer:
        raise click.exceptions.Exit(int(ExitCode.SOME_FAILED))


def _run(config: Any, folder: Path) -> dict[str, Any]:
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
