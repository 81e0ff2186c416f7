"""The command line: `main` is what the `fsdpbench` script calls.

The commands are in `group.py` and beside it.
"""

from fsdpbench import is_command
from fsdpbench.base import interruption

if is_command():
    interruption.take_over()


def main() -> None:
    """Entry point of the `fsdpbench` script. Ends the process with a documented exit code."""
    from fsdpbench.cli.startup import begin

    if is_command():
        begin()
    from fsdpbench.cli.group import run

    run()
