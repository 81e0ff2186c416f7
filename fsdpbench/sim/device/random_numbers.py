"""Functions of `torch.sim` that set the generator of random numbers, of which there are none."""

from __future__ import annotations

from typing import Any

import torch


class RandomNumbers:
    """As `torch.cuda`'s."""

    _seed = 0

    def manual_seed(self, seed: int) -> None:
        """Remember the seed; there are no numbers to make of it."""
        self._seed = int(seed)

    manual_seed_all = manual_seed

    def seed(self) -> None:
        """Same seed as before: simulations repeat."""

    seed_all = seed

    def initial_seed(self) -> int:
        """The seed that was set."""
        return self._seed

    def get_rng_state(self, device: Any = None) -> torch.Tensor:
        """A state as long as CUDA's (seed and offset), on the CPU."""
        return torch.tensor([self._seed & 0x7FFFFFFFFFFFFFFF, 0], dtype=torch.int64).view(torch.uint8)

    def set_rng_state(self, new_state: torch.Tensor, device: Any = None) -> None:
        """Take the seed out of a state."""
        self._seed = int(new_state.view(torch.int64)[0])

    def get_rng_state_all(self) -> list[torch.Tensor]:
        """The state of the one device."""
        return [self.get_rng_state()]

    def set_rng_state_all(self, new_states: list[torch.Tensor]) -> None:
        """Set the state of the one device."""
        self.set_rng_state(new_states[0])
