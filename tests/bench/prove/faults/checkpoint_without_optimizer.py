"""The checkpoint holds the weights only: the optimizer begins again."""

from common import FAULT
from saving import train

kept = ("model",) if FAULT else ("model", "optimizer")
train(
    lambda states, step: {name: states[name] for name in kept} | {"step": step},
    lambda loaded: int(loaded["step"]),
)
