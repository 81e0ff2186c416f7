"""The page of `analyze`: what traces say, of any origin, in one offline HTML file."""

from fsdpbench.reports.trace_page.drawing import draw_rank
from fsdpbench.reports.trace_page.page import write_trace_page

__all__ = ["draw_rank", "write_trace_page"]
