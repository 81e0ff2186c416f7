"""`fsdpbench list` and `fsdpbench doctor`: the available choices, and what this machine can run."""

import dataclasses
import shutil
import sys
import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import click

from fsdpbench.base.errors import ExitCode
from fsdpbench.base.settings import SETTINGS, show_value
from fsdpbench.cli.output import make_console, make_table, show, show_json

if TYPE_CHECKING:
    from fsdpbench.base.settings.setting import Trade
    from fsdpbench.sweep.catalogue import Row
    from fsdpbench.sweep.doctor import Finding


@click.command("list")
@click.argument("what", type=click.Choice(["models", "systems", "hardware", "software", "settings"]))
@click.option("--json", "as_json", is_flag=True)
def command(what: str, as_json: bool) -> None:
    """List models, systems, hardware profiles, software profiles or settings.

    \b
    fsdpbench list models
    fsdpbench list settings --json
    """
    from fsdpbench.sweep import catalogue

    rows = settings() if what == "settings" else getattr(catalogue, what)()
    if as_json:
        show_json(rows)
        return
    flat = [_flat(row) for row in _for_people(rows)]
    table = make_table({name: name == "parameters" for name in flat[0]}, (row.values() for row in flat))
    make_console(width_of_pipe=240).print(table)
    if what in _NOTES:
        show(f"\n{_NOTES[what]}")


def _for_people(rows: "list[Row]") -> "list[Row]":
    """Remove what does not fit into a table, and show defaults as users type them."""
    shown = [{key: value for key, value in row.items() if key != "trades"} for row in rows]
    return [
        row | ({"default": SETTINGS[str(row["name"])].usual} if "default" in row else {}) for row in shown
    ]


def settings() -> "list[Row]":
    """Return a row for every setting, including the reason for its default."""
    names = ("name", "default", "values", "meaning", "reason")
    return [
        {name: getattr(setting, name) for name in names} | {"trades": list(map(_trade, setting.trades))}
        for setting in SETTINGS.values()
    ]


def _trade(trade: "Trade") -> dict[str, str | None]:
    effects = {"memory": trade.memory.name.lower(), "time": trade.time.name.lower()}
    return {"value": trade.written, **effects, "meaning": trade.words, "script": trade.script}


_OF_MODELS = {"parameters": "parameters", "training_state_bytes": "state"}
_SHAPE_WIDTH = 29
"""Columns for the first fields of a shape, so that the table has 80; `--json` shows all fields."""
_NOTES = {
    "models": "state: parameters, gradients, AdamW's moments; all ranks. --json: whole shapes",
    "settings": "nodes, one value for a sweep: gpus_per_node (GPUs that one node has), nic_gb_s (network of "
    "one node),\ngpus_used_per_node (GPUs of each node that run ranks; default all)",
}


def _flat(row: "Row") -> dict[str, str]:
    flat = {}
    for key, value in row.items():
        if value is None and key in _OF_MODELS:
            flat[_OF_MODELS[key]] = "-"  # for a plugin that cannot be loaded
        elif isinstance(value, Mapping):
            flat[key] = _first_fields([f"{name}={show_value(v)}" for name, v in value.items()])
        elif isinstance(value, list):
            flat[key] = ", ".join(map(str, value))
        elif key == "parameters" and isinstance(value, int):
            flat[key] = f"{value / 1e9:,.2f} B" if value >= 1e9 else f"{value / 1e6:,.2f} M"
        elif key == "training_state_bytes" and isinstance(value, int):
            flat[_OF_MODELS[key]] = f"{value / 2**30:,.2f} GiB"
        elif key == "memory_bytes" and isinstance(value, int):
            key, flat["memory"] = "memory", f"{value / 2**30:.0f} GiB"
        else:
            flat[key] = show_value(value)
    return flat


def _first_fields(fields: list[str]) -> str:
    """Return as many fields as fit, followed by an ellipsis if some are left out."""
    shown = ""
    for index, field in enumerate(fields):
        longer = f"{shown} {field}".strip()
        more = 2 if index + 1 < len(fields) else 0
        if len(longer) + more > _SHAPE_WIDTH:
            return f"{shown} …".strip()
        shown = longer
    return shown


@click.command("doctor")
@click.option("--quick", is_flag=True)
@click.option("--json", "as_json", is_flag=True)
def doctor_command(quick: bool, as_json: bool) -> None:
    """Test what this machine can run, and say what is missing for the rest.

    \b
    fsdpbench doctor

    Exits with 5 if something that every command needs does not work.
    """
    from fsdpbench.sweep.doctor import Verdict, examine

    findings = examine(try_devices=not quick)
    if as_json:
        show_json({"schema": 1, "findings": [dataclasses.asdict(finding) for finding in findings]})
    else:
        _print(findings, shutil.get_terminal_size().columns if sys.stdout.isatty() else None)
    if any(finding.verdict is Verdict.BROKEN for finding in findings):
        raise click.exceptions.Exit(int(ExitCode.BENCH_FAILED))


def _print(findings: "Sequence[Finding]", columns: int | None) -> None:
    """Print a line for each finding; wrap long lines to `columns`, if given."""
    width = max(len(finding.what) for finding in findings)
    for finding in findings:
        head = f"{finding.what:<{width}}  {finding.verdict.value:<7}  "
        for text in filter(None, (finding.detail, finding.way_out)):
            room = None if columns is None else max(30, columns - len(head))
            for line in [text] if room is None else textwrap.wrap(text, room):
                show(head + line)
                head = " " * len(head)
