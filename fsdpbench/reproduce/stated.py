"""The runs as the FSDP paper states them; what a figure leaves open is taken from the paper's other runs.

6a  BF16 was turned on for the 11B model (section 5.2): the small ones are in TF32, torch's default for
    products until 1.12, as 27 TFLOPS exceed an A100's 19.5 in fp32; batch and GPUs are those of
    figure 7c at which T5-11B was published with the same TFLOPS
6c  no dtype is stated: BF16 and recomputation, as in section 5.4
7, 8  BF16 mixed precision, recomputation and Adam are stated (section 5.4)
T5  Hugging Face's model is stated: its attention is written out, with dropout of 0.1
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

from fsdpbench.reproduce.open_settings import HALF, TF32
from fsdpbench.validation.runs.case import Case

_OF_SECTION_5_4 = {**HALF, "activation_checkpointing": "full"}
_LARGEST_T5 = "t5-11b"


def as_stated(cases: Mapping[str, Case]) -> dict[str, Case]:
    """The validation's cases by name, as the paper states them."""
    return {name: _stated(case) for name, case in cases.items()}


def in_dtype_of_its_size(case: Case, folder: Path) -> Case:
    """A run of figure 6a: the small models are in TF32, on a machine whose profile is written to `folder`."""
    return case if case.model == _LARGEST_T5 else TF32.on(case, folder)


def _stated(case: Case) -> Case:
    if case.model.startswith("t5"):
        case = dataclasses.replace(case, shape={**case.shape, "attention": "explicit", "dropout": 0.1})
    if case.group.endswith(("Fig 6c", "Fig 7a and 8a")):
        case = dataclasses.replace(case, settings={**case.settings, **_OF_SECTION_5_4})
    return case
