"""The sizes that Dynamo has seen a frame with: what differs from them later it makes a symbol of."""

from __future__ import annotations

from typing import Any, NamedTuple

from fsdpbench.sim.compile.traces.frame import Frame
from fsdpbench.sim.compile.traces.meaning import NotKeptError
from fsdpbench.torch_internals import dynamo_pgo


class SizesSeen(NamedTuple):
    """By the values' names."""

    by_name: tuple[tuple[str, Any], ...] = ()

    @classmethod
    def with_frame(cls, frame: Frame) -> SizesSeen:
        """Until now."""
        return cls(_by_code().get(_code_of(frame), ()))

    @classmethod
    def since(cls, before: dict[Any, Any], frame: Frame) -> SizesSeen:
        """With this frame, and with none but it. Raises NotKeptError."""
        own = _code_of(frame)
        if any(seen != before.get(code, ()) for code, seen in _by_code().items() if code != own):
            raise NotKeptError("sizes of other frames were seen")
        return cls.with_frame(frame)

    def restore(self, frame: Frame) -> None:
        dynamo_pgo.get_code_state()[_code_of(frame)].automatic_dynamic.update(self.by_name)


def all_seen() -> dict[Any, Any]:
    """With any frame, until now."""
    return _by_code()


def _by_code() -> dict[Any, Any]:
    return {
        code: tuple(sorted(state.automatic_dynamic.items(), key=lambda item: item[0]))
        for code, state in dynamo_pgo.get_code_state().items()
    }


def _code_of(frame: Frame) -> Any:
    return dynamo_pgo.CodeId.make(frame.code, frame.closure)
