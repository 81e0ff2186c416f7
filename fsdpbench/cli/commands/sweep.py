"""`fsdpbench sweep`: run many configurations, here or with a launcher, rank them and write a report."""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fsdpbench.base.configuration.config import Config
from fsdpbench.base.errors import BenchError, ExitCode, UsageError, error_text
from fsdpbench.base.files.documents import is_there
from fsdpbench.base.numbers import MOST_GPUS
from fsdpbench.base.settings import SETTINGS
from fsdpbench.cli import values
from fsdpbench.cli.output import show, show_json, tell
from fsdpbench.cli.requests import options as common
from fsdpbench.cli.terminal import by_count as counted
from fsdpbench.cli.terminal.units import compiled_words
from fsdpbench.launch import fork_server

if TYPE_CHECKING:
    from fsdpbench.base.files.shared_log import SharedLog
    from fsdpbench.cli.requests.request import SweepRequest
    from fsdpbench.engine.results.store import Store, StoredPoint
    from fsdpbench.launch.nodes import Nodes
    from fsdpbench.sweep.runner import SweepSummary
    from fsdpbench.sweep.spaces.space import Plan
    from fsdpbench.sweep.trials import Pool

_OF_SIMULATED_GPUS = frozenset({"hardware", "software", "sanitize", "gpus_used_per_node", "nic_gb_s"})

