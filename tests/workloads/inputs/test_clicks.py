"""Clicks, synthetic or from a log, dealt out to the ranks."""

import math
from itertools import islice

import pytest
import torch

from fsdpbench.workloads import DataError, get_workload


def take(count, *args, **kwargs):
    return list(islice(get_workload("dhen-tiny").batches(*args, **kwargs), count))


def test_synthetic_clicks_have_shape_range_and_labels():
    (numbers, ids, labels), (_, later, _) = take(2, 50, None, 0, 0, "cpu")
    assert numbers.shape == (50, 13)
    assert ids.shape == (50, 26)
    assert ids.dtype == torch.int64
    assert 0 <= ids.min() < 50 < 950 < ids.max() < 1000
    assert set(labels.tolist()) == {0.0, 1.0}
    assert not torch.equal(ids, later)
    assert torch.equal(ids, take(1, 50, None, 0, 0, "cpu")[0][1])


def test_a_line_is_read_field_by_field(tmp_path):
    log = tmp_path / "log.tsv"
    log.write_text("\t".join(["1", "0", "", "-7", *["3"] * 10, *["same"] * 25, "other"]) + "\n")
    ((numbers, ids, labels),) = take(1, 1, None, 0, 0, "cpu", log)
    assert labels.tolist() == [1.0]
    expected = [0, 0, -math.log(8), *[math.log(4)] * 10]
    assert numbers[0].tolist() == pytest.approx(expected)
    assert len(set(ids[0, :25].tolist())) == 1
    assert ids[0, 25] != ids[0, 0]


def test_ranks_share_an_epoch_without_overlap(click_log):
    seen = [
        {tuple(row) for row in ids.tolist()}
        for rank in range(2)
        for _, ids, _ in take(1, 120, None, 3, rank, "cpu", click_log, world_size=2)
    ]
    assert [len(rows) for rows in seen] == [120, 120]
    assert not seen[0] & seen[1]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "has no lines"),
        ("1\t2\t3\n", "sample 0 of .* has 3 fields, the model takes 40: a label, 13 numbers and 26"),
        ("\t".join(["yes", *["1"] * 39]) + "\n", "sample 0 of .*could not convert string to float"),
    ],
)
def test_what_is_no_click_log_is_refused(tmp_path, content, message):
    log = tmp_path / "log.tsv"
    log.write_text(content)
    with pytest.raises(DataError, match=message):
        take(1, 1, None, 0, 0, "cpu", log)


def test_a_missing_log_is_named(tmp_path):
    with pytest.raises(DataError, match=r"cannot read the data file .*none\.tsv: No such file"):
        take(1, 1, None, 0, 0, "cpu", tmp_path / "none.tsv")
