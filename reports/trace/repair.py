"""Second chance for traces that are not quite JSON, or not quite of the usual shape.

Seen in the wild: raw control characters and invalid UTF-8 in names, backslashes of Windows paths, `NaN` and
`inf` as bandwidths, time stamps as strings.  The text is mended as a whole, then every event is converted on
its own, so that one broken event costs itself and not the file.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

from reports.trace.raw import ABSENT, FloatEvent

_CONTROL = bytes(0x20 if byte < 0x20 else byte for byte in range(256))
_ESCAPE = re.compile(rb'\\(?:u[0-9a-fA-F]{4}|["\\/bfnrt])?')
_NOT_A_NUMBER = re.compile(rb"([:\[,]\s*)[-+]?(?:NaN|nan|Infinity|inf|Inf)(?=\s*[,}\]])")


def mend(text: bytes) -> bytes:
    """The same JSON with every defect named above replaced by something harmless.

    Control characters become blanks: between tokens they are white space anyway.  A backslash that begins no
    legal escape is doubled.  What is not a number becomes null.
    """
    text = text.translate(_CONTROL)
    text = _ESCAPE.sub(lambda match: match[0] if len(match[0]) > 1 else b"\\\\", text)
    text = _NOT_A_NUMBER.sub(rb"\1null", text)
    return text.decode("utf-8", errors="replace").encode("utf-8")


def convert_events(events: list[Any]) -> tuple[list[FloatEvent], int]:
    """Events from plain JSON values, numbers given as strings accepted; and how many were unusable."""
    usable: list[FloatEvent] = []
    lost = 0
    for event in events:
        try:
            plain = {key: value for key, value in event.items() if key != "args"}
            converted = msgspec.convert(plain, FloatEvent, strict=False)
        except (AttributeError, msgspec.ValidationError, OverflowError, ValueError):
            lost += 1
            continue
        arguments = event.get("args")
        converted.args = msgspec.Raw(msgspec.json.encode(arguments)) if arguments else ABSENT
        usable.append(converted)
    return usable, lost
