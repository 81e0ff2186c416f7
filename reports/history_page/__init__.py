"""The page of `check --history`: figures of a gate over commits, and where they change level."""

from fsdpbench.reports.history_page.page import step_groups, write_history_page

__all__ = ["step_groups", "write_history_page"]
