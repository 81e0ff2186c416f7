"""Lists of models, systems, hardware and software to choose from, one row each.

They include plugins, and plugins that cannot be loaded, with the reason. Torch is imported only by lists that
need it.
"""

from collections.abc import Mapping

from fsdpbench.base.settings import Value
from fsdpbench.sim.model.profile import load_profile, profile_names
from fsdpbench.sim.model.software import load_software, software_names

Row = dict[str, Value | Mapping[str, Value] | list[str] | list[dict[str, str | None]]]
"""A row of a list, in the form that `--json` prints."""


def models() -> list[Row]:
    """Return a row for every model, including those of other packages and those that fail to load."""
    from fsdpbench.workloads import PLUGINS, get_workload, workload_names

    rows: list[Row] = []
    offers = PLUGINS.offers()
    origins = {size: each.origin for each in offers if each.thing for size in each.thing.sizes}
    for name in (*workload_names(), *origins):
        workload = get_workload(name)
        row: Row = {
            "name": name,
            "family": workload.family,
            "parameters": workload.parameters,
            "training_state_bytes": workload.training_state_bytes,
            "shape": dict(workload.shape),
        }
        rows.append(row | ({"from": origins.get(name, "fsdpbench"), "state": "ready"} if offers else {}))
    unknown: Row = {"parameters": None, "training_state_bytes": None, "shape": {}}
    rows += [
        {"name": each.name, "family": each.name, **unknown, "from": each.origin, "state": each.problem}
        for each in offers
        if each.problem
    ]
    return rows


def systems() -> list[Row]:
    """Return a row for every system, with its installation command if it is not installed."""
    from fsdpbench.systems import offers

    rows: list[Row] = []
    for offer in offers():
        system, state = offer.thing, offer.problem or "ready"
        if system is not None and not system.is_installed:
            state = f"{system.package} is not installed: {system.installation}"
        about: Row = {"summary": "-", "devices": []}
        if system is not None:
            about = {"summary": system.summary, "devices": sorted(system.devices)}
        rows.append({"name": offer.name, **about, "from": offer.origin, "state": state})
    return rows


def hardware() -> list[Row]:
    """Return a row for every packaged hardware profile."""
    return [
        {
            "name": name,
            "title": profile.title,
            "memory_bytes": profile.memory_bytes,
            "bf16_tflops": profile.peak_flops["bf16"] / 1e12,
            "gpus_per_node": profile.gpus_per_node,
            "source": profile.source,
        }
        for name, profile in ((name, load_profile(name)) for name in profile_names())
    ]


def software() -> list[Row]:
    """Return a row for every packaged software profile, with its changes."""
    profiles = {name: load_software(name) for name in software_names()}
    return [
        {"name": name, "title": profile.title, "changes": profile.changes, "source": profile.source}
        for name, profile in profiles.items()
    ]
