"""A baseline: the figures of a sweep with their provenance, committed to a repository.

Simulated figures are exact for one version of torch, so a baseline has one set for each minor version. It
also has the space, so that `fsdpbench check` can run the same sweep again. A set has its provenance:
versions, revision, date, command, and the surroundings of its figures. It does not name a host.

Committed files are typed structs: an unknown key raises an error that suggests the nearest names.
"""

import datetime
import difflib
import enum
import types
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from fsdpbench.answers.check.metrics import ALL
from fsdpbench.answers.check.records.entries import Entry
from fsdpbench.base.errors import CannotJudgeError, UsageError, error_text, written
from fsdpbench.base.files.documents import converted, to_json
from fsdpbench.base.reading import JsonObject, one_line, read_json
from fsdpbench.base.writing import write_whole
from fsdpbench.engine.results.provenance import git_revision, versions
from fsdpbench.engine.results.records import Status

SCHEMA = 1
T = TypeVar("T")
Part = tuple[str, object, Any]
"""A part of a document: its path, its value, and the expected type."""

_LONGEST_SHOWN = 60
_NEAR = 3


def strictly(content: object, kind: type[T], origin: str) -> T:
    """Return `content` as a struct `kind`. Raises `UsageError` with `origin`, key and expected type."""
    # Before the conversion, which stops at an unknown key without suggesting a name.
    _refuse_unknown(("", content, kind), origin)
    try:
        return converted(content, kind)
    except msgspec.ValidationError:
        where, value, wanted = _culprit(("", content, kind))
        shown = one_line(repr(value), _LONGEST_SHOWN)
        raise UsageError(f"{origin}: {where or 'it'} must be {_words(wanted)}, not {shown}") from None


def check_names(names: Iterable[str], known: Iterable[str], origin: str, where: str, what: str) -> None:
    """Raise `UsageError` for the first of `names` that is not in `known`, with the nearest known names."""
    known = list(known)
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name[:_LONGEST_SHOWN], known, n=_NEAR, cutoff=0.4)
            offer = f"did you mean {' or '.join(near)}?" if near else f"known: {', '.join(known)}"
            raise UsageError(f"{origin}: {_below(where, name)} is not a {what}; {offer}")


def _refuse_unknown(part: Part, origin: str) -> None:
    where, value, kind = part
    if isinstance(value, Mapping) and _is_struct(kind) and kind.__struct_config__.forbid_unknown_fields:
        fields = [field.encode_name for field in msgspec.structs.fields(kind)]
        check_names(value, fields, origin, where, "key")
    for inner in _parts(part):
        _refuse_unknown(inner, origin)


def _culprit(part: Part) -> Part:
    """Return the innermost part with a wrong type; for a missing key, the object that lacks it."""
    for inner in _parts(part):
        try:
            converted(inner[1], inner[2])
        except msgspec.ValidationError:
            return _culprit(inner)
    return part


def _parts(part: Part) -> Iterator[Part]:
    where, value, kind = part
    if isinstance(value, Mapping) and _is_struct(kind):
        types_of = {field.encode_name: _without_none(field.type) for field in msgspec.structs.fields(kind)}
        yield from ((_below(where, name), value[name], types_of[name]) for name in value if name in types_of)
    elif isinstance(value, Mapping) and typing.get_origin(kind) is dict:
        inner = typing.get_args(kind)[1]
        yield from ((_below(where, name), item, inner) for name, item in value.items())
    elif isinstance(value, list) and typing.get_origin(kind) is list:
        (inner,) = typing.get_args(kind)
        yield from ((f"{where}[{index}]", item, inner) for index, item in enumerate(value))


def _is_struct(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct)


def _without_none(kind: Any) -> Any:
    if isinstance(kind, types.UnionType) and types.NoneType in typing.get_args(kind):
        return next(inner for inner in typing.get_args(kind) if inner is not types.NoneType)
    return kind


