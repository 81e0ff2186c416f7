"""Files of rank 0 that other ranks find after the same collective."""

from __future__ import annotations

from pathlib import Path

from fsdpbench.script.files.overlay import Overlay
from fsdpbench.script.rank_check.recording import Arrivals


def layers(tmp_path: Path, *names: str) -> tuple[Path, Overlay]:
    """Rank 0's layer with these files in it, and another rank's."""
    root = tmp_path / "rank0"
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    return root, Overlay(tmp_path / "rank1", tmp_path)


def test_a_file_is_there_after_the_collective_that_followed_it(tmp_path: Path) -> None:
    root, overlay = layers(tmp_path, "home/first.pt", "home/second.pt")
    arrivals = Arrivals(overlay, root, {"/home/first.pt": (2, 5), "/home/second.pt": (3, 9)})
    seen = []
    for count in ((2, 2), (2, 5), (3, 5), (3, 10)):
        arrivals.arrive(count)
        seen.append([overlay.has(f"/home/{name}.pt") for name in ("first", "second")])
    assert seen == [[False, False], [False, False], [True, False], [True, True]]
    assert Path(overlay.visible("/home/first.pt")).read_text() == "home/first.pt"


def test_what_came_with_its_folder_arrives_with_it(tmp_path: Path) -> None:
    root, overlay = layers(tmp_path, "home/step/model.pt", "home/step/latest", "home/.gone.old")
    arrivals = Arrivals(overlay, root, {"/home/step/model.pt": (1, 1)})
    arrivals.arrive((2, 2))
    assert not overlay.has("/home/.gone.old")
    assert sorted(overlay.names("/home/step")) == ["latest", "model.pt"]


def test_what_a_rank_writes_leaves_rank_0_s_file_as_it_is(tmp_path: Path) -> None:
    root, overlay = layers(tmp_path, "home/model.pt")
    Arrivals(overlay, root, {"/home/model.pt": (0, 0)}).arrive((1, 1))
    Path(overlay.place("/home/model.pt")).write_text("own")
    assert (root / "home/model.pt").read_text() == "home/model.pt"
    assert Path(overlay.visible("/home/model.pt")).read_text() == "own"


def test_a_folder_that_rank_0_made_arrives_too(tmp_path: Path) -> None:
    root, overlay = layers(tmp_path)
    (root / "home" / "new").mkdir(parents=True)
    arrivals = Arrivals(overlay, root, {"/home/new": (1, 1)})
    arrivals.arrive((1, 1))
    assert not overlay.has("/home/new")
    arrivals.arrive((2, 2))
    assert overlay.has("/home/new")
