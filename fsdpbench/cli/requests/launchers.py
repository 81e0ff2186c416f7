"""`--launcher`: where the points of a sweep run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from fsdpbench.base.errors import UsageError
from fsdpbench.base.numbers import MOST_GPUS
from fsdpbench.cli.values import MOST_SECONDS, whole

if TYPE_CHECKING:
    from fsdpbench.launch.nodes import Nodes
    from fsdpbench.sweep.trials import Pool

F = TypeVar("F", bound=Callable[..., Any])


def launcher_options(function: F) -> F:
    """`--launcher` and what belongs to each of them."""
    options = (
        click.option(
            "--launcher",
            type=click.Choice(["local", "torchrun", "slurm"]),
            default="local",
            help="local: this machine. torchrun: several machines, the same command on each. slurm: Slurm "
            "jobs.",
        ),
        click.option("--nnodes", type=whole(most=MOST_GPUS), help="torchrun: number of machines."),
        click.option(
            "--node-rank", type=whole(0, MOST_GPUS), help="torchrun: number of this machine, from 0."
        ),
        click.option("--rdzv-endpoint", metavar="HOST:PORT", help="torchrun: address of node 0."),
        click.option("--partition", help="slurm: partition."),
        click.option("--account", help="slurm: account."),
        click.option(
            "--time",
            "time_minutes",
            type=whole(most=MOST_SECONDS // 60),
            help="slurm: time limit of a job, minutes.",
        ),
    )
    for option in reversed(options):
        function = option(function)
    return function


@dataclass(frozen=True)
class Launcher:
    """What was chosen. `nodes`: this machine's place among several, for torchrun."""

    name: str
    nodes: Nodes | None
    options: Mapping[str, Any]

    @property
    def follows(self) -> bool:
        """Whether another machine leads the sweep."""
        return self.nodes is not None and self.nodes.rank > 0

    def pool(self, folder: Path, jobs: int, analysed: str | None = None) -> Pool:
        """The pool for a sweep in `folder`; here it leaves its traces in the log `analysed`. Raises
        `UsageError` if its launcher is not there.
        """
        from fsdpbench.launch.pool import PointPool

        if self.name == "slurm":
            from fsdpbench.launch.slurm import SlurmPool, SlurmSettings

            asked = self.options
            settings = SlurmSettings(asked.get("partition"), asked.get("account"), asked.get("time_minutes"))
            return SlurmPool(folder, settings)
        return PointPool(jobs, self.nodes, analysed)


def make_launcher(options: Mapping[str, Any], gpus: list[int]) -> Launcher:
    """Raises `UsageError` for options that do not belong together."""
    name = options.get("launcher") or "local"
    of_torchrun = ("nnodes", "node_rank", "rdzv_endpoint")
    of_slurm = ("partition", "account", "time_minutes")
    for owner, names in (("torchrun", of_torchrun), ("slurm", of_slurm)):
        for option in names:
            if options.get(option) is not None and name != owner:
                flag = "--time" if option == "time_minutes" else f"--{option.replace('_', '-')}"
                raise UsageError(f"{flag} belongs to --launcher {owner}, not to {name}")
    return Launcher(name, _nodes(options, gpus) if name == "torchrun" else None, options)


def _nodes(options: Mapping[str, Any], gpus: list[int]) -> Nodes:
    from fsdpbench.launch.nodes import Nodes

    count, rank, endpoint = (options.get(name) for name in ("nnodes", "node_rank", "rdzv_endpoint"))
    if count is None or rank is None or endpoint is None:
        raise UsageError(
            "--launcher torchrun needs --nnodes, --node-rank and --rdzv-endpoint; start the same command on "
            "every machine, with its own --node-rank and the same run folder (-o)"
        )
    if rank >= count:
        raise UsageError(f"--node-rank {rank}: with --nnodes {count} they go from 0 to {count - 1}")
    for world in gpus:
        if world % count:
            raise UsageError(f"--gpus {world} cannot be divided among --nnodes {count}")
    return Nodes(count, rank, endpoint)
