"""The parts of parameters that a rank holds, whatever wraps them, whole parameters assembled from all ranks'
parts, and the values that a script keeps between steps besides parameters.

FSDP2 holds a block of each parameter (a `DTensor`), FSDP1 a range of a flat buffer, DDP all of it. Nothing
here calls a collective, so that the order of the script's own collectives stays the same.
"""

import hashlib
import itertools
import math
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from fsdpbench.base.writing import replacing
from fsdpbench.script.model_blocks import plain_name, roots
from fsdpbench.script.own_files import OwnFiles


@dataclass(frozen=True)
class Piece:
    """A part of a tensor of `shape`, from `offset` on. If `flat`, the tensor counts as one dimension."""

    shape: tuple[int, ...]
    offset: tuple[int, ...]
    values: torch.Tensor
    flat: bool = False


@dataclass(frozen=True)
class Held:
    """A parameter on one rank, and its gradient (None: it has none)."""

    weight: Piece
    gradient: Piece | None
    trains: bool
    identity: int
    """The `id` of the tensor that an optimizer would hold."""


@dataclass(frozen=True)
class Whole:
    """A tensor assembled from all ranks' pieces. `apart`: ranks have different values for the same part."""

    values: torch.Tensor
    apart: bool


def whole(pieces: Iterable[Piece | None]) -> Whole | None:
    """Return the tensor assembled from all pieces, in their dtype; None if every rank lacks it."""
    found = [piece for piece in pieces if piece is not None]
    if not found:
        return None
    values = torch.zeros(found[0].shape, dtype=found[0].values.dtype)
    known = torch.zeros(found[0].shape, dtype=torch.bool)
    apart = False
    for piece in found:
        into, mask = (each.view(-1) if piece.flat else each for each in (values, known))
        part = tuple(
            slice(start, start + length)
            for start, length in zip(piece.offset, piece.values.shape, strict=True)
        )
        seen = mask[part]
        apart |= bool(((into[part] != piece.values) & seen).any())
        into[part] = torch.where(seen, into[part], piece.values)
        mask[part] = True
    return Whole(values, apart)


class Names:
    """The first names of trained parameters: a block may leave its list, so that later ones move up."""

    def __init__(self) -> None:
        self._names: dict[int, list[str]] = {}
        self._alive: dict[int, nn.Parameter] = {}
        """Parameters kept alive, so that no other object gets their `id`."""

    def of(self, paths: Sequence[tuple[str, int]]) -> list[str]:
        """Return the names of a root's parameters, from their current paths and `id`s."""
        taken = {name for _, identity in paths for name in self._names.get(identity, ())}
        found = []
        for path, identity in paths:
            own = self._names.get(identity)
            other = own[0] if own else f"{path} (new)" if path in taken else path
            found.append(path if own and path in own else other)
        return found

    def of_all(
        self, every: Sequence[Sequence[tuple[str, int]]], trained: Iterable[int]
    ) -> Iterator[tuple[int, list[str]]]:
        """Yield index and names of each root in `every`, roots with the first `trained` parameters first. A
        root gets a number if another uses the names of its trained parameters or, if it has none, of all its
        parameters; several equal roots without trained ones cannot be distinguished, so get no number."""
        order = {identity: place for place, identity in enumerate(trained)}

        def first(index: int) -> tuple[float, int]:
            places = [order[identity] for _, identity in every[index] if identity in order]
            return min(places, default=math.inf), -len(places)

        taken: dict[str, int] = {}
        frozen = Counter(
            frozenset(dict(each)) for each in every if order.keys().isdisjoint(dict(each).values())
        )
        for index in sorted(range(len(every)), key=first):
            own = [each for each in every[index] if each[1] in order]
            if frozen[frozenset(dict(every[index]))] == 1:
                own = own or list(every[index])
            number = 1
            while any(taken.get(_numbered(path, number), identity) != identity for path, identity in own):
                number += 1
            paths = [(_numbered(path, number), identity) for path, identity in every[index]]
            taken = dict(paths) | taken
            yield index, self.of(paths)

    def learn(self, found: Sequence[tuple[str, int]], trained: Mapping[int, nn.Parameter]) -> None:
        """Keep the names of parameters that are `trained`, by `id`."""
        new = [
            (name, identity) for name, identity in found if identity in trained.keys() - self._names.keys()
        ]
        for name, identity in new:
            self._names.setdefault(identity, []).append(name)
            self._alive[identity] = trained[identity]


def _numbered(path: str, number: int) -> str:
    return path if number == 1 else f"{path} ({number})"


def held_parameters(trained: Mapping[int, nn.Parameter], names: Names) -> dict[str, Held]:
    """Return all parameters of the script's modules by name, without the names of wrappers. Of modules with
    equal names, those with the `id`s in `trained` count."""
    found: dict[str, Held] = {}
    every = [list(_of_root(root)) for root in roots()]
    paths = [[(path, held.identity) for path, held in each] for each in every]
    for index, named in names.of_all(paths, trained):
        each = every[index]
        names.learn([(name, held.identity) for name, (_, held) in zip(named, each, strict=True)], trained)
        found = dict(zip(named, (held for _, held in each), strict=True)) | found
    return found


