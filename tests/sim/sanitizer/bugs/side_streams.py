"""Compute on side streams: missing waits, events at the wrong place, memory that overlaps."""

from __future__ import annotations

import torch
from seeded import bug
from torch import nn


@bug("race", "wait_stream")
def compute_before_the_input_is_there(fixed: bool) -> None:
    side = torch.cuda.Stream()
    x = torch.randn(64, 64, device="cuda")
    x = x @ x  # first
    if fixed:
        side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        y = torch.relu(x)  # second
    torch.cuda.current_stream().wait_stream(side)
    y.sum()


@bug("race", "wait_stream")
def result_used_before_it_is_there(fixed: bool) -> None:
    main, side = torch.cuda.current_stream(), torch.cuda.Stream()
    x = torch.randn(64, 64, device="cuda")
    out = torch.empty(64, 64, device="cuda")
    side.wait_stream(main)
    with torch.cuda.stream(side):
        torch.mm(x, x, out=out)  # first
    if fixed:
        main.wait_stream(side)
    loss = out.sum()  # second
    loss.mul_(2)
    main.wait_stream(side)


@bug("race", "wait_stream")
def the_wrong_stream_waits(fixed: bool) -> None:
    main, side = torch.cuda.current_stream(), torch.cuda.Stream()
    gate, body = nn.Linear(32, 32).cuda(), nn.Linear(32, 32).cuda()
    x = torch.randn(8, 32, device="cuda")  # first
    if fixed:
        side.wait_stream(main)
    else:
        main.wait_stream(side)
    with torch.no_grad(), torch.cuda.stream(side):
        left = gate(x).sigmoid()  # second
    right = body(x)
    main.wait_stream(side)
    (left * right).sum()


@bug("race", "an event that is recorded after the first access")
def event_recorded_too_early(fixed: bool) -> None:
    side, ready = torch.cuda.Stream(), torch.cuda.Event()
    table = torch.zeros(1000, 16, device="cuda")
    if not fixed:
        ready.record()
    table.normal_()  # first
    if fixed:
        ready.record()
    with torch.cuda.stream(side):
        ready.wait()
        table.mean(0)  # second


@bug("race", "an event that is recorded after the first access")
def event_recorded_on_the_wrong_stream(fixed: bool) -> None:
    main, side, done = torch.cuda.current_stream(), torch.cuda.Stream(), torch.cuda.Event()
    weights = torch.randn(128, 128, device="cuda")
    side.wait_stream(main)
    with torch.cuda.stream(side):
        weights.mul_(0.9)  # first
    done.record(side if fixed else None)
    main.wait_event(done)
    weights.norm()  # second


@bug("race", "wait")
def event_waited_for_on_the_wrong_stream(fixed: bool) -> None:
    main, side, done = torch.cuda.current_stream(), torch.cuda.Stream(), torch.cuda.Event()
    weights = torch.randn(128, 128, device="cuda")
    side.wait_stream(main)
    with torch.cuda.stream(side):
        weights.mul_(0.9)  # first
        done.record()
        if not fixed:
            done.wait()
    if fixed:
        done.wait()
    weights.norm()  # second


@bug("race", "wait_stream")
def one_event_recorded_twice(fixed: bool) -> None:
    main, left, right = torch.cuda.current_stream(), torch.cuda.Stream(), torch.cuda.Stream()
    done = torch.cuda.Event()
    other = torch.cuda.Event() if fixed else done
    a, b = torch.zeros(2, 256, device="cuda").unbind()
    left.wait_stream(main)
    right.wait_stream(main)
    with torch.cuda.stream(left):
        a.add_(1)  # first
        done.record()
    with torch.cuda.stream(right):
        b.add_(2)
        other.record()
    main.wait_event(done)
    main.wait_event(other)
    torch.dot(a, b)  # second


@bug("race", "wait")
def event_waited_for_before_it_is_recorded(fixed: bool) -> None:
    main, side, done = torch.cuda.current_stream(), torch.cuda.Stream(), torch.cuda.Event()
    state = torch.zeros(256, device="cuda")
    side.wait_stream(main)
    if not fixed:
        main.wait_event(done)  # an event that was never recorded has passed
    with torch.cuda.stream(side):
        state.add_(1)  # first
        done.record()
    if fixed:
        main.wait_event(done)
    state.clone()  # second


