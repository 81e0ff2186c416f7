"""Other programs that a script starts: they do not see the layer."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from fsdpbench.script.cuda.refusals import NotSimulatedError

_MOVING = {"rm", "mv", "cp", "ln", "rsync", "rmdir", "unlink", "truncate", "tar", "zip"}


def starting(original: Callable[..., Any]) -> Callable[..., Any]:
    """`subprocess.Popen.__init__`."""

    def init(process: Any, args: Any, *others: Any, **options: Any) -> None:
        words = args.split() if isinstance(args, str) else [os.fsdecode(word) for word in args]
        _refuse(words)
        original(process, args, *others, **options)

    return init


def shell(original: Callable[..., Any]) -> Callable[..., Any]:
    """`os.system`."""

    def system(command: Any) -> int:
        _refuse(os.fsdecode(command).split())
        return original(command)

    return system


def _refuse(words: list[str]) -> None:
    """Other programs do not see the layer, and would change the files themselves."""
    if any(os.path.basename(word) in _MOVING for word in words):
        raise NotSimulatedError(
            f"'{' '.join(words)[:80]}'",
            "another program would change the files from before the run; use Python's os and shutil",
        )
