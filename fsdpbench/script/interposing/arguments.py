"""The batch's size among the arguments that a script's own parser read."""

from __future__ import annotations

import argparse
import re

_OF_BATCH = re.compile(r"(?:.*[-_])?(?:batch|batch[-_]size|bs|b)")
_NOT_OF_TRAINING = re.compile(r"(?:.*[-_])?(?:eval|val|valid|test)[-_].*")


def batch_argument(found: argparse.Namespace) -> str | None:
    """The name of the one argument that is the batch's size; None where there is none, or several."""
    names = [
        name
        for name, value in vars(found).items()
        if type(value) is int and _OF_BATCH.fullmatch(name) and not _NOT_OF_TRAINING.fullmatch(name)
    ]
    return names[0] if len(names) == 1 else None
