"""JSON and TOML that the project writes, for every string, are read again by strict readers."""

from __future__ import annotations

import enum
import json
import tomllib

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdpbench.base.files.documents import converted, to_json, to_toml

ANY_TEXT = st.text(st.characters(codec=None)) | st.sampled_from(
    ["\udcff.py", "\\ud800", "\\\ud800", "\ud83d\ude00", "\ud800\ud800\udc00", "\U0001f600\udcff"]
)


class Colour(enum.Enum):
    RED = "red"


@given(ANY_TEXT)
def test_every_string_is_read_by_strict_readers(text: str) -> None:
    seen = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    for content in ({"key": text}, {text: "key"}):
        read = msgspec.json.decode(to_json(content))
        assert read == json.loads(to_json(content))
        if seen == text:
            assert read == content
    assert tomllib.loads(to_toml({"key": text}))["key"] == text.encode("utf-8", "backslashreplace").decode()


@pytest.mark.parametrize("kind", [int, float, bool, Colour, dict[str, int], list[int], int | None])
def test_half_a_pair_where_a_number_belongs_is_a_wrong_value(kind: type) -> None:
    holder = msgspec.defstruct("Holder", [("field", kind)])
    for content in ({"field": "\ud800"}, {"field": 1, "\ud800": 2}):
        if content.get("\ud800") and kind is not int:
            continue
        with pytest.raises(msgspec.ValidationError, match=r"ud800"):
            converted(content, holder)
