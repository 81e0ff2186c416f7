"""Several runs side by side on one page."""

from fsdpbench.reports.runs_page.page import write_runs_page

__all__ = ["write_runs_page"]