launcher_options = values.grouped(
    click.option("--launcher", type=click.Choice(["local", "torchrun", "slurm"]), default="local"),
    click.option("--nnodes", type=values.whole(most=MOST_GPUS)),
    click.option("--node-rank", type=values.whole(0, MOST_GPUS)),
    click.option("--rdzv-endpoint", metavar="HOST:PORT"),
    click.option("--partition"),
    click.option("--account"),
    click.option("--time", "time_minutes", type=values.whole(most=values.MOST_SECONDS // 60)),
)
"""`--launcher`, and the options of each launcher."""


@dataclass(frozen=True)
class Launcher:
    """A launcher with its options. `nodes`: this machine's rank among several nodes, for torchrun."""

    name: str
    nodes: "Nodes | None"
    options: Mapping[str, Any]

    @property
    def follows(self) -> bool:
        """Return whether another machine leads the sweep."""
        return self.nodes is not None and self.nodes.rank > 0

    def pool(self, folder: Path, jobs: int, analysed: str | None = None) -> "Pool":
        """Return a pool of `jobs` processes for a sweep in `folder`; `analysed`: path of the log of analysed
        traces. Raises `UsageError` if Slurm's commands are missing."""
        from fsdpbench.launch.pool import PointPool

        if self.name == "slurm":
            from fsdpbench.launch.slurm import SlurmPool, SlurmSettings

            asked = self.options
            settings = SlurmSettings(asked.get("partition"), asked.get("account"), asked.get("time_minutes"))
            return SlurmPool(folder, settings)
        return PointPool(jobs, self.nodes, analysed)


def make_launcher(options: Mapping[str, Any], gpus: list[int]) -> Launcher:
    """Return the launcher in `options`. Raises `UsageError` if an option belongs to another launcher."""
    name = options.get("launcher") or "local"
    of_torchrun = ("nnodes", "node_rank", "rdzv_endpoint")
    of_slurm = ("partition", "account", "time_minutes")
    for owner, names in (("torchrun", of_torchrun), ("slurm", of_slurm)):
        for option in names:
            if options.get(option) is not None and name != owner:
                flag = "--time" if option == "time_minutes" else f"--{option.replace('_', '-')}"
                raise UsageError(f"{flag} belongs to --launcher {owner}, not to {name}")
    return Launcher(name, _nodes(options, gpus) if name == "torchrun" else None, options)


def _nodes(options: Mapping[str, Any], gpus: list[int]) -> "Nodes":
    from fsdpbench.launch.nodes import Nodes

    count, rank, endpoint = (options.get(name) for name in ("nnodes", "node_rank", "rdzv_endpoint"))
    if count is None or rank is None or endpoint is None:
        raise UsageError(error_text("sweep.torchrun_nodes"))
    if rank >= count:
        raise UsageError(f"--node-rank {rank}: with --nnodes {count} they go from 0 to {count - 1}")
    for world in gpus:
        if world % count:
            raise UsageError(f"--gpus {world} cannot be divided among --nnodes {count}")
    return Nodes(count, rank, endpoint)


_PATIENCE_S = 300.0


@click.command("sweep", cls=values.SectionedCommand)
@values.help_all_option
@click.argument("space", required=False, metavar="[SPACE.toml]")
@common.target_options
@common.space_options
@launcher_options
@click.option("-o", "--output", type=values.PossiblePath())
@click.option("--jobs", type=values.whole(most=values.MOST_JOBS))
@click.option("--repeat", type=values.whole(most=values.MOST_RUNS), default=1)
@click.option("--retry-failed", is_flag=True)
@click.option("--fail-fast", is_flag=True)
@common.sanitize_option
@counted.budget_options
@common.setting_options(many=True)
def command(space: str | None, assignments: tuple[str, ...], as_json: bool, **options: Any) -> None:
    """Run many configurations, rank them and write the report.

    \b
    fsdpbench sweep --model gpt-2.8b --gpus 8
    fsdpbench sweep --model llama3-8b --gpus 64 --hardware h100-80gb --batch 1,2 --wrap block,every-2

    Each setting takes a comma-separated list of values to compare. Without one GPU for each rank, the same
    training code runs on simulated GPUs. After an interruption the same command resumes.
    """
    if options["launcher"] == "local":
        _start_server(space, assignments, options)
    from fsdpbench.base.files.shared_log import SharedLog
    from fsdpbench.cli.terminal.progress import make_progress
    from fsdpbench.engine.results.store import BATCHES_FOLDER, Store
    from fsdpbench.sweep.runner import run_sweep
    from fsdpbench.sweep.trials import jobs_for

    budget = counted.Budget.of(options.pop("tokens"), options.pop("price"), options.pop("gpu_mtbf"))
    request = request_from(space, assignments, options)
    budget.check(request.target)
    folder = options["output"] or Path("runs") / default_name(request)
    launcher = make_launcher(options, request.gpus)
    kept = None if launcher.follows else Store.open_or_create(folder).folder / BATCHES_FOLDER
    request, plan = _planned(request, options["jobs"], folder, kept)
    repeat = _noted(plan, options["repeat"], request.target.device)
    jobs = options["jobs"] or jobs_for(request.target.device)
    if launcher.follows:
        follow_request(launcher, folder, request)
        return
    with (store := Store(folder)).locked(), SharedLog() as analysed:
        store.write_space(request.to_space(), plan.points)
        summary = run_sweep(
            store,
            plan.points,
            make_progress(),
            pool=launcher.pool(folder, jobs, analysed.path),
            jobs=jobs,
            retry_failed=options["retry_failed"],
            fail_fast=options["fail_fast"],
            repeat=repeat,
        )
        pasted, report_failed = _write_answers(store, plan, analysed)
    code = _tell_end(store, plan, summary, pasted, budget, as_json)
    if report_failed is not None:
        raise report_failed
    if code is not ExitCode.OK:
        raise click.exceptions.Exit(int(code))


def _noted(plan: "Plan", repeat: int, device: str) -> int:
    """Print the notes on a plan. Return the number of runs of each point: `repeat`, or 1 if simulated."""
    for note in plan.notes:
        tell(f"  {note}")
    if repeat > 1 and device == "sim":
        tell("  --repeat: a simulated run is exact, one is enough")
        return 1
    return repeat


def _start_server(space: str | None, assignments: tuple[str, ...], options: Mapping[str, Any]) -> None:
    """Start the fork server; delay it if the sweep's folder may exist, because nothing may be left to run."""
    is_default = space is None and not any("," in (options[name] or "") for name in SETTINGS)
    compiles = (is_default and not options["compile"]) or common.asks_to_compile(options, assignments, space)
    begin = re.sub(r"[:/]", "-", f"{options['model']}-")
    usual = (each for each in Path("runs").glob("*") if each.name.startswith(begin))
    found = [options["output"]] if options["output"] else usual
    is_new = not any(is_there(folder / "sweep.toml") for folder in found)
    fork_server.start(device_named(options["device"], space), compiles, now=is_new)


def device_named(named: str | None, space: str | None) -> str | None:
    """Return the device `named` by a flag, else by the TOML file `space`; None if neither names one."""
    if named is None and space is not None:
        named = common.read_space_file(space)[0].get("device")
    return named


def request_from(space: str | None, assignments: tuple[str, ...], options: dict[str, Any]) -> "SweepRequest":
    """Return the request of a command. Flags override `--set`, which overrides the TOML file `space`, which
    overrides the defaults. If a flag names a real device, the file's keys for simulated GPUs are ignored.
    Raises `UsageError` if no model is named."""
    from fsdpbench.cli.requests.request import gpu_counts, make_request

    from_file = ({}, {}) if space is None else common.read_space_file(space)
    named = {k: v for k, v in options.items() if v is not None and v != () and k not in SETTINGS}
    real = named.get("device") in ("cpu", "cuda")
    target = {k: v for k, v in from_file[0].items() if not (real and k in _OF_SIMULATED_GPUS)} | named
    lists = {**from_file[1], **common.given_settings(options, assignments)}
    if target.get("nnodes") and target.get("gpus_per_node") is None:
        target["gpus_per_node"] = max(gpu_counts(target.get("gpus"))) // target["nnodes"] or 1
    if not target.get("model") and not target.get("hf_config"):
        raise UsageError("which model? --model gpt-2.8b, for example; `fsdpbench list models` lists them")
    return make_request(target, lists, whole_space=space is not None)


def _planned(
    request: "SweepRequest", jobs: int | None, folder: Path, kept: Path | None
) -> "tuple[SweepRequest, Plan]":
    """Return the request with batches that fit, and its plan. If it is refused, remove the empty folder."""
    from fsdpbench.cli.requests.request import with_fitting_batches

    try:
        request = with_fitting_batches(request, jobs, tell, kept)
        return request, announced(request)
    except UsageError:
        with suppress(OSError):  # a folder that is not empty stays
            folder.rmdir()
        raise


def announced(request: "SweepRequest") -> "Plan":
    """Return the plan of a request, and announce it. Raises `UsageError` if nothing is left to run."""
    plan = request.plan()
    if not plan.points:
        raise UsageError(f"nothing is left to run: {'; '.join(plan.notes)}")
    tell(request.announcement(len(plan.points), compiled_words(c.settings.compile for c in plan.points)))
    if added := request.added_by_preset():
        tell(added)
    return plan


def _write_answers(
    store: "Store", plan: "Plan", analysed: "SharedLog"
) -> tuple[list[Path], BenchError | None]:
    """Write the code to paste and the page. Return the files of code, and the error that stopped the rest."""
    from fsdpbench.base.files.shared_log import records
    from fsdpbench.engine.results.store import REPORT_FILE, disk_errors
    from fsdpbench.reports.analysis.processes import kept
    from fsdpbench.reports.pages import write_report
    from fsdpbench.sweep.snippets import write_recommended

    pasted: list[Path] = []
    try:
        with disk_errors(store.folder):
            pasted = write_recommended(store.folder)
            found = kept(records(analysed.path) if analysed.path else [])
            write_report(store.folder, store.folder / REPORT_FILE, workers=fork_server.workers, kept=found)
    except BenchError as error:
        return pasted, error
    return pasted, None


def _tell_end(
    store: "Store",
    plan: "Plan",
    summary: "SweepSummary",
    pasted: list[Path],
    budget: counted.Budget,
    as_json: bool,
) -> ExitCode:
    """Print the outcome of a sweep as text or JSON, and return the exit code. `pasted`: files of code."""
    from fsdpbench.cli.terminal.ranking import print_ranking
    from fsdpbench.engine.results.provenance import content_key
    from fsdpbench.engine.results.records import Status
    from fsdpbench.sweep.snippets import without_code

    folder, keys = store.folder, {content_key(config) for config in plan.points}
    stored = [point for point in store.points() if point.key in keys]
    failed = [p for p in stored if not p.result.status.is_answer]
    by_count = _by_count(stored, budget)
    no_code = None if pasted else next(filter(None, map(without_code, plan.points)), None)
    if as_json:
        results = [{"name": p.config["name"], "folder": str(p.folder), **p.result.to_dict()} for p in stored]
        show_json(
            {"schema": 1, "folder": str(folder), "notes": plan.notes, "results": results}
            | {"by_gpus": [row.to_dict() for row in by_count], "code": [str(path) for path in pasted]}
            | {"no_code": no_code}
        )
    else:
        print_ranking(folder, ran=len(summary.ran), already_done=summary.already_done)
        for path in pasted:
            show(f"as code to paste: {path}")
        if no_code is not None:
            show(f"no code to paste: {no_code}")
        if any(point.result.status is Status.OOM for point in stored):
            tell(f"why memory ran out, and what fits: fsdpbench explain {folder}")
        if counted.is_wanted(by_count, budget):
            counted.print_rows(by_count, budget)
        counted.print_endured(by_count)
    return ExitCode.SOME_FAILED if failed else ExitCode.OK


def _by_count(stored: "Sequence[StoredPoint]", budget: counted.Budget) -> list[counted.Row]:
    """Return the best configuration for each number of GPUs."""
    from fsdpbench.engine.results.records import Status

    running = [each for each in stored if each.result.status is Status.OK and each.result.step_time_s]
    unit = "tokens" if all(each.result.tokens_per_s_per_gpu for each in running) else "samples"
    figure = f"{unit}_per_s_per_gpu"
    configs = ((Config.from_dict(each.config), each.result.at(figure) or 0.0) for each in running)
    return counted.rows_by_count(configs, unit, budget) if running else []


def follow_request(launcher: Launcher, folder: Path, request: "SweepRequest") -> None:
    """Run this machine's share of a sweep that another machine leads."""
    from fsdpbench.engine.results.store import Store
    from fsdpbench.launch.nodes import follow

    assert launcher.nodes is not None
    store, began = Store(folder), False

    def is_over() -> bool:
        nonlocal began
        began = began or store.is_locked
        return began and not store.is_locked

    patience = request.target.measurement.timeout_s + _PATIENCE_S
    tell(f"following node 0 in {folder}")
    count = follow(folder, launcher.nodes, is_over, patience)
    tell(f"took part in {count} configurations")


def default_name(request: "SweepRequest") -> str:
    """Return the name of a sweep's folder. Equal spaces have equal names: the same command resumes."""
    target = request.target
    where = Path(target.hardware).stem if target.hardware else target.device
    model = re.sub(r"[:/]", "-", target.model)
    name = f"{model}-{'-'.join(map(str, request.gpus))}x-{where}"
    if not request.is_default:
        digest = hashlib.sha256(json.dumps(request.to_space(), sort_keys=True, default=str).encode())
        name += f"-{digest.hexdigest()[:6]}"
    return name
