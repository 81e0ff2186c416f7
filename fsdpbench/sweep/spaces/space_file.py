"""A space in TOML (`sweep SPACE.toml`, `sweep.toml`, the space of a baseline), with types checked."""

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

from fsdpbench.base.errors import UsageError, unknown
from fsdpbench.base.files.documents import converted
from fsdpbench.base.numbers import LARGEST_INTEGER, MOST_GPUS
from fsdpbench.base.settings import SETTINGS, Value, read_list, setting_named

_Gpus = Annotated[int, msgspec.Meta(ge=1, le=MOST_GPUS)]
_Names = str | list[str]
_Rule = str | dict[str, dict[str, Any]]


class SpaceFile(msgspec.Struct, omit_defaults=True):
    """The keys of a space other than its settings."""

    schema: int = 1
    model: str | None = None
    hf_config: str | None = None
    shape: str | dict[str, bool | int | float | str] | None = None
    system: _Names | None = None
    reference: _Names | None = None
    device: str | None = None
    hardware: str | None = None
    emulate: bool | None = None
    """A key of earlier versions; refused if true."""
    sanitize: bool | None = None
    software: str | None = None
    gpus: _Gpus | str | list[_Gpus | str] | None = None
    gpus_per_node: _Gpus | None = None
    gpus_used_per_node: _Gpus | None = None
    nic_gb_s: float | None = None
    data: str | None = None
    preset: str | None = None
    when: str | list[_Rule] | None = None
    exclude: str | list[_Rule] | None = None
    max_points: Annotated[int, msgspec.Meta(ge=1)] | None = None
    sample_seed: Annotated[int, msgspec.Meta(ge=0, le=LARGEST_INTEGER)] | None = None
    settings: dict[str, Any] = {}
    points: list[str] = []
    shape_given: Any = None


_NOT_ASKED_FOR = ("schema", "points", "shape_given", "settings")
"""Keys that `sweep.toml` records in addition to the space, and `settings`, which become the lists."""
_NEVER_OFFERED = ("emulate", "schema", "points", "shape_given")
"""Keys of earlier or recorded spaces, which are read but not suggested to users."""


def read_space(content: Mapping[str, Any], origin: str) -> tuple[dict[str, Any], dict[str, list[Value]]]:
    """Return (target keys, lists of settings) of a space; settings may also be top-level keys.

    Raises `UsageError` that names `origin` and the key.
    """
    known = SpaceFile.__struct_fields__
    if empty := [name for name in known if content.get(name) == ""]:
        raise UsageError(f"{origin}: {empty[0]} is empty; leave it out for its default")
    settings = content.get("settings", {})
    if not isinstance(settings, Mapping):
        raise UsageError(f"{origin}: settings must be a table, as in [settings]")
    settings = dict(settings)
    for name in content:
        if name in known:
            continue
        if name.replace("-", "_") not in SETTINGS:
            offered = {*known, *SETTINGS}.difference(_NEVER_OFFERED)
            raise UsageError(f"{origin}: {unknown('key', name, offered, 'fsdpbench list settings')}")
        settings[name] = content[name]
    try:
        space = converted({name: content[name] for name in known if name in content}, SpaceFile)
    except msgspec.ValidationError as error:
        raise UsageError(f"{origin}: {_in_our_words(str(error))}") from None
    try:
        lists = {setting_named(name).name: read_list(name, value) for name, value in settings.items()}
    except UsageError as error:
        raise UsageError(f"{origin}: {error}") from None
    asked = {name: getattr(space, name) for name in known if name not in _NOT_ASKED_FOR}
    return {name: value for name, value in asked.items() if value is not None}, lists


def _in_our_words(message: str) -> str:
    """Rewrite ``Expected `int`, got `str` - at `$.gpus` `` as ``gpus: expected `int`, got `str` ``."""
    what, found, place = message.rpartition(" - at `$.")
    return f"{place.rstrip('`')}: {what[0].lower()}{what[1:]}" if found else message