def _words(kind: Any) -> str:
    """Return the description of a type for messages."""
    if typing.get_origin(kind) is typing.Annotated:
        _, meta = typing.get_args(kind)
        pairs = (meta.ge, meta.gt), (meta.le, meta.lt)
        low, high = (next((limit for limit in pair if limit is not None), None) for pair in pairs)
        return f"a number from {low:g}" + (f" up to {high:g}" if high is not None else " up")
    if typing.get_origin(kind) is typing.Literal:
        return " or ".join(map(str, typing.get_args(kind)))
    if _is_struct(kind):
        needed = [field.encode_name for field in msgspec.structs.fields(kind) if field.required]
        return f"a table with {', '.join(needed)}" if needed else "a table"
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return f"one of {', '.join(str(each.value) for each in kind)}"
    plain = {dict: "a table", list: "a list", str: "text", int: "a whole number", float: "a number"}
    return plain.get(typing.get_origin(kind) or kind, str(kind))


def _below(where: str, name: str) -> str:
    shown = one_line(name, _LONGEST_SHOWN)
    return f"{where}.{shown}" if where else shown


@dataclass(frozen=True)
class Surroundings:
    """Facts besides the configuration on which figures depend. Only sides with equal facts are compared.

    Simulated figures depend on torch, the simulated hardware, and the model. Measured ones also depend on the
    kind of machine, but not on its name, so that two machines of the same kind may be compared. `facts`: by
    name; several values of one name are joined.
    """

    facts: Mapping[str, str]

    @property
    def is_exact(self) -> bool:
        return self.facts.get("device") == "sim"

    def differences(self, other: "Surroundings") -> list[str]:
        """Return a line for each fact that differs; if the devices differ, only that, since others follow."""
        names = dict.fromkeys([*self.facts, *other.facts])
        if self.facts.get("device") != other.facts.get("device"):
            names = dict.fromkeys(["device"])
        return [
            f"{name}: {self.facts.get(name, 'unknown')} against {other.facts.get(name, 'unknown')}"
            for name in names
            if self.facts.get(name) != other.facts.get(name)
        ]


def require_alike(before: Surroundings, after: Surroundings) -> None:
    """Raise `CannotJudgeError` that names all differing facts."""
    differences = before.differences(after)
    if differences:
        raise CannotJudgeError(error_text("baseline.unlike", "; ".join(differences)))


def surroundings_of(results: Iterable[Mapping[str, Any]]) -> Surroundings:
    """Return the surroundings of all results of a side."""
    values: dict[str, set[str]] = {}
    for result in results:
        for name, value in _facts(result).items():
            values.setdefault(name, set()).add(value)
    return Surroundings({name: ", ".join(sorted(found)) for name, found in values.items()})


def _facts(result: Mapping[str, Any]) -> dict[str, str]:
    config, environment = result.get("config") or {}, result.get("environment") or {}
    versions = environment.get("versions") or {}
    shape = config.get("shape") or {}
    facts = {
        "device": str(result.get("device")),
        "hardware": str((result.get("hardware") or {}).get("name")),
        "torch": _minor(versions.get("torch")),
        "model": str(config.get("model")),
        **{f"shape {name}": str(value) for name, value in sorted(shape.items())},
        "gpus_per_node": str(config.get("gpus_per_node")),
        **{name: str(config[name]) for name in ("gpus_used_per_node",) if config.get(name)},
        "data": str(config.get("data")),
    }
    if facts["device"] == "sim":
        return facts
    machine = environment.get("machine") or {}
    facts |= {
        "python": _minor(versions.get("python")),
        "processor": str(machine.get("processor")),
        "cores": str(machine.get("cores")),
    }
    for name, value in (environment.get("variables") or {}).items():
        facts[f"variable {name}"] = str(value)
    return facts


def _minor(version: object) -> str:
    return ".".join(str(version).split("+")[0].split(".")[:2])


