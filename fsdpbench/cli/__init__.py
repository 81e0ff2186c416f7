"""The command line. The `fsdpbench` script calls `main`.

`group.py` collects the commands of `commands/`.
"""

from fsdpbench import is_command
from fsdpbench.base import interruption

if is_command():
    interruption.take_over()


def main() -> None:
    """Run the `fsdpbench` script. Ends the process with a documented exit code."""
    from fsdpbench.cli.startup import begin

    if is_command():
        begin()
    from fsdpbench.cli.group import run

    run()
