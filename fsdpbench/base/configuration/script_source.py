"""The script of a configuration: its path, arguments, definition of a step, and variations."""

import hashlib
import importlib.machinery
import os
import sys
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import pairwise
from pathlib import Path

import msgspec

from fsdpbench.base.errors import UsageError
from fsdpbench.base.reading import LARGEST_JSON, UnreadableError, read_bytes

_LAUNCHERS = {
    "torchrun", "accelerate", "deepspeed", "fabric", "composer", "llamafactory-cli", "torch.distributed.run",
    "torch.distributed.launch", "accelerate.commands.launch", "accelerate.commands.accelerate_cli",
    "deepspeed.launcher.runner", "lightning.fabric.cli", "composer.cli.launcher",
}  # fmt: skip
_LEFT_OUT = ("module", "check_ranks", "keeps_files", "function")
"""Fields that are not recorded if they have no value."""


class StepsBy(StrEnum):
    """The event that ends a step of a script."""

    OPTIMIZER = "optimizer"
    PROFILER = "profiler"


class Variation(StrEnum):
    """A variation of a script. Some take a value after `=` (`loader-time=0.05/4`)."""

    CHECKPOINT = "checkpoint"
    """Recompute every wrapped unit's forward in backward."""
    NO_CHECKPOINT = "no-checkpoint"
    NO_SAVE_ON_CPU = "no-save-on-cpu"
    """Do not offload activations to the CPU (`save_on_cpu`)."""
    BY_UNIT = "by-unit"
    """Recompute or offload some blocks, keep some units gathered: `by-unit=RECOMPUTE/OFFLOAD/RESHARD`."""
    RESHARD = "reshard"
    """Reshard units after forward, whatever the script sets."""
    KEEP = "keep"
    """Keep units unsharded from forward to backward."""
    HALF_BATCH = "half-batch"
    DOUBLE_BATCH = "double-batch"
    WRAP_BLOCKS = "wrap-blocks"
    """Wrap each repeated block of the model, and the whole model as the root."""
    WRAP_ROOT = "wrap-root"
    """Also wrap the module that contains all units."""
    WRAP_PAIRS = "wrap-pairs"
    """Wrap each two consecutive blocks as one unit."""
    PREFETCH = "prefetch"
    """Prefetch the next unit in forward, and in backward too if the script disabled that."""
    BACKWARD_PREFETCH = "backward-prefetch"
    """FSDP1: prefetch in backward, which is its default."""
    NO_FORWARD_PREFETCH = "no-forward-prefetch"
    LIMIT = "limit"
    """FSDP1: limit all-gathers."""
    HYBRID = "hybrid"
    """Shard within a node, replicate across nodes."""
    BF16 = "bf16"
    """All-gather parameters and compute in bf16."""
    NO_OFFLOAD = "no-offload"
    """Keep shards on the GPU."""
    FUSED = "fused"
    """Use the optimizer's fused kernel."""
    NONE_GRADS = "none-grads"
    """Let `zero_grad` set gradients to None."""
    COMPILE = "compile"
    """Compile every wrapped unit."""
    NO_WAITS = "no-waits"
    """Skip waits of the CPU for the GPU that the script's own lines cause."""
    DETACH_KEPT = "detach-kept"
    """Detach tensors that are kept across steps from their graphs."""
    HOST_KEPT = "host-kept"
    """Detach tensors that are kept across steps, and move them to the host."""
    LOADER_TIME = "loader-time"
    """Assume a loading time on the host for each batch: `loader-time=SECONDS/WORKERS`."""


@dataclass(frozen=True)
class FunctionSource:
    """A function that runs instead of its whole file. `folder`: has it and its arguments in `call.pickle`,
    and gets real ranks' results; `root`: of its files; `maps_cuda`: on real ranks, "cuda" is the CPU."""

    name: str
    module: str
    folder: str
    root: str
    maps_cuda: bool = False


