"""`--hf-config FILE|FOLDER` and `--model hf:NAME`: a Hugging Face configuration instead of a named model.

The file is read once, here, and becomes a model called `hf:NAME` with a complete shape. So a result, a
`sweep.toml` and a baseline describe the run without the file. Nothing is ever downloaded.
"""

import contextlib
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from fsdpbench.base.configuration.config import ShapeValue
from fsdpbench.base.errors import UsageError, error_text
from fsdpbench.base.files.documents import is_there, read_json_object, read_text
from fsdpbench.base.numbers import finite_number, whole_number
from fsdpbench.base.settings import Value
from fsdpbench.workloads import HF_PREFIX, WorkloadError
from fsdpbench.workloads.hf_config import translate
from fsdpbench.workloads.library import CONTENT, LIBRARY, packed

_CONFIG = "config.json"
_USUAL: Mapping[str, Value] = {"batch": 1, "activation_checkpointing": "full"}
"""The general defaults bring gpt-2.8b to the limit of 80 GB; with these, larger models fit too."""
_LONGEST_NAME = 60
_SNAPSHOTS = "snapshots"


def with_hf_model(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return `given` with model and shape instead of `hf_config`, or of a model `hf:NAME` that has no shape.
    Fields of a given shape override those of the file. `keep_content`: the shape also keeps the file's
    content, for the library's own modules. Raises `UsageError`."""
    done = {name: value for name, value in given.items() if name not in ("hf_config", "keep_content")}
    model, path = given.get("model"), given.get("hf_config")
    shape = given.get("shape")
    shape = dict(shape) if isinstance(shape, Mapping) else parse_shape(shape)
    if path is not None:
        if model is not None:
            raise UsageError(f"--hf-config {path}: it is a model; leave out --model {model}")
        file = _config_file(Path(str(path)), f"--hf-config {path}")
        name = _name_of(file)
    elif model is not None and str(model).startswith(HF_PREFIX) and "family" not in shape:
        name = str(model).removeprefix(HF_PREFIX)
        file = _cached_file(name)
    else:
        return done
    try:
        content = read_json_object(file)
        changed = "".join(f"+{field}={str(value).lower()}" for field, value in shape.items())
        found = translate(content, towers=bool(shape.pop("towers", False)))
    except WorkloadError as error:
        raise UsageError(f"{file}: {error}") from None
    plain = re.sub(r"[^A-Za-z0-9._+=/-]", "-", f"{name}{changed}")[:_LONGEST_NAME].strip("/")
    done["model"] = HF_PREFIX + (plain or "model")
    done["shape"] = {"family": found.family, **found.values, **shape}
    if given.get("keep_content"):
        if shape:
            raise UsageError(error_text("hf_model.shape_of_library", LIBRARY, ", ".join(shape)))
        done["shape"][CONTENT] = packed(content)
    return done


def usual_settings(model: str, named: Iterable[str]) -> dict[str, Value]:
    """Return default settings for a model from a configuration file, except those that the user named; empty
    for named models, which have the general defaults."""
    taken = set(named)
    return {
        name: value for name, value in _USUAL.items() if model.startswith(HF_PREFIX) and name not in taken
    }


def _config_file(path: Path, origin: str) -> Path:
    """Return the file at `path`, or the `config.json` in that folder. Raises `UsageError`."""
    if not is_there(path):
        raise UsageError(f"{origin}: no such file or folder")
    file = path / _CONFIG if path.is_dir() else path
    if not is_there(file):
        raise UsageError(f"{origin}: the folder holds no {_CONFIG}")
    return file


def _name_of(file: Path) -> str:
    """Return the name of the file, the folder of a `config.json`, or the model of a cached snapshot."""
    if file.name != _CONFIG:
        return file.stem
    folder = file.resolve().parent if file.parent == Path() else file.parent
    if folder.parent.name == _SNAPSHOTS:
        return folder.parent.parent.name.removeprefix("models--").replace("--", "/")
    return folder.name


def _cached_file(name: str) -> Path:
    """Return the cached `config.json` of the model `name` (owner/model), of the main revision if possible."""
    hub = _hub_cache()
    folder = hub / f"models--{name.replace('/', '--')}"
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name) or not is_there(folder):
        raise UsageError(error_text("hf_model.not_in_cache", HF_PREFIX, name, hub))
    main = folder / "refs" / "main"
    revisions = [read_text(main).strip()] if is_there(main) else []
    revisions += sorted(path.name for path in (folder / _SNAPSHOTS).glob("*"))
    for revision in revisions:
        file = folder / _SNAPSHOTS / revision / _CONFIG
        if is_there(file):
            return file
    raise UsageError(f"--model {HF_PREFIX}{name}: no snapshot in {folder} holds a {_CONFIG}")


def _hub_cache() -> Path:
    """Return the cache folder of huggingface_hub, by its own environment variables."""
    if os.environ.get("HF_HUB_CACHE"):
        return Path(os.environ["HF_HUB_CACHE"]).expanduser()
    home = os.environ.get("HF_HOME")
    if not home:
        home = str(Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface")
    return Path(home).expanduser() / "hub"


def parse_shape(text: str | None) -> dict[str, ShapeValue]:
    """Parse `layers=32,tied=true` to typed values. Raises `UsageError` for a part without `name=value`."""
    shape: dict[str, ShapeValue] = {}
    for part in (text or "").split(","):
        if not part.strip():
            continue
        name, equals, value = part.partition("=")
        if not equals or not value.strip():
            raise UsageError(f"--shape: {part!r:.80} is not name=value, as in layers=32,d_model=4096")
        shape[name.strip()] = _typed(value.strip())
    return shape


def _typed(text: str) -> ShapeValue:
    lowered = text.lower()
    if lowered in ("true", "false"):
        return lowered == "true"
    for read in (whole_number, finite_number):
        with contextlib.suppress(ValueError):
            return read(text)
    return text
