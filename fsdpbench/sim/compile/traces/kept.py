"""In the place of Dynamo's tracing: a trace of another process, where there is one that is the same."""

from __future__ import annotations

import functools
import logging
import pickle
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from fsdpbench.files.whole_files import write_whole
from fsdpbench.sim.compile.traces.entry import Entry, counting
from fsdpbench.sim.compile.traces.frame import Frame
from fsdpbench.sim.compile.traces.meaning import NotKeptError
from fsdpbench.sim.compile.traces.restored import Restored
from fsdpbench.sim.compile.traces.sizes_seen import SizesSeen, all_seen
from fsdpbench.torch_internals import (
    FakeTensorMode,
    autograd_cache,
    dynamo_convert_frame,
    dynamo_guards,
    dynamo_utils,
    inductor_config,
    replace,
    torch_guards,
)

_CUDA_GRAPHS = "triton.cudagraphs"
_LOG = logging.getLogger(__name__)


def keep_traces(working: Callable[[], AbstractContextManager[object]], tag: Callable[[], str]) -> KeptTraces:
    """Take traces from disk from now on, and leave new ones. `working`: entered while a graph is loaded.
    `tag`: what plans depend on beside the graph."""
    kept = KeptTraces(working, tag)
    key_of, trace = autograd_cache.autograd_cache_key, dynamo_convert_frame.compile_frame
    replace(autograd_cache, autograd_cache_key=kept.noting_key(key_of))
    replace(dynamo_convert_frame, compile_frame=kept.instead(trace))
    replace(dynamo_guards, profile_guard_manager=_not_measured)  # for a line of a log, in 20 ms
    return kept


def _not_measured(*args: Any) -> float:
    return 0.0


@dataclass
class KeptTraces:
    """Of one process. `found`, `left`: how many came from disk, and went there. `why_not`: of the others."""

    working: Callable[[], AbstractContextManager[object]]
    tag: Callable[[], str]
    found: int = 0
    left: int = 0
    why_not: list[str] = field(default_factory=list)
    _keys: list[str] = field(default_factory=list)

    def noting_key(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """AOTAutograd asks for the key of each graph that it is given."""

        @functools.wraps(original)
        def key_of(*args: Any, **options: Any) -> Any:
            found = original(*args, **options)
            self._keys.append(found[0])
            return found

        return key_of

    def instead(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """In the place of Dynamo's `compile_frame`."""

        def compile_frame(
            code: Any,
            f_globals: Any,
            f_locals: Any,
            builtins: Any,
            closure: Any,
            compiler: Any,
            *rest: Any,
            **about: Any,
        ) -> Any:
            def trace() -> Any:
                return original(code, f_globals, f_locals, builtins, closure, compiler, *rest, **about)

            frame = Frame(code, f_globals, f_locals, closure)
            options = _options_of(compiler)
            if options is None or any(about.get(name) for name in ("export", "package", "distributed_state")):
                return trace()
            try:
                with self.working():
                    place = frame.place(self.tag(), options, rest[0], SizesSeen.with_frame(frame))
            except NotKeptError as error:
                self._note(error)
                return trace()
            return self._from(place, frame) or self._traced(trace, place, frame)

        return compile_frame

    def _from(self, place: Path, frame: Frame) -> Restored | None:
        """The trace that is there; None without one that is of this frame."""
        try:
            with open(place, "rb") as file:
                entry: Entry = pickle.load(file)
            manager = entry.guards_for(frame)
            restored = Restored(entry, manager)
            graph = self._graph(entry.graph_key)
        except FileNotFoundError:
            return None
        except Exception as error:  # whatever a broken file, or a value that is not there, leads to
            self._note(error)
            return None
        frame.f_globals[entry.graph] = graph
        entry.sizes_seen.restore(frame)
        dynamo_utils.counters["stats"].update(entry.counts)
        dynamo_utils.increment_op_count(entry.calls)
        self.found += 1
        return restored

    def _graph(self, key: str) -> Callable[..., Any]:
        """The compiled graph, as AOTAutograd has kept it. Raises NotKeptError where it has not."""
        fake_mode = FakeTensorMode(shape_env=torch.fx.experimental.symbolic_shapes.ShapeEnv())
        with self.working(), torch_guards.tracing(torch_guards.TracingContext(fake_mode)):
            if not autograd_cache.should_use_local_autograd_cache():
                raise NotKeptError("caches are off")
            looked_up = autograd_cache.AOTAutogradCache._lookup(key, True, False, [], {}, None)
            if looked_up is None:
                raise NotKeptError("its graph was not kept")
            result = looked_up[0]
            compiled = result.wrap_post_compile(
                [], result.sanitized_aot_config, autograd_cache.create_fx_config()
            )
        counted = dynamo_utils.counters["aot_autograd"]
        for name in ("total", "ok", "autograd_cache_hit"):
            counted[name] += 1

        def forward(*args: Any) -> Any:
            return compiled(list(args))

        disabled: Callable[..., Any] = torch.compiler.disable(forward, reason="a compiled graph")
        return disabled

    def _traced(self, trace: Callable[[], Any], place: Path, frame: Frame) -> Any:
        """What Dynamo makes of it, which is kept if nothing is doubtful."""
        seen, self._keys = all_seen(), []
        counted = counting(dynamo_utils.counters["stats"])
        breaks = counting(dynamo_utils.counters["graph_break"])
        made = trace()
        keys, self._keys = self._keys, []
        try:
            if len(keys) != 1 or breaks():
                raise NotKeptError("it is not one graph")
            sizes = SizesSeen.since(seen, frame)
            place.parent.mkdir(exist_ok=True)
            write_whole(place, pickle.dumps(Entry.of(frame, made, keys[0], counted(), sizes)))
            self.left += 1
        except Exception as error:  # tracing went well; what cannot be kept is traced by the next process too
            self._note(error)
        return made

    def _note(self, error: Exception) -> None:
        self.why_not.append(f"{type(error).__name__}: {error}")
        _LOG.debug("trace not kept: %s", error, exc_info=error)


def _options_of(compiler: Any) -> str | None:
    """How a backend is to compile; None where it is not Inductor, or captures graphs."""
    while hasattr(compiler, "_torchdynamo_orig_backend"):
        compiler = compiler._torchdynamo_orig_backend
    if type(compiler).__name__ != "_TorchCompileInductorWrapper":
        return None
    config = dict(getattr(compiler, "config", None) or {})
    if config.get(_CUDA_GRAPHS, getattr(inductor_config, _CUDA_GRAPHS)):
        return None
    said = repr((sorted(config.items()), getattr(compiler, "dynamic", None)))
    return None if " at 0x" in said else said


__all__ = ["KeptTraces", "keep_traces"]
