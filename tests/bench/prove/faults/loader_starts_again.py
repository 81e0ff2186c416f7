"""The checkpoint does not say at which step it was: the data starts again."""

from common import FAULT
from saving import train

train(
    lambda states, step: states | ({} if FAULT else {"step": step}),
    lambda loaded: 0 if FAULT else int(loaded["step"]),
)
