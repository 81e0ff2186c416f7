"""Training that saves after step 2 and continues from what it finds; the programs beside it save and load."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from common import DEVICE, Net, loss_of, sharded, start
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

FOLDER = "checkpoint-of-faults"


States = dict[str, Any]


def train(content: Callable[[States, int], States], first: Callable[[States], int]) -> None:
    """Train. `content(states, step)`: what is saved and loaded of the states; `first(loaded)`: the step to
    continue with."""
    rank, _ = start()
    model = sharded(Net().to(DEVICE))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    begin = 0
    if os.path.exists(FOLDER):
        weights, states = get_state_dict(model, optimizer)
        loaded = content({"model": weights, "optimizer": states}, 0)
        dcp.load(loaded, checkpoint_id=FOLDER)
        if "optimizer" in loaded:
            both = {"model_state_dict": loaded["model"], "optim_state_dict": loaded["optimizer"]}
            set_state_dict(model, optimizer, **both)
        else:
            model.load_state_dict(loaded["model"])
        begin = first(loaded)
    for step in range(begin, 5):
        loss_of(model, rank, step).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 1:
            weights, states = get_state_dict(model, optimizer)
            dcp.save(content({"model": weights, "optimizer": states}, step + 1), checkpoint_id=FOLDER)
