"""What every offline page is made of: own files, JSON inside, a policy that lets nothing be fetched."""

from __future__ import annotations

import base64
import hashlib
import json
from importlib import resources
from typing import Any

from markupsafe import Markup


def island(value: Any) -> Markup:
    """JSON for a script element: nothing in it can end the element or open a comment."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(text)


def own_file(name: str) -> str:
    """The text of a file of `reports`, such as `page/assets/report.css`."""
    return resources.files("fsdpbench.reports").joinpath(name).read_text(encoding="utf-8")


def policy(*scripts: str) -> str:
    """Only these scripts run, and nothing is fetched: a hostile name could do nothing even if it got
    through.
    """
    allowed = " ".join(
        f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"
        for script in scripts
    )
    return (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data: blob:; "
        "base-uri 'none'; form-action 'none'"
    )
