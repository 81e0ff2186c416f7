"""The command line: `main` is what the `fsdpbench` script calls.

Until signals are heard nothing is imported that takes time; the commands lie in `group.py` and beside it.
"""

from __future__ import annotations

from fsdpbench import interruption

if interruption.is_command():
    interruption.take_over()


def main() -> None:
    """Entry point of the `fsdpbench` script. Ends the process with a documented exit code."""
    from fsdpbench.cli.startup import begin

    if interruption.is_command():
        begin()
    from fsdpbench.cli.group import run

    run()
