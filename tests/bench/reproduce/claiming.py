"""Claims of each kind, in short."""

from __future__ import annotations

from fsdpbench.lab.reproduce.figure import Claim, Kind, Place

At = tuple[str, Place]


def ratio(words: str, over: At, under: At, taken: str = "") -> Claim:
    return Claim(Kind.RATIO, words, (over, under), taken)


def level(words: str, place: At) -> Claim:
    return Claim(Kind.LEVEL, words, (place,))


def ran_out(words: str, *places: At) -> Claim:
    return Claim(Kind.RAN_OUT, words, places)


def retries(words: str, place: At) -> Claim:
    return Claim(Kind.RETRIES, words, (place,))
