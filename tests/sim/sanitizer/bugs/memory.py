"""Memory that is freed, handed out again or known by several names while another stream uses it."""

from __future__ import annotations

import torch
from seeded import bug


@bug("use_after_free", "record_stream")
def freed_before_the_side_stream_is_done(fixed: bool) -> None:
    main, side = torch.cuda.current_stream(), torch.cuda.Stream()
    x = torch.randn(512, 512, device="cuda")
    total = torch.zeros((), device="cuda")
    side.wait_stream(main)
    with torch.cuda.stream(side):
        total.add_(x.sum())  # first
    if fixed:
        x.record_stream(side)
    del x
    torch.zeros(512, 512, device="cuda")  # second
    main.wait_stream(side)


@bug("use_after_free", "record_stream")
def recorded_for_the_wrong_stream(fixed: bool) -> None:
    main, side = torch.cuda.current_stream(), torch.cuda.Stream()
    x = torch.randn(512, 512, device="cuda")
    total = torch.zeros((), device="cuda")
    side.wait_stream(main)
    with torch.cuda.stream(side):
        total.add_(x.sum())  # first
    x.record_stream(side if fixed else main)
    del x
    torch.zeros(512, 512, device="cuda")  # second
    main.wait_stream(side)


@bug("use_after_free", "record_stream")
def made_on_the_side_stream_read_on_the_main_one(fixed: bool) -> None:
    main, side = torch.cuda.current_stream(), torch.cuda.Stream()

    def load() -> torch.Tensor:
        with torch.cuda.stream(side):
            batch = torch.randn(512, 512, device="cuda")  # second
        main.wait_stream(side)
        return batch

    for _ in range(2):
        batch = load()
        if fixed:
            batch.record_stream(main)
        batch.square().sum()  # first
        del batch


@bug("use_after_free", "record_stream", allocator="expandable_segments:True")
def unmapped_and_mapped_again(fixed: bool) -> None:
    main, side = torch.cuda.current_stream(), torch.cuda.Stream()
    x = torch.randn(4 << 20, device="cuda")
    total = torch.zeros((), device="cuda")
    side.wait_stream(main)
    with torch.cuda.stream(side):
        total.add_(x.sum())  # first
    if fixed:
        x.record_stream(side)
    del x
    torch.cuda.empty_cache()
    torch.zeros(5 << 20, device="cuda")  # second
    main.wait_stream(side)


@bug("use_after_free", "record_stream")
def storage_resized_to_nothing(fixed: bool) -> None:
    main, side = torch.cuda.current_stream(), torch.cuda.Stream()
    shard, full = torch.randn(1 << 16, device="cuda"), torch.randn(1 << 20, device="cuda")
    side.wait_stream(main)
    with torch.cuda.stream(side):
        shard.copy_(full[: 1 << 16])  # first
    if fixed:
        main.wait_stream(side)
    full.untyped_storage().resize_(0)
    torch.zeros(1 << 20, device="cuda")  # second
    main.wait_stream(side)


@bug("race", "wait_stream")
def two_names_by_set(fixed: bool) -> None:
    main, side = torch.cuda.current_stream(), torch.cuda.Stream()
    flat = torch.zeros(1024, device="cuda")
    weight = torch.empty(0, device="cuda")
    weight.set_(flat.untyped_storage(), 256, (16, 16))
    side.wait_stream(main)
    with torch.cuda.stream(side):
        flat.mul_(0.9)  # first
    if fixed:
        main.wait_stream(side)
    weight.sum()  # second


@bug("race", "wait_stream")
def two_names_by_dlpack(fixed: bool) -> None:
    main, side = torch.cuda.current_stream(), torch.cuda.Stream()
    ours = torch.zeros(1024, device="cuda")
    theirs = torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(ours))
    side.wait_stream(main)
    with torch.cuda.stream(side):
        theirs[512:].fill_(1)  # first
    if fixed:
        main.wait_stream(side)
    ours[700:800].sum()  # second


@bug("use_after_free", "record_stream")
def data_replaced_while_it_is_averaged(fixed: bool) -> None:
    main, side = torch.cuda.current_stream(), torch.cuda.Stream()
    weight = torch.nn.Parameter(torch.randn(512, 512, device="cuda"))
    average = torch.zeros(512, 512, device="cuda")
    side.wait_stream(main)
    with torch.no_grad(), torch.cuda.stream(side):
        average.lerp_(weight, 0.1)  # first
        if fixed:
            weight.data.record_stream(side)
    weight.data = torch.empty(0, device="cuda")
    torch.zeros(512, 512, device="cuda")  # second
    main.wait_stream(side)


@bug("use_after_free", "record_stream")
def part_of_a_split_block(fixed: bool) -> None:
    main, side = torch.cuda.current_stream(), torch.cuda.Stream()
    total = torch.zeros((), device="cuda")
    pieces = torch.randn(8 << 20, device="cuda").chunk(4)
    side.wait_stream(main)
    with torch.cuda.stream(side):
        total.add_(pieces[3].sum())  # first
    if fixed:
        pieces[3].record_stream(side)
    del pieces
    smaller = [torch.zeros(2 << 20, device="cuda") for _ in range(4)]  # second
    main.wait_stream(side)
    smaller.clear()


@bug("race", "wait_stream")
def storage_copied_as_a_whole(fixed: bool) -> None:
    main, side = torch.cuda.current_stream(), torch.cuda.Stream()
    source, target = torch.randn(1024, device="cuda"), torch.randn(1024, device="cuda")
    side.wait_stream(main)
    with torch.cuda.stream(side):
        source.mul_(2)  # first
    if fixed:
        main.wait_stream(side)
    target.untyped_storage().copy_(source.untyped_storage())  # second
    main.wait_stream(side)


@bug("use_after_free", "record_stream")
def optimizer_state_dropped_while_it_steps(fixed: bool) -> None:
    main, side = torch.cuda.current_stream(), torch.cuda.Stream()
    weight = torch.nn.Parameter(torch.randn(1024, 1024, device="cuda"))
    weight.grad = torch.randn_like(weight)
    optimizer = torch.optim.AdamW([weight], foreach=False)
    optimizer.step()
    side.wait_stream(main)
    with torch.cuda.stream(side):
        optimizer.step()  # first
    if fixed:
        main.wait_stream(side)
    optimizer.state.clear()
    for _ in range(2):
        torch.zeros_like(weight)  # second
    main.wait_stream(side)
