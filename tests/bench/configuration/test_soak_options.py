"""Lengths and soaks: what is taken, what is refused by name, and the steps that come of it."""

from __future__ import annotations

import dataclasses
from itertools import islice
from pathlib import Path
from statistics import mean

import msgspec
import pytest

from fsdpbench.base.configuration.config import Config, Measurement
from fsdpbench.base.configuration.soak import LengthSettings, SoakSettings, StepShape
from fsdpbench.base.errors import UsageError
from fsdpbench.base.settings import Settings
from fsdpbench.engine.measuring.soak import ShapedBatches


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("lognormal:900", "write lognormal:900,0.8"),
        ("lognormal:900,0.8,1", "write lognormal:900,0.8"),
        ("lognormal:nan,0.8", "write lognormal:900,0.8"),
        ("lognormal:0,0.8", "the mean must be from 1"),
        ("lognormal:900,9", "sigma from 0 to 5"),
        ("lognormal:900,0.8,layout=ragged", "layout=ragged is none of padded, packed"),
        ("lognormal:900,0.8,bucket=16", "unknown 'bucket'"),
        ("lognormal:900,0.8,buckets=16,multiple=8", "not both"),
        ("lognormal:900,0.8,multiple=0", "multiple=0 must be from 1"),
        ("lognormal:900,0.8,seed=x", "seed=x"),
        ("buckets=16", "names no lengths"),
        ("there-is-no-such-file", "No such file"),
    ],
)
def test_what_says_no_lengths_is_refused_by_name(text: str, told: str) -> None:
    with pytest.raises(UsageError, match=r"^--seq-lengths") as refused:
        LengthSettings.parse(text)
    assert told in str(refused.value)


def test_a_file_names_the_line_that_is_no_length(tmp_path: Path) -> None:
    path = tmp_path / "lengths.txt"
    path.write_text("100\n\n200\n")
    lengths = LengthSettings.parse(f"{path},multiple=64")
    assert list(islice(lengths.draws("train"), 5)) == [100, 200, 100, 200, 100]
    for text, told in (("100\n-3\n", "line 2: '-3'"), ("1\ntwo\n", "line 2: 'two'"), ("\n", "0 lengths")):
        path.write_text(text)
        with pytest.raises(UsageError) as refused:
            LengthSettings.parse(str(path))
        assert told in str(refused.value)


def test_lognormal_lengths_have_the_mean_that_is_asked_for() -> None:
    lengths = LengthSettings.parse("lognormal:900,0.8,seed=3")
    drawn = list(islice(lengths.draws("train"), 20_000))
    assert mean(drawn) == pytest.approx(900, rel=0.03)
    assert drawn != list(islice(lengths.draws("eval"), 20_000))
    assert drawn[:50] == list(islice(LengthSettings.parse(lengths.to_text()).draws("train"), 50))


@pytest.mark.parametrize(
    ("words", "shape"),
    [
        ("", (3, 700)),
        (",least=800", (3, 800)),
        (",multiple=512", (3, 1024)),
        (",buckets=16", (3, 704)),
        (",layout=packed", (1, 900)),
        (",layout=packed,buckets=4", (1, 1024)),
    ],
)
def test_a_step_is_as_long_as_its_layout_makes_it(words: str, shape: tuple[int, int]) -> None:
    lengths = LengthSettings.parse(f"lognormal:9,0{words}")
    assert lengths.shape([100, 700, 100], 1024) == shape
    assert lengths.shape([5000, 1, 1], 1024)[1] == 1024  # cut off at the longest


@pytest.mark.parametrize("buckets", [1, 7, 16, 100])
def test_buckets_are_as_many_as_were_asked_for_and_hold_what_they_are_for(buckets: int) -> None:
    lengths = LengthSettings.parse(f"lognormal:9,0,buckets={buckets}")
    padded = {length: lengths.shape([length], 2048)[1] for length in range(1, 2049)}
    assert len(set(padded.values())) == buckets
    assert all(length <= longer <= 2048 for length, longer in padded.items())


def test_evaluation_comes_between_the_steps() -> None:
    soak = SoakSettings(5, LengthSettings.parse("lognormal:9,0.5"), eval_every=2, eval_steps=3)
    shapes = list(soak.schedule(4, 2, 64))
    assert [shape.evaluates for shape in shapes] == [0, 0, 1, 1, 1, 0, 0, 1, 1, 1, 0]
    assert {len(shape.microbatches) for shape in shapes if not shape.evaluates} == {2}
    assert msgspec.convert(dataclasses.asdict(soak), SoakSettings) == soak
    assert list(SoakSettings(2).schedule(4, 1, None)) == [StepShape(False, ((4, None),))] * 2


def test_a_file_of_an_earlier_version_is_read_without_its_replay() -> None:
    soak = SoakSettings(5, LengthSettings.parse("lognormal:9,0.5"), eval_every=2)
    config = Config(
        model="gpt-tiny", shape={}, system="single", device="sim", gpus=1, gpus_per_node=1,
        hardware="a100-80gb", settings=Settings.of(seq=64), measurement=Measurement.default_for("sim"),
        soak=soak,
    )  # fmt: skip
    for replay in (True, False):
        record = config.to_dict()
        record["soak"]["replay"] = replay
        assert Config.from_dict(record) == config


def test_a_model_without_sequences_has_no_lengths() -> None:
    soak = SoakSettings(5, LengthSettings.parse("lognormal:9,0.5"))
    measurement = Measurement.default_for("sim")
    with pytest.raises(UsageError, match="deepvit-tiny does not work on sequences"):
        Config(
            model="deepvit-tiny", shape={}, system="single", device="sim", gpus=1, gpus_per_node=1,
            hardware="a100-80gb", settings=Settings.of(), measurement=measurement, soak=soak,
        )  # fmt: skip


def test_every_microbatch_has_a_seed_of_its_own() -> None:
    asked: list[tuple[int, int | None, int]] = []

    def make(rows: int, tokens: int | None, seed: int):  # type: ignore[no-untyped-def]
        asked.append((rows, tokens, seed))
        yield ()

    batches = ShapedBatches(make, 10)
    for shape in (StepShape(False, ((2, 5), (2, 7))), StepShape(True, ((2, 5),))):
        batches.expect(shape)
        for _ in shape.microbatches:
            next(batches)
    assert asked == [(2, 5, 11), (2, 7, 12), (2, 5, 13)]
