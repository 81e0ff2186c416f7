"""`fsdpbench analyze`: the figures of a trace of any origin, and changes from another one."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from fsdpbench.base.errors import UsageError, error_text, written
from fsdpbench.cli.output import show_as, tell
from fsdpbench.cli.values import MOST_JOBS, PlaceForFile, PossiblePath, whole

if TYPE_CHECKING:
    from fsdpbench.engine.devices.detection import Roofs
    from fsdpbench.reports.analysis import Analysis
    from fsdpbench.reports.analysis.flight_recorder import Verdict
    from fsdpbench.reports.readers import TraceLimits


@click.command("analyze")
@click.argument("paths", nargs=-1, required=True, type=PossiblePath())
@click.option("--against", type=PossiblePath())
@click.option("--hardware")
@click.option("--hta", is_flag=True)
@click.option("--jobs", type=whole(most=MOST_JOBS))
@click.option("--limit", "limits", multiple=True, metavar="NAME=VALUE")
@click.option("-o", "--output", type=PlaceForFile())
@click.option("--json", "as_json", is_flag=True)
def command(
    paths: tuple[Path, ...],
    against: Path | None,
    hardware: str | None,
    hta: bool,
    jobs: int | None,
    limits: tuple[str, ...],
    output: Path | None,
    as_json: bool,
) -> None:
    """Show overlap, exposed communication, idle time and memory of Kineto traces.

    \b
    fsdpbench analyze trace.json.gz

    PATHS are files or folders, read --jobs at a time. Of Flight Recorder dumps (nccl_trace_rank_*), or of
    logs with time-outs of NCCL's watchdog, it shows which rank did not join which collective.
    """
    from fsdpbench.engine.devices.detection import roofs
    from fsdpbench.reports.analysis.flight_recorder import describe as describe_dumps
    from fsdpbench.reports.analysis.text import describe

    verdict = _dumps(paths)
    if verdict is not None:
        if against is not None or hta or output is not None:
            raise UsageError(f"--against, --hta and -o are for traces, and these are {verdict.source}")
        show_as(verdict.to_dict(), describe_dumps(verdict), as_json=as_json)
        return
    if against is not None and output is not None:
        raise UsageError(error_text("analyze.page_against"))
    known, allowed = roofs(hardware), _limits(limits)
    analysis = _analyzed(paths, jobs, known, allowed, draws=output is not None)
    content: dict[str, object] = analysis.to_dict()
    texts = [describe(analysis)]
    before = _analyzed((against,), jobs, known, allowed) if against is not None else None
    if before is not None:
        content, texts = _compared(before, analysis)
    if hta:
        content["hta"], opinion = _second_opinion(before, analysis)
        texts += opinion
    show_as(content, "\n\n".join(texts), as_json=as_json)
    if output is not None:
        from fsdpbench.reports.pages.trace_page import write_trace_page

        title = paths[0].resolve().name + (f" and {len(paths) - 1} more" if len(paths) > 1 else "")
        with written(output):
            write_trace_page(analysis, output, title)
        tell(f"wrote {output}")


def _dumps(paths: tuple[Path, ...]) -> "Verdict | None":
    """Return the verdict on Flight Recorder dumps or logs with time-outs; None if `paths` has neither."""
    from fsdpbench.reports.analysis.flight_recorder import judge, judge_logs
    from fsdpbench.reports.readers.flight_recorder import find_dumps, find_logs

    dumps = find_dumps(paths)
    if dumps:
        return judge(dumps)
    logs = find_logs(paths)
    return judge_logs(logs) if logs else None


def _limits(texts: tuple[str, ...]) -> "TraceLimits":
    from fsdpbench.reports.readers import TraceLimits

    try:
        return TraceLimits.from_environment().with_texts(texts)
    except ValueError as error:
        raise UsageError(str(error)) from None


def _analyzed(
    paths: tuple[Path, ...], jobs: int | None, roofs: "Roofs", limits: "TraceLimits", *, draws: bool = False
) -> "Analysis":
    from fsdpbench.reports.analysis import analyze
    from fsdpbench.reports.analysis.analyze import find_traces
    from fsdpbench.reports.analysis.processes import suitable_processes
    from fsdpbench.reports.pages.trace_page import draw_rank

    files = [file.path for file in find_traces(paths)]
    processes = jobs or suitable_processes(files)
    draw = partial(draw_rank, traces=len(files)) if draws else None
    links, chips = roofs
    return analyze(paths, processes=processes, links=links, limits=limits, chips=chips, draw=draw)


def _compared(before: "Analysis", after: "Analysis") -> tuple[dict[str, object], list[str]]:
    """Return the changes of each rank, as JSON and as text. Raises `UsageError` if a side has no trace."""
    from fsdpbench.reports.analysis.trace_diff import describe_diff, diff_analyses

    diffs = diff_analyses(before, after)
    if not diffs:
        raise UsageError("--against compares traces, and one side has none")
    content = {"schema": 1, "ranks": [diff.to_dict() for diff in diffs]}
    return content, [describe_diff(diff) for diff in diffs]


def _second_opinion(before: "Analysis | None", after: "Analysis") -> tuple[dict[str, object], list[str]]:
    """Return HTA's figures of each trace, and its diff of the first trace of each side, as JSON and text."""
    from fsdpbench.reports.readers.hta import describe_changes, describe_opinion, hta_changes, hta_opinion

    opinions = [hta_opinion(rank.path) for rank in after.ranks]
    content: dict[str, object] = {"ranks": [vars(each) for each in opinions]}
    texts = [describe_opinion(each) for each in opinions]
    if before is not None and before.ranks and after.ranks:
        found = hta_changes(before.ranks[0].path, after.ranks[0].path)
        kernels = found if isinstance(found, str) else {name: row._asdict() for name, row in found.items()}
        content["diff"] = {"kernels": kernels}
        texts.append(describe_changes(found))
    return content, texts
