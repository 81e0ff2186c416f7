"""Nanoseconds to seconds."""

from __future__ import annotations


def seconds(ns: int) -> float:
    """The only place where a time becomes a float."""
    return ns / 1_000_000_000
