"""What the vision families share: a workload of images with a cross entropy over classes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from fsdpbench.workloads.base import Batch, SampleWorkload
from fsdpbench.workloads.inputs.images import image_batches


class VisionWorkload(SampleWorkload):
    """A model of images; its field counts images, not tokens."""

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
        self.resolve_seq(seq)
        return image_batches(
            image=self.shape["image"],
            classes=self.shape["classes"],
            batch=batch,
            seed=seed,
            rank=rank,
            device=device,
            data=data,
            world_size=world_size,
        )


def class_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean cross entropy of `logits`, [batch, classes], against `labels`, int64 of [batch]; in float32."""
    return F.cross_entropy(logits.float(), labels)
