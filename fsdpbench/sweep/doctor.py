"""Checks that find out, by running it, what this machine can run, and what is missing for the rest."""

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from fsdpbench.base.configuration.config import Config, Measurement
from fsdpbench.base.files.documents import table_beside
from fsdpbench.engine.results.machine_state import available_memory, observe, usable_cores
from fsdpbench.reports.result import Status
from fsdpbench.sweep.planning import configured, make_target
from fsdpbench.sweep.trials import simulate

_TRY_TIMEOUT_S = 60.0


class Verdict(StrEnum):
    """`MISSING`: an optional part is not installed. `BROKEN`: a part that all commands need does not work."""

    OK = "ok"
    MISSING = "missing"
    BROKEN = "broken"


@dataclass(frozen=True)
class Finding:
    """The result of one check; `way_out` says what to do if it is not ok."""

    what: str
    verdict: Verdict
    detail: str
    way_out: str | None = None


def examine(try_devices: bool = True) -> list[Finding]:
    """Return all findings in display order. Without `try_devices` no configuration is run."""
    looks: list[Callable[[], Finding]] = [_python, _torch, _machine, _disk, _gpus]
    if try_devices:
        looks += [lambda: _tried("sim", 8), lambda: _tried("cpu", 2)]
    findings = [look() for look in looks]
    findings += _private_names()
    extras = table_beside(__file__, "doctor.toml")["extras"]
    return [*findings, *(_extra(*extra) for extra in extras), _slurm(), *_plugins()]


def _python() -> Finding:
    version = platform.python_version()
    if sys.version_info[:2] in ((3, 11), (3, 12), (3, 13)):
        return Finding("Python", Verdict.OK, version)
    return Finding("Python", Verdict.BROKEN, version, "use Python 3.11, 3.12 or 3.13")


def _torch() -> Finding:
    version = importlib.metadata.version("torch")
    numbers = tuple(int(part) for part in version.split("+")[0].split(".")[:2])
    if (2, 11) <= numbers < (2, 14):
        return Finding("torch", Verdict.OK, version)
    return Finding("torch", Verdict.BROKEN, version, "install torch 2.11, 2.12 or 2.13")


def _private_names() -> list[Finding]:
    """Return findings on private names that this torch lacks. Only features that need one of them fail."""
    what = "torch's private names"
    try:
        from fsdpbench.systems import private_names

        number, gone = private_names()
    except ImportError as error:
        return [Finding(what, Verdict.BROKEN, f"torch cannot be imported: {error}", "reinstall torch")]
    if not gone:
        return [Finding(what, Verdict.OK, f"all {number} that are used are there")]
    parts = [sentence.rpartition(": ") for sentence in gone]
    return [Finding(what, Verdict.MISSING, detail, way_out) for detail, _, way_out in parts]


def _machine() -> Finding:
    free = available_memory()
    memory = "memory unknown" if free is None else f"{free / 2**30:.1f} GiB of memory free"
    return Finding("machine", Verdict.OK, f"{usable_cores()} cores, {memory}")


def _disk() -> Finding:
    try:
        folder = Path.cwd()
    except OSError:
        return Finding("run folders", Verdict.BROKEN, "this folder was removed", "change to another")
    free = shutil.disk_usage(folder).free
    detail = f"{free / 2**30:.1f} GiB free in {folder}"
    if not os.access(folder, os.W_OK):
        return Finding("run folders", Verdict.BROKEN, f"{folder} cannot be written", "name another with -o")
    if free < 1 << 30:
        return Finding(
            "run folders", Verdict.BROKEN, detail, "free some space, or name another folder with -o"
        )
    return Finding("run folders", Verdict.OK, detail)


def _gpus() -> Finding:
    from fsdpbench.engine.devices.detection import visible_gpus

    found = visible_gpus()
    if found:
        names = {gpu["name"] for gpu in observe("cuda").gpus}
        return Finding("--device cuda", Verdict.OK, f"{found} x {', '.join(sorted(names)) or 'GPU'}")
    way_out = "needs one GPU a rank, its driver and a CUDA build of torch; --device sim needs none"
    return Finding("--device cuda", Verdict.MISSING, "no GPU is visible", way_out)


def _tried(device: str, gpus: int) -> Finding:
    """Run a tiny configuration on `device` and return the outcome."""
    what = f"--device {device}"
    (trial,) = simulate([_tiny(device, gpus)], 1)
    if trial.status is Status.OK:
        step = f"{(trial.step_time_s or 0.0) * 1e3:.1f} ms a step"
        return Finding(what, Verdict.OK, f"{trial.config.model} trained on {gpus} ranks, {step}")
    way_out = "run `fsdpbench run --model gpt-tiny --gpus 2 --device " + device + "` and read its logs"
    return Finding(what, Verdict.BROKEN, trial.cause or trial.status.value, way_out)


def _tiny(device: str, gpus: int) -> Config:
    measurement = Measurement(1, 1, 1, timeout_s=_TRY_TIMEOUT_S)
    target = make_target(model="gpt-tiny", device=device, gpus=gpus, measurement=measurement)
    return configured(target, "impl-fsdp2", batch=1, param_dtype="fp32", seq=16)


def _extra(name: str, module: str, purpose: str) -> Finding:
    if importlib.util.find_spec(module) is None:
        way_out = f"pip install 'fsdpbench[{name}]'"
        return Finding(f"extra {name}", Verdict.MISSING, f"{module} is not installed: no {purpose}", way_out)
    return Finding(f"extra {name}", Verdict.OK, f"{module} is installed: {purpose}")


def _plugins() -> list[Finding]:
    """Return findings on plugins. A plugin that cannot be loaded does not affect fsdpbench's own parts."""
    from fsdpbench.systems import offers
    from fsdpbench.workloads import PLUGINS

    found = []
    for kind, offered in (("system", offers()), ("family", PLUGINS.offers())):
        for offer in offered:
            if offer.origin == "fsdpbench":
                continue
            what = f"{kind} {offer.name}"
            if offer.problem is None:
                found.append(Finding(what, Verdict.OK, f"of {offer.origin}"))
            else:
                way_out = f"fix or remove {offer.origin}; everything else works"
                found.append(Finding(what, Verdict.MISSING, offer.problem, way_out))
    return found


def _slurm() -> Finding:
    if shutil.which("sbatch"):
        return Finding("Slurm", Verdict.OK, "sbatch is on the path")
    way_out = "start it on a Slurm login node; torchrun works without"
    return Finding("Slurm", Verdict.MISSING, "no sbatch on the path", way_out)