class Provenance(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The provenance of a set."""

    versions: dict[str, str]
    revision: str | None
    date: str
    command: str


class Figures(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One configuration, as in `Entry`. Invalid figures are kept, so that the gate can report them."""

    status: Status
    device: str
    runs: list[JsonObject]


class FigureSet(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The figures for one version of torch. `left_out`: configurations of the space that are not judged."""

    configurations: dict[str, Figures]
    surroundings: dict[str, str] = {}
    provenance: Provenance | None = None
    left_out: list[str] = []

    def entries(self) -> dict[str, Entry]:
        return {
            name: Entry(record.status, record.device, tuple(record.runs))
            for name, record in self.configurations.items()
        }


class Baseline(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A baseline file: the space that was swept, and sets of its figures by version of torch."""

    space: JsonObject
    sets: dict[str, FigureSet]
    schema: int = SCHEMA

    @classmethod
    def read(cls, path: Path) -> "Baseline":
        """Read a baseline from a file. Raises `UsageError` that names the file and the error in it."""
        return cls.of(read_json(path), path)

    @classmethod
    def of(cls, content: object, path: Path) -> "Baseline":
        """Return the baseline in JSON content that was read from `path`. Raises `UsageError`."""
        if not is_baseline(content):
            raise UsageError(f"{path}: is not a baseline of this version (schema {SCHEMA} with `sets`)")
        baseline = strictly(content, cls, str(path))
        for version, figures in baseline.sets.items():
            for name, record in figures.configurations.items():
                where = f"sets.{version}.configurations.{name}"
                for run in record.runs:
                    check_names(run, ALL, str(path), where, "metric")
                device = figures.surroundings.get("device", record.device)
                if record.device != device:
                    raise UsageError(f"{path}: {where} is of {record.device!r}, and its set of {device!r}")
        return baseline

    def write(self, path: Path) -> None:
        """Write the file atomically. Raises `BenchError`."""
        content = msgspec.to_builtins(self)
        replace_file(path, to_json(content, 1, sort_keys=True, allow_nan=False) + "\n")

    def of_this_torch(self, path: Path) -> FigureSet:
        """Return the set for the installed torch. Raises `CannotJudgeError` if there is none."""
        mine = torch_minor()
        if mine not in self.sets:
            have = ", ".join(sorted(self.sets)) or "none"
            raise CannotJudgeError(error_text("baseline.other_torch", path, have, mine, path))
        return self.sets[mine]

    @property
    def repeat(self) -> int:
        """Return the number of runs per configuration in the set for the installed torch; 1 without a set."""
        mine = self.sets.get(torch_minor())
        return max((len(record.runs) for record in mine.configurations.values()), default=1) if mine else 1

    def updated(
        self, entries: Mapping[str, Entry], surroundings: Surroundings, command: str, left_out: Sequence[str]
    ) -> "Baseline":
        """Return the baseline with `entries` as the set for the installed torch."""
        figures = FigureSet(
            configurations={
                name: Figures(each.status, each.device, each.known) for name, each in entries.items()
            },
            surroundings=dict(surroundings.facts),
            provenance=Provenance(
                versions=dict(versions()),
                revision=git_revision(),
                date=datetime.datetime.now(datetime.UTC).date().isoformat(),
                command=command,
            ),
            left_out=sorted(left_out),
        )
        return Baseline(self.space, {**self.sets, torch_minor(): figures})


def is_baseline(content: object) -> bool:
    """Return whether JSON content is a baseline of this schema."""
    return isinstance(content, Mapping) and content.get("schema") == SCHEMA and "sets" in content


def torch_minor() -> str:
    """Return the minor version of the installed torch, such as `2.13`; a baseline has one set for each."""
    return ".".join(versions()["torch"].split(".")[:2])


def replace_file(path: Path, text: str) -> None:
    """Replace the file at `path` atomically by `text`. Raises `BenchError`."""
    with written(path):
        write_whole(path, text)
