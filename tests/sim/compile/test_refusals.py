"""What `torch.compile` cannot do here is refused before anything is compiled, with the way out."""

from __future__ import annotations

from typing import Any

import pytest

from fsdpbench.sim.compile.refusals import CompileRefusedError, refuse_mode, refuse_options


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"mode": "reduce-overhead"}, 'CUDA graphs.*use mode="default"'),
        ({"mode": "max-autotune"}, "CUDA graphs"),
        ({"mode": "max-autotune-no-cudagraphs"}, "templates that are timed on the GPU"),
        ({"options": {"triton.cudagraphs": True}}, "CUDA graphs"),
        ({"options": {"max_autotune_gemm": True}}, "templates"),
        ({"options": {"cpp_wrapper": True}}, "cpp_wrapper.*leave that option out"),
        ({"backend": "cudagraphs"}, "default backend"),
    ],
    ids=str,
)
def test_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(CompileRefusedError, match=words):
        refuse_mode(options)


@pytest.mark.parametrize("options", [{}, {"mode": "default"}, {"fullgraph": True, "dynamic": True}], ids=str)
def test_taken(options: dict[str, Any]) -> None:
    refuse_mode(options)
    refuse_options(options)
