"""The provenance of a result beyond its configuration, and the cache key of both.

    key = sha256( config + content of hardware and software profile + content of the data file + versions
                  + sources [+ machine] [+ the allocator's settings in the environment] )

A resumed sweep reruns a configuration if and only if its key changed. Sources of pages and the command line
are not hashed, because they change how results are shown, not the results.
"""

import contextlib
import functools
import hashlib
import importlib.metadata
import json
import os
import platform
import shlex
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from fsdpbench.base.configuration.config import Config
from fsdpbench.base.configuration.script_source import ScriptSource, StepsBy
from fsdpbench.base.configuration.simulated_cuda import VARIABLE, simulated_cuda
from fsdpbench.base.errors import BenchError
from fsdpbench.base.plugins import foreign_identity, foreign_model
from fsdpbench.base.settings import SETTINGS, show_value
from fsdpbench.sim.model.allocator.conf import CONF_VARIABLES, conf_in
from fsdpbench.sim.model.profile import ProfileError, load_profile
from fsdpbench.sim.model.software import load_software

_PACKAGE = Path(__file__).resolve().parents[2]
_SHOWING_ONLY = (
    *("reports/pages/", "cli/", "sweep/", "answers/tune/", "answers/check/", "answers/atlas/"),
    *("answers/upgrade/", "lab/validation/", "lab/reproduce/"),
)


