"""The report of a run: one offline HTML page, and the same table as Markdown, JSON and CSV."""

from fsdpbench.reports.pages.exports import write_csv, write_json, write_markdown
from fsdpbench.reports.pages.html import LivePage, write_report
from fsdpbench.reports.pages.recommendation import best_lines, best_sentence, findings
from fsdpbench.reports.pages.view import Configuration, RunFolderError, RunView, Status, load_run
