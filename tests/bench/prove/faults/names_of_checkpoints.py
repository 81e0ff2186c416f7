"""Layers are to learn slowly, by names from before checkpoint wrappers, which change them: none does."""

import torch
from common import DEVICE, FAULT, STEPS, Block, Net, loss_of, sharded, start
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing

rank, world = start()
net = Net().to(DEVICE)
slow = {name for name, _ in net.named_parameters() if ".up." in name}
apply_activation_checkpointing(net, check_fn=lambda module: isinstance(module, Block))
model = sharded(net)
groups = {True: [], False: []}
for name, each in model.named_parameters():
    groups[(name if FAULT else name.replace("_checkpoint_wrapped_module.", "")) in slow].append(each)
groups = [{"params": groups[True], "lr": 1e-4}, {"params": groups[False]}]
optimizer = torch.optim.AdamW([each for each in groups if each["params"]], lr=1e-2)
for step in range(STEPS):
    loss_of(model, rank, step).backward()
    optimizer.step()
    optimizer.zero_grad()
