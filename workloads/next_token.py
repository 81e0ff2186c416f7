"""Decoder-only language models: each token is predicted from those before it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

from fsdpbench.workloads.base import Batch, TokenWorkload
from fsdpbench.workloads.inputs.data import token_batches


class NextTokenWorkload(TokenWorkload):
    """A model of tokens whose targets are its inputs one step on; the shape names `vocab` and `max_seq`."""

    @property
    def is_causal(self) -> bool:
        return True

    @property
    def default_seq(self) -> int:
        seq: int = self.shape["max_seq"]
        return seq

    def batches(
        self,
        batch: int,
        seq: int | None,
        seed: int,
        rank: int,
        device: torch.device | str,
        data: Path | None = None,
        *,
        world_size: int | None = None,
    ) -> Iterator[Batch]:
        return token_batches(
            vocab=self.shape["vocab"],
            batch=batch,
            seq=self.resolve_seq(seq),
            seed=seed,
            rank=rank,
            device=device,
            data=data,
            world_size=world_size,
        )
