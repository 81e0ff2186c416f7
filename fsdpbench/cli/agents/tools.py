"""A command as a tool: its options as a JSON schema, and a call's arguments as command-line words.

Each text of a call, and each part of it (`name=PATH`, `@PATH`, lists), is resolved as a path, and refused if
it is outside of the server's folder. A script's own arguments may name any file.
"""

import os
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import click
import msgspec

from fsdpbench.base.errors import UsageError, unknown
from fsdpbench.base.files.documents import converted
from fsdpbench.base.reading import UnreadableError, one_line, read_json, read_toml
from fsdpbench.base.settings import SETTINGS
from fsdpbench.base.settings.setting import Setting, plain_text
from fsdpbench.base.settings.values import Choice, flag
from fsdpbench.cli.group import command_named

vars(sys)["modules"].setdefault("rfc3987_syntax", None)
import jsonschema  # noqa: E402  (if it finds that package, it builds an IRI grammar, which takes a second)

JsonSchema = dict[str, object]

TOOLS = {name: name for name in ("plan", "run", "explain", "analyze", "prove", "compare", "expect")}
TOOLS |= {"run": "result", "analyze": "analysis", "compare": "comparison"}
"""The commands that are tools, and the JSON schemas of their answers."""
_OUTPUT = ("as_json", "form", "assignments")
"""Parameters for terminals, and `--set`, because every setting has its own argument."""
_OF_SCRIPT = ("script_arguments", "resume_with")
_RUNS, ANSWERS = "runs", "runs/answers"  # `ANSWERS`: files of answers that are too large to send
_ARGUMENTS = {"script_arguments": "The script's own arguments; of explain without a script its FILE."}
_SCALARS = ("string", "number", "boolean")
_ANY: JsonSchema = {"type": [*_SCALARS]}
_LONGEST = 20_000
_MOST_NAMES = 50_000
_SEPARATORS, _NEVER = re.compile(r"[,=:@\s]+"), re.compile("[\0\ud800-\udfff]")


class _Run(msgspec.Struct):
    script: dict[str, object] | None = None
    config: "_Run | None" = None


@dataclass(frozen=True)
class Tool:
    """The command `name`. It runs in `folder` (resolved), and may use files only there."""

    name: str
    folder: str

    @cached_property
    def command(self) -> click.Command:
        """Return the command."""
        command = command_named(self.name)
        assert command is not None
        return command

    @cached_property
    def parameters(self) -> Mapping[str, click.Parameter]:
        """Return the command's parameters by argument name: the option's name with underscores."""
        return {
            max(each.opts, key=len).lstrip("-").replace("-", "_"): each
            for each in self.command.params
            if each.expose_value and each.name not in _OUTPUT and not getattr(each, "hidden", False)
        }

    @cached_property
    def input_schema(self) -> JsonSchema:
        """Return the JSON schema of the arguments."""
        return {
            "type": "object",
            "properties": {name: _schema_of(each) for name, each in self.parameters.items()},
            "required": [name for name, each in self.parameters.items() if each.required],
            "additionalProperties": False,
        }

    @property
    def output_schema(self) -> JsonSchema:
        """Return the published JSON schema of the command's answer."""
        text = Path(__file__).with_name("schemas").joinpath(f"{TOOLS[self.name]}.schema.json").read_bytes()
        return msgspec.json.decode(text, type=JsonSchema)

    def words(self, arguments: Mapping[str, object]) -> list[str]:
        """Return the command line for `arguments`, after checking all paths.

        Raises:
            UsageError: an argument is unknown, has the wrong type, or names a path outside of the folder.
        """
        for name in arguments.keys() - self.parameters.keys():
            raise unknown("argument", one_line(name, 100), self.parameters, f"fsdpbench {self.name} --help")
        for error in jsonschema.Draft202012Validator(self.input_schema).iter_errors(arguments):
            raise UsageError(f"{self.name}: {error.json_path.removeprefix('$.')}: {error.message}")
        own = _OF_SCRIPT if arguments.get("script") or arguments.get("module") else ()
        check_inside(self.folder, "its own output", _RUNS if self.name == "run" else ANSWERS)
        options, rest = ["--json"], list[str]()
        for name, parameter in self.parameters.items():
            if name not in arguments:
                continue
            texts = _texts(parameter, arguments[name])
            for text in texts if parameter.name not in own else ():
                check_inside(self.folder, name, text)
            if isinstance(parameter, click.Argument):
                rest += texts
            elif getattr(parameter, "is_flag", False):
                options += [parameter.opts[-1]] if arguments[name] else []
            else:
                options += [f"{max(parameter.opts, key=len)}={text}" for text in texts]
        return [self.name, *options, "--", *rest]


