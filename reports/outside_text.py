"""Text that comes from outside, made fit for one line of a terminal, a log or a Markdown table.

Names, paths, causes and values may hold anything: escape sequences that a terminal obeys, line breaks that
make one line two, a megabyte. What is shown of them is printable and bounded.
"""

from __future__ import annotations

import re
from typing import Any

LONGEST_LINE = 1000
_NOT_PRINTABLE = re.compile(
    "[\x00-\x1f\x7f-\x9f\xad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\ud800-\udfff]"
)
"""C0 and C1 controls, line and paragraph separators, what is invisible or turns the direction of writing, and
halves of surrogate pairs (bytes of a path that are not UTF-8)."""


def printable(text: object) -> str:
    """`text` on one line: each control character is replaced by its escape, as in `\\x1b`."""
    return _NOT_PRINTABLE.sub(_escaped, str(text))


def printable_lines(text: object) -> str:
    """`printable` for what is made of lines: those stay."""
    return "\n".join(printable(line) for line in str(text).split("\n"))


def one_line(text: object, longest: int = LONGEST_LINE) -> str:
    """`printable`, and no longer than `longest`: of more, beginning and end are kept."""
    whole = str(text)
    if len(whole) <= longest:
        whole = printable(whole)
    if len(whole) <= longest:
        return whole
    # The beginning names the thing, the end says the way out.
    left_out = f" … {len(whole) - longest:,} characters … "
    head, tail = 2 * longest // 3, longest // 3 - len(left_out)
    return f"{printable(whole[:head])[:head]}{left_out}{printable(whole[-tail:])[-tail:]}"


def all_on_one_line(tree: Any, longest: int = 4 * LONGEST_LINE) -> Any:
    """What JSON holds, with `one_line` of each text in it. Raises `RecursionError` if it is too deep."""
    if isinstance(tree, str):
        return one_line(tree, longest)
    if isinstance(tree, list):
        return [all_on_one_line(item, longest) for item in tree]
    if isinstance(tree, dict):
        return {one_line(key, longest): all_on_one_line(item, longest) for key, item in tree.items()}
    return tree


def _escaped(found: re.Match[str]) -> str:
    code = ord(found[0])
    known = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}.get(found[0])
    return known or (f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}")
