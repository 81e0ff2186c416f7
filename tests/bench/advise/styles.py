"""Styles in which a script is written of its parts."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping

from .gradient_mistakes import PARTS, SETUP


def plain(parts: Mapping[str, str]) -> dict[str, str]:
    """Files of a script that stands at the top of one file."""
    step = textwrap.indent(parts["step"].strip(), "    ")
    head = "\n".join(parts[name] for name in ("model", "wrap", "optimizer"))
    return {"train.py": f"{SETUP}\n{head}\nfor step in range(8):\n{step}\n"}


def one_line(parts: Mapping[str, str]) -> dict[str, str]:
    """Statements in a row share a line; loops with one statement, too."""
    text = re.sub(r":\n +(?=fully_shard\(.*\)\n(?! ))", ": ", parts["wrap"])
    joined: list[str] = []
    for line in text.strip().splitlines():
        last = joined[-1] if joined else ""
        if all(
            re.match(r"(model|mesh|half|groups|other)\b", each) and _closed(each) for each in (line, last)
        ):
            joined[-1] += "; " + line
        else:
            joined.append(line)
    return plain({**parts, "wrap": "\n".join(joined)})


def _closed(line: str) -> bool:
    return line.count("(") == line.count(")") and not line.endswith(":")


def in_functions(parts: Mapping[str, str]) -> dict[str, str]:
    """Setup and model in a module of their own, which wraps, too."""
    body = textwrap.indent("\n".join(parts[name].strip() for name in ("model", "wrap")), "    ")
    helper = f"{SETUP}\ndef build():\n    global model\n{body}\n    return model\n"
    step = textwrap.indent(parts["step"].strip(), "    ")
    head = "import helper\nmodel = helper.build()\nfrom helper import *"
    optimizer = parts["optimizer"] or "optimizer = helper.optimizer"
    if not parts["optimizer"]:
        helper = helper.replace("global model", "global model, optimizer")
    return {"helper.py": helper, "train.py": f"{head}\n{optimizer}\nfor step in range(8):\n{step}\n"}


def in_a_class(parts: Mapping[str, str]) -> dict[str, str]:
    """A trainer."""
    head = "\n".join(parts[name].strip() for name in ("model", "wrap", "optimizer"))
    step = textwrap.indent(parts["step"].strip(), "        ")
    text = (
        f"{SETUP}\nclass Trainer:\n    def build(self):\n"
        "        global model, optimizer, judge, second, scaler, copies\n"
        f"{textwrap.indent(head, '        ')}\n    def step(self):\n{step}\n"
        "trainer = Trainer()\ntrainer.build()\nfor step in range(8):\n    trainer.step()\n"
    )
    return {"train.py": text}


STYLES = {"plain": plain, "one_line": one_line, "in_functions": in_functions, "in_a_class": in_a_class}


def script(parts: Mapping[str, str], style: str = "plain") -> dict[str, str]:
    """The files of a script, by name; `train.py` is what runs."""
    return STYLES[style](PARTS | dict(parts))
