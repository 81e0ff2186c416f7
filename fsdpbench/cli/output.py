"""Output of commands without control characters, so that no name, path or cause can control the terminal.

say     the one line of an error                       stderr
tell    progress, notes                                stderr
show    an answer, as text                             stdout
show_json   an answer, as one JSON object              stdout
show_as     one of the two, as `--json` chooses        stdout
make_console    rich's tables (`make_table`)           stdout, or stderr
"""

import shutil
import sys
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from fsdpbench.base.files.documents import to_json
from fsdpbench.base.reading import one_line, printable_lines

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text


def say(message: object) -> None:
    """Print the error that ends the command: one line, of bounded length."""
    print(f"fsdpbench: {one_line(message)}", file=sys.stderr, flush=True)


def tell(text: object, end: str = "\n", over: bool = False) -> None:
    """Print progress, or a note on the answer. `over`: replace the current line."""
    print("\r" * over + printable_lines(text), end=end, file=sys.stderr, flush=True)


def show(text: object) -> None:
    """Print the answer, which may have several lines."""
    shown = printable_lines(text)
    print(shown, end="" if shown.endswith("\n") else "\n")


def show_json(content: object, indent: int | None = None) -> None:
    """Print the answer as JSON, which escapes control characters itself."""
    print(to_json(content, indent))


def show_as(content: object, text: object, *, as_json: bool, indent: int | None = None) -> None:
    """Print `content` as JSON, or `text`."""
    if as_json:
        show_json(content, indent)
    else:
        show(text)


def terminal_width() -> int | None:
    """Return the columns of the terminal that `tell` writes to; None if that is a file or a pipe."""
    return shutil.get_terminal_size().columns if sys.stderr.isatty() else None


def make_console(stderr: bool = False, width_of_pipe: int = 200) -> "Console":
    """Return a console that escapes control characters; for a pipe plain, with tables of `width_of_pipe`."""
    from rich.console import Console, RenderableType
    from rich.segment import Segment
    from rich.text import Text

    class PrintableConsole(Console):
        def print(self, *objects: Any, **options: Any) -> None:
            folds = self.is_terminal or not all(isinstance(each, str | Text) for each in objects)
            super().print(*objects, **{"soft_wrap": not folds} | options)

        def render(self, renderable: RenderableType, options: Any = None) -> Iterable[Segment]:
            for segment in super().render(renderable, options):
                if segment.control:
                    yield segment
                else:
                    yield segment._replace(text=printable_lines(segment.text))

    # No markup, because a path may contain brackets.
    console = PrintableConsole(stderr=stderr, markup=False, emoji=False)
    if not console.is_terminal and not stderr:
        console.width, console.no_color = width_of_pipe, True
    return console


def make_table(columns: Mapping[str, bool], rows: "Iterable[Iterable[str | Text]]") -> "Table":
    """Return a plain table of `rows`. `columns`: by title, whether they hold figures, which are
    right-aligned. Figures and the first column are never folded."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for place, (title, figures) in enumerate(columns.items()):
        whole = figures or not place
        table.add_column(title, justify="right" if figures else "left", no_wrap=whole, overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in row))
    return table
