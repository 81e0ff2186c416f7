"""Why a configuration runs out of memory, and the smallest changes that fit."""

from fsdpbench.answers.explain.advice import Advice, advise
from fsdpbench.answers.explain.changes import Change
from fsdpbench.sweep.trials import Trial

__all__ = ["Advice", "Change", "Trial", "advise"]
