"""`fsdpbench report`: the page of a run folder, made again from the record."""

from __future__ import annotations

from pathlib import Path

import click

from fsdpbench.base.errors import BenchError, UsageError
from fsdpbench.cli.output import show, tell
from fsdpbench.cli.values import PlaceForFile, PossiblePath


@click.command("report")
@click.argument("folders", metavar="FOLDER...", nargs=-1, required=True, type=PossiblePath())
@click.option("-o", "--output", type=PlaceForFile(), help="Output file (default: in the run folder).")
@click.option("--format", "form", type=click.Choice(["html", "md", "json", "csv"]), default="html")
@click.option("--json", "form", flag_value="json", help="Same as --format json.")
def command(folders: tuple[Path, ...], output: Path | None, form: str) -> None:
    """Write the report of a run folder: an offline page, or the ranked table as Markdown, JSON or CSV.

    \b
    fsdpbench report runs/gpt-2.8b-8x-a100-80gb

    Of several folders -o names one page that has them side by side.
    """
    if len(folders) > 1:
        _side_by_side(folders, output, form)
    else:
        _one(folders[0], output, form)


def _side_by_side(folders: tuple[Path, ...], output: Path | None, form: str) -> None:
    from fsdpbench.reports.pages import RunFolderError
    from fsdpbench.reports.pages.runs_page import write_runs_page

    if form != "html" or output is None:
        raise UsageError("several folders make one page: -o FILE.html (--format is for one folder)")
    try:
        write_runs_page(folders, output)
    except RunFolderError as error:
        raise UsageError(str(error)) from None
    except OSError as error:
        raise BenchError(f"{output}: cannot be written ({error.strerror})") from None
    tell(f"wrote {output}")


def _one(folder: Path, output: Path | None, form: str) -> None:
    from fsdpbench.base.files.whole_files import write_whole
    from fsdpbench.engine.results.index import refresh_index
    from fsdpbench.engine.results.store import REPORT_FILE, Store
    from fsdpbench.reports.pages import RunFolderError, write_csv, write_json, write_markdown, write_report

    try:
        if form != "html":
            text = {"md": write_markdown, "json": write_json, "csv": write_csv}[form](folder)
            if output is None:
                show(text)
                return
            write_whole(output, text)
        else:
            output = output or folder / REPORT_FILE
            write_report(folder, output)
            if (folder / "sweep.toml").is_file():
                refresh_index(Store.open(folder))
    except RunFolderError as error:
        raise UsageError(str(error)) from None
    except OSError as error:
        raise BenchError(f"{output or folder}: cannot be written ({error.strerror})") from None
    tell(f"wrote {output}")