@bug("race", "wait_stream")
def columns_that_overlap(fixed: bool) -> None:
    main, side = torch.cuda.current_stream(), torch.cuda.Stream()
    qkv = torch.randn(64, 96, device="cuda")
    side.wait_stream(main)
    query = qkv[:, :32] if fixed else qkv[:, :33]
    with torch.cuda.stream(side):
        query.mul_(0.125)  # first
    qkv[:, 32:64].neg_()  # second
    main.wait_stream(side)
    qkv.sum()


@bug("race", "wait_stream")
def statistics_of_one_norm_on_two_streams(fixed: bool) -> None:
    main, side = torch.cuda.current_stream(), torch.cuda.Stream()
    norm = nn.BatchNorm1d(32).cuda()
    other = nn.BatchNorm1d(32).cuda() if fixed else norm
    real, fake = torch.randn(8, 32, device="cuda"), torch.randn(8, 32, device="cuda")
    side.wait_stream(main)
    with torch.no_grad():
        with torch.cuda.stream(side):
            norm(real)  # first
        other(fake)  # second
    main.wait_stream(side)


@bug("race", "wait_stream")
def two_streams_add_to_one_total(fixed: bool) -> None:
    main, side = torch.cuda.current_stream(), torch.cuda.Stream()
    total, other = torch.zeros((), device="cuda"), torch.zeros((), device="cuda")
    x, y = torch.randn(2, 1000, device="cuda").unbind()
    side.wait_stream(main)
    with torch.cuda.stream(side):
        (other if fixed else total).add_(x.sum())  # first
    total.add_(y.sum())  # second
    main.wait_stream(side)
    total.add_(other)


@bug("race", "wait_stream")
def shared_workspace_of_two_heads(fixed: bool) -> None:
    main = torch.cuda.current_stream()
    streams = [torch.cuda.Stream() for _ in range(2)]
    scratch = torch.empty(2, 64, 64, device="cuda")
    x = torch.randn(64, 64, device="cuda")
    outs = []
    for index, stream in enumerate(streams):
        stream.wait_stream(main)
        with torch.cuda.stream(stream):
            mine = scratch[index if fixed else 0]
            torch.mm(x, x, out=mine)  # first # second
            outs.append(mine.softmax(-1))
    for stream in streams:
        main.wait_stream(stream)
    torch.stack(outs)


@bug("race", "wait_stream")
def many_columns_then_the_first(fixed: bool) -> None:
    """What was done to the first column must not be forgotten over those that follow."""
    main, side = torch.cuda.current_stream(), torch.cuda.Stream()
    table = torch.randn(64, 200, device="cuda")
    side.wait_stream(main)
    with torch.cuda.stream(side):
        for column in range(200):
            table[:, column].mul_(2)  # first
    if fixed:
        main.wait_stream(side)
    table[:, 0].sum()  # second
    main.wait_stream(side)


@bug("race", "wait_stream")
def window_by_strides(fixed: bool) -> None:
    """Rows of eight in steps of ten from the third element on, and one element of another type."""
    main, side = torch.cuda.current_stream(), torch.cuda.Stream()
    flat = torch.randn(1024, device="cuda")
    windows = flat.as_strided((100, 8), (10, 1), 3)
    side.wait_stream(main)
    with torch.cuda.stream(side):
        windows.zero_()  # first
    place = 12 if fixed else 13
    flat.view(torch.int32)[place : place + 1].add_(1)  # second
    main.wait_stream(side)


@bug("race", "wait_stream")
def imaginary_part(fixed: bool) -> None:
    main, side = torch.cuda.current_stream(), torch.cuda.Stream()
    spectrum = torch.zeros(64, dtype=torch.complex64, device="cuda")
    side.wait_stream(main)
    with torch.cuda.stream(side):
        torch.view_as_real(spectrum)[:, 1].fill_(1)  # first
    (spectrum.real if fixed else spectrum.imag).add_(1)  # second
    main.wait_stream(side)
