"""`python -m fsdpbench`: the command line."""

from fsdpbench.cli import main

main()