@functools.cache
def source_hash() -> str:
    """Return a hash of every source file that can change a result (hex, 16 digits)."""
    digest = hashlib.sha256()
    for name, path in sorted(_source_files()):
        if path.suffix in (".py", ".toml", ".csv") and not name.startswith(_SHOWING_ONLY):
            digest.update(name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def _source_files() -> Iterator[tuple[str, Path]]:
    """Yield (name in the package, path) of all its files; in a checkout some of its folders are links."""
    for folder, _, files in os.walk(_PACKAGE, followlinks=True):
        for file in files:
            path = Path(folder, file)
            yield path.relative_to(_PACKAGE).as_posix(), path


@functools.cache
def versions() -> dict[str, str]:
    """Return the versions that results depend on; torch's version without importing torch."""
    return {
        "python": platform.python_version(),
        "torch": importlib.metadata.version("torch"),
        "fsdpbench": _version("fsdpbench"),
        "source": source_hash(),
    }


def _version(package: str) -> str:
    """Return a package's version, or "not installed": a library of another machine, or a plain checkout."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def versions_of(config: Config) -> dict[str, str]:
    """Return `versions`, and the version of the library whose model code a configuration runs, if any."""
    library = str(config.shape_given.get("family", "own"))
    library = library if library == "transformers" else config.settings.implementation
    if config.script is not None or library == "own":
        return versions()
    return {**versions(), library: _version(library)}


@functools.cache
def machine() -> dict[str, str | int | None]:
    """Return the machine that measured, described without torch."""
    return {"host": platform.node(), "processor": _processor(), "cores": os.cpu_count()}


@functools.cache
def git_revision() -> str | None:
    """Return this project's git revision, with `+` if files differ from it; `None` outside a checkout."""
    if not (_PACKAGE.parent / ".git").exists():
        return None  # installed, perhaps inside the checkout of another project
    try:
        head = _git("rev-parse", "--short=12", "HEAD")
        return head + ("+" if _git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def environment(config: Config) -> dict[str, object]:
    """Return the `environment` of a result. On `sim` it never names this machine, for equal results."""
    recorded: dict[str, object] = {"versions": versions_of(config)}
    if config.device == "sim" and conf_in(os.environ):
        recorded["variables"] = {name: os.environ[name] for name in CONF_VARIABLES if name in os.environ}
    if config.device != "sim":
        recorded["machine"] = machine()
        recorded["git"] = git_revision()
        recorded["variables"] = {
            name: value
            for name, value in sorted(os.environ.items())
            if name.startswith(("NCCL_", "TORCH_", "PYTORCH_", "CUDA_", "OMP_", "GLOO_")) or name == VARIABLE
        }
    return recorded


def content_key(config: Config) -> str:
    """Return 64 hex digits, which are equal if and only if the results must be."""
    depends: dict[str, object] = {"config": config.identity(), "versions": versions_of(config)}
    if config.hardware is not None:
        depends["hardware"] = _content(load_profile, config.hardware)
    if config.software is not None:
        depends["software"] = _content(load_software, config.software)
    if config.data is not None:
        depends["data"] = _data_content(Path(config.data))
    if (foreign := foreign_identity(config.system)) is not None:
        depends["system"] = foreign
    if (model := foreign_model(config.model)) is not None:
        depends["model"] = model
    if config.device != "cpu" and (conf := conf_in(os.environ)):
        depends["allocator"] = conf
    if config.device != "sim":
        depends["machine"] = machine()
    if config.device == "cuda" and (rehearsed := simulated_cuda()) is not None:
        depends["simulated_cuda"] = rehearsed
    text = json.dumps(depends, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def another_key(config: Mapping[str, Any], result: Mapping[str, Any]) -> str | None:
    """Return why a `config.json` does not match its key and name. None if it matches, or if that cannot be
    decided because of other versions, another machine, or files and packages from outside."""
    where = result.get("environment") or {}
    try:
        own = Config.from_dict(config)
        outside = [config.get(name) for name in ("system_from", "model_from", "data")]
        outside += [name for name in (own.hardware, own.software) if name and ("/" in name or "." in name)]
        same_machine = own.device == "sim" or where.get("machine") == machine()
        same = same_machine and conf_in(where.get("variables") or {}) == conf_in(os.environ)
        if any(outside) or where.get("versions") != versions_of(own) or not same or simulated_cuda():
            return None
        right = {"key": content_key(own), "name": own.name}
    except (AttributeError, KeyError, TypeError, ValueError, BenchError):
        return None
    for name, value in right.items():
        if config.get(name) != value:
            return f"config.json was changed: its {name} is {config.get(name)}, and by its content {value}"
    return None


@functools.cache
def _content(load: Callable[[str], object], profile: str) -> str:
    return repr(load(profile))


def _data_content(path: Path) -> str:
    """Return a hash of a data file's content; for a folder, which may hold a hundred gigabytes of images, a
    hash of the names, sizes and times of its files."""
    if path.is_file():
        with path.open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()
    digest = hashlib.sha256()
    for file in sorted(path.rglob("*")):
        if file.is_file():
            about = file.stat()
            digest.update(f"{file.relative_to(path)}\0{about.st_size}\0{about.st_mtime_ns}\n".encode())
    return digest.hexdigest()


def _processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _git(*arguments: str) -> str:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    asked = ["git", "-C", str(_PACKAGE.parent), *arguments]
    done = subprocess.run(asked, capture_output=True, text=True, timeout=10, check=True, env=clean)
    return done.stdout.strip()


def node_stated(hardware: str | None, gpus: int, per_node: int, used: int | None) -> dict[str, int]:
    """Return `gpus_per_node` and `gpus_used_per_node` as options that give nodes of `per_node` GPUs."""
    whole = per_node
    with suppress(ProfileError):
        whole = load_profile(hardware).gpus_per_node if hardware is not None else per_node
    ranks = used or per_node
    return {"gpus_per_node": whole} | ({"gpus_used_per_node": ranks} if ranks < min(whole, gpus) else {})


def nodes_of(config: Config) -> dict[str, int]:
    """Return `gpus_per_node` and `gpus_used_per_node` as options that give the nodes of `config`."""
    return node_stated(config.hardware, config.gpus, config.gpus_per_node, config.gpus_used_per_node)


def run_command(config: Config) -> str:
    """Return `fsdpbench run ...` with every setting that is not at its default, quoted for a shell."""
    if config.script is not None:
        return _script_command(config, config.script)
    words = ["fsdpbench", "run", "--model", config.model]
    if config.shape_given:
        words += ["--shape", ",".join(f"{name}={show_value(v)}" for name, v in config.shape_given.items())]
    words += ["--system", config.system, "--device", config.device]
    if config.hardware is not None:
        words += ["--hardware", config.hardware]
    words += _nodes(config)
    if config.data is not None:
        words += ["--data", config.data]
    for name, value in config.settings.to_dict().items():
        if value is not None and value != SETTINGS[name].default:
            words += ["--set", f"{name}={show_value(value)}"]
    return shlex.join([*words, *_of_simulation(config)])


def _nodes(config: Config) -> list[str]:
    words = ["--gpus", str(config.gpus)]
    for name, value in nodes_of(config).items():
        words += [f"--{name.replace('_', '-')}", str(value)]
    return words


def _of_simulation(config: Config) -> list[str]:
    words = [] if config.jitter is None else ["--jitter", config.jitter.to_text()]
    if config.software is not None:
        words += ["--software", config.software]
    if config.soak is not None:
        words += config.soak.words()
    return [*words, "--sanitize"] if config.sanitize else words


def _script_command(config: Config, script: ScriptSource) -> str:
    if script.function is not None:
        return shlex.join(["pytest", script.path])
    source = ("--module", script.module) if script.module else ("--script", script.path)
    words = ["fsdpbench", "run", *source, "--hardware", str(config.hardware), *_nodes(config)]
    if script.steps_by is not StepsBy.OPTIMIZER:
        words += ["--steps-by", script.steps_by.value]
    if script.to_the_end:
        words.append("--to-the-end")
    if script.check_ranks:
        words += ["--check-ranks", str(len(script.check_ranks))]
    words += _of_simulation(config)
    if script.arguments:
        words += ["--", *script.arguments]
    return shlex.join(words)
