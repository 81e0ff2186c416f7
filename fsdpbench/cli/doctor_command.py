"""`fsdpbench doctor`: what this machine can run, and what is missing for the rest."""

from __future__ import annotations

import json

import click

from fsdpbench.errors import ExitCode


@click.command("doctor")
@click.option("--quick", is_flag=True, help="Look only; do not run a small model on each device.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
def command(quick: bool, as_json: bool) -> None:
    """Say what this machine can run, by running it, and what is missing for the rest.

    Exits with 5 if something that everybody needs does not work.
    """
    from fsdpbench.doctor import Verdict, examine

    findings = examine(try_devices=not quick)
    if as_json:
        print(json.dumps({"schema": 1, "findings": [finding.to_dict() for finding in findings]}))
    else:
        width = max(len(finding.what) for finding in findings)
        for finding in findings:
            print(f"{finding.what:<{width}}  {finding.verdict.value:<7}  {finding.detail}")
            if finding.way_out:
                print(f"{'':<{width}}           {finding.way_out}")
    if any(finding.verdict is Verdict.BROKEN for finding in findings):
        raise click.exceptions.Exit(int(ExitCode.BENCH_FAILED))
