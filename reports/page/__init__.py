"""The report of a run: one offline HTML page, and the same table as Markdown, JSON and CSV."""

from fsdpbench.reports.page.exports import write_csv, write_json, write_markdown
from fsdpbench.reports.page.html import write_report
from fsdpbench.reports.page.live import LivePage
from fsdpbench.reports.page.recommendation import best_sentence, findings
from fsdpbench.reports.page.view import Configuration, RunFolderError, RunView, Status, load_run

__all__ = [
    "Configuration",
    "LivePage",
    "RunFolderError",
    "RunView",
    "Status",
    "best_sentence",
    "findings",
    "load_run",
    "write_csv",
    "write_json",
    "write_markdown",
    "write_report",
]
