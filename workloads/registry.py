"""Families and named sizes of models, and the lookup of a workload by name.

Other packages add families by entry point; they are loaded when one of their models is chosen or listed.
"""

import difflib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from fsdpbench.base.files.documents import table_beside
from fsdpbench.base.plugins import FAMILIES, OWN_FAMILIES, Loader, family_of
from fsdpbench.workloads.base import Shaped, Workload
from fsdpbench.workloads.decoder import DecoderWorkload
from fsdpbench.workloads.families.dhen_workload import DHENWorkload
from fsdpbench.workloads.families.gpt_workload import GPTWorkload
from fsdpbench.workloads.families.llama_workload import LlamaWorkload
from fsdpbench.workloads.families.t5_workload import T5Workload
from fsdpbench.workloads.families.vision_workloads import DeepViTWorkload, RegNetWorkload
from fsdpbench.workloads.library import CONTENT, LIBRARY, LibraryWorkload, unpacked
from fsdpbench.workloads.shape import ShapeError, UnknownModelError, error_text, make_shape


@dataclass(frozen=True)
class Family:
    """A family of models: a factory of workloads from shape values, and its named sizes.

    `make(name, values)` returns a `Workload`. A plugin offers a `Family` as its entry point; the names of its
    sizes begin with the family's name (`my-model-7b` for `my-model`).
    """

    make: Callable[[str, Mapping[str, Any]], Workload]
    sizes: Mapping[str, Mapping[str, Any]]


def _families(*workloads: type[Shaped[Any]]) -> dict[str, Family]:
    """Return our families by name, with their sizes from `sizes.toml`."""
    sizes = table_beside(__file__, "sizes.toml")
    found: dict[str, Family] = {}
    for each in workloads:
        shapes = {
            name: asdict(make_shape(each.shape_type, values)) for name, values in sizes[each.family].items()
        }
        found[each.family] = Family(each.from_values, shapes)
    return found


_FAMILIES = _families(
    GPTWorkload, T5Workload, LlamaWorkload, DecoderWorkload, RegNetWorkload, DeepViTWorkload, DHENWorkload
)
HF_PREFIX = "hf:"
"""Prefix of a model name that refers to a Hugging Face configuration; its shape names the family."""


def _flaw(name: str, loaded: object) -> str | None:
    if not isinstance(loaded, Family):
        return f"is {type(loaded).__name__}, no fsdpbench.workloads.Family"
    wrong = next((size for size in loaded.sizes if not size.startswith(f"{name}-")), None)
    return None if wrong is None else f"has a size {wrong!r}: its name must begin with '{name}-'"


PLUGINS = Loader[Family](FAMILIES, "family", OWN_FAMILIES, _flaw)


def families() -> tuple[str, ...]:
    """Return the names of our families, which accept shapes of the user's own."""
    return tuple(_FAMILIES)


def workload_names() -> tuple[str, ...]:
    """Return the names of our sized models by family, from small to large."""
    return tuple(name for family in _FAMILIES.values() for name in family.sizes)


def get_workload(name: str, shape: Mapping[str, Any] | None = None) -> Workload:
    """Return the workload called `name` (`gpt-2.8b`), or of the family `name` (`gpt`) in the given `shape`.

    `shape` can also override single fields of a named size; the workload's name then lists them.

    Raises:
        UnknownModelError: there is no such name; the error has the nearest ones.
        ShapeError: a shape field is unknown, missing or invalid.
        PluginError: the package that offers the model cannot be loaded.
    """
    overrides = dict(shape or {})
    if name.startswith(HF_PREFIX):
        return _of_hf_config(name, overrides)
    for family_name, family in _candidates(name):
        if name == family_name and not overrides and name not in family.sizes:
            raise ShapeError(error_text("registry.no_shape", name, ", ".join(list(family.sizes)[:3])))
        if name == family_name or name in family.sizes:
            base = family.sizes.get(name, {})
            return family.make(_label(name, base, overrides), {**base, **overrides})
    offered = [size for each in PLUGINS.offers() if each.thing for size in (each.name, *each.thing.sizes)]
    known = (*workload_names(), *families(), *offered)
    raise UnknownModelError(name, difflib.get_close_matches(name, known, n=3, cutoff=0.5), known)


def _of_hf_config(name: str, values: dict[str, object]) -> Workload:
    """Make a workload from `values`: a whole shape and the family's name, as from `hf_config.translate`."""
    family_name = str(values.pop("family", None))
    if family_name == LIBRARY:
        return LibraryWorkload.from_values(name, values)
    content = values.pop(CONTENT, None)
    family = _FAMILIES.get(family_name)
    if family is None:
        raise ShapeError(error_text("registry.no_family", name, DecoderWorkload.family))
    workload = family.make(name, values)
    workload.library_config = None if content is None else unpacked(str(content))
    return workload


def _candidates(model: str) -> Iterator[tuple[str, Family]]:
    yield from _FAMILIES.items()
    entry = family_of(model)
    if entry is not None:
        yield entry.name, PLUGINS.load(entry.name)


def _label(name: str, base: Mapping[str, Any], overrides: Mapping[str, Any]) -> str:
    """Return `name` plus the fields that differ from that size: `gpt-2.8b+layers=4,tied=true`."""
    changed = [
        f"{key}={str(value).lower()}"
        for key, value in overrides.items()
        if key not in base or str(base[key]).lower() != str(value).lower()
    ]
    return f"{name}+{','.join(changed)}" if changed else name
