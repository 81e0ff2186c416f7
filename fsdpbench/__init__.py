"""fsdpbench: run any FSDP configuration on GPUs, CPUs or simulated GPUs, and see what it costs."""

import _signal  # type: ignore[import-not-found]  # Python's own `signal` takes milliseconds to import
import sys

__version__ = "0.1.0"


def is_command() -> bool:
    """Whether this process was started as a command, not by a program that imports this package."""
    words = sys.orig_argv[1:]
    while words and words[0].startswith("-") and words[0] not in ("-c", "-m"):
        words = words[1:]  # the interpreter's own flags
    if words[:1] == ["-c"]:
        return "fsdpbench.cli" in words[1]
    if words[:1] == ["-m"]:
        return words[1] == "fsdpbench"
    return bool(words) and words[0].rpartition("/")[2] == "fsdpbench"


# Before anything else is imported: an interruption of an import would be printed as an error of it.
if is_command() and _signal.getsignal(_signal.SIGINT) is _signal.default_int_handler:
    _signal.signal(_signal.SIGINT, _signal.SIG_DFL)
