"""Text from outside is shown on one bounded line, without what a terminal would obey."""

from __future__ import annotations

from fsdpbench.base.reading import LONGEST_LINE, all_on_one_line, one_line, printable


def test_control_characters_are_shown_as_escapes() -> None:
    assert printable("a\x1b[31m\nb\t\r\x00\x7f\x9b") == "a\\x1b[31m\\nb\\t\\r\\x00\\x7f\\x9b"


def test_line_separators_direction_and_halves_of_pairs_are_escaped() -> None:
    assert printable("a\u2028b\u202ec\ud800") == "a\\u2028b\\u202ec\\ud800"


def test_letters_of_any_script_stay() -> None:
    assert printable("Größe 数 🙂") == "Größe 数 🙂"


def test_long_text_keeps_its_beginning_and_end() -> None:
    shown = one_line("name: " + "x" * 1_000_000 + " the way out")
    assert len(shown) <= LONGEST_LINE
    assert shown.startswith("name: x")
    assert shown.endswith("x the way out")
    assert "characters" in shown


def test_every_text_of_a_tree_is_shown_on_one_line() -> None:
    tree = {"a\n": ["b\x1b", {"c": 1.5, "d": None}], "e": True}
    assert all_on_one_line(tree) == {"a\\n": ["b\\x1b", {"c": 1.5, "d": None}], "e": True}


def test_escapes_do_not_make_it_longer_than_asked() -> None:
    assert len(one_line("\n" * 999)) <= LONGEST_LINE
    assert len(one_line("\x1b" * 5000, 100)) <= 100
