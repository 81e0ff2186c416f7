"""Second chance for traces that are not quite JSON, or not quite of the usual shape.

Seen in the wild: raw control characters and invalid UTF-8 in names, backslashes of Windows paths, `NaN` and
`inf` as bandwidths, time stamps as strings.  The text is fixed as a whole, then every event is converted on
its own, so that one broken event costs itself and not the file.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import msgspec

from fsdpbench.reports.trace.text.raw import ABSENT, FLOAT_EVENT, FLOAT_EVENTS, RAW_EVENTS, FloatEvent

_CONTROL = bytes(0x20 if byte < 0x20 else byte for byte in range(256))
_ESCAPE = re.compile(rb'\\(?:u[0-9a-fA-F]{4}|["\\/bfnrt])?')
_OFFSET = re.compile(r" \(byte \d+\)$")
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


class UnmendableError(Exception):
    """Text that is not JSON, fixed or not; the message is the decoder's."""


@dataclass
class Recovered:
    """What a list of events held.

    events, text: those of the usual shape, and the JSON they were decoded from.  converted: events with, say,
    numbers as strings.  lost: how many could not be understood.  defect: why the text had to be fixed.
    """

    events: list[FloatEvent]
    text: bytes
    converted: list[FloatEvent] = field(default_factory=list)
    lost: int = 0
    defect: str | None = None


def recover_events(text: bytes) -> Recovered:
    """The events of a JSON list, fixed if need be. Raises UnmendableError."""
    defect = None
    try:
        return Recovered(FLOAT_EVENTS.decode(text), text)
    except msgspec.ValidationError:
        pass
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        defect, text = _told(error), mend(text)
    try:
        raws = RAW_EVENTS.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UnmendableError(_told(error)) from None
    found = Recovered([], b"", defect=defect)
    usual: list[bytes] = []
    for raw in raws:
        try:
            found.events.append(FLOAT_EVENT.decode(raw))
            usual.append(bytes(raw))
        except (msgspec.DecodeError, UnicodeDecodeError):
            converted, lost = _convert(raw)
            found.converted += converted
            found.lost += lost
    found.text = b"[" + b",".join(usual) + b"]"
    return found


def recover_value(text: bytes) -> tuple[Any, str | None]:
    """The plain value of JSON, fixed if need be, and why it had to be. Raises UnmendableError."""
    try:
        return msgspec.json.decode(text), None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        defect = _told(error)
    try:
        return msgspec.json.decode(mend(text)), defect
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UnmendableError(_told(error)) from None


def _convert(raw: msgspec.Raw) -> tuple[list[FloatEvent], int]:
    """An event from plain JSON values, numbers given as strings accepted; and whether one is lost."""
    try:
        plain = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return [], 1
    try:
        arguments = plain.pop("args", None)
        converted = msgspec.convert(plain, FloatEvent, strict=False)
    except (AttributeError, TypeError, msgspec.ValidationError, OverflowError, ValueError):
        # What is surely no complete event is missed by nobody.
        other = isinstance(plain, dict) and isinstance(plain.get("ph"), str) and plain["ph"] not in ("X", "i")
        return [], 0 if other else 1
    converted.args = msgspec.Raw(msgspec.json.encode(arguments)) if arguments else ABSENT
    return [converted], 0


def _told(error: Exception) -> str:
    """The decoder's message without its offset, which counts from the beginning of a piece."""
    return _OFFSET.sub("", str(error))[:200]