def _of_root(root: nn.Module) -> Iterator[tuple[str, Held]]:
    modules = list(root.named_modules())
    sharded = dict(itertools.chain.from_iterable(_sharded(module) for _, module in modules))
    flat: set[str] = set()
    for path, module in modules:
        handle = getattr(module, "_handle", None) if isinstance(module, FullyShardedDataParallel) else None
        if handle is not None:
            for name, held in _of_flat(handle.flat_param):
                flat.add(name := plain_name(f"{path}.{name}"))
                yield name, held
            for info in handle.flat_param._shared_param_infos:  # tied parameters: yielded with the first
                flat.add(plain_name(f"{path}.{info.module_name}.{info.param_name}"))
    for path, module in modules:
        for name, parameter in module.named_parameters(recurse=False):
            whole_name = plain_name(f"{path}.{name}")
            is_flat = whole_name in flat or hasattr(parameter, "_param_infos")
            if not is_flat and not parameter.is_meta:  # a model not yet built on a device has no values
                yield whole_name, held_tensor(sharded.get((id(module), name), parameter))


def _sharded(unit: nn.Module) -> Iterator[tuple[tuple[int, str], nn.Parameter]]:
    """Yield module and name of the parameters of an FSDP2 unit, and the tensor that an optimizer holds."""
    state: Any = unit._get_fsdp_state() if isinstance(unit, FSDPModule) else None
    groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
    for group in groups:
        for each in [] if group is None else group.fsdp_params:
            infos = each._module_info
            modules = zip(
                (infos.module, *infos.shared_modules),
                (infos.param_name, *infos.shared_param_names),
                strict=True,
            )
            for module, name in modules:
                yield (id(module), name), each.sharded_param


def held_tensor(parameter: nn.Parameter) -> Held:
    """Return the held part of a tensor outside of FSDP1's flat parameters."""
    gradient = None if parameter.grad is None else _piece(parameter.grad)
    return Held(_piece(parameter), gradient, parameter.requires_grad, id(parameter))


def _piece(tensor: Any) -> Piece:
    if not isinstance(tensor, DTensor):
        return Piece(tuple(tensor.shape), (0,) * tensor.ndim, _copy(tensor))
    chunks = tensor.__create_chunk_list__()  # empty if this rank has no part
    offset = tuple(chunks[0].offsets) if chunks else (0,) * tensor.ndim
    return Piece(tuple(tensor.shape), offset, _copy(tensor.to_local()))


def _of_flat(flat: Any) -> Iterator[tuple[str, Held]]:
    """Yield the parameters of an FSDP1 unit."""
    shard = getattr(flat, "_local_shard", None)
    shard = flat.detach() if shard is None else shard.detach()
    starts = itertools.accumulate(flat._numels_with_padding, initial=0)
    real = [start for start, pads in zip(starts, flat._is_padding_mask, strict=False) if not pads]
    originals = flat._params or [None] * len(flat._shapes)
    rows = zip(flat._param_infos, flat._shapes, flat._shard_param_infos, real, originals, strict=True)
    for info, shape, part, start, original in rows:
        length = part.numel_in_shard if part.in_shard else 0
        first = part.intra_param_start_idx or 0
        inside = slice(part.offset_in_shard or 0, (part.offset_in_shard or 0) + length)
        held = flat if original is None else original
        found = held.grad
        if original is None and found is not None:  # sharded, or whole under no_sync()
            whole = slice(start, start + shape.numel())
            found = found[inside if found.numel() == shard.numel() else whole]
        elif found is None and original is not None and not length:
            found = shard[:0]  # this rank has no part of it
        gradient = None
        if found is not None:
            gradient = _stretch(shape, 0 if found.numel() == shape.numel() else first, found)
        weight = _stretch(shape, first, shard[inside])
        yield f"{info.module_name}.{info.param_name}", Held(weight, gradient, held.requires_grad, id(held))


def _stretch(shape: torch.Size, start: int, values: torch.Tensor) -> Piece:
    return Piece(tuple(shape), (start,), _copy(values.reshape(-1)), flat=True)


def keep(content: object, path: Path) -> None:
    """Write tensors, and objects that hold them, to `path` atomically, for the other ranks and runs."""
    with replacing(path) as aside:
        torch.save(content, aside)


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().to_dense().clone()


def weights_of(ranks: Iterable[Mapping[str, Held]]) -> dict[str, Whole]:
    """Return the whole weights of all ranks' parameters."""
    every = list(ranks)
    names = every[0] if every else ()
    found = {name: whole(rank[name].weight for rank in every if name in rank) for name in names}
    return {name: value for name, value in found.items() if value is not None}


def digest_of(tensor: torch.Tensor) -> str:
    """Return a digest of a tensor's content."""
    content = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(content).hexdigest()[:8]


def kept_beside(own_files: OwnFiles, frame: FrameType | None) -> dict[str, torch.Tensor]:
    """Return the tensors of real numbers of the script's modules and functions that run in `frame`, of their
    objects, and the buffers of all models, by name."""
    modules = [each for root in roots() for each in root.named_modules()]
    holders = [("buffer " + f"{plain_name(path)}.".lstrip("."), each._buffers) for path, each in modules]
    while frame is not None:
        own = frame.f_locals if own_files.has(frame.f_code.co_filename) else {}
        holders.append((of := f"{frame.f_code.co_name}.".replace("<module>.", ""), own))
        for key, each in own.items():
            file = getattr(sys.modules.get(type(each).__module__), "__file__", None)
            if own_files.has(file or ""):
                holders.append((f"{of}{key}.", getattr(each, "__dict__", {})))
        frame = frame.f_back
    every = {f"{of}{key}": value for of, holder in holders for key, value in holder.items()}
    return {
        name: value
        for name, value in every.items()
        if type(value) is torch.Tensor and value.is_floating_point() and value.numel()
        if not value.requires_grad and not value.is_meta
    }
