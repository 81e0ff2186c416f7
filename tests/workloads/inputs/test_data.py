"""Input data, synthetic or from a file: the same for the same arguments, apart between ranks."""

from itertools import islice

import pytest
import torch

from fsdpbench.workloads import DataError, WorkloadError, get_workload


@pytest.fixture
def workload():
    return get_workload("gpt-tiny")


@pytest.fixture
def text(tmp_path):
    """201 bytes, each window of 10 recognisable by its first byte."""
    path = tmp_path / "text.bin"
    path.write_bytes(bytes(range(201)))
    return path


def take(count, *args, **kwargs):
    return list(islice(get_workload("gpt-tiny").batches(*args, **kwargs), count))


def test_synthetic_batches_have_shape_range_and_shifted_targets(workload):
    for inputs, targets in take(3, 4, 32, 0, 0, "cpu"):
        assert inputs.shape == targets.shape == (4, 32)
        assert inputs.dtype == targets.dtype == torch.int64
        assert torch.equal(inputs[:, 1:], targets[:, :-1])
        assert 0 <= inputs.min() <= inputs.max() < workload.shape["vocab"]


def test_synthetic_batches_depend_on_seed_rank_and_step_only():
    first = take(2, 2, 16, 5, 1, "cpu")
    torch.manual_seed(99)
    again = take(2, 2, 16, 5, 1, "cpu")
    assert torch.equal(first[0][0], again[0][0])
    assert torch.equal(first[1][0], again[1][0])
    assert not torch.equal(first[0][0], first[1][0])
    assert not torch.equal(first[0][0], take(1, 2, 16, 5, 0, "cpu")[0][0])
    assert not torch.equal(first[0][0], take(1, 2, 16, 1, 5, "cpu")[0][0])


def test_batches_go_to_the_device_even_under_a_default_device():
    with torch.device("meta"):
        inputs, targets = take(1, 2, 8, 0, 0, "cpu")[0]
    assert inputs.device.type == targets.device.type == "cpu"
    assert take(1, 2, 8, 0, 0, "meta")[0][0].device.type == "meta"


def test_file_batches_are_its_bytes_shifted_by_one(text):
    for inputs, targets in take(6, 3, 10, 0, 0, "cpu", text):
        assert torch.equal(targets, inputs + 1)
        assert (inputs[:, 0] % 10 == 0).all()


def test_ranks_share_an_epoch_without_overlap(text):
    # 20 windows over 3 ranks: 6 each, two sit out.
    seen = [
        [int(row[0]) for inputs, _ in take(3, 2, 10, 4, rank, "cpu", text, world_size=3) for row in inputs]
        for rank in range(3)
    ]
    assert [len(set(rows)) for rows in seen] == [6, 6, 6]
    assert len(set().union(*seen)) == 18


def test_file_goes_on_into_further_epochs_in_another_order(text):
    rows = [int(inputs[0, 0]) for inputs, _ in take(40, 1, 10, 0, 0, "cpu", text)]
    assert sorted(rows[:20]) == sorted(rows[20:]) == list(range(0, 200, 10))
    assert rows[:20] != rows[20:]


def test_missing_file_is_named(tmp_path):
    with pytest.raises(DataError, match=r"cannot read the data file .*nothing\.txt: No such file"):
        take(1, 1, 8, 0, 0, "cpu", tmp_path / "nothing.txt")


def test_directory_is_refused(tmp_path):
    with pytest.raises(DataError, match="cannot read the data file"):
        take(1, 1, 8, 0, 0, "cpu", tmp_path)


@pytest.mark.parametrize("content", [b"", b"short"])
def test_short_file_is_refused_with_its_size(tmp_path, content):
    path = tmp_path / "short.txt"
    path.write_bytes(content)
    with pytest.raises(DataError, match=f"has {len(content)} bytes: too few for one sequence of 8 tokens"):
        take(1, 1, 8, 0, 0, "cpu", path)


def test_vocabulary_too_small_for_bytes_is_refused(text):
    small = get_workload("gpt-tiny", shape={"vocab": 100})
    with pytest.raises(DataError, match="vocab of at least 256"):
        small.batches(1, 8, 0, 0, "cpu", text)


def test_errors_come_at_the_call_not_at_the_first_batch(workload, text):
    with pytest.raises(WorkloadError, match="batch is 0"):
        workload.batches(0, 8, 0, 0, "cpu")
    with pytest.raises(WorkloadError, match="world_size is missing"):
        workload.batches(1, 8, 0, 2, "cpu", text)
    with pytest.raises(WorkloadError, match="rank is 2: it must be less than world_size, 2"):
        workload.batches(1, 8, 0, 2, "cpu", text, world_size=2)
