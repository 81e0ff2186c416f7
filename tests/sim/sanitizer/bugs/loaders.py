"""Data loaders that copy the next batch beside the computation of this one."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from seeded import bug
from torch import nn


class Prefetcher:
    """The prefetcher that many training scripts carry along. ``waits`` and ``records``: what it must not
    leave out."""

    def __init__(self, batches: Iterator[torch.Tensor], *, waits: bool, records: bool) -> None:
        self.batches = batches
        self.stream = torch.cuda.Stream()
        self.waits, self.records = waits, records
        self.preload()

    def preload(self) -> None:
        batch = next(self.batches, None)
        self.batch = None
        if batch is None:
            return
        with torch.cuda.stream(self.stream):
            self.batch = batch.cuda(non_blocking=True)
            self.batch = self.batch.float().div_(255)

    def next(self) -> torch.Tensor | None:
        if self.waits:
            torch.cuda.current_stream().wait_stream(self.stream)
        batch = self.batch
        if batch is not None and self.records:
            batch.record_stream(torch.cuda.current_stream())
        self.preload()
        return batch


def images(count: int) -> Iterator[torch.Tensor]:
    for _ in range(count):
        yield torch.zeros(64, 3, 32, 32, dtype=torch.uint8).pin_memory()


def train(prefetcher: Prefetcher) -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(7200, 10))
    model.cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    while (batch := prefetcher.next()) is not None:
        model(batch).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        del batch


@bug("race", "wait_stream")
def prefetcher_that_does_not_wait(fixed: bool) -> None:
    prefetcher = Prefetcher(images(3), waits=fixed, records=True)  # first
    train(prefetcher)  # second


@bug("use_after_free", "record_stream")
def prefetcher_that_does_not_record(fixed: bool) -> None:
    prefetcher = Prefetcher(images(4), waits=True, records=fixed)
    train(prefetcher)  # first # second


@bug("race", "wait_stream")
def batch_in_fixed_device_buffers(fixed: bool) -> None:
    """One device buffer that is filled anew while the last batch is still computed with."""
    main, side = torch.cuda.current_stream(), torch.cuda.Stream()
    model, batch = nn.Linear(64, 64).cuda(), torch.empty(32, 64, device="cuda")
    side.wait_stream(main)
    for _ in range(3):
        rows = torch.zeros(32, 64).pin_memory()
        if fixed:
            side.wait_stream(main)
        with torch.cuda.stream(side):
            batch.copy_(rows, non_blocking=True)  # second
        main.wait_stream(side)
        model(batch).sum().backward()  # first


@bug("race", "wait_stream")
def label_copied_on_the_side_and_used_at_once(fixed: bool) -> None:
    main, side = torch.cuda.current_stream(), torch.cuda.Stream()
    logits = torch.randn(16, 10, device="cuda", requires_grad=True)
    labels = torch.zeros(16, dtype=torch.long).pin_memory()
    with torch.cuda.stream(side):
        target = labels.cuda(non_blocking=True)  # first
    target.record_stream(main)
    if fixed:
        main.wait_stream(side)
    nn.functional.cross_entropy(logits, target).backward()  # second


@bug("read_before_ready", "synchronize")
def collated_into_the_same_pinned_memory(fixed: bool) -> None:
    """`out=` of collate: the copy of the batch before may still read it."""
    batch = torch.empty(8, 128, pin_memory=True)
    for _ in range(2):
        samples = [torch.zeros(128) for _ in range(8)]
        torch.stack(samples, out=batch)  # second
        on_device = batch.to("cuda", non_blocking=True)  # first
        on_device.sum()
        if fixed:
            batch = torch.empty(8, 128, pin_memory=True)


@bug("read_before_ready", "synchronize")
def metrics_of_the_last_step_read_at_once(fixed: bool) -> None:
    """Two pinned slots, the right idea; but the slot just started is read."""
    slots = [torch.zeros(4, pin_memory=True) for _ in range(2)]
    events = [torch.cuda.Event() for _ in range(2)]
    for step in range(4):
        loss = torch.randn(4, device="cuda")
        slots[step % 2].copy_(loss, non_blocking=True)  # first
        events[step % 2].record()
        if step:
            other = (step + 1) % 2
            events[other].synchronize()
            float(slots[other if fixed else step % 2].mean())  # second
