"""Batches of another size: the `DataLoader`'s, or an argument of the script's own parser."""

from __future__ import annotations

import argparse
import functools
from typing import Any

from fsdpbench.script.interposing.arguments import batch_argument
from fsdpbench.script.interposing.calls import around_loader


class Batches:
    """Multiplies the size of batches by `factor`; with `parser`, where the script's parser reads one,
    there."""

    def __init__(self, factor: float, *, parser: bool) -> None:
        self.count = 0
        self._factor = factor
        self._by_parser = False
        around_loader(self._loader)
        if parser:
            self._around_parser()

    def _scaled(self, size: Any) -> int | None:
        """The other size; None where there is none, or the parser's comes to the loader already."""
        if type(size) is int and int(size * self._factor) >= 1 and not self._by_parser:
            return int(size * self._factor)
        return None

    def _loader(self, dataset: Any, kwargs: dict[str, Any]) -> None:
        scaled = self._scaled(kwargs.get("batch_size"))
        if scaled is not None:
            kwargs["batch_size"] = scaled
            self.count += 1

    def _around_parser(self) -> None:
        original = argparse.ArgumentParser.parse_known_args

        @functools.wraps(original)
        def parse_known_args(parser: Any, *args: Any, **kwargs: Any) -> Any:
            found, rest = original(parser, *args, **kwargs)
            name = batch_argument(found)
            if name is not None and not self._by_parser:
                scaled = self._scaled(getattr(found, name))
                if scaled is not None:
                    setattr(found, name, scaled)
                    self.count += 1
                    self._by_parser = True
            return found, rest

        argparse.ArgumentParser.parse_known_args = parse_known_args  # type: ignore[method-assign,assignment]
