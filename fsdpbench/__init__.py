"""fsdpbench: run any FSDP configuration on GPUs, CPUs or simulated GPUs, and see what it costs.

Installed, all is in this package; in the repository three folders are beside it, with links::

    fsdpbench/impl -> ../impl        one folder, two ways to it, one set of module objects

A folder whose `__init__` finds itself imported under its bare name (`import impl` from the repository's root)
calls `stand_for`. A user's own `impl.py` or `workloads.py` is not touched: it is another file.
"""

import _signal  # type: ignore[import-not-found]  # Python's own `signal` takes milliseconds to import
import sys

# `typing`, and what annotations name, would be imported before the interruption is handled.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

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


def stand_for(name: str) -> None:
    """Let the top-level `name`, which is being imported, and its submodules mean this package's modules.

    Both names then mean the same module objects, so that no class exists twice.
    """
    import importlib

    sys.modules[name] = importlib.import_module(f"{__name__}.{name}")
    if not any(isinstance(finder, _BareNames) for finder in sys.meta_path):
        sys.meta_path.insert(0, _BareNames())


class _BareNames:
    """A finder and loader of `impl...` as `fsdpbench.impl...`, where `impl` means `fsdpbench.impl`."""

    def find_spec(
        self, name: str, path: "Sequence[str] | None" = None, target: "ModuleType | None" = None
    ) -> "ModuleSpec | None":
        top, _, rest = name.partition(".")
        owner = sys.modules.get(top)
        if not rest or owner is None or owner.__name__ != f"{__name__}.{top}":
            return None
        from importlib.machinery import ModuleSpec

        return ModuleSpec(name, self)  # type: ignore[arg-type]  # it has both methods of a loader

    def create_module(self, spec: "ModuleSpec") -> "ModuleType":
        import importlib

        module = importlib.import_module(f"{__name__}.{spec.name}")
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: "ModuleType") -> None:
        """Run nothing again, and give the module back the spec that the import system has just replaced."""
        assert module.__spec__ is not None
        module.__spec__ = module.__spec__.loader_state
