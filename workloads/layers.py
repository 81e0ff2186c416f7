"""Layers whose `reset_parameters` draws what the models want, be it long after a build on `meta`."""

from __future__ import annotations

from torch import nn

# GPT-2's standard deviation of weights (Radford et al. 2019, and its published code).
WEIGHT_STD = 0.02


class Projection(nn.Linear):
    """A linear layer with weights from N(0, std) and zero bias."""

    def __init__(self, in_features: int, out_features: int, bias: bool, std: float = WEIGHT_STD) -> None:
        self.std = std  # before super().__init__, which calls reset_parameters
        super().__init__(in_features, out_features, bias)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.std)
        if self.bias is not None:
            nn.init.zeros_(self.bias)


class Lookup(nn.Embedding):
    """An embedding with weights from N(0, std)."""

    def __init__(self, entries: int, features: int, std: float = WEIGHT_STD) -> None:
        self.std = std
        super().__init__(entries, features)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.std)
