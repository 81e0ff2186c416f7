"""The configuration of `fsdpbench run --script`."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

from fsdpbench.base.configuration.script_source import ScriptSource, StepsBy, file_of_module, spread_ranks
from fsdpbench.base.errors import UsageError, error_text
from fsdpbench.base.settings import SETTINGS, Settings
from fsdpbench.cli.output import tell
from fsdpbench.cli.values import PossiblePath, grouped

if TYPE_CHECKING:
    from fsdpbench.base.configuration.config import Config

_NOT_FOR_SCRIPTS = ("model", "hf_config", "shape", "system", "data", *SETTINGS)
_SYSTEM = "script"


script_options = grouped(
    click.option("--script", type=PossiblePath(dir_okay=False)),
    click.option("--module", metavar="NAME"),
    click.option("--steps-by", type=click.Choice([way.value for way in StepsBy]), default=None),
    click.option("--to-the-end", is_flag=True),
    click.option("--check-ranks", metavar="[N]", is_flag=False, flag_value="", default=None),
    click.argument("script_arguments", nargs=-1, type=click.UNPROCESSED),
)
"""`--script` and its options; the script's own arguments come after `--`."""


def script_config(options: Mapping[str, Any], assignments: tuple[str, ...]) -> "Config | None":
    """Return the configuration of `--script` or `--module`, None without them. Raises `UsageError`."""
    path, module = options.get("script"), options.get("module")
    if path is None and module is None:
        if options.get("check_ranks") is not None:
            raise UsageError("--check-ranks belongs to --script: the bench's own models have no control flow")
        _refuse(options, ("steps_by", "to_the_end", "script_arguments"), "belongs to --script")
        return None
    if path is not None and module is not None:
        raise UsageError(f"--script {path} and --module {module}: give one of them")
    _refuse(options, _NOT_FOR_SCRIPTS, "is what the script decides itself; leave it out with --script")
    if assignments:
        raise UsageError("--set is what the script decides itself; leave it out with --script")
    if options.get("device") not in (None, "auto", "sim"):
        raise UsageError(error_text("script_request.device", options["device"]))
    source = ScriptSource.read(
        path or file_of_module(module or ""),
        tuple(options.get("script_arguments") or ()),
        StepsBy(options.get("steps_by") or StepsBy.OPTIMIZER),
        to_the_end=bool(options.get("to_the_end")),
        module=module or "",
        check_ranks=_checked_ranks(options),
    )
    return _config(source, options)


def _config(source: ScriptSource, options: Mapping[str, Any]) -> "Config":
    from fsdpbench.base.configuration.config import DEFAULT_HARDWARE, Config, Measurement
    from fsdpbench.sweep.planning import simulated_nodes  # imports the models, so only for scripts

    gpus = _world(options)
    stated = [options.get(name) for name in ("gpus_per_node", "gpus_used_per_node", "nic_gb_s")]
    hardware, per_node, used = simulated_nodes(options.get("hardware") or DEFAULT_HARDWARE, gpus, *stated)
    timeout = options.get("timeout") or 600.0
    measurement = Measurement(2, 3, traced_steps=2, timeout_s=timeout, most_timed_steps=8)
    return Config(
        model=source.name,
        shape={},
        system=_SYSTEM,
        device="sim",
        hardware=hardware,
        gpus=gpus,
        gpus_per_node=min(per_node, gpus),
        gpus_used_per_node=used,
        settings=Settings.of(),
        measurement=measurement,
        script=source,
        software=_software(options.get("software")),
    )


def _software(given: str | None) -> str | None:
    """Return the name of a script's software profile; None for the current one. Raises `UsageError`."""
    from fsdpbench.sweep.planning import software_of_script

    name, note = software_of_script(given)
    if note:
        tell(note)
    return name


def _world(options: Mapping[str, Any]) -> int:
    from fsdpbench.cli.requests.request import gpu_counts

    counts = gpu_counts(options.get("gpus"))
    if len(counts) > 1:
        raise UsageError(f"--gpus {options['gpus']}: expected one number with --script")
    return counts[0]


def _checked_ranks(options: Mapping[str, Any]) -> tuple[int, ...]:
    given = options.get("check_ranks")
    if given is None:
        return ()
    from fsdpbench.cli.requests.request import whole

    return spread_ranks(_world(options), whole("--check-ranks", given) if given else None)


def _refuse(options: Mapping[str, Any], names: tuple[str, ...], why: str) -> None:
    for name in names:
        if given := options.get(name):
            flag = repr(given[0]) if name == "script_arguments" else f"--{name.replace('_', '-')}"
            hint = "; `sweep` takes a file of settings" if flag.endswith(".toml'") else ""
            raise UsageError(f"{flag} {why}{hint}")


def config_asked_for(options: Mapping[str, Any], assignments: tuple[str, ...]) -> "Config | None":
    """Return the configuration that --model, --hf-config or --script names; None without them.

    The default system is torch's FSDP2, because that is what users measured or saw fail.
    Raises `UsageError`, also for settings without a model.
    """
    from fsdpbench.cli.requests.options import given_settings, single_settings
    from fsdpbench.cli.requests.request import single_config
    from fsdpbench.sweep.planning import not_applicable, without_absent

    config = script_config(options, assignments)
    given = {} if config is not None else single_settings(given_settings(options, assignments))
    if config is not None or not (options.get("model") or options.get("hf_config")):
        if given:
            raise UsageError(f"{', '.join(given)}: of which model? Name it with --model or --hf-config")
        return config
    options = {**options, "system": options.get("system") or "torch-fsdp2"}
    config, _, assumed = single_config(options, given)
    tell(f"{config.model}, {config.system}{assumed}")
    reasons = not_applicable(config, given)
    if reasons:
        raise UsageError("; ".join(f"{name}: {reason}" for name, reason in reasons.items()))
    return without_absent(config)