@dataclass(frozen=True)
class ScriptSource:
    """A script: `path` as typed, `digest` of the file's content. `to_the_end`: continue after measuring.
    `check_ranks`: the ranks that run and are compared; empty for rank 0 alone.
    `module`: the module's name if the file runs as one (`torchrun -m`). `keeps_files`: redirect all files
    that it writes into the run's folder. `function`: the only function of the file to run."""

    path: str
    arguments: tuple[str, ...]
    digest: str
    steps_by: StepsBy = StepsBy.OPTIMIZER
    to_the_end: bool = False
    module: str = ""
    check_ranks: tuple[int, ...] = ()
    keeps_files: bool = False
    function: FunctionSource | None = None

    @classmethod
    def read(
        cls,
        path: Path,
        arguments: tuple[str, ...],
        steps_by: StepsBy,
        *,
        to_the_end: bool,
        module: str = "",
        check_ranks: tuple[int, ...] = (),
    ) -> "ScriptSource":
        """Return the source of the script at `path`, which compares `check_ranks`. Raises `UsageError`."""
        source = cls(str(path), arguments, "", steps_by, to_the_end, module, check_ranks)
        try:
            content = read_bytes(path, LARGEST_JSON)
            if source.program[0] != str(path):
                content += read_bytes(Path(source.program[0]), LARGEST_JSON)
        except UnreadableError as error:
            raise UsageError(f"--script {error}") from None
        return replace(source, digest=hashlib.sha256(content).hexdigest())

    @property
    def program(self) -> tuple[str, str]:
        """Return file and module name of the training program, which may be the argument of a launcher."""
        if (self.module or Path(self.path).name) not in _LAUNCHERS:
            return self.path, self.module
        for option, word in pairwise(("", *self.arguments)):
            if option in ("-m", "--module") and not word.startswith("-"):
                return str(file_of_module(word)), word
            if word.endswith(".py") and Path(word).is_file():
                return word, ""
        return self.path, self.module

    @property
    def name(self) -> str:
        """Return the file's name, or the module's."""
        path, module = self.program
        function = self.function and f"{Path(path).stem}.{self.function.name}"
        return function or module or Path(path).name

    @property
    def own_folder(self) -> Path:
        """Return the folder of the script's own files: its parent folder, or its package."""
        if self.function is not None:
            return Path(self.function.root)
        file, module = self.program
        path = Path(file).absolute()
        if not module:
            return path.parent
        package = module.partition(".")[0]
        return next((folder for folder in path.parents if folder.name == package), path.parent)

    def to_dict(self) -> dict[str, object]:
        record = msgspec.to_builtins(self)
        return {name: value for name, value in record.items() if value or name not in _LEFT_OUT}


def spread_ranks(world: int, count: int | None) -> tuple[int, ...]:
    """Return `count` ranks of `world`, evenly spread from first to last; without a count the first two, a
    middle one and the last. Raises `UsageError`."""
    if world < 2:
        raise UsageError(f"--check-ranks compares ranks, and --gpus {world} has one; give 2 or more")
    if count is None:
        return tuple(sorted({0, 1, world // 2, world - 1}))
    if not 2 <= count <= world:
        raise UsageError(f"--check-ranks {count}: from 2 to the {world:,} ranks that there are")
    return tuple(round(place * (world - 1) / (count - 1)) for place in range(count))


def file_of_module(name: str) -> Path:
    """Return the file that `python -m NAME` would run, without importing it. Raises `UsageError`."""
    top, *rest = name.split(".")
    spec = importlib.machinery.PathFinder.find_spec(top, [os.getcwd(), *sys.path]) if top else None
    if spec is None:
        raise UsageError(f"--module '{name}': there is no module '{top}' on Python's path")
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
    if not folders and not rest and spec.origin:
        return Path(spec.origin)
    for folder in folders:
        inside = folder.joinpath(*rest)
        for path in ([Path(f"{inside}.py")] if rest else []) + [inside / "__main__.py"]:
            if path.is_file():
                return path
    raise UsageError(f"--module '{name}': {top} has no such module, or it is a package without __main__.py")
