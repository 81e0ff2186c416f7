"""Images, synthetic or from a folder, dealt out to the ranks."""

import sys
from itertools import islice

import pytest
import torch

from fsdpbench.workloads import DataError, get_workload
from fsdpbench.workloads.inputs import read_image


def take(count, *args, name="regnet-tiny", **kwargs):
    return list(islice(get_workload(name).batches(*args, **kwargs), count))


@pytest.mark.parametrize("name", ["regnet-tiny", "deepvit-tiny"])
def test_synthetic_images_have_shape_range_and_labels(name):
    (images, labels), (later, _) = take(2, 5, None, 0, 0, "cpu", name=name)
    assert images.shape == (5, 3, 32, 32)
    assert images.dtype == torch.float32
    assert -1 <= images.min() < -0.9 < 0.9 < images.max() <= 1
    assert labels.dtype == torch.int64
    assert 0 <= labels.min() <= labels.max() < 10
    assert not torch.equal(images, later)
    assert torch.equal(images, take(1, 5, None, 0, 0, "cpu", name=name)[0][0])
    assert not torch.equal(images, take(1, 5, None, 0, 1, "cpu", name=name)[0][0])


def test_a_folder_is_read_by_class(image_folder):
    # Labels are the classes in the order of their names; each has a colour of its own.
    for images, labels in take(6, 6, None, 0, 0, "cpu", image_folder):
        assert images.shape == (6, 3, 32, 32)
        strongest = images.mean(dim=(2, 3)).argmax(dim=1)
        assert torch.equal(strongest, 2 - labels)


def test_ranks_share_an_epoch_without_overlap(image_folder):
    # 36 images over 5 ranks: 7 each, one sits out.
    seen = [
        {image.numpy().tobytes() for image in images}
        for rank in range(5)
        for images, _ in take(1, 7, None, 3, rank, "cpu", image_folder, world_size=5)
    ]
    assert [len(images) for images in seen] == [7] * 5
    assert len(set().union(*seen)) == 35


def test_the_middle_of_an_image_is_cut_out(tmp_path):
    from PIL import Image

    wide = Image.new("RGB", (90, 30), (255, 0, 0))
    wide.paste((0, 255, 0), (30, 0, 60, 30))
    wide.save(tmp_path / "wide.png")
    pixels = read_image(tmp_path / "wide.png", 8)
    assert pixels.shape == (3, 8, 8)
    middle = torch.tensor([-1.0, 1.0, -1.0])[:, None, None].expand(3, 8, 8)
    # At the edges, scaling mixes in what lies beyond.
    torch.testing.assert_close(pixels[..., 1:-1], middle[..., 1:-1], rtol=0, atol=1e-6)


def test_reading_draws_nothing_from_the_models_random_stream(image_folder):
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    take(2, 4, None, 0, 0, "cpu", image_folder)
    assert torch.equal(torch.rand(3), expected)


def test_what_is_no_image_is_named(image_folder):
    for path in image_folder.rglob("*.png"):
        path.write_bytes(b"nothing")
    with pytest.raises(DataError, match=r"cannot read the image .*\.png"):
        take(1, 2, None, 0, 0, "cpu", image_folder)


def test_what_is_no_folder_of_classes_is_refused(tmp_path, image_folder):
    text = tmp_path / "text.txt"
    text.write_text("words")
    for path, message in (
        (text, "it must be a folder with one subfolder a class"),
        (tmp_path / "none", "it must be a folder"),
        (image_folder / "red", "holds no images"),
    ):
        with pytest.raises(DataError, match=message):
            take(1, 2, None, 0, 0, "cpu", path)
    with pytest.raises(DataError, match="has 36 samples: too few for 40 ranks"):
        take(1, 2, None, 0, 0, "cpu", image_folder, world_size=40)


def test_more_classes_than_the_model_has_are_refused(image_folder):
    workload = get_workload("regnet-tiny", shape={"classes": 2})
    with pytest.raises(DataError, match="has 3 classes, the model 2: give --shape classes=3"):
        workload.batches(2, None, 0, 0, "cpu", image_folder)


def test_without_pillow_the_way_out_is_told(image_folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(DataError, match=r"pip install 'fsdpbench\[vision\]'"):
        take(1, 2, None, 0, 0, "cpu", image_folder)
    assert take(1, 2, None, 0, 0, "cpu")[0][0].shape == (2, 3, 32, 32)
