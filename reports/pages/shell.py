"""The frame of every page: one HTML file that contains its styles, scripts and data, and fetches nothing."""

import base64
import hashlib
import json
import re
from collections.abc import Sequence
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup
from plotly.offline import get_plotlyjs

from fsdpbench.base.reading import MIB, UnreadableError, read_bytes
from fsdpbench.base.writing import write_whole

ASSETS = "reports/pages/assets"
_SCRIPTS = tuple(f"{ASSETS}/{name}.js" for name in ("theme", "table", "timeline", "detail", "report"))


def render_page(template: str, scripts: Sequence[str] = _SCRIPTS, draws: bool = True, **values: Any) -> str:
    """Return a page from a template of the package (`reports/pages/assets/report.html.jinja`), with the given
    `scripts`, and with plotly's if the page `draws` charts."""
    plotly = Markup(get_plotlyjs() if draws else "")
    script = Markup("\n".join(map(own_file, scripts)))
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, loader=jinja2.FunctionLoader(own_file)
    )
    # Figures stay on one line with their units; a header may break after an underscore or a slash.
    environment.filters["unbroken"] = partial(_BEFORE_UNIT.sub, "\u00a0")
    environment.filters["breakable"] = lambda text: Markup("<wbr>").join(re.findall(r"[^_/]*[_/]?", text))
    return environment.get_template(template).render(
        reload_s=values.pop("reload_s", None),
        policy=policy(*filter(None, (plotly, script))),
        css=Markup(own_file(f"{ASSETS}/report.css")),
        plotly=plotly,
        script=script,
        island=island,
        **values,
    )


def write_page(target: Path, template: str, **values: Any) -> Path:
    """Write the page of `render_page` to `target` atomically. Raises `OSError`.
    `key`: a hash of all inputs; the last line of the page has it, and a hash of the page."""
    key = values.pop("key", None)
    page = render_page(template, **values).encode("utf-8", "backslashreplace")
    write_whole(target, page if key is None else page + _seal(page, key))
    return target


def is_made_from(target: Path, key: str) -> bool:
    """Return whether `target` is a complete page, not a link, that was written with this `key`."""
    try:
        page = read_bytes(target, LARGEST) if target.is_file() and not target.is_symlink() else b""
    except UnreadableError:
        return False
    written = page[: page.rfind(_SEAL)]
    return page == written + _seal(written, key)


LARGEST = 256 * MIB
_SEAL = b"\n<!-- made from "


def _seal(page: bytes, key: str) -> bytes:
    return _SEAL + f"{key}: {hashlib.sha256(page).hexdigest()} -->\n".encode()


_BEFORE_UNIT = re.compile(r"(?<=\d) (?=%|GiB|ms|TFLOPS|tokens|samples)")


def island(value: Any) -> Markup:
    """Return JSON for a script element, escaped so that it can neither end the element nor open a comment."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(text)


def own_file(name: str) -> str:
    """Return the text of a file of the package, such as `reports/pages/assets/report.css`."""
    return resources.files("fsdpbench").joinpath(name).read_text(encoding="utf-8")


def policy(*scripts: str) -> str:
    """Return a content security policy that runs only these scripts and fetches nothing: a hostile name could
    do nothing even if it were not escaped."""
    allowed = " ".join(
        f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"
        for script in scripts
    )
    return (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data: blob:; "
        "base-uri 'none'; form-action 'none'"
    )
