"""Explain why a configuration runs out of memory, and find the smallest changes that fit."""

from fsdpbench.answers.explain.advice import Advice, advise, grows