def _schema_of(parameter: click.Parameter) -> JsonSchema:
    """Return the schema of one argument. An option with a comma-separated list also takes an array."""
    setting = SETTINGS.get(parameter.name or "")
    if setting is not None:
        one = _of_setting(setting)
        said = setting.meaning + f" Values: {setting.values}." * (one == _ANY)
    else:
        one = {"type": "boolean"} if getattr(parameter, "is_flag", False) else _of_option(parameter.type)
        said = getattr(parameter, "help", None) or _ARGUMENTS.get(parameter.name or "", "")
    about: JsonSchema = {"description": said} if said else {}
    if parameter.multiple or parameter.nargs == -1:
        return {"type": "array", "items": one, **about}
    if one == _ANY:
        return {"type": [*_SCALARS, "array"], "items": one, **about}
    if parameter.metavar == "V,V":  # how `setting_options` marks a list
        return {"anyOf": [one, {"type": "array", "items": one}], **about}
    return {**one, **about}


def _of_option(kind: click.ParamType) -> JsonSchema:
    if isinstance(kind, click.IntRange):
        return {"type": "integer", "minimum": kind.min}
    if isinstance(kind, click.FloatRange):
        return {"type": "number", "exclusiveMinimum": kind.min}
    if isinstance(kind, click.Choice):
        return {"enum": list(kind.choices)}
    return {"type": "string"} if isinstance(kind, click.Path) else _ANY


def _of_setting(setting: Setting) -> JsonSchema:
    if setting.parse is flag:
        return {"type": "boolean"}
    if isinstance(setting.parse, Choice):
        return {"enum": list(setting.parse.words)}
    return {"type": "integer"} if isinstance(setting.default, int) and not setting.words else _ANY


def _texts(parameter: click.Parameter, value: object) -> list[str]:
    """Return an argument as one text, or as one per item if the command takes several. Raises `UsageError`
    for text that a command line cannot hold."""
    items = [plain_text(item) for item in value] if isinstance(value, list) else [plain_text(value)]
    for text in items:
        if len(text) > _LONGEST or _NEVER.search(text):
            raise UsageError(f"{parameter.name}: {text!r}: no more than {_LONGEST:,} characters, and no NUL")
    return items if parameter.multiple or parameter.nargs == -1 else [",".join(items)]


def check_inside(folder: str, name: str, text: str) -> None:
    """Raise `UsageError` if `text`, the argument `name`, or a part of it is a path outside of `folder`
    (resolved). Links inside a folder that it names, and paths inside a TOML file, are checked too."""
    for part in dict.fromkeys((text, *_SEPARATORS.split(text))):
        _check_path(folder, name, part)
    place = Path(folder, text)
    named = [os.path.realpath(place)] if place.suffix == ".json" and place.is_file() else []
    for file in _found_below(place, name) if place.is_dir() else named:
        for path in (file,) if os.path.islink(file) else _scripts_of(Path(file)):
            _check_path(folder, f"{name}: {os.path.relpath(file, folder)}", path)
    if place.suffix == ".toml" and place.is_file():
        with suppress(UnreadableError):  # the command reports it
            for value in _strings(read_toml(place)):
                _check_path(folder, f"{name} {text}", value)


def _strings(node: object) -> Iterator[str]:
    """Yield the strings of a parsed file, at any depth."""
    if isinstance(node, str):
        yield node
    elif isinstance(node, dict | list):
        for each in node.values() if isinstance(node, dict) else node:
            yield from _strings(each)


def _check_path(folder: str, name: str, path: str) -> None:
    place = os.path.realpath(os.path.join(folder, path))
    if place != folder and not place.startswith(os.path.join(folder, "")):
        raise UsageError(f"{name}: {path!r} is outside of {folder}, where this server works")


def _scripts_of(file: Path) -> Iterator[str]:
    """Yield the paths of script and test in the JSON of a run, because `explain` would execute them."""
    with suppress(UnreadableError, msgspec.ValidationError):
        run = converted(read_json(file), _Run)
        for script in (each.script for each in (run, run.config) if each and each.script):
            yield from _strings([str(script.get("path")), script.get("function")])


def _found_below(folder: Path, name: str) -> Iterator[str]:
    """Yield the links below `folder`, without following them, and the JSON files of runs. Raises `UsageError`
    if `folder` has more than `_MOST_NAMES` entries."""
    seen = 0
    for place, folders, files in os.walk(folder):
        folders[:] = [each for each in folders if not each.startswith(".")]
        paths = [os.path.join(place, each) for each in (*folders, *files)]
        seen += len(paths)
        if seen > _MOST_NAMES:
            raise UsageError(f"{name}: {folder} holds more than {_MOST_NAMES:,} names; name a folder in it")
        yield from (
            each for each in paths if os.path.islink(each) or each.endswith(("/config.json", "/result.json"))
        )
